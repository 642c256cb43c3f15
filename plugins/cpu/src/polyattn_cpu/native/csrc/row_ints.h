// Decode over rows of int8, and of codes that stand for integers times a unit, by products of pairs of 16-bit
// integers, exact in 32 bits: twice as many in an instruction as of float32. Queries and weights are such
// integers times a unit. A vector has QUARTERS of 128 bits, and of codes a quarter is a key's. Included by row_keys.h.

constexpr int INT_MOST = 32767;
constexpr int QUARTERS = W / 4;
constexpr int INT_TWICE = W == 8 ? 2 : 1;  // a query's integers of codes lie so often: for each quarter, if they have room

typedef int16_t vs __attribute__((vector_size(W * 4)));
#if defined(__AVX512F__)
#define PA_INT(NAME) _mm512_##NAME
typedef __m512i vint;
typedef __m512 vfloat;
#else
#define PA_INT(NAME) _mm256_##NAME
typedef __m256i vint;
typedef __m256 vfloat;
#endif

PA_INLINE vi add_ints(vi acc, vs x, vs by) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)x, (__m512i)by);
#else
  return acc + (vi)PA_INT(madd_epi16)((vint)x, (vint)by);
#endif
}
PA_INLINE vf int_sums(vi x) { return __builtin_convertvector(x, vf); }
// What turns numbers up to `most` into integers: none where that isn't finite.
PA_INLINE vf int_scale(vf most) { return most > splat(INT_LEAST) ? splat((float)INT_MOST) / most : vf{}; }
PA_INLINE vi to_ints(vf x, vf scale) { return (vi)PA_INT(cvtps_epi32)((vfloat)(x * scale)); }
// 128 bits in each quarter.
template <class V>
PA_INLINE V in_quarters(const void *from) {
  const __m128i each = _mm_loadu_si128((const __m128i *)from);
#if defined(__AVX512F__)
  return (V)_mm512_broadcast_i32x4(each);
#else
  return (V)_mm256_broadcastsi128_si256(each);
#endif
}
// Even 16 bits of one, odd ones of the other.
PA_INLINE vs even_and_odd(vu even, vu odd) {
#if defined(__AVX512F__)
  return (vs)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)even, (__m512i)odd);
#else
  return (vs)_mm256_blend_epi16((__m256i)even, (__m256i)odd, 0xaa);
#endif
}
PA_INLINE vs look_up(vs table, vs bytes) { return (vs)PA_INT(shuffle_epi8)((vint)table, (vint)bytes); }
template <int LANES>
PA_INLINE vf quarter_lanes(vf x) {
  return (vf)PA_INT(permute_ps)((vfloat)x, LANES);
}

// A format's 16 numbers, as integers times `unit` if all are such, else of no unit. A code that is added to others lies in 16 bits, and is
// such an integer and `more`: where it `looks`, both its bytes are looked up, the upper one as that of 0.
struct IntTable {
  static constexpr int MOST = 31;  // 256 times that, a query's integer and 8 of these products are 32 bits
  float unit = 0;
  int more = 0;
  bool looks = false;
  int8_t whole[16], raised[16];

  explicit IntTable(const pa_row_format &f) {
    if (f.form != PA_CODES) return;
    const float *table = (const float *)f.table;
    int least = 0;
    for (int i = 0; i < 16; i++) {
      const float size = fabsf(table[i]);
      if (size > 0 && (unit == 0 || size < unit)) unit = size;
    }
    for (int i = 0; i < 16; i++) {
      const float each = table[i] / unit;
      if (!(fabsf(each) <= MOST) || each != (float)(int)each) {
        unit = 0;
        return;
      }
      whole[i] = (int8_t)each;
      least = pa_min(least, (int)each);
    }
    for (int i = 0; i < 16; i++) {
      looks = looks || whole[i] != whole[0] + i;
      raised[i] = (int8_t)(whole[i] - least);
    }
    more = looks ? 256 * raised[0] - least : -whole[0];
  }
};
// Four codes of each 16 bits, as 256 times their integers.
struct FourCodes {
  vs of[4];
  PA_ALWAYS FourCodes(vs whole, vs codes) {
    const vs even = look_up(whole, codes & 0x0f0f);
    const vs odd = look_up(whole, (vs)((vu)codes >> 4) & 0x0f0f);
    of[0] = even << 8, of[1] = odd << 8;
    of[2] = even & (int16_t)0xff00, of[3] = odd & (int16_t)0xff00;
  }
};
// The Jth of them, as an integer and `more`.
template <int J, bool LOOKS>
PA_INLINE vs one_code(vs raised, vs codes) {
  vs x = J ? (vs)PA_INT(srli_epi16)((vint)codes, 4 * J) : codes;
  if (J < 3) x &= 15;
  return LOOKS ? look_up(raised, x) : x;
}

