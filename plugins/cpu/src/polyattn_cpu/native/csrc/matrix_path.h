// Prefill, and decode of large groups: matrix products. Included inside an anonymous namespace.
//
// S^T = K Q^T and O^T = V^T P^T: rows are vector lanes, so the softmax is vertical, and keys and
// values are converted once for all the rows of an item. Rows come in panels whose queries, scores
// and weights stay in the first cache; a panel knows how far its own rows see.
//
// An operand element is 32 bits: one float32, or two bfloat16 that follow one another in the sum.
//   Q  [k][lane]      per panel; k counts elements of the head size
//   K  as the engine's product over k wants it
//   P  [key or pair][lane]
//   V  as the engine's product over keys wants it
//   O  [v][lane]      per panel, float32
// An engine whose panels are `PLANES` has [vector][...][W lanes] in place of [...][lane].

constexpr int MATRIX_TILE = 128;  // keys of a tile
#if defined(__AVX512F__)
constexpr int BLOCK = 8;  // rows of a micro kernel: 24 accumulators of 32 registers
constexpr int MATRIX_ROWS = 768;  // of an item, which share the conversion of keys and values
#else
constexpr int BLOCK = 4;  // 12 of 16
constexpr int MATRIX_ROWS = 384;
#endif
static_assert(BLOCK <= W, "values are packed a vector at a time");

struct Sizes {
  int k, v, keys;  // head size in elements, V head size, keys of a tile; each padded
};

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
  static constexpr int VECTORS = 3, STEP = BLOCK;  // of a panel; rows of a product's step
  static constexpr int SCORE_DEPTH = 192;
  static constexpr bool PLANES = false;
  // Cycles of a step whose sum has `depth` elements, about.
  static int cost(int depth, int vectors) { return 4 * vectors * depth; }
  static int value_depth(int keys) { return keys; }
  static Sizes sizes(const pa_layer &layer) {
    return {pa_round_up(layer.head_size, W), pa_round_up(layer.v_head_size, W), MATRIX_TILE};
  }
  static void begin() {}
  static void end() {}
  static void stage_query(const void *from, int dtype, uint32_t *to, int size) {
    widen_any(from, dtype, (float *)to, size);
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
                     const uint32_t *, Ahead &ahead) {
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
                     const Sizes &is, const uint32_t *, Ahead &ahead) {
    for (int d = 0; d < is.v; d += BLOCK) {
      micro<MulFloat, V, true>(v + (int64_t)d * is.keys, 1, BLOCK, (const uint32_t *)s,
                               o + (int64_t)d * V * W, keys);
      ahead(cost(keys, V));
    }
  }
};

#if defined(PA_BASE)
#include "bf16_engines.h"
#endif

struct Panels {  // of one item
  int rows, count;
  int vectors(int panel, int most) const {
    return pa_min(most, (rows - panel * most * W + W - 1) / W);
  }
};

template <class Engine>
static int64_t matrix_scratch(const pa_layer &layer, int rows) {
  Sizes is = Engine::sizes(layer);
  int64_t lanes = pa_round_up(rows, Engine::VECTORS * W), width = Engine::VECTORS * W;
  int64_t words = lanes * (is.k + is.v + LANE_ARRAYS) + (int64_t)is.keys * (is.k + is.v) +
                  2 * is.keys * width + width + (int64_t)W * pa_max(is.k, is.v) + 4 * BLOCK * width;
  return words * 4 + Walk::scratch(is.keys) + 20 * 64;
}

template <class Engine>
struct Matrix {  // an item's scratch, and what stays the same over its tiles
  Run *run;
  const Item &item;
  const pa_layer &layer;
  Sizes is;
  Panels panels;
  Lanes lanes;
  Logits how;
  uint32_t *q, *k, *v, *pairs, *stage;
  float *o, *s, *alpha;

