// Decode over rows of codes by products of pairs of bfloat16, which holds a table's numbers. A lane is a key,
// whose sums need no others; of values it is a word. Included by row_path.h.

// 16 numbers, twice: a code's fifth bit may be anything. Queries lie [W words][j][word]: element 8 i + j of
// word i, and beside it element 8 i + 4 + j.
struct PairTable {
  static constexpr int EACH = WORD_CODES / 2;  // pairs of a word
  __m512i all;
  explicit PairTable(const float *from) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from));
    all = _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
  }
  PA_ALWAYS __m512i operator()(__m512i codes, int j) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), all);
  }
};

template <int SCALE>
constexpr int CODE_GROUPS = SCALE == PA_E4M3S ? 8 : 4;  // of W words

// The scales of W words' groups, from the `word`th on, of `count` rows: of each four groups [row][group].
template <int SCALE>
PA_NOINLINE void pair_scales(const pa_row_format &f, const Codes &of, int count, int word, float *by, float *least) {
  constexpr int GROUPS = CODE_GROUPS<SCALE>, BYTES = SCALE == PA_STEPS ? 4 : SCALE == PA_HALVES ? 2 : 1;
  const int first = word / (W / GROUPS), some = pa_min(GROUPS, f.size / f.group - first);
  const int64_t at = of.offset + f.size / 2 + first * BYTES;
  for (int t = 0; t < count; t++, by += 4, least += 4) {
    const char *from = of.rows[t] + at;
    if constexpr (SCALE == PA_STEPS) {
      const __m256 pairs = _mm256_cvtph_ps(_mm_maskz_loadu_epi32((__mmask8)((1 << some) - 1), from));
      const __m256 each = _mm256_permutevar8x32_ps(pairs, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0));
      _mm_storeu_ps(by, _mm256_castps256_ps128(each));
      _mm_storeu_ps(least, _mm256_extractf128_ps(each, 1));
      continue;
    }
    const __m128i bytes = _mm_cvtsi64_si128((long long)some_bytes(from, BYTES * some));
    if constexpr (SCALE == PA_HALVES) {
      _mm_storeu_ps(by, _mm_cvtph_ps(bytes));
    } else {
      _mm_storeu_si128((__m128i *)by, _mm_cvtepu8_epi32(bytes));
      if (GROUPS == 8) _mm_storeu_si128((__m128i *)(by + of.ld), _mm_cvtepu8_epi32(_mm_srli_si128(bytes, 4)));
    }
  }
  if constexpr (BYTES == 1) {
    by -= 4 * count;
    for (int plane = 0; plane < GROUPS / 4; plane++, by += of.ld) {
      for (int i = 0; i < 4 * count; i += W) write(by + i, byte_scales<SCALE>(read<vu>(by + i)));
    }
  }
}

// Rows of 4 x 4 elements in 128 bits, turned over their diagonal.
PA_INLINE void turn_quarters(vf *v) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512d low = (__m512d)_mm512_unpacklo_ps(a, b), high = (__m512d)_mm512_unpackhi_ps(a, b);
  const __m512d low2 = (__m512d)_mm512_unpacklo_ps(c, d), high2 = (__m512d)_mm512_unpackhi_ps(c, d);
  v[0] = (vf)_mm512_unpacklo_pd(low, low2), v[1] = (vf)_mm512_unpackhi_pd(low, low2);
  v[2] = (vf)_mm512_unpacklo_pd(high, high2), v[3] = (vf)_mm512_unpackhi_pd(high, high2);
}
// 4 x 4 quarters, turned over their diagonal.
PA_INLINE void turn_by_quarters(vf *v) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 even = _mm512_shuffle_f32x4(a, b, 0x88), even2 = _mm512_shuffle_f32x4(c, d, 0x88);
  const __m512 odd = _mm512_shuffle_f32x4(a, b, 0xdd), odd2 = _mm512_shuffle_f32x4(c, d, 0xdd);
  v[0] = (vf)_mm512_shuffle_f32x4(even, even2, 0x88), v[1] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0x88);
  v[2] = (vf)_mm512_shuffle_f32x4(even, even2, 0xdd), v[3] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
}
// W words of W rows, a vector of each word: lane 4 i + m is row 4 m + i's.
PA_INLINE void turned_words(const Codes &of, int first, int word, vf *to) {
  vf quarter[4][4];
  PA_UNROLLED
  for (int i = 0; i < 4; i++) {
    PA_UNROLLED
    for (int m = 0; m < 4; m++) {
      quarter[i][m] = (vf)code_words(of.rows[first + 4 * m + i] + of.offset + 4 * word, of.words - word);
    }
    turn_quarters(quarter[i]);
  }
  PA_UNROLLED
  for (int m = 0; m < 4; m++) {
    vf each[4] = {quarter[0][m], quarter[1][m], quarter[2][m], quarter[3][m]};
    turn_by_quarters(each);
    PA_UNROLLED
    for (int i = 0; i < 4; i++) to[4 * i + m] = each[i];
  }
}

