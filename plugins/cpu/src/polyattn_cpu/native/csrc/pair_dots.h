// Decode's products of bfloat16 by vdpbf16ps: twice the rate of float32's on AMD's processors. What is
// stored as bfloat16 needs no conversion, 8 bits few instructions. Weights are rounded to bfloat16, as in
// the matrix path. Included by dot_path.h.

template <>
struct DotForms<true> {
  typedef Pairs Form;
};

PA_INLINE vf add_pairs(vf acc, __m512i a, __m512i b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

// A query in the order of keys of 8 bits, as they are looked up: of each 64 elements.
template <class T>
PA_ONCE void turn_to_keys(uint16_t *q, int size) {
  for (int d = 0; sizeof(T) == 1 && d + 64 <= size; d += 64, q += 64) {
    uint16_t each[64];
    __builtin_memcpy(each, q, sizeof each);
    for (int i = 0; i < 64; i += 8) __builtin_memcpy(q + i % 16 / 8 * 32 + i / 16 * 8, each + i, 16);
  }
}

// Dot products of W / ROWS keys with ROWS rows, as one vector, [key][row]; `q` is zero beyond `size`, and
// as `turn_to_keys` leaves it.
template <class T, int ROWS, class Asks>
PA_NOINLINE vf pair_dots(const char *const *keys, int64_t offset, const uint16_t *q, int ldq, int size,
                         Asks asks) {
  constexpr int KEYS = W / ROWS, LINE = 64 / (int)sizeof(T), PARTS = LINE / 32;
  vf acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  auto step = [&](int d, auto key) __attribute__((always_inline)) {
    Asks::template keys<KEYS>(asks, d * sizeof(T));
    __m512i row[PARTS * ROWS];
    PA_UNROLLED
    for (int i = 0; i < PARTS * ROWS; i++) {
      row[i] = _mm512_loadu_si512(q + (int64_t)(i % ROWS) * ldq + d + i / ROWS * 32);
    }
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const Halves x = key((const T *)(keys[k] + offset) + d);
      PA_UNROLLED
      for (int i = 0; i < PARTS * ROWS; i++) {
        vf &to = acc[k * ROWS + i % ROWS];
        to = add_pairs(to, x.part[i / ROWS], row[i]);
      }
    }
  };
  int d = 0;
  for (; d + LINE <= size; d += LINE) {
    step(d, [](const T *at) __attribute__((always_inline)) { return halves<AS_LOOKED_UP>(at, LINE); });
  }
  if (d < size) {
    step(d, [=](const T *at) __attribute__((always_inline)) { return halves(at, size - d); });
  }
  return sums(acc);
}

// Rows of a query, NULL where there is none, as `lane_dots` takes them: of each the same WORDS pairs of elements,
// then the next ones.
template <int WORDS>
PA_ONCE void turn_to_lanes(const char *const *rows, uint32_t *q, int size) {
  __builtin_memset(q, 0, 4 * W * (int64_t)((size + 2 * WORDS - 1) / (2 * WORDS)));
  for (int r = 0; r < W / WORDS; r++) {
    if (!rows[r]) continue;
    int d = 0;
    uint32_t *to = q + r * WORDS;
    for (; d + 2 * WORDS <= size; d += 2 * WORDS, to += W) __builtin_memcpy(to, rows[r] + 2 * d, 4 * WORDS);
    __builtin_memcpy(to, rows[r] + 2 * d, 2 * (size - d));
  }
}

// Dot products of LANE_KEYS keys with up to W / WORDS rows, as `turn_to_lanes` leaves them: a row's sums are WORDS
// lanes, so that hardly any are added across. Of keys that aren't bfloat16 `room` takes a copy. Writes `rows` of
// each key, `ld` on.
template <class T, int WORDS, class Asks>
PA_NOINLINE void lane_dots(const char *const *keys, int64_t offset, const uint32_t *q, int size, uint16_t *room,
                           float *s, int64_t ld, int rows, Asks asks) {
  typedef std::conditional_t<WORDS == 2, uint64_t, uint32_t> Words;
  constexpr int LINE = 64 / (int)sizeof(T), STEP = 2 * WORDS;
  const char *at[LANE_KEYS];
  PA_UNROLLED
  for (int k = 0; k < LANE_KEYS; k++) {
    at[k] = keys[k] + offset;
    if constexpr (sizeof(T) == 1) {
      uint16_t *to = room + (int64_t)k * pa_round_up(size, 64);
      for (int d = 0; d < size; d += 64) write(to + d, halves((const T *)at[k] + d, size - d));
      at[k] = (const char *)to;
    }
  }
  vf acc[LANE_KEYS];
  PA_UNROLLED
  for (int k = 0; k < LANE_KEYS; k++) acc[k] = vf{};
  auto step = [&](int d, int bytes) __attribute__((always_inline)) {
    const __m512i row = _mm512_loadu_si512(q + d / STEP * W);
    PA_UNROLLED
    for (int k = 0; k < LANE_KEYS; k++) {
      Words some = 0;
      __builtin_memcpy(&some, at[k] + 2 * d, bytes);
      const __m512i all = WORDS == 2 ? _mm512_set1_epi64((int64_t)some) : _mm512_set1_epi32((int)some);
      acc[k] = add_pairs(acc[k], row, all);
    }
  };
  for (int first = 0; first < size; first += LINE) {
    Asks::template keys<LANE_KEYS>(asks, first * sizeof(T));
    const int end = pa_min(first + LINE, size);
    int d = first;
    for (; d + STEP <= end; d += STEP) step(d, 2 * STEP);
    if (d < end) step(d, 2 * (end - d));
  }
  if constexpr (WORDS == 1) {
    const __mmask16 valid = (__mmask16)((1u << rows) - 1);
    PA_UNROLLED
    for (int k = 0; k < LANE_KEYS; k++) _mm512_mask_storeu_ps(s + k * ld, valid, (__m512)acc[k]);
  } else {
    PA_UNROLLED
    for (int k = 0; k < LANE_KEYS; k += 2) {
      const __m512 a = (__m512)acc[k], b = (__m512)acc[k + 1];
      const vf sum = (vf)_mm512_shuffle_ps(a, b, 0x88) + (vf)_mm512_shuffle_ps(a, b, 0xdd);
      const __m512d both = _mm512_permutexvar_pd(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), (__m512d)sum);
      _mm256_storeu_pd((double *)(s + k * ld), _mm512_castpd512_pd256(both));
      _mm256_storeu_pd((double *)(s + (k + 1) * ld), _mm512_extractf64x4_pd(both, 1));
    }
  }
}

