// Rows of bytes, as numbers: traces of a format's `decode`, codes of four bits, bytes with a scale behind
// them. Included inside an anonymous namespace.

constexpr int WORD_CODES = 8;  // of four bits, in 32

// Integers with the cache's scale are rows of int8 without one behind them.
PA_INLINE bool in_rows(const pa_layer &layer) { return layer.key_format || layer.cache_dtype == PA_INT8; }
PA_INLINE pa_row_format format_of(const pa_row_format *f, int size) {
  return f ? *f : pa_row_format{PA_ROWS_INT8, 0, size, size, size, 0, 0, 0, 0, 1, NULL, NULL, NULL};
}
PA_INLINE pa_row_format key_rows(const pa_layer &layer) { return format_of(layer.key_format, layer.head_size); }
PA_INLINE pa_row_format value_rows(const pa_layer &layer) { return format_of(layer.value_format, layer.v_head_size); }
// Where rows' float32 lie: behind them, or one for all.
struct RowScales {
  const char *const *rows;
  int64_t at;
  PA_ALWAYS RowScales from(int t) const { return {rows + t, at}; }
  PA_ALWAYS float operator[](int t) const { return read<float>(rows[t] + at); }
};

PA_INLINE int row_width(const pa_row_format &f) { return pa_round_up(f.size, 16); }
PA_INLINE int64_t row_registers(const pa_row_format &f) {
  return (int64_t)(f.num_registers - f.num_constants) * row_width(f);
}

PA_INLINE int32_t floor_div(int32_t a, int32_t b) {
  if (b == 0 || (b == -1 && a == INT32_MIN)) return 0;
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// A trace's result for a row: a row's elements, or of elements its bytes. `memory`: of the registers that
// aren't constants.
PA_ONCE const float *trace_row(const pa_row_format &f, const char *row, int32_t *memory) {
  const int width = row_width(f);
  auto at = [&](int i) {
    return i < f.num_constants ? (int32_t *)f.constants + (int64_t)i * width
                               : memory + (int64_t)(i - f.num_constants) * width;
  };
  for (int s = 0; s < f.num_steps; s++) {
    const pa_row_step &step = f.steps[s];
    int32_t *to = at(step.to);
    const int32_t *a = at(step.a);
    const int n = step.count;
    switch (step.op) {
      case PA_BYTE:
        for (int i = 0; i < n; i++) to[i] = (uint8_t)row[a[i]];
        break;
      case PA_LOOK_UP:
        for (int i = 0; i < n; i++) to[i] = f.table[step.b + pa_min(pa_max(a[i], 0), step.c - 1)];
        break;
      case PA_ELEMENT:
        __builtin_memcpy(to, row, sizeof(float) * f.group);
        break;
      case PA_GATHER: {
        const int32_t *from = at(step.b);
        for (int i = 0; i < n; i++) to[i] = a[from[i]];
        break;
      }
      case PA_WHERE:
        for (int i = 0; i < n; i += W) {
          write(to + i, read<vi>(a + i) != 0 ? read<vi>(at(step.b) + i) : read<vi>(at(step.c) + i));
        }
        break;
#define PA_EACH(OP, V, RESULT)                                 \
  case OP:                                                     \
    for (int i = 0; i < n; i += W) {                           \
      const V x = read<V>(a + i), y = read<V>(at(step.b) + i); \
      (void)y;                                                 \
      write(to + i, RESULT);                                   \
    }                                                          \
    break;
#define PA_EACH_ALONE(OP, T, RESULT)               \
  case OP:                                         \
    for (int i = 0; i < n; i++) {                  \
      T x, y, found;                               \
      __builtin_memcpy(&x, a + i, 4);              \
      __builtin_memcpy(&y, at(step.b) + i, 4);     \
      (void)y;                                     \
      found = RESULT;                              \
      __builtin_memcpy(to + i, &found, 4);         \
    }                                              \
    break;
        PA_EACH(PA_TO_FLOAT, vi, __builtin_convertvector(x, vf))
        PA_EACH(PA_TO_INT, vf, __builtin_convertvector(x, vi))
        PA_EACH(PA_HALF, vu, half_bits(x & 0xffffu))
        PA_EACH(PA_AND, vi, x & y)
        PA_EACH(PA_OR, vi, x | y)
        PA_EACH(PA_XOR, vi, x ^ y)
        PA_EACH(PA_SHL, vu, x << (y & 31))
        PA_EACH(PA_SHR, vi, x >> (y & 31))
        PA_EACH(PA_ADD_INT, vu, x + y)
        PA_EACH(PA_SUB_INT, vu, x - y)
        PA_EACH(PA_MUL_INT, vu, x * y)
        PA_EACH(PA_MIN_INT, vi, x < y ? x : y)
        PA_EACH(PA_MAX_INT, vi, x < y ? y : x)
        PA_EACH(PA_LT_INT, vi, (x < y) & 1)
        PA_EACH(PA_LE_INT, vi, (x <= y) & 1)
        PA_EACH(PA_EQ_INT, vi, (x == y) & 1)
        PA_EACH(PA_ADD, vf, x + y)
        PA_EACH(PA_SUB, vf, x - y)
        PA_EACH(PA_MUL, vf, x * y)
        PA_EACH(PA_DIV, vf, x / y)
        PA_EACH(PA_MIN, vf, x != x ? x : x < y ? x : y)
        PA_EACH(PA_MAX, vf, x != x ? x : x > y ? x : y)
        PA_EACH(PA_LT, vf, (x < y) & 1)
        PA_EACH(PA_LE, vf, (x <= y) & 1)
        PA_EACH(PA_EQ, vf, (x == y) & 1)
        PA_EACH_ALONE(PA_DIV_INT, int32_t, floor_div(x, y))
        PA_EACH_ALONE(PA_MOD_INT, int32_t, x - floor_div(x, y) * y)
        PA_EACH_ALONE(PA_EXP, float, expf(x))
        PA_EACH_ALONE(PA_EXP2, float, exp2f(x))
        PA_EACH_ALONE(PA_LOG, float, logf(x))
        PA_EACH_ALONE(PA_LOG2, float, log2f(x))
        PA_EACH_ALONE(PA_SQRT, float, sqrtf(x))
        PA_EACH_ALONE(PA_SIN, float, sinf(x))
        PA_EACH_ALONE(PA_COS, float, cosf(x))
        PA_EACH_ALONE(PA_TANH, float, tanhf(x))
        PA_EACH_ALONE(PA_FLOOR, float, floorf(x))
        PA_EACH_ALONE(PA_CEIL, float, ceilf(x))
#undef PA_EACH
#undef PA_EACH_ALONE
    }
  }
  return (const float *)at(f.result);
}

// Up to 8 bytes, then zeros.
PA_INLINE uint64_t some_bytes(const char *p, int count) {
  if (count == 8) return read<uint64_t>(p);
  if (count == 4) return read<uint32_t>(p);
  if (count == 2) return read<uint16_t>(p);
  uint64_t found = 0;
  __builtin_memcpy(&found, p, count);
  return found;
}
PA_INLINE vf some_halves(uint64_t bits) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi64_si128((long long)bits)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_cvtsi64_si128((long long)bits));
#else
  vu h = {};
  for (int i = 0; i < 4; i++) h[i] = bits >> 16 * i & 0xffff;
  return half_bits(h);
