// Up to 16 rows per KV head, of several KV heads, where the processor has AMX: decode, short rows. Included inside an
// anonymous namespace.
//
// S^T = K Q^T reads tile registers straight from the cache; O = P V reads values interleaved in
// pairs of keys, which is one instruction for 64 bytes. So little arithmetic is left that memory sets
// the pace, which takes the lines of the next tile while this one is computed.
//
// A unit is the rows of one KV head. Tile registers: 0 to 3 are sums, as a product's latency is that of three more; 4 and
// 5 hold keys or values, 6 queries or weights.

constexpr int TILE_KEYS = 128;
constexpr int TILE_ROWS = 16;   // per KV head at most
constexpr int PANEL = 512;      // of 32 keys' values, in 16 bits
constexpr int KEY_STEP = 64;    // keys whose scores are computed at a time
constexpr int VALUE_STEP = 64;  // elements of the values that are interleaved, then used, at a time

struct TileLayout {
  int rows, heads;  // of a unit; heads
  int lanes, k, v;  // of the scores; padded sizes, in bfloat16 elements
  TileLayout(const pa_layer &layer, int heads, int per_head)
      // A single head's lanes fill a register anyway; whole units take one configuration of the tiles.
      : rows(heads == 1 && per_head >= 8 ? 16 : per_head), heads(heads), lanes(pa_round_up(heads * rows, W)),
        k(pa_round_up(layer.head_size, 32)), v(pa_round_up(layer.v_head_size, VALUE_STEP)) {}
  int64_t query_words() const { return (int64_t)rows * k / 2; }  // of a unit
  int64_t output_floats() const { return (int64_t)rows * v; }
};

static int64_t tile_scratch(const pa_layer &layer, int heads, int per_head) {
  TileLayout is(layer, heads, per_head);
  int64_t words = (int64_t)heads * (is.query_words() + is.output_floats()) +
                  (int64_t)is.lanes * (LANE_ARRAYS + 1 + TILE_KEYS * 2) +
                  (int64_t)(KEY_STEP * pa_max(is.k + 32, 128) + 2 * VALUE_STEP / 16 * PANEL) / 2 + is.v;
  return words * 4 + Walk::scratch(layer, TILE_KEYS) + 16 * 64;
}

// 32 elements of a row's outputs in their order, from two panels: the first has those whose number is 0 to 3 modulo 8.
struct PairedOrder {
  __m512 first, second;
  PA_ALWAYS PairedOrder(const float *a, const float *b) {
    const __m512i order = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512 x = _mm512_loadu_ps(a), y = _mm512_loadu_ps(b);
    first = _mm512_permutex2var_ps(x, order, y);
    second = _mm512_permutex2var_ps(x, _mm512_add_epi32(order, _mm512_set1_epi32(8)), y);
  }
};

// 16 rows of keys as a tile register takes them: where they lie, or copied.
struct KeyRows {
  const char *at;
  int64_t stride;
};

#include "tile_asks.h"

template <class T>
struct Tile {  // an item's scratch, and what stays the same over its tiles
  static constexpr int KEYS = TILE_KEYS;
  Run *run;
  const Item &item;
  const pa_layer &layer;
  TileLayout is;
  Lanes lanes;
  Logits how;
  uint32_t *q, *pairs, *turned;
  uint16_t *keys, *values;
  float *o, *s, *alpha, *row;
  int64_t strides[TILE_KEYS / 16];  // between a tile's rows of 16 keys; 0: not even
  int configured = -1;              // which configuration the tiles have