  Matrix(Run *run, const Item &item, Arena &arena)
      : run(run), item(item), layer(run->plan->layer), is(Engine::sizes(layer)) {
    int ratio = layer.num_heads / layer.num_kv_heads;
    constexpr int width = Engine::VECTORS * W;
    panels = {item.tokens * ratio, (item.tokens * ratio + width - 1) / width};
    int64_t count = (int64_t)panels.count * width;
    lanes = lanes_at(arena.take<char>(4 * LANE_ARRAYS * count), (int)count);
    q = arena.take<uint32_t>(count * is.k);
    o = arena.take<float>(count * is.v);
    k = arena.take<uint32_t>((int64_t)is.keys * is.k);
    v = arena.take<uint32_t>((int64_t)is.keys * is.v);
    s = arena.take<float>((int64_t)(is.keys + BLOCK) * width);
    pairs = arena.take<uint32_t>((int64_t)is.keys * width);
    alpha = arena.take<float>(width);
    stage = arena.take<uint32_t>((int64_t)W * pa_max(is.k, is.v));
    clear_lanes(lanes, (int)count);
    __builtin_memset(o, 0, 4 * count * is.v);
    how = logits_of(run);
  }

  uint32_t *q_of(int panel) const { return q + (int64_t)panel * Engine::VECTORS * W * is.k; }
  float *o_of(int panel) const { return o + (int64_t)panel * Engine::VECTORS * W * is.v; }
  // Of a panel's matrix with `vectors` of lanes: elements to the next row, and from W lanes to the next.
  static int row_of(int vectors) { return Engine::PLANES ? W : vectors * W; }
  static int64_t step_of(int rows) { return Engine::PLANES ? (int64_t)rows * W : W; }

  PA_NOINLINE void take_queries() {
    const int ratio = layer.num_heads / layer.num_kv_heads;
    const int64_t first = run->plan->query_starts[item.seq] + item.token0;
    __builtin_memset(stage, 0, 4L * W * is.k);
    for (int row0 = 0; row0 < panels.rows; row0 += W) {
      int panel = row0 / (Engine::VECTORS * W), ld = row_of(panels.vectors(panel, Engine::VECTORS));
      int vector = row0 / W % Engine::VECTORS, count = pa_min(W, panels.rows - row0);
      uint32_t *to = q_of(panel) + vector * step_of(is.k);
      for (int r = 0; r < count; r++) {
        int token = (row0 + r) / ratio, head = item.head0 * ratio + (row0 + r) % ratio;
        int64_t at = (first + token) * run->t.query_token + head * run->t.query_head;
        Engine::stage_query((const char *)run->t.query + at * itemsize(layer.dtype), layer.dtype,
                            stage + (int64_t)r * is.k, layer.head_size);
        set_lane(run, item, lanes, row0 + r, item.token0 + token, head);
      }
      for (int d = 0; d < is.k; d += W) {
        vf block[W];
        for (int r = 0; r < W; r++) {
          block[r] = r < count ? read<vf>(stage + (int64_t)r * is.k + d) : vf{};
        }
        transpose(block);
        for (int i = 0; i < W; i++) write(to + (int64_t)(d + i) * ld, block[i]);
      }
    }
  }

  template <int V>
  void rescale(float *out) {
    vf by[V];
    for (int i = 0; i < V; i++) by[i] = loadf(alpha + i * W);
    for (int d = 0; d < is.v; d++) {
      for (int i = 0; i < V; i++) {
        float *at = out + (int64_t)d * row_of(V) + i * step_of(is.v);
        write(at, loadf(at) * by[i]);
      }
    }
  }

  // One panel over the tile at `first_key`; its rows see `keys` of it at most.
  template <int V>
  PA_NOINLINE void attend(int panel, int first_key, int keys, bool masked, Ahead &ahead) {
    float *out = o_of(panel);
    const Grid grid = {row_of(V), step_of(is.keys), step_of(is.keys / 2)};
    Engine::template scores<V>(k, q_of(panel), s, keys, is, v, ahead);
    bool changed = softmax_tile<typename Engine::Form>(
        s, grid, V, keys, first_key, how, lanes_from(lanes, panel * Engine::VECTORS * W), masked,
        alpha, pairs);
    if (changed) rescale<V>(out);
    Engine::template output<V>(v, s, pairs, out, keys, is, k, ahead);
  }