// A query of `size` elements as integers in its place; returns their unit. Those of codes lie in these' order, 32 at a
// time: of the first nibbles of 16 bits, of the second ones, and so on; and there are the sums of each word's.
PA_ONCE float query_ints(float *x, int size, bool codes, float *word_sums) {
  vf most = {};
  for (int i = 0; i < size; i += W) most = larger(most, loadf(x + i));
  for (int i = 1; i < W; i++) {
    if (((vi)most)[i] > ((vi)most)[0]) most[0] = most[i];
  }
  const vf scale = int_scale(splat(most[0]));
  constexpr int EACH = 4 * WORD_CODES, SAME = 8 * INT_TWICE;
  for (int d = 0; d < size; d += EACH) {
    int32_t each[EACH];
    int16_t turned[INT_TWICE * EACH];
    for (int i = 0; i < EACH; i += W) write(each + i, d + i < size ? to_ints(loadf(x + d + i), scale) : vi{});
    if (!codes) {
      for (int i = 0; i < EACH; i++) turned[i] = (int16_t)each[i];
      __builtin_memcpy((char *)x + 2 * d, turned, 2 * EACH);
      continue;
    }
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < SAME; i++) turned[j * SAME + i] = (int16_t)each[i % 8 * 4 + j];
    }
    for (int w = 0; w < 4; w++) {
      int32_t sum = 0;
      for (int i = 0; i < WORD_CODES; i++) sum += each[w * WORD_CODES + i];
      word_sums[d / WORD_CODES + w] = (float)sum;
    }
    __builtin_memcpy((char *)x + 2 * INT_TWICE * d, turned, sizeof turned);
  }
  return most[0] / INT_MOST;
}

// Four words, or `some` and zeros, of each of QUARTERS rows, `each` rows apart.
PA_INLINE vs quarter_words(const char *const *rows, int each, int64_t at, int some) {
  if (some < 4) {
    uint32_t padded[W] = {};
    for (int k = 0; k < QUARTERS; k++) __builtin_memcpy(padded + 4 * k, rows[k * each] + at, 4 * some);
    return read<vs>(padded);
  }
  auto one = [&](int k) __attribute__((always_inline)) { return _mm_loadu_si128((const __m128i *)(rows[k * each] + at)); };
  const __m256i two = _mm256_inserti128_si256(_mm256_castsi128_si256(one(0)), one(1), 1);
#if defined(__AVX512F__)
  return (vs)_mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi256_si512(two), one(2), 2), one(3), 3);
#else
  return (vs)two;
#endif
}
// The scales of 16 words of each of QUARTERS rows, at most `groups` groups: those of four words are a vector.
template <int SCALE>
struct QuarterScales {
  vf all[2];
  QuarterScales(const char *const *rows, int each, int64_t at, int groups) {
    uint64_t first[QUARTERS], second[QUARTERS];
    auto some = [&](int k, int from) __attribute__((always_inline)) {
      const int left = pa_min(SCALE == PA_POWERS ? 4 : 8, SCALE_BYTES<SCALE> * groups - from);
      return left <= 0 ? 0 : some_bytes(rows[k * each] + at + from, left);
    };
    PA_UNROLLED
    for (int k = 0; k < QUARTERS; k++) {
      first[k] = some(k, 0);
      if (SCALE == PA_STEPS) second[k] = some(k, 8);
    }
    if constexpr (SCALE == PA_HALVES || SCALE == PA_STEPS) {
      all[0] = halves(first);
      if (SCALE == PA_STEPS) all[1] = halves(second);
    } else {
      all[0] = bytes(first, 0);
      if (SCALE == PA_E4M3S) all[1] = bytes(first, 32);
    }
  }
  static PA_ALWAYS vf halves(const uint64_t *of) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_set_epi64x((long long)of[3], (long long)of[2], (long long)of[1], (long long)of[0]));