// acc += x times one pair, which the multiplication loads itself: an instruction less.
PA_INLINE void add_one_pair(vf &acc, __m512i x, const float *pair) {
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(x), "m"(*pair));
}

// Scores of W keys, from the `first` on, with ROWS rows: a key's are `lds` on. `sums_of`: a row's of each group.
template <int SCALE, int ROWS, class Asks>
PA_NOINLINE void code_scores(const Codes &of, const PairTable &table, int first, const float *q, int ldq,
                             const float *sums_of, int ldsum, float *s, int lds, Asks asks) {
  constexpr int GROUPS = CODE_GROUPS<SCALE>, WORDS = W / GROUPS, CHAINS = ROWS > 4 ? 1 : 2;
  vf acc[ROWS < 4 ? 4 : ROWS];
  PA_UNROLLED
  for (int r = 0; r < (ROWS < 4 ? 4 : ROWS); r++) acc[r] = vf{};
  const float *by = of.by + 4 * first, *least = of.least + 4 * first;
  for (int word = 0; word < of.words; word += W, q += PairTable::EACH * W, sums_of += GROUPS) {
    vf turned[W], scale[4], low[4];
    turned_words(of, first, word, turned);
    for (int g = 0; g < GROUPS && word + g * WORDS < of.words; g++) {
      if (g % 4 == 0) {
        for (int m = 0; m < 4; m++) scale[m] = loadf(by + m * W);
        turn_quarters(scale);
        by += of.ld;
        if (SCALE == PA_STEPS) {
          for (int m = 0; m < 4; m++) low[m] = loadf(least + m * W);
          turn_quarters(low);
          least += of.ld;
        }
      }
      vf part[CHAINS][ROWS];
      PA_UNROLLED
      for (int i = 0; i < CHAINS * ROWS; i++) part[i / ROWS][i % ROWS] = vf{};
      Asks::template keys<1>(asks, 0);
      PA_UNROLLED
      for (int w = 0; w < WORDS; w++) {
        Asks::template keys<1>(asks, 0);
        const float *row = q + g * WORDS + w;
        PA_UNROLLED
        for (int j = 0; j < PairTable::EACH; j++) {
          __m512i x = table((__m512i)turned[g * WORDS + w], j);
          PA_UNROLLED
          for (int r = 0; r < ROWS; r++) {
            vf &to = part[j % CHAINS][r];
            add_one_pair(to, x, row + (int64_t)r * ldq + j * W);
          }
        }
      }
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        acc[r] += (CHAINS == 2 ? part[0][r] + part[CHAINS - 1][r] : part[0][r]) * scale[g % 4];
        if (SCALE == PA_STEPS) acc[r] += low[g % 4] * splat(sums_of[(int64_t)r * ldsum + g]);
      }
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r += 4) {
    turn_quarters(acc + r);
    PA_UNROLLED
    for (int m = 0; m < 4; m++) {
      for (int i = 0; i < 4; i++) {
        const __m128 each = _mm512_extractf32x4_ps((__m512)acc[r + m], i);
        float *to = s + (int64_t)(first + 4 * m + i) * lds + r;
        if (ROWS == 1) _mm_store_ss(to, each);
        else if (ROWS == 2) _mm_storel_pi((__m64 *)to, each);
        else _mm_storeu_ps(to, each);
      }
    }
  }
}

