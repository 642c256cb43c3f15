// Decode over rows of int8, and of codes that stand for evenly spaced numbers, by products of pairs of 16-bit
// integers, exact in 32 bits: twice as many in an instruction as of float32. Queries and weights are such
// integers times a unit. Included by row_path.h.

constexpr int INT_MOST = 32767;
constexpr float INT_LEAST = 0x1p-110f;  // whose reciprocal, times that, is finite

PA_INLINE __m256i add_ints(__m256i acc, __m256i x, __m256i by) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x, by));
}
PA_INLINE vf int_sums(__m256i x) { return (vf)_mm256_cvtepi32_ps(x); }
PA_INLINE vf magnitude_bits(vf x) { return (vf)((vi)x & 0x7fffffff); }
// The larger magnitude; NaN is the largest.
PA_INLINE vf larger(vf a, vf b) {
  return (vf)_mm256_max_epi32((__m256i)a, (__m256i)magnitude_bits(b));
}
// What turns numbers up to `most` into integers: none where that isn't finite.
PA_INLINE vf int_scale(vf most) { return most > splat(INT_LEAST) ? splat((float)INT_MOST) / most : vf{}; }
PA_INLINE __m256i to_ints(vf x, vf scale) { return _mm256_cvtps_epi32((__m256)(x * scale)); }

// How far from 0 the first of 16 evenly spaced numbers is, in steps; NaN of others.
PA_INLINE float first_step(const float *table) {
  const float step = table[1] - table[0], first = table[0] / step;
  for (int i = 0; i < 16; i++) {
    if (table[i] != table[0] + (float)i * step) return NAN;
  }
  return first == (float)(int32_t)first ? first : NAN;
}

// A query of `size` elements, whole words of codes, as integers in half of its place; returns their unit. In
// the order of codes, 64 at a time: those of the first nibbles of 16 bits, of the second ones, and so on; and
// the sums of each word's.
PA_ONCE float query_ints(float *x, int size, bool codes, float *word_sums) {
  vf most = {};
  for (int i = 0; i < size; i += W) most = larger(most, loadf(x + i));
  for (int i = 1; i < W; i++) {
    if (((vi)most)[i] > ((vi)most)[0]) most[0] = most[i];
  }
  const vf scale = int_scale(splat(most[0]));
  int16_t each[WORD_CODES * W], turned[WORD_CODES * W];
  for (int d = 0; d < size; d += WORD_CODES * W) {
    const int some = pa_min(WORD_CODES * W, size - d);
    __builtin_memset(each, 0, sizeof each);
    for (int i = 0; i < some; i += W) {
      const vi whole = (vi)to_ints(loadf(x + d + i), scale);
      float sum = 0;
      for (int j = 0; j < W; j++) {
        each[i + j] = (int16_t)whole[j];
        sum += each[i + j];
      }
      if (codes) word_sums[(d + i) / WORD_CODES] = sum;
    }
    for (int i = 0; codes && i < WORD_CODES * W; i++) turned[i % 4 * 16 + i / 4] = each[i];
    __builtin_memcpy((char *)x + 2 * d, codes ? turned : each, sizeof each);
  }
  return most[0] / INT_MOST;
}

// Dot products of W / ROWS keys of codes with ROWS rows, in their units. `sums_of`: of each word's elements,
// times the first step; of PA_STEPS they are times least numbers, which it has in place of a first step.
template <int ROWS, int SCALE>
PA_NOINLINE vf code_int_dots(const pa_row_format &f, const Codes &of, int first, const float *q, int ldq,
                             const float *sums_of, int ldsum) {
  constexpr int KEYS = W / ROWS;
  constexpr bool LEAST = SCALE == PA_STEPS;
  const __m256i low = _mm256_set1_epi16(15);
  vf acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  for (int word = 0; word < of.words; word += W) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const char *key = of.rows[first + k] + of.offset;
      const __m256i codes = (__m256i)code_words(key + 4 * word, of.words - word);
      const __m256i x[4] = {_mm256_and_si256(codes, low), _mm256_and_si256(_mm256_srli_epi16(codes, 4), low),
                            _mm256_and_si256(_mm256_srli_epi16(codes, 8), low), _mm256_srli_epi16(codes, 12)};
      const GroupScales is = group_scales<SCALE>(f, of.groups, key, word);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const float *row = q + (int64_t)r * ldq + word * WORD_CODES / 2;
        __m256i part = _mm256_madd_epi16(x[0], read<__m256i>(row));
        PA_UNROLLED
        for (int j = 1; j < 4; j++) part = add_ints(part, x[j], read<__m256i>(row + j * W));
        const vf sums = loadf(sums_of + r * ldsum + word);
        vf &sum = acc[k * ROWS + r];
        sum += (LEAST ? int_sums(part) : int_sums(part) + sums) * is.by;
        if (LEAST) sum += is.least * sums;
      }
    }
  }
  return sums(acc);
}

// 16 elements as integers of 16 bits, or `some` and zeros.
PA_INLINE __m256i wide_bytes(const char *p, int some) {
  if (some >= 16) return _mm256_cvtepi8_epi16(read<__m128i>(p));
  char padded[16] = {};
  __builtin_memcpy(padded, p, some);
  return _mm256_cvtepi8_epi16(read<__m128i>(padded));
}