#else
    return (vf)_mm256_cvtph_ps(_mm_set_epi64x((long long)of[1], (long long)of[0]));
#endif
  }
  static PA_ALWAYS vf bytes(const uint64_t *of, int shift) {
#if defined(__AVX512F__)
    const __m128i all = _mm_set_epi32((int)(of[3] >> shift), (int)(of[2] >> shift), (int)(of[1] >> shift), (int)(of[0] >> shift));
    return byte_scales<SCALE>((vu)_mm512_cvtepu8_epi32(all));
#else
    return byte_scales<SCALE>((vu)_mm256_cvtepu8_epi32(_mm_set_epi32(0, 0, (int)(of[1] >> shift), (int)(of[0] >> shift))));
#endif
  }
  template <int G>
  PA_ALWAYS GroupScales at() const {
    constexpr int SECOND = G % 2 * 0xaa;
    if constexpr (SCALE == PA_STEPS) {
      return {quarter_lanes<SECOND>(all[G / 2]), quarter_lanes<SECOND + 0x55>(all[G / 2])};
    } else if constexpr (SCALE == PA_E4M3S) {
      return {quarter_lanes<SECOND + 0x50>(all[G / 2]), vf{}};
    } else {
      return {quarter_lanes<G * 0x55>(all[0]), vf{}};
    }
  }
};
// Four vectors' sums of each quarter, beside one another there.
PA_INLINE vf quarter_sums(const vf *v) {
  return sum_of_halves<2>(sum_of_halves<1>(v[0], v[1]), sum_of_halves<1>(v[2], v[3]));
}

// Scores of `count` keys of codes from the `first` on, in whole visits of W / ROWS or QUARTERS, times `units`, those
// of queries. `sums_of`: of each word's elements.
template <int SCALE, int ROWS, class Asks>
PA_NOINLINE void code_int_scores(const Codes &of, const IntTable &table, int first, int count, const float *q, int ldq,
                                 const float *sums_of, int ldsum, const float *units, float *s, int64_t ld, Asks asks) {
  constexpr int EACH = ROWS < 4 ? 4 / ROWS : 1;
  constexpr int WORDS = SCALE == PA_E4M3S ? 2 : 4;  // of a group
  constexpr bool LEAST = SCALE == PA_STEPS;
  const vs numbers = in_quarters<vs>(table.whole);
  const int words = of.words, groups = of.groups;
  const int64_t offset = of.offset, scales_at = of.scales;
  const char *const *keys = of.rows + first;
  const auto all = [&](auto whole) __attribute__((always_inline)) {  // words are a multiple of 16: no part is looked for
    for (int t = 0; t < count; t += QUARTERS * EACH, keys += QUARTERS * EACH, s += QUARTERS * EACH * ld) {
      vf acc[EACH * ROWS];
      PA_UNROLLED
      for (int i = 0; i < EACH * ROWS; i++) acc[i] = vf{};
      for (int word = 0; word < words; word += 16) {
        const int group = word / WORDS, left = whole() ? 16 / WORDS : groups - group;
        PA_UNROLLED
        for (int i = 0; i < EACH; i++) {
          const QuarterScales<SCALE> scales(keys + i, EACH, scales_at + SCALE_BYTES<SCALE> * group, left);
          auto four = [&](auto g) __attribute__((always_inline)) {
            const int at = word + 4 * g();
            if (!whole() && at >= words) return;
            Asks::template keys<1>(asks, 0);
            const FourCodes x(numbers, quarter_words(keys + i, EACH, offset + 4 * at, whole() ? 4 : words - at));
            const GroupScales is = scales.template at<g()>();
            PA_UNROLLED
            for (int r = 0; r < ROWS; r++) {
              const int16_t *row = (const int16_t *)(q + (int64_t)r * ldq) + at * WORD_CODES * INT_TWICE;
              vi part = {};
              PA_UNROLLED
              for (int j = 0; j < 4; j++) {
                part = add_ints(part, x.of[j], INT_TWICE == 2 ? read<vs>(row + 16 * j) : in_quarters<vs>(row + 8 * j));
              }
              acc[i * ROWS + r] += int_sums(part) * is.by;
              if (LEAST) acc[i * ROWS + r] += in_quarters<vf>(sums_of + r * ldsum + at) * is.least;
            }
          };
          four(std::integral_constant<int, 0>());
          four(std::integral_constant<int, 1>());
          four(std::integral_constant<int, 2>());
          four(std::integral_constant<int, 3>());
        }
      }
      if constexpr (ROWS < 4) {
        put_scores<ROWS>(quarter_sums(acc) * loadf(units), s, ld);
      } else {
        PA_UNROLLED
        for (int r = 0; r < ROWS; r += 4) put_scores<4>(quarter_sums(acc + r) * loadf(units + r / 4 * W), s + r, ld);
      }
    }
  };
  if (words % 16 == 0) all(std::true_type());
  else all(std::false_type());
}