  // Cycles that a tile of `count` keys takes, about: in the units of what `Ahead` is told.
  int cost_of(int count) const {
    int vectors = (panels.rows + W - 1) / W;
    return count * (is.k + is.v) / 8 +
           (count + Engine::STEP - 1) / Engine::STEP * Engine::cost(is.k, vectors) +
           is.v / Engine::STEP * Engine::cost(Engine::value_depth(count), vectors);
  }

  void attend_panel(int panel, int first_key, int count, Ahead &ahead) {
    const int width = Engine::VECTORS * W, first = panel * width;
    const int last = pa_min(first + width, panels.rows) - 1;
    // Positions grow with the rows, and what is seen moves with them: the ends bound all between.
    int hi = pa_max(lanes.near_hi[last], lanes.sink_hi[last]);
    int lo = pa_min(lanes.near_lo[first], lanes.sink_hi[last] > lanes.sink_lo[first]
                                              ? lanes.sink_lo[first] : lanes.near_lo[first]);
    int keys = pa_min(count, hi - first_key);
    if (keys <= 0 || first_key + count <= lo) return;
    bool whole = first_key >= lanes.near_lo[last] && first_key + keys <= lanes.near_hi[first];
    switch (panels.vectors(panel, Engine::VECTORS)) {
      case 1: return attend<1>(panel, first_key, keys, !whole, ahead);
      case 2: return attend<2>(panel, first_key, keys, !whole, ahead);
      default:
        if constexpr (Engine::VECTORS >= 3) attend<3>(panel, first_key, keys, !whole, ahead);
    }
  }

  PA_NOINLINE void put_outputs() {
    float *rows = (float *)stage;
    for (int row0 = 0; row0 < panels.rows; row0 += W) {
      int panel = row0 / (Engine::VECTORS * W), ld = row_of(panels.vectors(panel, Engine::VECTORS));
      turn_rows(o_of(panel) + row0 / W % Engine::VECTORS * step_of(is.v), ld, rows);
      for (int r = 0; r < W && row0 + r < panels.rows; r++) {
        leave(run, item, 0, row0 + r, rows + (int64_t)r * is.v, lanes.m[row0 + r], lanes.l[row0 + r]);
      }
    }
  }

  void turn_rows(const float *from, int ld, float *rows) {
    for (int d = 0; d < is.v; d += W) {
      vf block[W];
      for (int i = 0; i < W; i++) block[i] = loadf(from + (int64_t)(d + i) * ld);
      transpose(block);
      for (int r = 0; r < W; r++) write(rows + (int64_t)r * is.v + d, block[r]);
    }
  }
};

template <class T, class Engine>
static void matrix_item(Run *run, const Item &item, Turn *turn) {
  Arena arena = {turn->scratch};
  Matrix<Engine> matrix(run, item, arena);
  const Sizes &is = matrix.is;
  const pa_layer &layer = matrix.layer;
  Walk walk(run, item, turn, arena, is.keys);
  Ahead &ahead = walk.ahead;
  __builtin_memset(matrix.k, 0, 4L * is.keys * is.k);
  __builtin_memset(matrix.v, 0, 4L * is.keys * is.v);
  Engine::begin();
  matrix.take_queries();
  while (walk.step([&](int keys) { return matrix.cost_of(keys); })) {
    const Tiles &tile = walk.tile;
    for (int t = 0; t < tile.count; t++) {
      ahead(is.k / 8);
      Engine::pack_key((const T *)(walk.keys[t] + walk.key_offset), matrix.k, t, layer.head_size,
                       is);
    }
    Engine::template pack_values<T>(walk.values, walk.value_offset, tile.count, matrix.v,
                                    layer.v_head_size, is, ahead);
    for (int panel = 0; panel < matrix.panels.count; panel++) {
      matrix.attend_panel(panel, tile.first_key, tile.count, ahead);
    }
  }
  Engine::end();
  if (!walk.fine) {
    __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
    return;
  }
  matrix.put_outputs();
  end_item(run, item, (float *)matrix.stage);
}