#endif
}
PA_INLINE vu some_lanes(uint64_t bytes) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
#else
  vu b = {};
  for (int i = 0; i < (W < 8 ? W : 8); i++) b[i] = bytes >> 8 * i & 0xff;
  return b;
#endif
}
// Lane i is lane i / EACH of x.
template <int EACH>
PA_INLINE vf repeated(vf x) {
#if defined(__AVX512F__)
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(lane, EACH == 8 ? 3 : EACH / 2), (__m512)x);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  return (vf)_mm256_permutevar8x32_ps((__m256)x, _mm256_srli_epi32(lane, EACH == 8 ? 3 : EACH / 2));
#else
  vf found = {};
  for (int i = 0; i < W; i++) found[i] = x[i / EACH];
  return found;
#endif
}

// The scales of W / ROWS rows of bytes, a lane each of a visit's scores.
template <int ROWS>
PA_INLINE vf byte_row_scales(const RowScales &scales) {
#if PA_W == 8 && defined(__AVX2__)
  if constexpr (ROWS == 4) return (vf)_mm256_blend_ps(_mm256_set1_ps(scales[0]), _mm256_set1_ps(scales[1]), 0xf0);
#endif
  vf each = {};
  PA_UNROLLED
  for (int k = 0; k < W / ROWS; k++) each[k] = scales[k];
  return repeated<ROWS>(each);
}

