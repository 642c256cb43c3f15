// Prefill, and decode of large groups: matrix products. Included inside an anonymous namespace.
//
// S^T = K Q^T and O^T = V^T P^T: rows are vector lanes, so the softmax is vertical, and keys and
// values are converted once for all the rows of an item, some tiles of them at a time. Rows come in
// panels whose queries, scores and weights stay in the first cache; a panel knows how far its own rows
// see.
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
constexpr int MATRIX_ROWS = 1024;  // of an item, which share the conversion of keys and values
#else
constexpr int BLOCK = 4;  // 12 of 16
constexpr int MATRIX_ROWS = 384;
#endif
static_assert(BLOCK <= W, "values are packed a vector at a time");

struct Sizes {
  int k, v, keys;  // head size in elements, V head size, keys of a tile; each padded
};

#include "float_engine.h"
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
  int64_t words = lanes * (is.k + is.v + LANE_ARRAYS) +
                  (int64_t)Engine::TILES * is.keys * (is.k + is.v) + 2 * is.keys * width + width +
                  (int64_t)W * pa_max(is.k, is.v) + 4 * BLOCK * width;
  return words * 4 + Walk::scratch(layer, Engine::TILES * is.keys) + 20 * 64;
}

// A panel's way over one tile of those that are packed: its rows see `keys` of it at most, and `masked`
// says that some row doesn't see all of these.
struct Visit {
  int panel, tile, first_key, keys;
  bool masked;
};

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
    constexpr int width = Engine::VECTORS * W;
    const int rows = rows_per_head(layer, item);
    panels = {rows, (rows + width - 1) / width};
    int64_t count = (int64_t)panels.count * width;
    lanes = lanes_at(arena.take<char>(4 * LANE_ARRAYS * count), (int)count);
    q = arena.take<uint32_t>(count * is.k);
    o = arena.take<float>(count * is.v);
    k = arena.take<uint32_t>((int64_t)Engine::TILES * is.keys * is.k);
    v = arena.take<uint32_t>((int64_t)Engine::TILES * is.keys * is.v);
    s = arena.take<float>((int64_t)(is.keys + BLOCK) * width);
    pairs = arena.take<uint32_t>((int64_t)is.keys * width);
    alpha = arena.take<float>(width);
    stage = arena.take<uint32_t>((int64_t)W * pa_max(is.k, is.v));
    clear_lanes(lanes, (int)count);
    __builtin_memset(q_of(panels.count - 1), 0, 4L * width * is.k);  // of rows that aren't there
    __builtin_memset(o, 0, 4 * count * is.v);
    how = logits_of(run);
  }

  uint32_t *k_of(int tile) const { return k + (int64_t)tile * is.keys * is.k; }
  uint32_t *v_of(int tile) const { return v + (int64_t)tile * is.keys * is.v; }
  uint32_t *q_of(int panel) const { return q + (int64_t)panel * Engine::VECTORS * W * is.k; }
  float *o_of(int panel) const { return o + (int64_t)panel * Engine::VECTORS * W * is.v; }
  // Of a panel's matrix with `vectors` of lanes: elements to the next row, and from W lanes to the next.
  static int row_of(int vectors) { return Engine::PLANES ? W : vectors * W; }
  static int64_t step_of(int rows) { return Engine::PLANES ? (int64_t)rows * W : W; }

  char *output_of(int row) const { return output_row(run, item.seq, item_row(layer, item, 0, row)); }

  // Two vectors of rows on: a row is a few lines only, too few for the processor to see what comes next.
  static constexpr int ROWS_AHEAD = 2 * W;

  PA_NOINLINE void take_queries() {
    const int bytes = layer.head_size * itemsize(layer.dtype);
    for (int row0 = 0; row0 < panels.rows; row0 += W) {
      int panel = row0 / (Engine::VECTORS * W), ld = row_of(panels.vectors(panel, Engine::VECTORS));
      uint32_t *to = q_of(panel) + row0 / W % Engine::VECTORS * step_of(is.k);
      const int count = pa_min(W, panels.rows - row0);
      const char *from[W];
      for (int r = 0; r < count; r++) {
        const int row = row0 + r;
        from[r] = enter_row(run, item, lanes, row, 0, row);
        if (row + ROWS_AHEAD >= panels.rows) continue;
        const char *next = query_row(run, item.seq, item_row(layer, item, 0, row + ROWS_AHEAD));
        for (int i = 0; i < bytes; i += 64) prefetch(next + i);
      }
      for (int d = 0; d < is.k; d += W) {
        vf block[W];
        for (int r = 0; r < W; r++) {
          block[r] = r < count ? Engine::query_part(from[r], layer.dtype, d, layer.head_size) : vf{};
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

  template <int V>
  PA_NOINLINE void attend(const Visit &visit, Ahead &ahead) {
    float *out = o_of(visit.panel);
    const int keys = visit.keys;
    const Grid grid = {row_of(V), step_of(is.keys), step_of(is.keys / 2)};
    Engine::template scores<V>(k_of(visit.tile), q_of(visit.panel), s, keys, is, ahead);
    bool changed = softmax_tile<typename Engine::Form>(
        s, grid, V, keys, visit.first_key, how, lanes_of(visit.panel), visit.masked, alpha, pairs);
    if (changed) rescale<V>(out);
    Engine::template output<V>(v_of(visit.tile), s, pairs, out, keys, is, ahead);
  }

  // Cycles that a tile of `count` keys takes, about: in the units of what `Ahead` is told.
  int cost_of(int count) const {
    int vectors = (panels.rows + W - 1) / W;
    return count * (is.k + is.v) / 8 +
           (count + Engine::STEP - 1) / Engine::STEP * Engine::cost(is.k, vectors) +
           is.v / Engine::STEP * Engine::cost(Engine::value_depth(count), vectors);
  }

  Lanes lanes_of(int panel) const { return lanes_from(lanes, panel * Engine::VECTORS * W); }

  // Nothing of the tile is seen where `keys` isn't positive.
  Visit visit_of(int panel, int tile, const Tiles &packed) const {
    const int width = Engine::VECTORS * W, first = panel * width;
    const int last = pa_min(first + width, panels.rows) - 1;
    const int first_key = packed.first_key + tile * is.keys;
    const int count = pa_min(is.keys, packed.count - tile * is.keys);
    // Positions grow with the rows, and what is seen moves with them: the ends bound all between.
    int hi = pa_max(lanes.near_hi[last], lanes.kept_hi[last]);
    int lo = pa_min(lanes.near_lo[first], lanes.kept_hi[last] > lanes.kept_lo[first]
                                              ? lanes.kept_lo[first] : lanes.near_lo[first]);
    int keys = first_key + count <= lo ? 0 : pa_min(count, hi - first_key);
    bool whole = first_key >= lanes.near_lo[last] && first_key + keys <= lanes.near_hi[first];
    // Logits that are masked are rounded before they are weighed, so all are or none.
    return {panel, tile, first_key, keys, !whole || layer.invariant};
  }

  template <class T>
  void pack(const Walk &walk, Ahead &ahead) {
    for (int t = 0; t < walk.tile.count; t++) {
      ahead(is.k / 8);
      Engine::pack_key((const T *)(walk.keys[t] + walk.key_offset), k_of(t / is.keys), t % is.keys,
                       layer.head_size, is);
    }
    for (int t = 0; t < walk.tile.count; t += is.keys) {
      Engine::template pack_values<T>(walk.values + t, walk.value_offset,
                                      pa_min(is.keys, walk.tile.count - t), v_of(t / is.keys),
                                      layer.v_head_size, is, ahead);
    }
  }

  void attend_all(const Tiles &packed, Ahead &ahead) {
    for (int panel = 0; panel < panels.count; panel++) {
      for (int tile = 0; tile * is.keys < packed.count; tile++) {
        const Visit visit = visit_of(panel, tile, packed);
        if (visit.keys <= 0) continue;
        switch (panels.vectors(panel, Engine::VECTORS)) {
          case 1: attend<1>(visit, ahead); break;
          case 2: attend<2>(visit, ahead); break;
          default: attend<Engine::VECTORS>(visit, ahead);
        }
      }
    }
  }

  PA_NOINLINE void put_outputs() {
    float *rows = (float *)stage;
    const int bytes = layer.v_head_size * itemsize(layer.dtype);
    for (int row0 = 0; row0 < panels.rows; row0 += W) {
      int panel = row0 / (Engine::VECTORS * W), ld = row_of(panels.vectors(panel, Engine::VECTORS));
      for (int row = row0 + ROWS_AHEAD; item.part < 0 && row < row0 + ROWS_AHEAD + W; row++) {
        if (row >= panels.rows) break;
        char *next = output_of(row);
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 1, 3);
      }
      const float *from = o_of(panel) + row0 / W % Engine::VECTORS * step_of(is.v);
#if defined(PA_BASE)
      if (item.part < 0) {
        put_halves(from, ld, row0);
        continue;
      }
#endif
      turn_rows(from, ld, rows);
      for (int r = 0; r < W && row0 + r < panels.rows; r++) {
        leave(run, item, 0, row0 + r, rows + (int64_t)r * is.v, lanes.m[row0 + r], lanes.l[row0 + r]);
      }
    }
  }

#if defined(PA_BASE)
  // W rows to the output in bfloat16: what they are multiplied by is a vector here, and pairs of
  // elements take half as many turns.
  void put_halves(const float *from, int ld, int row0) {
    const int count = pa_min(W, panels.rows - row0);
    float factor[W] = {};
    char *to[W];
    for (int r = 0; r < count; r++) {
      const int row = row0 + r;
      factor[r] = finish_sum(run, item.seq, item_row(layer, item, 0, row), lanes.m[row], lanes.l[row]);
      to[r] = output_of(row);
    }
    const vf by = loadf(factor);
    for (int d = 0; d < layer.v_head_size; d += 2 * W) {
      const int bytes = 2 * pa_min(2 * W, layer.v_head_size - d);
      vf block[W];
      for (int i = 0; i < W; i++) {
        const float *at = from + (int64_t)(d + 2 * i) * ld;
        block[i] = d + 2 * i < is.v ? (vf)bf16_pairs(loadf(at) * by, loadf(at + ld) * by) : vf{};
      }
      transpose(block);
      for (int r = 0; r < count; r++) {
        if (bytes == 4 * W) {
          write(to[r] + 2 * d, block[r]);
        } else {
          __builtin_memcpy(to[r] + 2 * d, block + r, bytes);
        }
      }
    }
  }
#endif

  void turn_rows(const float *from, int ld, float *rows) {
    for (int d = 0; d < is.v; d += W) {
      vf block[W];
      for (int i = 0; i < W; i++) block[i] = loadf(from + (int64_t)(d + i) * ld);
      transpose(block);
      for (int r = 0; r < W; r++) write(rows + (int64_t)r * is.v + d, block[r]);
    }
  }
};

#if defined(__AMX_BF16__)
#include "tile_steps.h"
#endif

template <class T, class Engine>
static void matrix_item(Run *run, const Item &item, Turn *turn) {
  Arena arena = turn->scratch;
  Matrix<Engine> matrix(run, item, arena);
  const Sizes &is = matrix.is;
  Walk walk(run, item, turn, arena, Engine::TILES * is.keys);
  if (is.k * Engine::PER_WORD != matrix.layer.head_size) {  // what pads a key stays zero
    __builtin_memset(matrix.k, 0, 4L * Engine::TILES * is.keys * is.k);
  }
  Engine::begin();
  matrix.take_queries();
  while (walk.step([&](int keys) { return matrix.cost_of(keys); })) {
    matrix.template pack<T>(walk, walk.ahead);
    if constexpr (Engine::PLANES) {
      attend_tiles(matrix, walk.tile, walk.ahead);
    } else {
      matrix.attend_all(walk.tile, walk.ahead);
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