// 64 elements of two keys' values, each pair in 32 bits; no second key: zeros.
template <class T>
PA_INLINE void value_pairs(const T *a, const T *b, __m512i *pairs) {
  const __m512i x = _mm512_loadu_si512(a), y = b ? _mm512_loadu_si512(b) : __m512i{};
  if constexpr (sizeof(T) == 1) {
    const Halves low = looked_up<T>(_mm512_unpacklo_epi8(x, y));
    const Halves high = looked_up<T>(_mm512_unpackhi_epi8(x, y));
    pairs[0] = low.part[0], pairs[1] = low.part[1];
    pairs[2] = high.part[0], pairs[3] = high.part[1];
  } else {
    const __m512i z = _mm512_loadu_si512(a + 32), w = b ? _mm512_loadu_si512(b + 32) : __m512i{};
    pairs[0] = _mm512_unpacklo_epi16(x, y), pairs[1] = _mm512_unpackhi_epi16(x, y);
    pairs[2] = _mm512_unpacklo_epi16(z, w), pairs[3] = _mm512_unpackhi_epi16(z, w);
  }
}

// o[row][0 .. C * W) += weights of `count` keys times their values, two keys at a time; `p` has both
// weights in 32 bits. `some` < 32: the last elements of a value, of which there are so many. o isn't in order
// until `pairs_together`.
template <class T, int ROWS, int C, class Asks>
PA_NOINLINE void add_value_pairs(const char *const *values, int64_t offset, int count, const uint32_t *p,
                                 int ldp, float *o, int ldo, int some, Asks asks) {
  constexpr int BYTES = C * W * (int)sizeof(T);
  vf acc[ROWS][C];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + c * W);
  }
  auto two = [&](int t, bool both) __attribute__((always_inline)) {
    const T *a = (const T *)(values[t] + offset), *b = both ? (const T *)(values[t + 1] + offset) : NULL;
    __m512i weight[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) weight[r] = _mm512_set1_epi32((int)p[(int64_t)(t / 2) * ldp + r]);
    PA_UNROLLED
    for (int c = 0; c < C; c += 4) {
      __m512i pairs[4];
      if (C - c >= 4) {
        value_pairs(a + c * W, b ? b + c * W : NULL, pairs);
      } else {
        const int most = C > 2 ? 2 * W : pa_min(2 * W, some);
        const __m512i x = halves(a + c * W, most).part[0], y = b ? halves(b + c * W, most).part[0] : __m512i{};
        pairs[0] = _mm512_unpacklo_epi16(x, y), pairs[1] = _mm512_unpackhi_epi16(x, y);
      }
      constexpr int most = C < 4 ? C : 4;
      PA_UNROLLED
      for (int i = 0; i < most; i++) {
        if (c + i >= C) break;
        PA_UNROLLED
        for (int r = 0; r < ROWS; r++) acc[r][c + i] = add_pairs(acc[r][c + i], pairs[i], weight[r]);
      }
    }
  };
  int t = 0;
  for (; t + 2 <= count; t += 2) {
    Asks::template values<BYTES>(asks, t);
    Asks::template values<BYTES>(asks, t + 1);
    two(t, true);
  }
  if (t < count) two(t, false);
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) write(o + r * ldo + c * W, acc[r][c]);
  }
}

// Elements back in their order: those that were added 64 at a time, of which `most` vectors tell, and the
// others, 32 at a time. A vector has of each 16 (of a lookup of 64) or 8 elements four.
template <class T>
PA_ONCE void pairs_together(float *x, int size, int most) {
  for (int d = 0; d < size;) {
    const int vectors = d + most * W <= size ? most : 2;
    for (int v = 0; v < vectors; v += 4) {
      const int some = pa_min(4, vectors - v), each_lane = sizeof(T) == 1 && some == 4 ? 4 : 2;
      float each[4 * W];
      __builtin_memcpy(each, x + d, some * W * sizeof(float));
      for (int i = 0; i < some * W; i += 4) {
        const int lane = i / (4 * each_lane), vector = i / 4 % each_lane;
        const int second = each_lane == 2 ? lane / 4 * 2 : 0;  // of bfloat16, 32 elements are a load
        __builtin_memcpy(x + d + i, each + (vector + second) * W + lane % 4 * 4, 16);
      }
      d += some * W;
    }
  }
}