  Tile(Run *run, const Item &item, Arena &arena)
      : run(run), item(item), layer(run->plan->layer),
        is(layer, item.heads, rows_per_head(layer, item)) {
    q = arena.take<uint32_t>(is.heads * is.query_words());
    o = arena.take<float>(is.heads * is.output_floats());
    s = arena.take<float>((int64_t)TILE_KEYS * is.lanes);
    pairs = arena.take<uint32_t>((int64_t)TILE_KEYS / 2 * is.lanes);
    turned = arena.take<uint32_t>((int64_t)TILE_KEYS / 2 * is.lanes);
    lanes = lanes_at(arena.take<char>(4L * LANE_ARRAYS * is.lanes), is.lanes);
    alpha = arena.take<float>(is.lanes);
    keys = arena.take<uint16_t>((int64_t)KEY_STEP * pa_max(is.k + 32, 128));
    values = arena.take<uint16_t>(2 * VALUE_STEP / 16 * PANEL);
    row = arena.take<float>(is.v);
    how = logits_of(run);
    clear_lanes(lanes, is.lanes);
    __builtin_memset(q, 0, 4 * is.heads * is.query_words());
    __builtin_memset(o, 0, 4 * is.heads * is.output_floats());
    __builtin_memset(s, 0, 4L * TILE_KEYS * is.lanes);
  }

  // Forgets all but the queries.
  void start_over() {
    clear_sums(lanes, is.lanes);
    __builtin_memset(o, 0, 4 * is.heads * is.output_floats());
  }

  int per_head() const { return rows_per_head(layer, item); }
  int lane_of(int head) const { return head * is.rows; }
  uint32_t *query_at(int lane) const { return q + lane / is.rows * is.query_words(); }
  // O as [unit][v / 16][row][16]: what a tile register holds is one run of memory.
  float *output_at(int lane) const { return o + lane / is.rows * is.output_floats(); }
  int image() const { return is.rows * 16; }

  // Sums are (16 keys, rows) of scores and (rows, 16 elements) of outputs. Of whole units the two
  // don't differ.
  void configure(bool outputs) {
    if (is.rows == 16) outputs = false;
    if (configured == outputs) return;
    configured = outputs;
    struct {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      const bool ours = i != 4 && i != 5;  // of a unit's rows
      config.bytes[i] = (uint16_t)(ours && !outputs ? 4 * is.rows : 64);
      config.rows[i] = (uint8_t)(ours && outputs ? is.rows : 16);
    }
    load_tile_config(&config);
  }

  // Q as [unit][pair of k][row].
  PA_NOINLINE void take_queries() {
    for (int h = 0; h < is.heads; h++) take_unit(h, per_head());
  }
  void take_unit(int h, int count) {
    const int lane = lane_of(h);
    const char *from[16];
    for (int r = 0; r < count; r++) from[r] = enter_row(run, item, lanes, lane + r, h, r);
    const __mmask16 used = (__mmask16)((1u << is.rows) - 1);
    uint32_t *to = query_at(lane);
    for (int d = 0; d < is.k; d += 32) {
      const int some = pa_min(32, layer.head_size - d);
      const __mmask32 valid = some == 32 ? ~0u : (1u << some) - 1;
      vf block[W] = {};
      for (int r = 0; r < count; r++) block[r] = (vf)_mm512_maskz_loadu_epi16(valid, from[r] + 2 * d);
      transpose(block);
      for (int i = 0; i < W; i++, to += is.rows) _mm512_mask_storeu_epi32(to, used, (__m512i)block[i]);
    }
  }

  // Which keys lie so evenly that a tile register reads them from the cache.
  PA_NOINLINE void look_at(const char *const *rows, int count) {
    for (int t = 0; t < TILE_KEYS; t += 16) {
      int64_t stride = t + 16 <= count ? rows[t + 1] - rows[t] : 0;
      for (int i = 2; stride && i < 16; i++) {
        if (rows[t + i] - rows[t] != i * stride) stride = 0;
      }
      strides[t / 16] = layer.head_size % 32 || !(sizeof(T) == 2) ? 0 : stride;
    }
  }

