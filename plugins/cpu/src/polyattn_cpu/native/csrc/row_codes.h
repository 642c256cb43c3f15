// Codes and a table in registers: dot products of keys, and weights times values. Included by row_keys.h.

// to[row] += W words of codes, of which queries lie [W words][code of a word][word], times a row.
template <int ROWS>
PA_INLINE void add_products(vf *to, const Table &table, vu codes, const float *q, int ldq) {
  PA_UNROLLED
  for (int j = 0; j < WORD_CODES; j++) {
    vf x = table(codes >> 4 * j);
    in_register(x);
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) to[r] += x * loadf(q + (int64_t)r * ldq + j * W);
  }
}

// W words of codes, or `count` and zeros.
PA_INLINE vu code_words(const char *p, int count) {
  if (count >= W) return read<vu>(p);
#if defined(__AVX512F__)
  return (vu)_mm512_maskz_loadu_epi32((__mmask16)((1 << count) - 1), p);
#else
  uint32_t padded[W] = {};
  __builtin_memcpy(padded, p, 4 * count);
  return read<vu>(padded);
#endif
}

struct NoAsks {
  template <int KEYS>
  PA_INLINE void keys(const NoAsks &, int64_t) {}
  template <int BYTES>
  PA_INLINE void values(NoAsks &, int) {}
};

// What is known of a head's codes in a tile: per row and W words the lanes' scales, and least numbers.
struct Codes {
  const char *const *rows;
  int64_t offset;
  const float *by, *least;
  int words, ld;  // of a row; floats from one row's scales to the next one's
  int64_t scales;  // where a row's lie
  int groups;
};

// Dot products of W / ROWS keys with ROWS rows that lie as the table says. `sums`: those of each word's elements.
template <int ROWS, bool LEAST>
PA_NOINLINE vf code_dots(const Codes &of, const Table &table, int first, const float *q, int ldq,
                         const float *sums_of, int ldsum) {
  constexpr int KEYS = W / ROWS;
  vf acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  for (int word = 0; word < of.words; word += W) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const int t = first + k;
      const vu codes = code_words(of.rows[t] + of.offset + 4 * word, of.words - word);
      vf part[ROWS];
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) part[r] = vf{};
      add_products<ROWS>(part, table, codes, q + word * WORD_CODES, ldq);
      const vf by = loadf(of.by + (int64_t)t * of.ld + word);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        vf &sum = acc[k * ROWS + r];
        sum += part[r] * by;
        if (LEAST) sum += loadf(of.least + (int64_t)t * of.ld + word) * loadf(sums_of + r * ldsum + word);
      }
    }
  }
  return sums(acc);
}

// o[row] += weights of `count` keys times codes [j, j + C) of each of W words, from `word` on.
template <int ROWS, int C, bool LEAST>
PA_NOINLINE void add_codes(const Codes &of, const Table &table, int first, int count, const float *p,
                           int ldp, float *o, int ldo, int word, int j) {
  vf acc[ROWS][C], low[ROWS];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    low[r] = vf{};
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + word * WORD_CODES + (j + c) * W);
  }
  for (int t = first; t < first + count; t++) {
    const vu codes = code_words(of.rows[t] + of.offset + 4 * word, of.words - word) >> 4 * j;
    const vf by = loadf(of.by + (int64_t)t * of.ld + word);
    vf weight[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      const vf plain = splat(p[(int64_t)t * ldp + r]);
      weight[r] = plain * by;
      if (LEAST) low[r] += plain * loadf(of.least + (int64_t)t * of.ld + word);
    }
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      vf x = table(codes >> 4 * c);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[r][c] += x * weight[r];
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      write(o + r * ldo + word * WORD_CODES + (j + c) * W, LEAST ? acc[r][c] + low[r] : acc[r][c]);
    }
  }
}

#if defined(__AVX2__)
// The larger magnitude; NaN is the largest.
PA_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_epi32((__m512i)a, (__m512i)((vi)b & 0x7fffffff));
#else
  return (vf)_mm256_max_epi32((__m256i)a, (__m256i)((vi)b & 0x7fffffff));
#endif
}
constexpr float INT_LEAST = 0x1p-110f;  // whose reciprocal, times an integer of 16 bits, is finite
#endif