// Of each two keys of a tile their weights times W words' scales in pairs, [row][group], and their words in
// pairs, the lower halves and the upper ones: lane GROUPS i + g is word i of group g. Least numbers are added.
template <int SCALE, int ROWS>
PA_NOINLINE void code_pairs(const Codes &of, int count, int word, const float *p, int ldp, uint32_t *weights,
                            __m512i *codes, float *o, int ldo) {
  constexpr int GROUPS = CODE_GROUPS<SCALE>, IN = W / GROUPS, VECTORS = (ROWS + IN - 1) / IN;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i row = _mm512_srli_epi32(lane, GROUPS == 8 ? 3 : 2);
  const __m512i group = _mm512_and_epi32(lane, _mm512_set1_epi32(GROUPS - 1));
  const __m512i at = _mm512_or_epi32(_mm512_slli_epi32(group, GROUPS == 8 ? 1 : 2), row);
  auto spread = [](const float *from, int ld) __attribute__((always_inline)) {
    const __m512 low = _mm512_broadcast_f32x4(_mm_loadu_ps(from));
    if (GROUPS == 4) return (vf)low;
    return (vf)_mm512_mask_broadcast_f32x4(low, 0xf0f0, _mm_loadu_ps(from + ld));
  };
  const int64_t blocks = word / W * (GROUPS / 4) * of.ld, bytes = of.offset + 4 * word;
  const float *by = of.by + blocks, *least = of.least + blocks;
  vf low[VECTORS];
  for (int v = 0; v < VECTORS; v++) low[v] = vf{};
  for (int t = 0; t < count; t += 2, by += 8, least += 8) {
    const bool both = t + 1 < count;
    const int second = both ? t + 1 : t;
    const vf a = spread(by, of.ld), b = both ? spread(by + 4, of.ld) : vf{};
    PA_UNROLLED
    for (int v = 0; v < VECTORS; v++, weights += W) {
      auto of_rows = [&](int key) __attribute__((always_inline)) {
        return (vf)_mm512_permutexvar_ps(row, _mm512_loadu_ps(p + (int64_t)key * ldp + v * IN));
      };
      const vf x = of_rows(t), y = of_rows(second);
      write(weights, bf16_pairs(x * a, y * b));
      if (SCALE == PA_STEPS) low[v] += x * spread(least, of.ld) + y * (both ? spread(least + 4, of.ld) : vf{});
    }
    auto turned = [&](int key) __attribute__((always_inline)) {
      return _mm512_permutexvar_epi32(at, (__m512i)code_words(of.rows[key] + bytes, of.words - word));
    };
    const __m512i x = turned(t), y = turned(second);
    *codes++ = _mm512_mask_blend_epi16(0xaaaaaaaau, x, _mm512_slli_epi32(y, 16));
    *codes++ = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y);
  }
  if (SCALE != PA_STEPS) return;
  float each[VECTORS * W];
  for (int v = 0; v < VECTORS; v++) write(each + v * W, low[v]);
  for (int r = 0; r < ROWS; r++) {
    const vf sum = spread(each + r * GROUPS, 4);
    for (int j = 0; j < WORD_CODES; j++) {
      float *to = o + (int64_t)r * ldo + word * WORD_CODES + j * W;
      write(to, loadf(to) + sum);
    }
  }
}