  // Scores of 64 keys with a unit's rows.
  PA_NOINLINE RowAsks scores(const KeyRows *keys, int lane, float *to, RowAsks asks) {
    const uint32_t *from = query_at(lane);
    const int64_t row = 4L * is.rows;
    zero_sums();
    for (int d = 0; d < is.k; d += 32) {
      _tile_loadd(6, from + (int64_t)d / 2 * is.rows, row);
      _tile_loadd(4, keys[0].at + 2 * d, keys[0].stride);
      _tile_dpbf16ps(0, 4, 6);
      asks();
      _tile_loadd(5, keys[1].at + 2 * d, keys[1].stride);
      _tile_dpbf16ps(1, 5, 6);
      asks();
      _tile_loadd(4, keys[2].at + 2 * d, keys[2].stride);
      _tile_dpbf16ps(2, 4, 6);
      asks();
      _tile_loadd(5, keys[3].at + 2 * d, keys[3].stride);
      _tile_dpbf16ps(3, 5, 6);
      asks();
    }
    put_sums(to + lane, 16 * is.lanes, 32 * is.lanes, 4L * is.lanes);
    return asks;
  }

  // Values of 32 keys from `t` on, VALUE_STEP elements from `d` on, each pair of keys in 32 bits: panels
  // of 16 elements; within 32 elements the first has those whose number is 0 to 3 modulo 8.
  PA_ALWAYS void pair_values(const char *const *rows, int64_t offset, int d, int t, int count, uint16_t *to,
                             RowAsks &asks) {
    const int size = layer.v_head_size - d;
    auto pair = [&](const Halves &x, const Halves &y) __attribute__((always_inline)) {
      for (int i = 0; i < VALUE_STEP / 32; i++) {
        _mm512_storeu_si512(to + 2 * i * PANEL, _mm512_unpacklo_epi16(x.part[i], y.part[i]));
        _mm512_storeu_si512(to + (2 * i + 1) * PANEL, _mm512_unpackhi_epi16(x.part[i], y.part[i]));
      }
      to += 32;
    };
    auto at = [&](int i) { return (const T *)(rows[t + i] + offset) + d; };
    for (int i = 0; i < 32; i += 2) {
      asks();
      if (t + 32 <= count && size >= VALUE_STEP) {
        pair(halves(at(i), VALUE_STEP), halves(at(i + 1), VALUE_STEP));
      } else {
        pair(t + i < count ? halves(at(i), size) : Halves{},
             t + i + 1 < count ? halves(at(i + 1), size) : Halves{});
      }
    }
  }

  // Inlined, as a compiler may drop calls of what only asks.
  static PA_ALWAYS void ask_near(const char *values) {
    for (int i = 0; i < VALUE_STEP * (int)sizeof(T); i += 64) prefetch(values + i);
  }

  // O += P V of a single unit, VALUE_STEP elements at `to`. While the values of 32 keys are multiplied,
  // those of the next are paired: what was just stored a tile register waits for.
  PA_NOINLINE RowAsks weigh(const char *const *rows, int64_t offset, int d, int count, int lane,
                            float *to, RowAsks asks) {
    constexpr int ld = TILE_KEYS / 2;
    const uint32_t *weights = turned + (int64_t)lane * ld;
    pair_values(rows, offset, d, 0, count, values, asks);
    take_sums(to, image(), 2 * image());
    for (int t = 0; t < count; t += 32) {
      const uint16_t *from = values + t / 32 % 2 * 4 * PANEL;
      if (t + 32 < count) {
        uint16_t *next = values + (t / 32 + 1) % 2 * 4 * PANEL;
        pair_values(rows, offset, d, t + 32, count, next, asks);
      }
      _tile_loadd(6, weights + t / 2, ld * 4);
      _tile_loadd(4, from, 64);
      _tile_dpbf16ps(0, 6, 4);
      asks();
      _tile_loadd(5, from + PANEL, 64);
      _tile_dpbf16ps(1, 6, 5);
      asks();
      _tile_loadd(4, from + 2 * PANEL, 64);
      _tile_dpbf16ps(2, 6, 4);
      asks();
      _tile_loadd(5, from + 3 * PANEL, 64);
      _tile_dpbf16ps(3, 6, 5);
      asks();
    }
    put_sums(to, image(), 2 * image());
    return asks;
  }