// 2 W elements as integers of 16 bits, or `some` and zeros.
PA_INLINE vs wide_bytes(const char *p, int some) {
#if defined(__AVX512F__)
  const __m256i bytes = some >= 2 * W ? read<__m256i>(p) : _mm256_maskz_loadu_epi8((1u << some) - 1, p);
  return (vs)_mm512_cvtepi8_epi16(bytes);
#else
  typedef int8_t half __attribute__((vector_size(W * 2)));
  half bytes = {};
  if (some >= 2 * W) bytes = read<half>(p);
  else __builtin_memcpy(&bytes, p, some);
  return (vs)_mm256_cvtepi8_epi16((__m128i)bytes);
#endif
}

// The same of keys of int8.
template <int ROWS, class Asks>
PA_NOINLINE void byte_int_scores(const char *const *keys, int count, int64_t offset, RowScales scales, const float *q, int ldq,
                                 int size, const float *units, float *s, int64_t ld, Asks asks) {
  constexpr int KEYS = W / ROWS;
  for (int t = 0; t < count; t += KEYS, keys += KEYS, s += KEYS * ld) {
    vi acc[W];
    PA_UNROLLED
    for (int i = 0; i < W; i++) acc[i] = vi{};
    auto step = [&](int d, int some) __attribute__((always_inline)) {
      vs row[ROWS];
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) row[r] = read<vs>(q + (int64_t)r * ldq + d / 2);
      PA_UNROLLED
      for (int k = 0; k < KEYS; k++) {
        const vs x = wide_bytes(keys[k] + offset + d, some);
        PA_UNROLLED
        for (int r = 0; r < ROWS; r++) {
          vi &sum = acc[k * ROWS + r];
          sum = add_ints(sum, x, row[r]);
          in_register(sum);  // else GCC adds in another order, for which there are no registers
        }
      }
    };
    int d = 0;
    for (; d + 8 * W <= size; d += 8 * W) {
      PA_UNROLLED
      for (int i = 0; i < 4; i++) {
        if (i % (16 / W) == 0) Asks::template keys<(KEYS + 1) / 2>(asks, 0);
        step(d + i * 2 * W, 2 * W);
      }
    }
    for (; d < size; d += 2 * W) {
      Asks::template keys<(KEYS + 1) / 2>(asks, 0);
      step(d, pa_min(size - d, 2 * W));
    }
    put_scores<ROWS>(int_sums(sums(acc)) * byte_row_scales<ROWS>(scales.from(t)) * loadf(units), s, ld);
  }
}

// A vector of each row, of vectors whose lanes are four rows', of quarters apart.
template <int VECTORS>
struct RowLanes {
  vf of[VECTORS];
  template <int R>
  PA_ALWAYS vf row() const {
    return (vf)PA_INT(shuffle_ps)((vfloat)of[0], (vfloat)of[VECTORS - 1], R * 0x55);
  }
  template <class Each>
  PA_ALWAYS void rows(Each each) const {
    each(0, row<0>()), each(1, row<1>()), each(2, row<2>()), each(3, row<3>());
  }
};

