// Decode's products: a few rows of queries with some keys, of weights with some values. `Asks` says which
// lines are asked for beside them (dot_asks.h). Included by dot_path.h.

// Products of W / ROWS keys with ROWS rows, a vector of sums for each, [key][row]. SIZE is `size` where the compiler
// knows it, else 0.
template <class T, int ROWS, class How, int SIZE, class Asks>
PA_ALWAYS void multiply_keys(const char *const *keys, int64_t offset, const float *q, int ldq, int size, Asks asks,
                             vf *acc) {
  constexpr int KEYS = W / ROWS, LINE = 64 / (int)sizeof(T);
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  int d = 0;
  auto row_at = [&](int r, int at) __attribute__((always_inline)) {
    vf row = loadf(q + r * ldq + at);
    if (KEYS > 1) in_register(row);
    return row;
  };
  auto both = [&](int k, int at, vf *x) __attribute__((always_inline)) {
    const T *key = (const T *)(keys[k] + offset) + at;
    if constexpr (SIZE > 0) {
      if (at) return How::inside(key, x);
    }
    How::both(key, x);
  };
  auto two = [&](int at) __attribute__((always_inline)) {  // vectors of elements, which may be apart
    if constexpr (KEYS <= 2) {
      vf x[KEYS][2];
      PA_UNROLLED
      for (int k = 0; k < KEYS; k++) both(k, at, x[k]);
      PA_UNROLLED
      for (int i = 0; i < 2 * ROWS; i++) {
        vf row = row_at(i % ROWS, at + i / ROWS * W);
        PA_UNROLLED
        for (int k = 0; k < KEYS; k++) acc[k * ROWS + i % ROWS] += x[k][i / ROWS] * row;
      }
    } else {
      vf row[2 * ROWS];
      PA_UNROLLED
      for (int i = 0; i < 2 * ROWS; i++) row[i] = row_at(i % ROWS, at + i / ROWS * W);
      PA_UNROLLED
      for (int k = 0; k < KEYS; k++) {
        vf x[2];
        both(k, at, x);
        PA_UNROLLED
        for (int i = 0; i < 2 * ROWS; i++) acc[k * ROWS + i % ROWS] += x[i / ROWS] * row[i];
      }
    }
  };
  auto step = [&](int at, int some) __attribute__((always_inline)) {
    vf row[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) row[r] = row_at(r, at);
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const T *key = (const T *)(keys[k] + offset) + at;
      vf x = some < W ? load_some<How>(key, some) : How::some(key);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[k * ROWS + r] += x * row[r];
    }
  };
  auto line = [&](int d) __attribute__((always_inline)) {
    Asks::template keys<KEYS>(asks, d * sizeof(T));
    PA_UNROLLED
    for (int at = 0; at < LINE; at += How::ANY ? 2 * W : W) {
      if constexpr (How::ANY) {
        two(d + at);
      } else {
        step(d + at, W);
      }
    }
  };
  if constexpr (SIZE > 0) {
    PA_UNROLLED
    for (; d + LINE <= SIZE; d += LINE) line(d);
  } else {
    for (; d + LINE <= size; d += LINE) line(d);
  }
  if (d < size) {
    Asks::template keys<KEYS>(asks, d * sizeof(T));
    for (; d + W <= size; d += W) step(d, W);
    if (d < size) step(d, size - d);
  }
}
// The same as dot products, one vector.
template <class T, int ROWS, class How, class Asks>
PA_ALWAYS vf dots_here(const char *const *keys, int64_t offset, const float *q, int ldq, int size, Asks asks) {
  vf acc[W];
  multiply_keys<T, ROWS, How, 0>(keys, offset, q, ldq, size, asks, acc);
  return sums(acc);
}
template <class T, int ROWS, class Asks>
PA_NOINLINE vf dots(const char *const *keys, int64_t offset, const float *q, int ldq, int size, Asks asks) {
  return dots_here<T, ROWS, Apart<T>>(keys, offset, q, ldq, size, asks);
}

