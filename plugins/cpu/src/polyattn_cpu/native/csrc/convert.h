// Storage types to W floats and back. Included inside an anonymous namespace.

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

// float16's bits, one in each 32-bit lane, as floats: exact, NaN and infinities too.
PA_INLINE vf half_bits(vu h) {
  vu magnitude = h & 0x7fffu;
  vf value = (vf)(magnitude << 13) * splat(0x1p112f);
  vf special = (vf)((magnitude << 13) | 0x7f800000u);
  vf both = magnitude >= 0x7c00u ? special : value;
  return (vf)((vu)both | ((h & 0x8000u) << 16));
}

// W elements of 16 or 8 bits, each in a 32-bit lane. SVE widens as it loads; what the compiler makes of
// a conversion there goes through memory. On x86 GCC 12 cuts a conversion of 16 elements into halves, five
// instructions; the intrinsic is one.
PA_INLINE vu lanes(const uint16_t *p) {
#if defined(PA_SVE)
  return (vu)svld1uh_u32(svptrue_b32(), p);
#elif defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(read<__m256i>(p));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(read<__m128i>(p));
#else
  return __builtin_convertvector(read<vh>(p), vu);
#endif
}
PA_INLINE vu lanes(const uint8_t *p) {
#if defined(PA_SVE)
  return (vu)svld1ub_u32(svptrue_b32(), p);
#else
  return __builtin_convertvector(read<vb>(p), vu);
#endif
}

PA_INLINE vf load(const float *p) { return read<vf>(p); }
PA_INLINE vf load(const bf16 *p) { return (vf)(lanes(&p->bits) << 16); }
PA_INLINE vf load(const f16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(PA_SVE)
  return (vf)svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32((svuint32_t)lanes(&p->bits)));
#elif defined(__ARM_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  return half_bits(lanes(&p->bits));
#endif
}
PA_INLINE vf load(const e5m2 *p) {  // the upper byte of a float16
#if defined(__AVX512F__)
  __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
  return (vf)_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
#elif defined(__AVX2__)
  __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
  return (vf)_mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
#else
  return half_bits(lanes(&p->bits) << 8);
#endif
}
// e4m3 in the place of a float16's exponent and mantissa is its 256th part, subnormals included;
// only 0x7f and 0xff, which are NaN, need a look.
#if defined(__AVX512F__)
PA_INLINE vf part_256(const e4m3 *p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
  __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
  __mmask16 nan = _mm256_cmpeq_epi16_mask(
      _mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
  half = _mm256_mask_set1_epi16(half, nan, 0x7fff);
  return (vf)_mm512_cvtph_ps(half);
}
PA_INLINE vf load(const e4m3 *p) { return part_256(p) * splat(256.0f); }
#else
PA_INLINE vf load(const e4m3 *p) {
#if defined(__AVX2__)
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
  __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));
  __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7f));
  return (vf)_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7fff)))) *
         splat(256.0f);
#else
  vu b = lanes(&p->bits);
  vu magnitude = b & 0x7fu;
  vf value = (vf)(magnitude << 20) * splat(0x1p120f);
  vf both = magnitude == 0x7fu ? (vf)(vu{} + 0x7fc00000u) : value;
  return (vf)((vu)both | ((b & 0x80u) << 24));
#endif
}
#endif
PA_INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(PA_SVE)
  return (vf)svcvt_f32_s32_x(svptrue_b32(), svld1sb_s32(svptrue_b32(), p));
#else
  return __builtin_convertvector(__builtin_convertvector(read<vsb>(p), vi), vf);
#endif
}