  // Weights as [lane][pair of keys]; pairs beyond the last become zero, up to a tile register.
  PA_NOINLINE void turn_weights(int count) {
    const int used = (count + 1) / 2, depth = pa_round_up(used, 16);
    __builtin_memset(pairs + (int64_t)used * is.lanes, 0, 4L * (depth - used) * is.lanes);
    for (int lane = 0; lane < is.lanes; lane += W) {
      for (int t = 0; t < depth; t += 16) {
        vf block[W];
        for (int j = 0; j < W; j++) block[j] = read<vf>(pairs + (int64_t)(t + j) * is.lanes + lane);
        transpose(block);
        for (int j = 0; j < W; j++) {
          write(turned + (int64_t)(lane + j) * (TILE_KEYS / 2) + t, block[j]);
        }
      }
    }
  }

  PA_NOINLINE void rescale() {
    const int used = is.heads * is.rows;
    for (int lane = 0; lane < used; lane++) {
      if (alpha[lane] == 1.0f) continue;
      vf by = splat(alpha[lane]);
      float *at = output_at(lane) + lane % is.rows * 16;
      for (int d = 0; d < is.v; d += 16, at += image()) write(at, loadf(at) * by);
    }
  }

  // Scores of 64 keys that don't lie evenly with one unit's rows. While 64 elements of them are multiplied, the next
  // are copied: what was just stored a tile register waits for.
  template <bool WHOLE>
  PA_NOINLINE RowAsks copied_scores(const char *const *rows, int64_t offset, int count, int lane, float *to,
                                    RowAsks asks) {
    constexpr int image = 16 * 32, slice = KEY_STEP / 16 * 2 * image;  // of 16 keys, 32 elements; of all
    // Four keys from the `first` on, elements from `d` on.
    auto copy = [&](int first, int d) __attribute__((always_inline)) {
      uint16_t *at = keys + d / 64 % 2 * slice + first / 16 * 2 * image + first % 16 * 32;
      const int64_t from = offset + d * (int64_t)sizeof(T);
      PA_UNROLLED
      for (int i = 0; i < 4; i++, at += 32) {
        Halves x = {};
        if (WHOLE || first + i < count) x = halves((const T *)(rows[first + i] + from), WHOLE ? 64 : layer.head_size - d);
        _mm512_storeu_si512(at, x.part[0]);
        _mm512_storeu_si512(at + image, x.part[1]);
      }
      asks();
    };
    const uint32_t *from = query_at(lane);
    const int64_t row = 4L * is.rows;
    for (int i = 0; i < KEY_STEP; i += 4) copy(i, 0);
    zero_sums();
    for (int d = 0; d < is.k; d += 32, from += 16 * is.rows) {
      const uint16_t *at = keys + d / 64 % 2 * slice + d / 32 % 2 * image;
      const int next = d / 64 * 64 + 64, first = d / 32 % 2 * (KEY_STEP / 2);
      auto beside = [&](int i) __attribute__((always_inline)) {
        asks();
        if (next >= is.k) return;
        copy(first + 8 * i, next);
        copy(first + 8 * i + 4, next);
      };
      _tile_loadd(6, from, row);
      _tile_loadd(4, at, 64);
      _tile_dpbf16ps(0, 4, 6);
      beside(0);
      _tile_loadd(5, at + 2 * image, 64);
      _tile_dpbf16ps(1, 5, 6);
      beside(1);
      _tile_loadd(4, at + 4 * image, 64);
      _tile_dpbf16ps(2, 4, 6);
      beside(2);
      _tile_loadd(5, at + 6 * image, 64);
      _tile_dpbf16ps(3, 5, 6);
      beside(3);
    }
    put_sums(to + lane, 16 * is.lanes, 32 * is.lanes, 4L * is.lanes);
    return asks;
  }

