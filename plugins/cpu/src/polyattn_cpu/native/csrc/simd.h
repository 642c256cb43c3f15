// One vector of W floats per instruction set, in the compiler's vector extensions; what those can't
// say is an intrinsic. Included inside an anonymous namespace.

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#define PA_SVE 1
#endif
#if defined(__AVX512F__)
#define PA_W 16
#elif defined(__AVX2__) || defined(PA_SVE)
#define PA_W 8
#else
#define PA_W 4
#endif
constexpr int W = PA_W;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));

#define PA_ALWAYS inline __attribute__((always_inline))
#define PA_INLINE static PA_ALWAYS
#define PA_NOINLINE __attribute__((noinline))
// Before a loop over registers: an array of them is in memory wherever a loop over it is left.
#if defined(__clang__)
#define PA_UNROLLED _Pragma("clang loop unroll(full)")
#define PA_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define PA_UNROLLED _Pragma("GCC unroll 16")
#define PA_ROLLED _Pragma("GCC unroll 1")
#endif
#define PA_ONCE static __attribute__((noinline, unused))  // too large to be copied into each caller

template <class V>
PA_INLINE V read(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
PA_INLINE void write(void *p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
PA_INLINE vf loadf(const float *p) { return read<vf>(p); }
// Keeps a compiler from loading it again for each use: load ports are what runs out.
template <class V>
PA_INLINE void in_register(V &v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
}
PA_INLINE vf splat(float x) { return x - vf{}; }
PA_INLINE vi splati(int32_t x) { return x - vi{}; }

// The larger one; b where either is NaN.
PA_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
PA_INLINE vf vmin(vf a, vf b) {  // the smaller one; b where either is NaN
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// A bit for each lane: its highest.
PA_INLINE uint32_t lanes_of(vi mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t found = 0;
  for (int i = 0; i < W; i++) found |= (uint32_t)mask[i] >> 31 << i;
  return found;
#endif
}
#if PA_W == 8 && defined(__AVX2__)
// A mask's lanes, beside one another; the others behind them are the first one.
struct LanesOf {
  uint8_t of[256][W];
  constexpr LanesOf() : of() {
    for (int mask = 0; mask < 256; mask++) {
      for (int i = 0, n = 0; i < W; i++) {
        if (mask >> i & 1) of[mask][n++] = (uint8_t)i;
      }
    }
  }
};
constexpr LanesOf LANES_OF;
PA_INLINE __m256i lanes_together(__m256i x, uint32_t mask) {
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)LANES_OF.of[mask])));
}
#endif

PA_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(PA_SVE)
  return svorv_s32(svptrue_b32(), (svint32_t)mask) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < W; i++) found |= mask[i];
  return found != 0;
#endif
}

PA_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
PA_INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); }
// Stays among the products where it stands: compilers gather the others, and of a burst a Zen 3 drops some.
PA_INLINE void prefetch_l2_here(const void *p) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %0" : : "m"(*(const char *)p));
#else
  prefetch_l2(p);
#endif
}

// 2^x for x <= 128, to 2e-7 of it: Cody-Waite by the rounding constant, a polynomial of degree 5
// (minimax on [-1/2, 1/2]), the exponent added as an integer. Below 2^-126 it is 0, because a
// denormal costs a hundred cycles in everything that follows. NaN stays NaN.
PA_INLINE vf exp2v(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23
  vf clamped = vmax(splat(-127.0f), x);
  vf shifted = clamped + magic;
  vf f = clamped - (shifted - magic);
  vf p = splat(1.32647e-3f);
  p = p * f + splat(9.67151e-3f);
  p = p * f + splat(5.550734e-2f);
  p = p * f + splat(2.4022242e-1f);
  p = p * f + splat(6.9314698e-1f);
  p = p * f + splat(1.0f);
  vf r = (vf)((vu)p + ((vu)shifted << 23));  // unsigned: beside a NaN x may be anything
  return clamped < splat(-126.0f) ? vf{} : r;
}

// tanh(x) to 2e-7 absolute.
PA_INLINE vf tanhv(vf x) {
  vf y = vmin(x * splat(2.8853900817779268f), splat(64.0f));
  return splat(1.0f) - splat(2.0f) / (exp2v(y) + splat(1.0f));
}

// Lanes of (a, b) taken in blocks of B: `low` the even blocks of both in turn, `high` the odd ones.
template <int B, bool HIGH>
constexpr int interleaved(int lane) {
  int start = lane / (2 * B) * (2 * B), at = lane % (2 * B);
  return (at < B ? start + at : W + start + at - B) + (HIGH ? B : 0);
}
#define PA_FOUR(F, B, H, AT) F<B, H>(AT), F<B, H>(AT + 1), F<B, H>(AT + 2), F<B, H>(AT + 3)
#if PA_W == 16
#define PA_LANES(F, B, H) \
  PA_FOUR(F, B, H, 0), PA_FOUR(F, B, H, 4), PA_FOUR(F, B, H, 8), PA_FOUR(F, B, H, 12)
