// The matrix path where the processor multiplies bfloat16: by vdpbf16ps, bfdot, or AMX tiles. Queries are
// bfloat16, and so are keys and values, or 8 bits, which bfloat16 holds exactly; weights are
// rounded to it. Included by matrix_path.h.

struct MulPairs {
  PA_INLINE vf add(vf acc, uint32_t a, vu b) {
#if defined(__aarch64__)
    return dot_pairs(acc, a, b);
#else
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#endif
  }
};

// The first `count` elements as bfloat16; `count` may exceed W only for storage of 16 bits.
template <class T>
PA_INLINE void copy_bf16(const T *from, uint16_t *to, int count) {
  int i = 0;
  if constexpr (sizeof(T) == 2) {  // by vectors, as compilers make a string instruction of 64 bytes that are copied
    for (; i + 2 * W <= count; i += 2 * W) write(to + i, read<vu>(from + i));
    if (i < count) __builtin_memcpy(to + i, from + i, 2 * (count - i));
  } else {
#if defined(__AVX512BF16__)
    for (; i + 64 <= count; i += 64) {
      const Halves x = halves(from + i, 64);
      write(to + i, x.part[0]);
      write(to + i + 32, x.part[1]);
    }
#endif
    for (; i + W <= count; i += W) write(to + i, __builtin_convertvector((vu)load(from + i) >> 16, vh));
    if (i == count) return;
    const vh half = __builtin_convertvector((vu)load_some(from + i, count - i) >> 16, vh);
    __builtin_memcpy(to + i, &half, 2 * (count - i));
  }
}

// W elements of two consecutive keys' values, each pair in 32 bits.
template <class T>
PA_INLINE vu value_pair(const T *a, const T *b, int some) {
  vu first = (vu)(some == W ? load(a) : load_some(a, some));
  vu second = b ? (vu)(some == W ? load(b) : load_some(b, some)) : vu{};
  return (first >> 16) | (second & 0xffff0000u);
}

// W pairs of elements of `size` elements, from the `d`th pair on; zeros beyond the last.
PA_INLINE vf pairs_part(const char *from, int d, int size) {
  const int left = 2 * (size - 2 * d);  // bytes
  if (left >= 4 * W) return read<vf>(from + 4 * d);
  vf part = {};
  if (left > 0) __builtin_memcpy(&part, from + 4 * d, left);
  return part;
}

struct PairEngine {
  typedef Pairs Form;
  static constexpr int VECTORS = 3, STEP = BLOCK, TILES = 1;
  static constexpr int PER_WORD = 2;
  static constexpr bool PLANES = false;
  static int cost(int depth, int vectors) { return 4 * vectors * depth; }
  static int value_depth(int keys) { return keys / 2; }
  static Sizes sizes(const pa_layer &layer) {
    return {pa_round_up(layer.head_size, 2 * W) / 2, pa_round_up(layer.v_head_size, W), MATRIX_TILE};
  }
  static void begin() {}
  static void end() {}
  PA_INLINE vf query_part(const char *from, int, int d, int size) {
    return pairs_part(from, d, size);
  }
  template <class T>
  static void pack_key(const T *from, uint32_t *k, int key, int size, const Sizes &is) {
    copy_bf16(from, (uint16_t *)(k + (int64_t)key * is.k), size);
  }
  template <class T>
  static void pack_values(const char *const *rows, int64_t offset, int count, uint32_t *to, int size,
                          const Sizes &is, Ahead &ahead) {
    for (int t = 0; t < count; t += 2) {
      ahead(is.v / 4);
      const T *a = (const T *)(rows[t] + offset);
      const T *b = t + 1 < count ? (const T *)(rows[t + 1] + offset) : NULL;
      for (int d = 0; d < size; d += W) {
        vu x = value_pair(a + d, b ? b + d : NULL, pa_min(W, size - d));
        uint32_t each[W];
        write(each, x);
        for (int i = 0; i < W; i += BLOCK) {
          uint32_t *at = to + ((int64_t)(d + i) / BLOCK * (is.keys / 2) + t / 2) * BLOCK;
          __builtin_memcpy(at, each + i, 4 * BLOCK);
        }
      }
    }
  }
  template <int V>
  static void scores(const uint32_t *k, const uint32_t *q, float *s, int keys, const Sizes &is,
                     Ahead &ahead) {
    for (int t = 0; t < keys; t += BLOCK) {
      micro<MulPairs, V, false>(k + (int64_t)t * is.k, is.k, 1, q, s + (int64_t)t * V * W, is.k);
      ahead(cost(is.k, V));
    }
  }
  template <int V>
  static void output(const uint32_t *v, const float *, const uint32_t *pairs, float *o, int keys,
                     const Sizes &is, Ahead &ahead) {
    for (int d = 0; d < is.v; d += BLOCK) {
      micro<MulPairs, V, true>(v + (int64_t)d * (is.keys / 2), 1, BLOCK, pairs,
                               o + (int64_t)d * V * W, (keys + 1) / 2);
      ahead(cost(keys / 2, V));
    }
  }
};