// Four rows' weights of `count` keys as integers, two keys' in 32 bits, for `put`: times the scales that `scales_of` a key
// returns. A lane is row i % 4; of two vectors, the second has the scales of each second pair of words.
template <int VECTORS, bool LEAST>
struct IntWeights {
  RowLanes<VECTORS> unit, sum;  // of each lane; sums of integers
  vf least;                     // of weights times least numbers
  template <class Scales, class Put>
  PA_ALWAYS IntWeights(const float *p, int ldp, int count, float *room, Scales scales_of, Put put) {
    vf most[VECTORS], scale[VECTORS];
    vi sums[VECTORS];
    least = vf{};
    PA_UNROLLED
    for (int v = 0; v < VECTORS; v++) most[v] = vf{};
    for (int t = 0; t < count; t++) {
      const vf plain = in_quarters<vf>(p + (int64_t)t * ldp);
      const GroupScales is = scales_of(t);
      if (LEAST) least += plain * is.least;
      PA_UNROLLED
      for (int v = 0; v < VECTORS; v++) {
        const vf x = plain * (VECTORS == 1 ? is.by : v ? quarter_lanes<0xaa>(is.by) : quarter_lanes<0>(is.by));
        write(room + (t * VECTORS + v) * W, x);
        most[v] = larger(most[v], x);
      }
    }
    PA_UNROLLED
    for (int v = 0; v < VECTORS; v++) {
      scale[v] = int_scale(most[v]);
      unit.of[v] = most[v] * splat(1.0f / INT_MOST);
      sums[v] = vi{};
    }
    for (int t = 0; t < count; t += 2, room += 2 * VECTORS * W) {
      RowLanes<VECTORS> two;
      PA_UNROLLED
      for (int v = 0; v < VECTORS; v++) {
        const vi a = to_ints(loadf(room + v * W), scale[v]);
        const vi b = t + 1 < count ? to_ints(loadf(room + (VECTORS + v) * W), scale[v]) : vi{};
        sums[v] += a + b;
        two.of[v] = (vf)even_and_odd((vu)a, (vu)b << 16);
      }
      put(t, two);
    }
    PA_UNROLLED
    for (int v = 0; v < VECTORS; v++) sum.of[v] = (vf)sums[v];
  }
};

// What integers of W words of codes become numbers by: a vector of each row.
struct WordUnits {
  vf unit[4], least[4];
  vi start[4];  // of their sums: less what codes are more
};
// The weights of a tile times the scales of W words of codes, a vector of each of ROWS rows for each two keys.
template <int SCALE, int ROWS>
PA_NOINLINE WordUnits code_int_weights(pa_row_format f, const Codes &of, int count, int word, const IntTable &table,
                                       const float *p, int ldp, float *room, uint32_t *pairs) {
  constexpr int VECTORS = SCALE == PA_E4M3S ? 2 : 1;
  const char *const *rows = of.rows;
  const int64_t offset = of.offset;
  const int groups = of.groups;
  const IntWeights<VECTORS, SCALE == PA_STEPS> by(
      p, ldp, count, room,
      [&](int t) __attribute__((always_inline)) { return group_scales<SCALE>(f, groups, rows[t] + offset, word); },
      [&](int t, const RowLanes<VECTORS> &two) __attribute__((always_inline)) {
        uint32_t *to = pairs + t / 2 * ROWS * W;
        two.rows([&](int r, vf x) __attribute__((always_inline)) {
          if (r < ROWS) write(to + r * W, x);
        });
      });
  WordUnits found;
  const RowLanes<1> least = {{by.least}};
  by.unit.rows([&](int r, vf x) { found.unit[r] = x * splat(table.unit); });
  least.rows([&](int r, vf x) { found.least[r] = x; });
  by.sum.rows([&](int r, vf x) { found.start[r] = (vi)((vu)x * (uint32_t)-table.more); });
  return found;
}

constexpr int INT_CODES = W >= 16 ? 4 : 2;  // of a word that are added at once