#elif PA_W == 8
#define PA_LANES(F, B, H) PA_FOUR(F, B, H, 0), PA_FOUR(F, B, H, 4)
#else
#define PA_LANES(F, B, H) PA_FOUR(F, B, H, 0)
#endif
template <int B>
PA_INLINE vf low(vf a, vf b) {
  return __builtin_shufflevector(a, b, PA_LANES(interleaved, B, false));
}
template <int B>
PA_INLINE vf high(vf a, vf b) {
  return __builtin_shufflevector(a, b, PA_LANES(interleaved, B, true));
}

// Every other lane of (a, b), from the first or the second one on.
template <int, bool SECOND>
constexpr int every_other(int lane) {
  return 2 * lane + SECOND;
}
// N vectors that hold N numbers, again and again, as a vector of each.
template <int N>
PA_INLINE void apart_by_turns(vf *v) {
  if constexpr (N > 1) {
    vf half[2][N / 2];
    PA_UNROLLED
    for (int i = 0; i < N / 2; i++) {
      half[0][i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], PA_LANES(every_other, 0, false));
      half[1][i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], PA_LANES(every_other, 0, true));
    }
    apart_by_turns<N / 2>(half[0]);
    apart_by_turns<N / 2>(half[1]);
    PA_UNROLLED
    for (int i = 0; i < N; i++) v[i] = half[i % 2][i / 2];
  }
}

#if defined(__x86_64__)
// What x86 takes of (a, b) in one instruction without a table: halves of 128 bits, one of a beside one of
// b for B of 1 and 2; for larger ones a's even (odd) 128 bits, then b's. Of 256 bits the lower ones are blends
// for B of 1 and 4, which any port takes.
template <int B, bool HIGH>
constexpr int summed(int lane) {
  if (W == 8 && B == 1) return lane % 4 < 2 ? lane + (HIGH ? 2 : 0) : W + lane - (HIGH ? 2 : 0);
  if (W == 8 && B == 2) return lane / 4 * 4 + 2 * (lane % 2) + (HIGH ? 1 : 0) + (lane % 4 < 2 ? 0 : W);
  if (W == 8) return lane < 4 ? lane + (HIGH ? 4 : 0) : W + lane - (HIGH ? 4 : 0);
  if (B == 1) return lane / 4 * 4 + lane % 4 / 2 + (HIGH ? 2 : 0) + (lane % 2 ? W : 0);
  if (B == 2) return interleaved<2, HIGH>(lane);
  const int quarter = lane / 4, half = W / 8 ? W / 8 : 1;
  return quarter / half * W + (2 * (quarter % half) + (HIGH ? 1 : 0)) * 4 + lane % 4;
}
#else
template <int B, bool HIGH>
constexpr int summed(int lane) {
  return interleaved<B, HIGH>(lane);
}
#endif

template <int B, class V>
PA_INLINE V sum_of_halves(V a, V b) {
#if PA_W == 8  // the compiler's own choice for those is a shuffle, which two ports take
  if constexpr (B != 2) {
    return (V)_mm256_blend_ps((__m256)a, (__m256)b, B == 1 ? 0xcc : 0xf0) +
           __builtin_shufflevector(a, b, PA_LANES(summed, B, true));
  }
#endif
  return __builtin_shufflevector(a, b, PA_LANES(summed, B, false)) +
         __builtin_shufflevector(a, b, PA_LANES(summed, B, true));
}

// The sums of W vectors as one vector: lane i is the sum of v[i]. 45 operations for 16 sums. Of N vectors the first
// steps from blocks of B on; those of W / N such sums are the rest of them.
template <int B = 1, int N = W / B, class V>
PA_INLINE V sums(const V *v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    V half[N / 2];
    PA_UNROLLED
    for (int i = 0; i < N / 2; i++) half[i] = sum_of_halves<B>(v[2 * i], v[2 * i + 1]);
    return sums<2 * B, N / 2>(half);
  }
}

// N vectors as N x N matrices of 32-bit elements, one of each N lanes, turned over their diagonals in place.
template <int N = W, int B = 1>
PA_INLINE void transpose(vf *v) {
  if constexpr (B < N) {
    PA_UNROLLED
    for (int i = 0; i < N; i++) {
      if (i & B) continue;
      vf a = v[i], b = v[i + B];
      v[i] = low<B>(a, b);
      v[i + B] = high<B>(a, b);
    }
    transpose<N, 2 * B>(v);
  }
}