  RowAsks score_tile(const Walk &walk, RowAsks asks) {
    const int count = walk.tile.count;
    for (int t = 0; t < count; t += KEY_STEP) {
      float *to = s + (int64_t)t * is.lanes;
      bool even = true;
      for (int i = 0; i < KEY_STEP / 16; i++) even &= strides[t / 16 + i] != 0;
      for (int h = 0; h < is.heads; h++) {
        const int64_t offset = walk.key_offset + h * walk.source.key_head;
        if (!even) {
          const bool whole = t + KEY_STEP <= count && layer.head_size % 64 == 0;
          const auto score = whole ? &Tile::copied_scores<true> : &Tile::copied_scores<false>;
          asks = (this->*score)(walk.keys + t, offset, count - t, lane_of(h), to, asks);
          continue;
        }
        KeyRows rows[KEY_STEP / 16];
        for (int i = 0; i < KEY_STEP / 16; i++) rows[i] = {walk.keys[t + 16 * i] + offset, strides[t / 16 + i]};
        asks = scores(rows, lane_of(h), to, asks);
      }
    }
    return asks;
  }

  RowAsks weigh_tile(const Walk &walk, RowAsks asks) {
    turn_weights(walk.tile.count);
    for (int h = 0; h < is.heads; h++) {
      const int64_t offset = walk.value_offset + h * walk.source.value_head;
      for (int d = 0; d < is.v; d += VALUE_STEP) {
        asks = weigh(walk.values, offset, d, walk.tile.count, lane_of(h), output_at(lane_of(h)) + d * is.rows, asks);
      }
    }
    return asks;
  }

  // A tile; `last`: sums are results.
  void attend(Walk &walk, bool masked, bool last) {
    look_at(walk.keys, walk.tile.count);
    configure(false);
    RowAsks asks = score_tile(walk, RowAsks(walk.ahead));
    for (int t = 0; t < pa_min(RowAsks::NEAR, walk.tile.count); t++) ask_near(walk.values[t] + walk.value_offset);
    const bool changed = softmax_tile<Pairs>(s, {is.lanes, W, W}, is.lanes / W, walk.tile.count,
                                             walk.tile.first_key, how, lanes, masked, alpha, pairs, asks);
    if (changed) rescale();
    configure(true);
    weigh_tile(walk, asks).all();
    if (last) put_outputs();
  }
  void put_empty() { put_outputs(); }

  PA_NOINLINE void put_outputs() {
    for (int h = 0; h < is.heads; h++) {
      for (int r = 0; r < per_head(); r++) {
        const int lane = lane_of(h) + r;
        const float *from = output_at(lane) + lane % is.rows * 16;
        for (int d = 0; d < is.v; d += 32, from += 2 * image()) {
          const PairedOrder x(from, from + image());
          _mm512_storeu_ps(row + d, x.first);
          _mm512_storeu_ps(row + d + 16, x.second);
        }
        leave(run, item, h, r, row, lanes.m[lane], lanes.l[lane]);
      }
    }
  }
};

// An item's tiles of keys one after another: `Rows` is `Tile` or `Wide`.
template <class Rows>
static void tiled_item(Run *run, const Item &item, Turn *turn) {
  Arena arena = turn->scratch;
  Run own = *run;  // whose partial results a joined item keeps
  Item piece = item;
  Rows rows(&own, piece, arena);
  Walk walk(run, item, turn, arena, Rows::KEYS);
  if (item.joined) {
    own.parts = arena.take<float>(item.joined * run->plan->part_floats);
    piece.part = 0;
  }
  walk.touches = false;
  rows.take_queries();
  TileEngine::begin();
  // A single query token sees every key that its item was given.
  const bool masked = item.tokens > 1;
  bool empty = true;
  while (walk.step([](int) { return 0; })) {
    const bool ends = walk.tile.ends_piece();
    rows.attend(walk, masked, ends || !walk.more);
    empty = false;
    if (!ends) continue;
    piece.part++;
    if (piece.part < item.joined) rows.start_over();
  }
  TileEngine::end();
  if (!walk.fine) {
    __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
    return;
  }
  if (item.joined) return merge_parts(&own, item, {0, item.joined}, rows.row);
  if (empty) rows.put_empty();
  end_item(run, item, rows.row);
}