template <int SCALE>
PA_INLINE vf byte_scales(vu b) {
  if constexpr (SCALE == PA_POWERS) {
    const vu bits = b == 0 ? vu{} + 0x00400000u : b == 255 ? vu{} + 0x7fc00000u : b << 23;
    return (vf)bits;
  } else {
    const vu magnitude = b & 0x7fu;
    const vf value = (vf)((magnitude << 20) + (magnitude < 8 ? vu{} : vu{} + (120u << 23)));
    const vf small = __builtin_convertvector((vi)magnitude, vf) * splat(0x1p-9f);
    const vf both = magnitude == 0x7fu ? (vf)(vu{} + 0x7fc00000u) : magnitude < 8 ? small : value;
    return (vf)((vu)both | ((b & 0x80u) << 24));
  }
}
template <int SCALE>
constexpr int SCALE_BYTES = SCALE == PA_STEPS ? 4 : SCALE == PA_HALVES ? 2 : 1;  // of a group
// The scales of the groups that W words of codes lie in, from the `word`th on, a lane each; where a format
// has steps from a least number on, that too.
struct GroupScales {
  vf by, least;
};
template <int SCALE>
PA_INLINE GroupScales group_scales(const pa_row_format &f, int groups, const char *row, int word) {
  constexpr int EACH = SCALE == PA_E4M3S ? 2 : 4;  // words of a group
  const char *scales = row + f.size / 2;
  const int first = word / EACH, count = pa_min(W / EACH, groups - first);
  if constexpr (SCALE == PA_NORM) {
    const vf norm = some_halves(some_bytes(scales, 2));
    return {splat(norm[0] * f.factor), vf{}};
  } else if constexpr (SCALE == PA_HALVES) {
    return {repeated<EACH>(some_halves(some_bytes(scales + 2 * first, 2 * count))), vf{}};
  } else if constexpr (SCALE == PA_STEPS) {
#if defined(__AVX512F__)
    const __m128i pairs = _mm_maskz_loadu_epi32((__mmask8)((1 << count) - 1), scales + 4 * first);
    const __m512 both = _mm512_cvtph_ps(_mm256_castsi128_si256(pairs));
    const __m512i at = _mm512_set_epi32(6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0);
    return {(vf)_mm512_permutexvar_ps(at, both),
            (vf)_mm512_permutexvar_ps(_mm512_add_epi32(at, _mm512_set1_epi32(1)), both)};
#elif defined(__AVX2__)
    const __m256 both = (__m256)some_halves(some_bytes(scales + 4 * first, 4 * count));
    const __m256i at = _mm256_set_epi32(2, 2, 2, 2, 0, 0, 0, 0);
    return {(vf)_mm256_permutevar8x32_ps(both, at),
            (vf)_mm256_permutevar8x32_ps(both, _mm256_add_epi32(at, _mm256_set1_epi32(1)))};
#else
    float each[2][W] = {};
    for (int i = 0; i < count; i += 2) {
      const int some = pa_min(2, count - i);
      const vf pairs = some_halves(some_bytes(scales + 4 * (first + i), 4 * some));
      for (int j = 0; j < 2 * some; j++) each[j % 2][i + j / 2] = pairs[j];
    }
    return {repeated<EACH>(loadf(each[0])), repeated<EACH>(loadf(each[1]))};
#endif
  } else {
    vf found = byte_scales<SCALE>(some_lanes(some_bytes(scales + first, count)));
    if (SCALE == PA_POWERS && count < W / EACH) {  // a power of byte 0 is subnormal: Intel multiplies it slowly
      PA_UNROLLED
      for (int i = 0; i < W / EACH; i++) found[i] = i < count ? found[i] : 0.0f;
    }
    return {repeated<EACH>(found), vf{}};
  }
}