// Two vectors' elements with fewer instructions: those of even number, then those of odd number, each
// times a factor. What has no such way is loaded in order.
template <class T>
struct Apart {
  static constexpr bool ANY = false;
  static constexpr float FACTOR = 1;
  static vf some(const T *p) { return load(p); }
  static void both(const T *p, vf *x) {
    x[0] = load(p);
    x[1] = load(p + W);
  }
};
// The same for an indexer's products. Decode's don't gain from words of bfloat16 on AVX2: eight rows lose by them.
// SIZE: of the keys that have a loop of their own; 0: none.
template <class T>
struct IndexApart : Apart<T> {
  static constexpr int SIZE = 0;
};
#if defined(__AVX2__)
struct WordsApart {
  static constexpr bool ANY = true;
  static constexpr float FACTOR = 1;
  PA_INLINE vf some(const bf16 *p) { return load(p); }
  PA_INLINE void both(const bf16 *p, vf *x) {
    vu pairs = read<vu>(p);
    x[0] = (vf)(pairs << 16);
    x[1] = (vf)(pairs & 0xffff0000u);
  }
};
template <>
struct IndexApart<bf16> : WordsApart {
  static constexpr int SIZE = W == 8 ? 128 : 0;
  // Behind a key's first elements. From a word before, those of even number are upper halves as well: one more load,
  // and no shift, which takes a port of the products.
  PA_INLINE void inside(const bf16 *p, vf *x) {
    x[0] = (vf)(read<vu>(p - 1) & 0xffff0000u);
    x[1] = (vf)(read<vu>(p) & 0xffff0000u);
  }
};
#endif
#if defined(__AVX512F__)
template <>
struct Apart<bf16> : WordsApart {};
PA_INLINE void halves_apart(__m256i even, __m256i odd, vf *x) {
  x[0] = (vf)_mm512_cvtph_ps(even);
  x[1] = (vf)_mm512_cvtph_ps(odd);
}
template <>
struct Apart<e5m2> {
  static constexpr bool ANY = true;
  static constexpr float FACTOR = 1;
  PA_INLINE vf some(const e5m2 *p) { return load(p); }
  PA_INLINE void both(const e5m2 *p, vf *x) {
    __m256i pairs = read<__m256i>(p);
    halves_apart(_mm256_slli_epi16(pairs, 8), _mm256_and_si256(pairs, _mm256_set1_epi16((short)0xff00)),
                 x);
  }
};
template <>
struct Apart<e4m3> {
  static constexpr bool ANY = true;
  static constexpr float FACTOR = 1 / 256.0f;
  PA_INLINE vf some(const e4m3 *p) { return part_256(p); }
  PA_INLINE void both(const e4m3 *p, vf *x) {
    __m256i pairs = read<__m256i>(p);
    halves_apart(half(_mm256_slli_epi16(pairs, 8)), half(pairs), x);
  }
  // Of each upper byte. Where all of its magnitude's bits are set, adding the last one carries into the
  // exponent's first, which makes that of NaN.
  PA_INLINE __m256i half(__m256i upper) {
    __m256i h = _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16((short)0xbf80));
    __m256i carry = _mm256_add_epi16(h, _mm256_set1_epi16(0x80));
    return _mm256_ternarylogic_epi32(h, carry, _mm256_set1_epi16(0x4000), 0xf8);  // h | carry & 0x4000
  }
};
#endif

// The first `count` < W elements, then zeros; reads no byte beyond them.
template <class T>
PA_INLINE vf load_some(const T *p, int count) {
  T padded[W] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class How, class T>
PA_INLINE vf load_some(const T *p, int count) {
  T padded[W] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return How::some(padded);
}

template <class T>
PA_INLINE void widen(const T *from, float *to, int count) {
  int i = 0;
  for (; i + W <= count; i += W) write(to + i, load(from + i));
  if (i < count) write(to + i, load_some(from + i, count - i));
}

PA_INLINE uint16_t round_half(float x) {  // to nearest, ties to even
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns its last place with 2^-24
    float aligned;
    __builtin_memcpy(&aligned, &magnitude, 4);
    aligned += 0.5f;
    __builtin_memcpy(&magnitude, &aligned, 4);
    return (uint16_t)(sign | (magnitude - 0x3f000000u));
  }
  magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | (magnitude >> 13));
}

PA_INLINE void narrow_bf16(const float *from, uint16_t *to, int count) {
  for (int i = 0; i < count; i++) {
    uint32_t u;
    __builtin_memcpy(&u, from + i, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    to[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
}

PA_INLINE void narrow_half(const float *from, uint16_t *to, int count) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256((__m256i *)(to + i), half);
  }
#elif defined(__AVX2__)
  for (; i + 8 <= count; i += 8) {
    __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)(to + i), half);
  }
#endif
  for (; i < count; i++) to[i] = round_half(from[i]);
}

PA_ONCE void narrow(const float *from, void *to, int dtype, int count) {
  if (dtype == PA_F32) {
    __builtin_memcpy(to, from, count * sizeof(float));
  } else if (dtype == PA_BF16) {
    narrow_bf16(from, (uint16_t *)to, count);
  } else {
    narrow_half(from, (uint16_t *)to, count);
  }
}

PA_INLINE int itemsize(int dtype) { return dtype == PA_F32 ? 4 : dtype <= PA_F16 ? 2 : 1; }

PA_ONCE void widen_any(const void *from, int dtype, float *to, int count) {
  switch (dtype) {
    case PA_F32: return widen((const float *)from, to, count);
    case PA_BF16: return widen((const bf16 *)from, to, count);
    case PA_F16: return widen((const f16 *)from, to, count);
    case PA_E4M3: return widen((const e4m3 *)from, to, count);
    case PA_E5M2: return widen((const e5m2 *)from, to, count);
    default: return widen((const int8_t *)from, to, count);
  }
}