// o[row] += `weights` times codes [j, j + C) of each of W words, of which pairs are `codes`.
template <int GROUPS, int ROWS, int C, class Asks>
PA_NOINLINE void add_code_pairs(const PairTable &table, const __m512i *codes, int count, const uint32_t *weights,
                                float *o, int ldo, int j, Asks asks) {
  constexpr int VECTORS = (ROWS * GROUPS + W - 1) / W, HALF = WORD_CODES / 2;
  vf acc[ROWS][C];
  o += j * W;
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + c * W);
  }
  codes += j / HALF;
  for (int t = 0; t < count; t += 2, codes += 2, weights += VECTORS * W) {
    Asks::template values<64>(asks, t);
    if (t % 16 == 0) Asks::template values<64>(asks, t);
    const __m512i two = j % HALF ? _mm512_srli_epi16(*codes, 4 * C) : *codes;
    __m512i weight[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      const uint32_t *at = weights + r * GROUPS;
      weight[r] = GROUPS == 8 ? _mm512_broadcast_i32x8(_mm256_loadu_si256((const __m256i *)at))
                              : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at));
    }
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      const __m512i x = table(two, c);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[r][c] = add_pairs(acc[r][c], x, weight[r]);
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) write(o + r * ldo + c * W, acc[r][c]);
  }
}

// A query in pairs, as code_scores takes them; it takes half the room.
PA_ONCE void to_halves(float *x, int size) {
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
  for (int d = 0; d < size; d += WORD_CODES * W) {
    vf word[4];
    for (int i = 0; i < 4; i++) {
      const float *at = x + d + 2 * W * i;
      const __m512i half = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + W), _mm512_loadu_ps(at));
      word[i] = (vf)_mm512_shuffle_epi8(half, pairs);
    }
    turn_by_quarters(word);
    turn_quarters(word);
    for (int i = 0; i < 4; i++) write(x + d / 2 + i * W, word[i]);
  }
}
// Sums back in their order, whose lanes are as code_pairs says.
template <int GROUPS>
PA_ONCE void sums_in_order(float *x, int size) {
  const __m512i word = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr int SHIFT = GROUPS == 8 ? 1 : 2;  // of words of a group
  const __m512i within = _mm512_and_epi32(word, _mm512_set1_epi32(W / GROUPS - 1));
  const __m512i lane = _mm512_or_epi32(_mm512_slli_epi32(within, 4 - SHIFT), _mm512_srli_epi32(word, SHIFT));
  for (int d = 0; d < size; d += WORD_CODES * W, x += WORD_CODES * W) {
    vf code[WORD_CODES];
    for (int j = 0; j < WORD_CODES; j++) code[j] = (vf)_mm512_permutexvar_ps(lane, _mm512_loadu_ps(x + j * W));
    for (int j = 0; j < WORD_CODES; j += 4) {
      turn_quarters(code + j);
      for (int m = 0; m < 4; m++) {
        float each[W];
        write(each, code[j + m]);
        for (int i = 0; i < 4; i++) __builtin_memcpy(x + (4 * i + m) * WORD_CODES + j, each + 4 * i, 16);
      }
    }
  }
}

// The scales of W / ROWS rows of bytes, a lane each of a visit's scores.
template <int ROWS>
PA_INLINE vf byte_row_scales(const char *const *rows, int64_t at) {
  vf each = {};
  PA_UNROLLED
  for (int k = 0; k < W / ROWS; k++) each[k] = read<float>(rows[k] + at);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr int SHIFT = ROWS == 8 ? 3 : ROWS / 2;
  return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(lane, SHIFT), (__m512)each);
}
// Weights of each two keys in pairs, times their rows' scales.
template <int ROWS>
PA_INLINE void weight_pairs(const char *const *rows, int64_t at, int count, const float *p, int ldp, uint32_t *pairs) {
  for (int t = 0; t < count; t += 2, pairs += W) {
    const bool both = t + 1 < count;
    const vf a = loadf(p + (int64_t)t * ldp) * splat(read<float>(rows[t] + at));
    const vf b = both ? loadf(p + (int64_t)(t + 1) * ldp) * splat(read<float>(rows[t + 1] + at)) : vf{};
    _mm512_mask_storeu_epi32(pairs, (__mmask16)((1 << ROWS) - 1), (__m512i)bf16_pairs(a, b));
  }
}

// A query in pairs, as pair_dots takes it of keys of bytes.
template <class T>
PA_ONCE void to_keys(float *x, int size) {
  uint16_t *half = (uint16_t *)x;
  narrow_bf16(x, half, size);
  __builtin_memset(half + size, 0, 2 * size);
  turn_to_keys<T>(half, size);
}