// 16 numbers that codes of four bits, in lanes whose higher bits may be anything, stand for.
struct Table {
#if defined(__AVX512F__)
  __m512 all;
  explicit Table(const float *from) : all(_mm512_loadu_ps(from)) {}
  PA_ALWAYS vf operator()(vu code) const { return (vf)_mm512_permutexvar_ps((__m512i)code, all); }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Table(const float *from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
  PA_ALWAYS vf operator()(vu code) const {
    const __m256i at = (__m256i)code;
    const __m256 a = _mm256_permutevar8x32_ps(low, at), b = _mm256_permutevar8x32_ps(high, at);
    return (vf)_mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
  }
#elif defined(__aarch64__) && !defined(PA_SVE)
  uint8x16x4_t all;
  explicit Table(const float *from) {
    for (int i = 0; i < 4; i++) all.val[i] = vld1q_u8((const uint8_t *)(from + 4 * i));
  }
  PA_ALWAYS vf operator()(vu code) const {
    const vu bytes = (code & 15u) * 0x04040404u + 0x03020100u;
    return (vf)vqtbl4q_u8(all, (uint8x16_t)bytes);
  }
#else
  const float *from;
  explicit Table(const float *from) : from(from) {}
  PA_ALWAYS vf operator()(vu code) const {
    float each[W];
    for (int i = 0; i < W; i++) each[i] = from[code[i] & 15];
    return loadf(each);
  }
#endif
};

// Words of W codes, each where its code's lane is.
PA_INLINE vu words_of_lanes(const char *p) {
#if defined(__AVX512F__)
  const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return (vu)_mm512_permutexvar_epi32(second, _mm512_set1_epi64(read<long long>(p)));
#else
  uint32_t word = 0;
  __builtin_memcpy(&word, p, W / 2);
  return vu{} + word;
#endif
}

// A row's first `count` numbers, in order, in whole vectors: a group has some.
template <int SCALE>
PA_ONCE void unpack_codes(const pa_row_format &f, const char *row, int count, float *to) {
  const Table table((const float *)f.table);
  const int groups = f.size / f.group;
  vu place;
  for (int i = 0; i < W; i++) place[i] = i % WORD_CODES * 4;
  for (int word = 0; word * WORD_CODES < count; word += W) {
    const GroupScales is = group_scales<SCALE>(f, groups, row, word);
    const int end = pa_min(count, (word + W) * WORD_CODES);
    for (int i = word * WORD_CODES; i < end; i += W) {
      const int at = i / WORD_CODES - word;
      const vf x = table(words_of_lanes(row + i / 2) >> place);
      write(to + i, x * splat(is.by[at]) + (SCALE == PA_STEPS ? splat(is.least[at]) : vf{}));
    }
  }
}
template <class T>
PA_ONCE void unpack_bytes(const T *row, float scale, int count, float *to) {
  for (int i = 0; i < count; i += W) {
    const vf x = count - i >= W ? load(row + i) : load_some(row + i, count - i);
    write(to + i, x * splat(scale));
  }
}

// `to` has room for whole vectors.
PA_ONCE void unpack_row(const pa_row_format &f, const char *row, int count, float *to, int32_t *registers) {
  switch (f.form) {
    case PA_CODES:
      switch (f.scale) {
        case PA_HALVES: return unpack_codes<PA_HALVES>(f, row, count, to);
        case PA_STEPS: return unpack_codes<PA_STEPS>(f, row, count, to);
        case PA_E4M3S: return unpack_codes<PA_E4M3S>(f, row, count, to);
        case PA_POWERS: return unpack_codes<PA_POWERS>(f, row, count, to);
        default: return unpack_codes<PA_NORM>(f, row, count, to);
      }
    case PA_TRACED: __builtin_memcpy(to, trace_row(f, row, registers), sizeof(float) * count); return;
    case PA_ROWS_INT8: return unpack_bytes((const int8_t *)row, read<float>(row + f.size), count, to);
    default: return unpack_bytes((const e4m3 *)row, read<float>(row + f.size), count, to);
  }
}

// Room for a tile's rows of one head, as elements of the layer's `cache_dtype`.
struct Unpacked {
  const pa_layer *layer = NULL;
  char *keys = NULL, *values = NULL;
  float *row = NULL;
  int32_t *registers = NULL;

  static int64_t scratch(const pa_layer &layer, int tile) {
    if (!layer.key_format) return 0;
    const pa_row_format &k = *layer.key_format, &v = *layer.value_format;
    return (int64_t)tile * itemsize(layer.cache_dtype) * (row_width(k) + row_width(v)) +
           4 * (pa_max(row_width(k), row_width(v)) + row_registers(k) + row_registers(v)) + 4 * 64;
  }
  Unpacked() {}
  Unpacked(const pa_layer &of, Arena &arena, int tile) {
    if (!of.key_format) return;
    layer = &of;
    const pa_row_format &k = *of.key_format, &v = *of.value_format;
    keys = arena.take<char>((int64_t)tile * itemsize(of.cache_dtype) * row_width(k));
    values = arena.take<char>((int64_t)tile * itemsize(of.cache_dtype) * row_width(v));
    row = arena.take<float>(pa_max(row_width(k), row_width(v)));
    registers = arena.take<int32_t>(row_registers(k) + row_registers(v));
  }
  explicit operator bool() const { return layer; }

  // Turns addresses of rows into those of their elements. `in_keys`: a value is its key's first elements.
  void tile(const char **k, int64_t key_offset, const char **v, int64_t value_offset, int count,
            bool in_keys) {
    put(*layer->key_format, k, key_offset, layer->head_size, count, keys);
    if (!in_keys) return put(*layer->value_format, v, value_offset, layer->v_head_size, count, values);
    for (int t = 0; t < count; t++) v[t] = k[t];
  }
  void put(const pa_row_format &f, const char **rows, int64_t offset, int size, int count, char *to) {
    const int64_t bytes = (int64_t)row_width(f) * itemsize(layer->cache_dtype);
    for (int t = 0; t < count; t++, to += bytes) {
      unpack_row(f, rows[t] + offset, size, row, registers);
      narrow(row, to, layer->cache_dtype, size);
      rows[t] = to;
    }
  }
};
