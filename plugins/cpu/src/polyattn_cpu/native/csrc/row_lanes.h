// Codes in lanes, a lane a key's: words and scales of W rows, turned. Included by row_keys.h where bfloat16, which
// holds a table's numbers, is multiplied.

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

// Scales of e4m3, bytes of 16 lanes: as float16 their 256th part, NaN too.
PA_INLINE vf e4m3_scales(__m128i bytes) {
  vf x[2];
  const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  halves_apart(Apart<e4m3>::half(upper), _mm256_setzero_si256(), x);
  return x[0] * splat(256.0f);
}
PA_INLINE vf halves_of(__m512i words) { return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }

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
// 16 bytes, or `some` and zeros, of each of four rows beside one another.
template <bool WHOLE>
PA_INLINE __m512i four_rows(const char *a, const char *b, const char *c, const char *d, int some) {
  auto one = [=](const char *from) __attribute__((always_inline)) {
    if (WHOLE) return _mm_loadu_si128((const __m128i *)from);
    return _mm_maskz_loadu_epi8((__mmask16)((1 << some) - 1), from);
  };
  __m512i x = _mm512_broadcast_i32x4(one(a));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, one(b));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, one(c));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, one(d));
}
// The same of W rows as four vectors of words, a lane each row's.
template <bool WHOLE>
PA_INLINE void turned_words(const char *const *rows, int64_t at, int some, vf *to) {
  PA_UNROLLED
  for (int i = 0; i < 4; i++) {
    // Each is loaded where it is used: there are no registers for sixteen.
    auto row = [=](int t) __attribute__((always_inline)) { return *(const char *const volatile *)(rows + t) + at; };
    to[i] = (vf)four_rows<WHOLE>(row(i), row(4 + i), row(8 + i), row(12 + i), some);
  }
  turn_quarters(to);
}
// The scales, or four bytes, of each of W rows.
PA_INLINE vf one_of_each(const RowScales &scales) {
  auto four = [=](int i) __attribute__((always_inline)) {
    return _mm_setr_ps(scales[i], scales[i + 1], scales[i + 2], scales[i + 3]);
  };
  const __m256 low = _mm256_set_m128(four(4), four(0)), high = _mm256_set_m128(four(12), four(8));
  return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
// W rows' scales, and least numbers, of W words' groups: a vector of each group.
template <int SCALE>
PA_INLINE void turned_scales(const char *const *rows, int64_t at, int groups, vf *by, vf *least) {
  constexpr int BYTES = SCALE_BYTES<SCALE>, GROUPS = CODE_GROUPS<SCALE>;
  const int some = BYTES * pa_min(groups, GROUPS);
  if constexpr (SCALE == PA_STEPS) {
    vf both[4];
    if (groups >= GROUPS) {
      turned_words<true>(rows, at, 16, both);
    } else {
      for (int i = 0; i < 4; i++) both[i] = vf{};
      for (int i = 0; i < W; i++) {
        for (int g = 0; g < groups; g++) both[g][i] = read<float>(rows[i] + at + BYTES * g);
      }
    }
    PA_UNROLLED
    for (int g = 0; g < 4; g++) {
      by[g] = halves_of((__m512i)both[g]);
      least[g] = halves_of(_mm512_srli_epi32((__m512i)both[g], 16));
    }
    return;
  }
  if constexpr (SCALE == PA_POWERS) {
    vf each;
    if (groups >= GROUPS) {
      each = one_of_each({rows, at});
    } else {
      uint32_t words[W];
      for (int i = 0; i < W; i++) words[i] = (uint32_t)some_bytes(rows[i] + at, some);
      each = read<vf>(words);
    }
    PA_UNROLLED
    for (int g = 0; g < GROUPS; g++) by[g] = byte_scales<SCALE>((vu)each >> 8 * g & 0xffu);
    return;
  }
  __m256i four[4];  // rows i, 4 + i, 8 + i, 12 + i
  auto all = [&](auto eight) __attribute__((always_inline)) {
    PA_UNROLLED
    for (int i = 0; i < 4; i++) {
      four[i] = eight(i);
      four[i] = _mm256_mask_mov_epi64(four[i], 2, eight(4 + i));
      four[i] = _mm256_mask_mov_epi64(four[i], 4, eight(8 + i));
      four[i] = _mm256_mask_mov_epi64(four[i], 8, eight(12 + i));
    }
  };
  if (some == 8) {
    all([&](int t) __attribute__((always_inline)) { return (__m256i)_mm256_broadcast_sd((const double *)(rows[t] + at)); });
  } else {
    all([&](int t) __attribute__((always_inline)) { return _mm256_set1_epi64x((long long)some_bytes(rows[t] + at, some)); });
  }
  if constexpr (SCALE == PA_HALVES) {
    PA_UNROLLED
    for (int i = 0; i < 4; i++) by[i] = (vf)_mm512_cvtph_ps(four[i]);
    turn_quarters(by);
  } else {
    PA_UNROLLED
    for (int part = 0; part < 2; part++) {
      PA_UNROLLED
      for (int i = 0; i < 4; i++) {
        const __m256i some_of = part ? _mm256_srli_epi64(four[i], 32) : four[i];
        by[4 * part + i] = e4m3_scales(_mm256_cvtepi64_epi32(some_of));
      }
      turn_quarters(by + 4 * part);
    }
  }
}

// Queries and weights that bytes are multiplied by are integers of 16 bits, as an upper and a lower byte.
constexpr int BYTE_MOST = 127 * 256 + 127;  // whose upper byte, as the lower one is signed, is 127
PA_INLINE __m128i upper_bytes(__m512i x) {
  return _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8));
}
PA_INLINE __m128i lower_bytes(__m512i x) { return _mm512_cvtepi32_epi8(x); }
// The largest of all lanes, its unit, and what turns numbers up to it into integers: 0 where that isn't finite.
struct ByteUnit {
  float unit, by;
  explicit ByteUnit(vf most) {
    const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    unit = largest / BYTE_MOST;
    by = largest > INT_LEAST ? BYTE_MOST / largest : 0.0f;
  }
};

// Scores of W keys, a vector of each row, to their places: a key's are `lds` on.
template <int ROWS>
PA_INLINE void put_turned(vf *acc, float *s, int lds) {
  PA_UNROLLED
  for (int r = 0; r < ROWS; r += 4) turn_quarters(acc + r);
  PA_UNROLLED
  for (int i = 0; i < 4; i++) {
    float *const to = s + (int64_t)i * lds;
    if constexpr (ROWS == 8) {  // of each key four rows, and the other four
      const __m512i lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
      PA_UNROLLED
      for (int half = 0; half < 2; half++) {
        const __m512d two = _mm512_permutex2var_pd((__m512d)acc[i], half ? upper : lower, (__m512d)acc[4 + i]);
        _mm256_storeu_pd((double *)(to + (int64_t)8 * half * lds), _mm512_castpd512_pd256(two));
        _mm256_storeu_pd((double *)(to + (int64_t)(8 * half + 4) * lds), _mm512_extractf64x4_pd(two, 1));
      }
    } else {
      PA_UNROLLED
      for (int m = 0; m < 4; m++) {
        const __m128 each = _mm512_extractf32x4_ps((__m512)acc[i], m);
        float *const key = to + (int64_t)4 * m * lds;
        if (ROWS == 1) _mm_store_ss(key, each);
        else if (ROWS == 2) _mm_storel_pi((__m64 *)key, each);
        else _mm_storeu_ps(key, each);
      }
    }
  }
}