// o[row][0 .. C * W) += weights of `count` keys times their values. `some` < W: the last elements of
// a value, of which there are so many. Asks at every SHAREth key.
template <class T, int ROWS, int C, int SHARE, class Asks>
PA_NOINLINE void add_values(const char *const *values, int64_t offset, int count, const float *p,
                          int ldp, float *o, int ldo, int some, Asks asks) {
  vf acc[ROWS][C];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + c * W);
  }
  auto one = [&](int t) __attribute__((always_inline)) {
    const T *value = (const T *)(values[t] + offset);
    vf weight[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      weight[r] = splat(p[(int64_t)t * ldp + r]);
      if (C > 1) in_register(weight[r]);
    }
    if constexpr (C > 1) {
      PA_UNROLLED
      for (int c = 0; c < C; c += 2) {
        vf x[2];
        Apart<T>::both(value + c * W, x);
        PA_UNROLLED
        for (int i = 0; i < 2 * ROWS; i++) acc[i % ROWS][c + i / ROWS] += x[i / ROWS] * weight[i % ROWS];
      }
    } else {
      vf x = some < W ? load_some<Apart<T>>(value, some) : Apart<T>::some(value);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[r][0] += x * weight[r];
    }
  };
  int t = 0;
  for (; t + SHARE <= count; t += SHARE) {
    Asks::template values<C * W * (int)sizeof(T)>(asks, t);
    PA_UNROLLED
    for (int i = 0; i < SHARE; i++) one(t + i);
  }
  for (; t < count; t++) one(t);
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) write(o + r * ldo + c * W, acc[r][c]);
  }
}

// How many vectors of a value are added at a time where so many whole ones are left. A vector of a few
// elements, or a last one, goes alone; of pairs two do, as they hold the elements of one load.
template <int C, bool PAIRS>
PA_INLINE int value_vectors(int whole) {
  for (int each = C; each > 1; each -= 2) {
    if (whole > 1 && whole / 2 * 2 % each == 0) return each;
  }
  return PAIRS ? 2 : 1;
}

// W / ROWS keys' scores of ROWS rows to their places; a key is `ld` on.
template <int ROWS>
PA_INLINE void put_scores(vf found, float *s, int64_t ld) {
#if defined(__AVX512F__)
  if constexpr (ROWS == 4) {  // the compiler's own way is through memory
    _mm_storeu_ps(s, _mm512_castps512_ps128((__m512)found));
    _mm_storeu_ps(s + ld, _mm512_extractf32x4_ps((__m512)found, 1));
    _mm_storeu_ps(s + 2 * ld, _mm512_extractf32x4_ps((__m512)found, 2));
    _mm_storeu_ps(s + 3 * ld, _mm512_extractf32x4_ps((__m512)found, 3));
    return;
  }
#elif defined(__AVX2__)
  if constexpr (ROWS == 4) {
    _mm_storeu_ps(s, _mm256_castps256_ps128((__m256)found));
    _mm_storeu_ps(s + ld, _mm256_extractf128_ps((__m256)found, 1));
    return;
  }
#endif
  float each[W];
  write(each, found);
  for (int i = 0; i < W / ROWS; i++) __builtin_memcpy(s + i * ld, each + i * ROWS, 4 * ROWS);
}

// Elements of even and of odd number, of each two vectors, apart and together again.
PA_ONCE void apart(float *x, int size) {
  for (int d = 0; d < size; d += 2 * W, x += 2 * W) {
    float each[2 * W];
    __builtin_memcpy(each, x, sizeof each);
    for (int i = 0; i < 2 * W; i++) x[i % 2 * W + i / 2] = each[i];
  }
}
template <class T>
PA_ONCE void together(float *x, int size, int all) {
  for (int d = 0; d < size; d += 2 * W) {
    float each[2 * W];
    __builtin_memcpy(each, x + d, sizeof each);
    for (int i = 0; i < 2 * W; i++) x[d + i] = each[i % 2 * W + i / 2];
  }
  if (Apart<T>::FACTOR != 1) {
    for (int d = 0; d < all; d++) x[d] *= 1 / Apart<T>::FACTOR;
  }
}

template <bool PAIRS>
struct DotForms {
  typedef Floats Form;
};
#if defined(PA_PAIR_DOTS)
#include "pair_dots.h"
#endif
