// The matrix path's products in float32, and the micro kernel that all its products in vector registers share.
// Included by matrix_path.h.

// C[BLOCK][V * W] = or += A B over `depth`; A(i, k) is at a[i * row + k * column].
template <class Op, int V, bool ADD>
PA_INLINE void micro(const uint32_t *a, int64_t row, int64_t column, const uint32_t *b, float *c,
                     int depth) {
  constexpr int ld = V * W;
  vf acc[BLOCK][V];
  for (int i = 0; i < BLOCK; i++) {
    for (int v = 0; v < V; v++) acc[i][v] = ADD ? loadf(c + i * ld + v * W) : vf{};
  }
  for (int k = 0; k < depth; k++) {
    vu x[V];
    for (int v = 0; v < V; v++) x[v] = read<vu>(b + (int64_t)k * ld + v * W);
    for (int i = 0; i < BLOCK; i++) {
      for (int v = 0; v < V; v++) acc[i][v] = Op::add(acc[i][v], a[i * row + k * column], x[v]);
    }
  }
  for (int i = 0; i < BLOCK; i++) {
    for (int v = 0; v < V; v++) write(c + i * ld + v * W, acc[i][v]);
  }
}

// W elements, those beyond `count` zero.
template <class T>
PA_INLINE vf load_part(const T *from, int count) {
  return count >= W ? load(from) : count > 0 ? load_some(from, count) : vf{};
}

struct MulFloat {
  PA_INLINE vf add(vf acc, uint32_t a, vu b) {
    float x;
    __builtin_memcpy(&x, &a, 4);
    return acc + splat(x) * (vf)b;
  }
};

// Keys and values as float32, from any storage.
struct FloatEngine {
  typedef Floats Form;
  // Of a panel; rows of a product's step; tiles that are packed at a time.
  static constexpr int VECTORS = 3, STEP = BLOCK, TILES = 1;
  static constexpr int SCORE_DEPTH = 192;
  static constexpr int PER_WORD = 1;  // elements of a key in 32 bits
  static constexpr bool PLANES = false;
  // Cycles of a step whose sum has `depth` elements, about.
  static int cost(int depth, int vectors) { return 4 * vectors * depth; }
  static int value_depth(int keys) { return keys; }
  static Sizes sizes(const pa_layer &layer) {
    return {pa_round_up(layer.head_size, W), pa_round_up(layer.v_head_size, W), MATRIX_TILE};
  }
  static void begin() {}
  static void end() {}
  // W elements of an operand, of a query of `size` in all, from the `d`th on.
  PA_INLINE vf query_part(const char *from, int dtype, int d, int size) {
    switch (dtype) {
      case PA_F32: return load_part((const float *)from + d, size - d);
      case PA_BF16: return load_part((const bf16 *)from + d, size - d);
      default: return load_part((const f16 *)from + d, size - d);
    }
  }
  template <class T>
  static void pack_key(const T *from, uint32_t *k, int key, int size, const Sizes &is) {
    widen(from, (float *)k + (int64_t)key * is.k, size);
  }
  // V in panels [v / BLOCK][key][BLOCK], so that one micro kernel reads one run of memory.
  template <class T>
  static void pack_values(const char *const *rows, int64_t offset, int count, uint32_t *to, int size,
                          const Sizes &is, Ahead &ahead) {
    for (int t = 0; t < count; t++) {
      ahead(is.v / 8);
      const T *from = (const T *)(rows[t] + offset);
      for (int d = 0; d < size; d += W) {
        vf x = d + W <= size ? load(from + d) : load_some(from + d, size - d);
        float each[W];
        write(each, x);
        for (int b = 0; b < W; b += BLOCK) {
          uint32_t *at = to + ((int64_t)(d + b) / BLOCK * is.keys + t) * BLOCK;
          __builtin_memcpy(at, each + b, 4 * BLOCK);
        }
      }
    }
  }
  template <int V>
  static void scores(const uint32_t *k, const uint32_t *q, float *s, int keys, const Sizes &is,
                     Ahead &ahead) {
    // A panel's queries of so many elements stay in the first cache over all keys.
    for (int d = 0; d < is.k; d += SCORE_DEPTH) {
      const int depth = pa_min(SCORE_DEPTH, is.k - d);
      for (int t = 0; t < keys; t += BLOCK) {
        const uint32_t *a = k + (int64_t)t * is.k + d, *b = q + (int64_t)d * V * W;
        float *c = s + (int64_t)t * V * W;
        if (d) {
          micro<MulFloat, V, true>(a, is.k, 1, b, c, depth);
        } else {
          micro<MulFloat, V, false>(a, is.k, 1, b, c, depth);
        }
        ahead(cost(depth, V));
      }
    }
  }
  template <int V>
  static void output(const uint32_t *v, const float *s, const uint32_t *, float *o, int keys,
                     const Sizes &is, Ahead &ahead) {
    for (int d = 0; d < is.v; d += BLOCK) {
      micro<MulFloat, V, true>(v + (int64_t)d * is.keys, 1, BLOCK, (const uint32_t *)s,
                               o + (int64_t)d * V * W, keys);
      ahead(cost(keys, V));
    }
  }
};