#if defined(__AMX_BF16__)
// The compiler takes only eight bytes of it to be read.
PA_INLINE void load_tile_config(const void *config) {
  __asm__ volatile("" : : "r"(config) : "memory");
  _tile_loadconfig(config);
}

// Eight registers of 16 rows of 64 bytes.
struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int TILE_STEP = 256;   // keys of a tile of these
constexpr int TILE_WORDS = 256;  // of a tile register: 16 rows of 64 bytes

// Four tile registers of sums: they lie at an address, `step` on, and both again `pair` on; rows are `ld` bytes apart.
PA_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
PA_INLINE void take_sums(const float *from, int64_t step, int64_t pair) {
  _tile_loadd(0, from, 64);
  _tile_loadd(1, from + step, 64);
  _tile_loadd(2, from + pair, 64);
  _tile_loadd(3, from + pair + step, 64);
}
PA_INLINE void put_sums(float *to, int64_t step, int64_t pair, int64_t ld = 64) {
  _tile_stored(0, to, ld);
  _tile_stored(1, to + step, ld);
  _tile_stored(2, to + pair, ld);
  _tile_stored(3, to + pair + step, ld);
}

// K as [16 keys][32 elements] register images, V^T as [16 elements][16 pairs of keys].
struct TileEngine {
  typedef Pairs Form;
  static constexpr int VECTORS = 2, STEP = 32, TILES = 2;
  static constexpr int PER_WORD = 2;
  static constexpr bool PLANES = true;
  static int cost(int depth, int vectors) { return 2 * vectors * depth; }
  static int value_depth(int keys) { return keys / 2; }
  static Sizes sizes(const pa_layer &layer) {
    return {pa_round_up(layer.head_size, 32) / 2, pa_round_up(layer.v_head_size, 32), TILE_STEP};
  }
  static void begin() {
    const TileConfig config;
    load_tile_config(&config);
  }
  static void end() { _tile_release(); }
  PA_INLINE vf query_part(const char *from, int, int d, int size) {
    return pairs_part(from, d, size);
  }
  template <class T>
  static void pack_key(const T *from, uint32_t *k, int key, int size, const Sizes &is) {
    uint32_t *to = k + (int64_t)(key / 16) * 16 * is.k + key % 16 * 16;
    int d = 0;
    for (; d + 32 <= size; d += 32, to += TILE_WORDS) copy_bf16(from + d, (uint16_t *)to, 32);
    if (d < size) copy_bf16(from + d, (uint16_t *)to, size - d);
  }
  // The pairs of 32 keys and 16 elements, turned in registers. Keys beyond the last become zero, up
  // to a whole tile register.
  template <class T>
  static void pack_values(const char *const *rows, int64_t offset, int count, uint32_t *to, int size,
                          const Sizes &is, Ahead &ahead) {
    for (int t = 0; t < count; t += 32) {
      for (int d = 0; d < size; d += W) {
        ahead(4 * W);
        vf block[W];
        for (int i = 0; i < W; i++) {
          int at = t + 2 * i;
          const T *a = at < count ? (const T *)(rows[at] + offset) + d : NULL;
          const T *b = at + 1 < count ? (const T *)(rows[at + 1] + offset) + d : NULL;
          block[i] = a ? (vf)value_pair(a, b, pa_min(W, size - d)) : vf{};
        }
        transpose(block);
        uint32_t *tile = to + (int64_t)d * (is.keys / 2) + t / 2 * W;
        for (int i = 0; i < W; i++) write(tile + i * W, block[i]);
      }
    }
  }
};

#endif