// The same of keys of int8.
template <int ROWS>
PA_NOINLINE vf byte_int_dots(const char *const *keys, int64_t offset, const float *q, int ldq, int size) {
  constexpr int KEYS = W / ROWS;
  __m256i acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = __m256i{};
  auto step = [&](int d, int some) __attribute__((always_inline)) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const __m256i x = wide_bytes(keys[k] + offset + d, some);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        acc[k * ROWS + r] = add_ints(acc[k * ROWS + r], x, read<__m256i>(q + (int64_t)r * ldq + d / 2));
      }
    }
  };
  int d = 0;
  for (; d + 16 <= size; d += 16) step(d, 16);
  if (d < size) step(d, size - d);
  vf all[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) all[i] = int_sums(acc[i]);
  return sums(all);
}

// Four rows' weights of `count` keys, times the scales that `scales_of` a key returns, as integers: lane i is row
// i % 4, of the first or the second half of the scales. Two keys' are in 32 bits.
struct IntWeights {
  vf unit, least;  // of each lane; sums of weights times least numbers
  __m256i sum;
  template <class Scales>
  PA_NOINLINE IntWeights(const float *p, int ldp, int count, float *room, uint32_t *pairs, Scales scales_of) {
    vf most = {};
    least = vf{};
    for (int t = 0; t < count; t++) {
      const vf plain = (vf)_mm256_broadcast_ps((const __m128 *)(p + (int64_t)t * ldp));
      const GroupScales is = scales_of(t);
      const vf x = plain * is.by;
      least += plain * is.least;
      write(room + t * W, x);
      most = larger(most, x);
    }
    const vf scale = int_scale(most);
    unit = most * splat(1.0f / INT_MOST);
    sum = __m256i{};
    for (int t = 0; t < count; t += 2, pairs += W) {
      const __m256i a = to_ints(loadf(room + t * W), scale);
      const __m256i b = t + 1 < count ? to_ints(loadf(room + (t + 1) * W), scale) : __m256i{};
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
      write(pairs, _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa));
    }
  }
};

// o[row] += weights of `count` keys times codes [j, j + 2) of each of W words, from `word` on. A half's words
// are of one group.
template <int ROWS>
PA_NOINLINE void add_int_codes(const Codes &of, int count, const IntWeights &by, const uint32_t *pairs, int first_step,
                               float *o, int ldo, int word, int j) {
  constexpr int C = 2;
  const __m256i low = _mm256_set1_epi16(15);
  const __m128i shift[C] = {_mm_cvtsi32_si128(j % 4 * 4), _mm_cvtsi32_si128(j % 4 * 4 + 4)};
  const __m256i start = _mm256_mullo_epi32(by.sum, _mm256_set1_epi32(first_step));
  __m256i acc[ROWS][C];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm256_shuffle_epi32(start, r * 0x55);
  auto all = [&](auto upper) __attribute__((always_inline)) {
    const uint32_t *from = pairs;
    for (int t = 0; t < count; t += 2, from += W) {
      const int64_t at = of.offset + 4 * word;
      const __m256i x = (__m256i)code_words(of.rows[t] + at, of.words - word);
      const __m256i y = (__m256i)code_words(of.rows[pa_min(t + 1, count - 1)] + at, of.words - word);
      const __m256i two = upper() ? _mm256_blend_epi16(_mm256_srli_epi32(x, 16), y, 0xaa)
                                  : _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xaa);
      const __m256i weights = read<__m256i>(from);
      __m256i code[C];
      PA_UNROLLED
      for (int c = 0; c < C; c++) code[c] = _mm256_and_si256(_mm256_srl_epi16(two, shift[c]), low);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const __m256i weight = _mm256_shuffle_epi32(weights, r * 0x55);
        PA_UNROLLED
        for (int c = 0; c < C; c++) acc[r][c] = add_ints(acc[r][c], code[c], weight);
      }
    }
  };
  if (j < 4) all(std::false_type());
  else all(std::true_type());
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    const vf unit = (vf)_mm256_permute_ps((__m256)by.unit, r * 0x55);
    const vf least = (vf)_mm256_permute_ps((__m256)by.least, r * 0x55);
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      float *to = o + (int64_t)r * ldo + word * WORD_CODES + (j + c) * W;
      write(to, loadf(to) + (int_sums(acc[r][c]) * unit + least));
    }
  }
}

// o[row] += weights of `count` keys times 16 elements of int8, or `some`, from `c` on.
template <int ROWS>
PA_NOINLINE void add_int_bytes(const char *const *values, int64_t offset, int count, const IntWeights &by,
                               const uint32_t *pairs, float *o, int ldo, int some) {
  __m256i acc[ROWS][2];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = __m256i{};
  auto all = [&](int most) __attribute__((always_inline)) {
    const uint32_t *from = pairs;
    for (int t = 0; t < count; t += 2, from += W) {
      const __m256i x = wide_bytes(values[t] + offset, most);
      const __m256i y = wide_bytes(values[pa_min(t + 1, count - 1)] + offset, most);
      const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const __m256i weight = _mm256_set1_epi32((int)from[r]);
        acc[r][0] = add_ints(acc[r][0], low, weight);
        acc[r][1] = add_ints(acc[r][1], high, weight);
      }
    }
  };
  if (some >= 16) all(16);
  else all(some);
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    const vf unit = (vf)_mm256_permute_ps((__m256)by.unit, r * 0x55);
    float *to = o + (int64_t)r * ldo;
    const __m256i first = _mm256_permute2x128_si256(acc[r][0], acc[r][1], 0x20);
    const __m256i second = _mm256_permute2x128_si256(acc[r][0], acc[r][1], 0x31);
    write(to, loadf(to) + int_sums(first) * unit);
    write(to + W, loadf(to + W) + int_sums(second) * unit);
  }
}