// o[row] += weights of `count` keys times INT_CODES codes, from the Jth on, of each of W words, from `word` on.
template <int ROWS, bool LOOKS, int J, class Asks>
PA_NOINLINE void add_int_codes(const Codes &of, const IntTable &table, int count, const WordUnits &by,
                               const uint32_t *pairs, float *o, int ldo, int word, Asks asks) {
  constexpr int C = INT_CODES;
  const vs raised = in_quarters<vs>(table.raised);
  vi acc[ROWS][C];
  PA_UNROLLED
  for (int i = 0; i < ROWS * C; i++) acc[i / C][i % C] = by.start[i / C];
  const int64_t at = of.offset + 4 * word;
  const char *const *rows = of.rows;
  auto all = [&](int some) __attribute__((always_inline)) {
    for (int t = 0; t < count; t += 2, pairs += ROWS * W) {
      Asks::template values<64>(asks, t);
      const vu x = code_words(rows[t] + at, some), y = code_words(rows[pa_min(t + 1, count - 1)] + at, some);
      const vs two = J >= 4 ? even_and_odd(x >> 16, y) : even_and_odd(x, y << 16);
      vs code[C];
      code[0] = one_code<J % 4, LOOKS>(raised, two), code[1] = one_code<J % 4 + 1, LOOKS>(raised, two);
      if constexpr (C > 2) code[2] = one_code<2, LOOKS>(raised, two), code[3] = one_code<3, LOOKS>(raised, two);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const vs weight = read<vs>(pairs + r * W);
        PA_UNROLLED
        for (int c = 0; c < C; c++) acc[r][c] = add_ints(acc[r][c], code[c], weight);
      }
    }
  };
  if (of.words - word >= W) all(W);
  else all(of.words - word);
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      float *to = o + (int64_t)r * ldo + word * WORD_CODES + (J + c) * W;
      write(to, loadf(to) + (int_sums(acc[r][c]) * by.unit[r] + by.least[r]));
    }
  }
}

// Keys whose values the first cache holds wherever they lie; longer runs are the faster by AVX-512.
constexpr int INT_RUN = W == 16 ? 32 : 16;

// The same of keys of int8 and `size` elements, as integers: those of 2 W elements' lower and upper halves of 128 bits for each
// row. Of each two keys there is a weight of each of four rows. `first`: `sums` has none yet.
template <int ROWS, class Asks>
PA_NOINLINE void add_int_bytes(const char *const *values, int64_t offset, int count, const uint32_t *pairs, int size, bool first,
                               vi *sums, Asks asks) {
  constexpr int ASKS = 32 / W;  // keys for each line
  for (; count > 0; count -= INT_RUN, values += INT_RUN, pairs += 2 * INT_RUN, first = false) {
    vi *to = sums;
    for (int c = 0; c < size; c += 2 * W, to += 2 * ROWS) {
      vi acc[2 * ROWS];
      PA_UNROLLED
      for (int i = 0; i < 2 * ROWS; i++) acc[i] = first ? vi{} : to[i];
      auto two = [&](int t, int next, int some) __attribute__((always_inline)) {
        if (t % ASKS == 0) Asks::template values<64>(asks, t);
        const vs x = wide_bytes(values[t] + offset + c, some), y = wide_bytes(values[next] + offset + c, some);
        const vs lower = (vs)PA_INT(unpacklo_epi16)((vint)x, (vint)y), upper = (vs)PA_INT(unpackhi_epi16)((vint)x, (vint)y);
        PA_UNROLLED
        for (int r = 0; r < ROWS; r++) {
          const vs weight = (vs)(vu{} + pairs[2 * t + r]);
          acc[2 * r] = add_ints(acc[2 * r], lower, weight);
          acc[2 * r + 1] = add_ints(acc[2 * r + 1], upper, weight);
          in_register(acc[2 * r]);
          in_register(acc[2 * r + 1]);
        }
      };
      if (count >= INT_RUN && c + 2 * W <= size) {
        PA_UNROLLED
        for (int t = 0; t < INT_RUN; t += 2) two(t, t + 1, 2 * W);
      } else {
        const int some = pa_min(count, INT_RUN);
        PA_ROLLED
        for (int t = 0; t < some; t += 2) two(t, pa_min(t + 1, some - 1), size - c);
      }
      PA_UNROLLED
      for (int i = 0; i < 2 * ROWS; i++) to[i] = acc[i];
    }
  }
}
// o[row] += such sums times the row's unit.
template <int ROWS>
PA_NOINLINE void add_int_sums(const vi *sums, vf units, float *o, int ldo, int size) {
  for (int r = 0; r < ROWS; r++, o += ldo) {
    const vf unit = splat(units[r]);
    for (int c = 0; c < size; c += 2 * W) {
      const vi *from = sums + c / W * ROWS + 2 * r;
      const vf lower = int_sums(from[0]) * unit, upper = int_sums(from[1]) * unit;
      vf first = low<4>(lower, upper), second = high<4>(lower, upper);
      if constexpr (W == 16) {
        const vf even = first;
        first = low<W / 2>(even, second), second = high<W / 2>(even, second);
      }
      write(o + c, loadf(o + c) + first);
      write(o + c + W, loadf(o + c + W) + second);
    }
  }
}
#undef PA_INT
