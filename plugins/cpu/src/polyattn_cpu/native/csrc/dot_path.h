// Decode: few rows per KV head, so memory sets the pace. Included inside an anonymous namespace.
//
// All KV heads of a range of keys are one item: the rows of a token lie one after another, and only
// the scores are kept. The memory must never be idle while there is arithmetic to do, so lines are asked
// for ahead of their use, in one of three ways:
// - near: each load of a row prefetches the same line of the row that is read a few visits later;
// - latents, where rows have several parts and values lie in the keys: lines of the next tile, in the
//   order of their addresses;
// - far, where the plan wants it: a tile's values while its keys are multiplied, then the next tile's
//   keys, into the second cache, in the order of their addresses.

constexpr int PART_ROWS = W < 8 ? W : 8;   // rows that share a load of a key or a value
constexpr int DOT_ROWS = 2 * PART_ROWS;    // per KV head at most: parts, all but one out of the cache
// Of more rows than a part has: where elements need no conversion, 4 rows and 4 keys are multiplied with
// fewer loads than 8 and 2. Where bfloat16 is multiplied, only rows of bytes are such, and need one.
template <class T>
#if defined(__AVX512BF16__)
constexpr int FEWER_ROWS = PART_ROWS;
#else
constexpr int FEWER_ROWS = W >= 16 && sizeof(T) == 4 ? 4 : PART_ROWS;
#endif
constexpr int DOT_KEYS = 2 * SPLIT_KEYS + SPLIT_KEYS / 4;   // of an item at most
constexpr int DOT_TILE = 64;             // keys whose scores are kept
constexpr int LANE_KEYS = 8;             // keys that are multiplied at a time where rows are lanes
#if defined(__AVX2__)
constexpr bool MAY_BE_FAR = true;
#else
constexpr bool MAY_BE_FAR = false;
#endif

// Whether an item is one of few rows and of no more keys than there is room for: a long prompt's
// last block may have few rows, too, and all keys.
PA_ONCE bool is_few(const pa_layer &layer, const Item &item, int most) {
  return rows_per_head(layer, item) <= most && item.to - item.from <= DOT_KEYS;
}

#include "dot_asks.h"
#include "dot_products.h"

// Whether a key's bytes hold its value, as a latent's do.
PA_INLINE bool values_in_keys(const Source &s, const pa_layer &layer, int64_t size) {
  return s.value >= s.key && s.value + layer.v_head_size * size <= s.key + layer.head_size * size;
}

struct DotLayout {
  int parts, each;            // of a head's rows; rows of a part
  int rows, lanes, ldq, ldo;  // of a part, padded to a power of two; floats of a row of q, of o
  DotLayout(const pa_layer &layer, int heads, int per_head, int part_rows)
      : parts(per_head <= PART_ROWS ? 1 : (per_head + part_rows - 1) / part_rows),
        each((per_head + parts - 1) / parts),
        rows(each <= 1 ? 1 : each <= 2 ? 2 : each <= 4 ? 4 : 8),
        lanes(pa_round_up(heads * parts * rows, W)),
        ldq(pa_round_up(layer.head_size, (in_rows(layer) ? 8 : 2) * W)),
        ldo(pa_round_up(layer.v_head_size, (in_rows(layer) ? 8 : 2) * W)) {}
};

static int64_t dot_scratch(const pa_layer &layer, int heads, int rows) {
  DotLayout is(layer, heads, rows, PART_ROWS);  // smaller parts need no more
  int64_t floats = (int64_t)heads * is.parts * is.rows * (is.ldq + is.ldo) +
                   (int64_t)(DOT_TILE + W) * is.lanes + (LANE_ARRAYS + 1) * (int64_t)is.lanes +
                   (int64_t)DOT_TILE / 2 * is.lanes;
  return floats * 4 + 2 * (DOT_KEYS + DOT_TILE) * (int64_t)sizeof(char *) + 17 * 64 +
         2 * LANE_KEYS * (int64_t)pa_round_up(layer.head_size, 64);
}

// One item. SHARE: parts that share the asking for a line. PAIRS: products of bfloat16, of pairs of
// elements; LANED: each of a head's rows is so many of a vector's lanes where keys are multiplied; 0: none is.
template <class T, int ROWS, int SHARE, bool PAIRS = false, int LANED = 0>
struct Decode {
  static constexpr int KEYS = LANED ? LANE_KEYS : W / ROWS, SIZE = (int)sizeof(T), LINE = 64 / SIZE;
  static constexpr int LANE_ROWS = LANED ? W / LANED : 0;
  static constexpr int VALUES = (W >= 16 ? 16 : 8) / ROWS, C = ROWS == 6 ? 4 : VALUES > 8 ? 8 : VALUES;

  Run *run;
  const Item &item;
  Turn *turn;
  Arena arena;
  const pa_layer &layer;
  const int rows, heads, size, v_size;  // rows of a KV head
  const DotLayout is;
  const int used, total;  // lanes; keys
  const int ldq;          // floats of a row of q; bfloat16 takes half, so that q and o share the first cache
  const Source source;
  const int64_t key_base, value_base;
  const bool in_keys, latents, far;
  const bool beside;  // a token's value is asked for with its key, which it follows or lies in
  float *q, *o, *s, *alpha;
  uint32_t *pairs;
  uint16_t *copies;  // of LANE_KEYS keys
  Lanes lanes;
  const char **keys, **values;  // of the item's tokens, then of those that follow

  Decode(Run *run, const Item &item, Turn *turn)
      : run(run), item(item), turn(turn), arena(turn->scratch), layer(run->plan->layer),
        rows(rows_per_head(layer, item)), heads(item.heads),
        size(layer.head_size), v_size(layer.v_head_size), is(layer, heads, rows, FEWER_ROWS<T>),
        used(heads * is.parts * ROWS), total(item.to - item.from),
        ldq(PAIRS ? pa_round_up(layer.head_size, 4 * W) / 2 : is.ldq), source(source_of(run, item.seq)),
        key_base(item.head0 * source.key_head), value_base(item.head0 * source.value_head),
        in_keys(values_in_keys(source, layer, SIZE)), latents(SHARE > 1 && in_keys),
        far(PAIRS || (MAY_BE_FAR && run->plan->far && !latents)),
        beside(in_keys || value_follows_key(source, size * SIZE)) {
    q = arena.take<float>((int64_t)(LANED ? heads * LANE_ROWS : used) * ldq);
    o = arena.take<float>((int64_t)used * is.ldo);
    s = arena.take<float>((int64_t)(DOT_TILE + W) * is.lanes);
    pairs = arena.take<uint32_t>((int64_t)DOT_TILE / 2 * is.lanes);
    copies = arena.take<uint16_t>(LANED ? LANE_KEYS * (int64_t)pa_round_up(size, 64) : 0);
    alpha = arena.take<float>(is.lanes);
    lanes = lanes_at(arena.take<char>(4L * LANE_ARRAYS * is.lanes), is.lanes);
    keys = arena.take<const char *>(DOT_KEYS + DOT_TILE);
    values = arena.take<const char *>(DOT_KEYS + DOT_TILE);
  }

  int lane_of(int h, int r) const { return (h * is.parts + r / is.each) * ROWS + r % is.each; }

  // False where the block table points outside the cache.
  bool find_keys() {
    Tiles piece = {&item, item.from, DOT_KEYS, 0, 0};
    for (int at = 0; piece.next(); at += piece.count) {
      if (!token_addresses(source, piece.first_key, piece.count, keys + at, values + at)) return false;
    }
    for (int i = total; total && i < total + DOT_TILE; i++) {  // a visit may reach over the end
      keys[i] = keys[total - 1];
      values[i] = values[total - 1];
    }
    return true;
  }

  void take_rows() {
    clear_lanes(lanes, is.lanes);
    if (!LANED) __builtin_memset(q, 0, sizeof(float) * used * ldq);
    __builtin_memset(o, 0, sizeof(float) * used * is.ldo);
    if (is.lanes > used) {  // lanes of no row: nothing else writes them
      __builtin_memset(s, 0, sizeof(float) * (pa_min(total, DOT_TILE) + W) * is.lanes);
    }
    for (int h = 0; h < heads; h++) {
      [[maybe_unused]] const char *together[W] = {};
      for (int r = 0; r < rows; r++) {
        const Row row = item_row(layer, item, h, r);
        const int lane = lane_of(h, r);
        const char *from = query_row(run, item.seq, row);
        float *to = q + (int64_t)lane * ldq;
        if constexpr (LANED) {
          together[lane - lane_of(h, 0)] = from;
        } else if constexpr (PAIRS) {
          __builtin_memcpy(to, from, 2 * size);
#if defined(PA_PAIR_DOTS)
          turn_to_keys<T>((uint16_t *)to, size);
#endif
        } else {
          widen_any(from, layer.dtype, to, size);
          if (Apart<T>::ANY) apart(to, size / LINE * LINE);
        }
        set_lane(run, item, lanes, lane, row);
      }
#if defined(PA_PAIR_DOTS)
      if constexpr (LANED) turn_to_lanes<LANED>(together, (uint32_t *)q + (int64_t)h * LANE_ROWS * ldq, size);
#endif
    }
  }

  // The scores of `count` keys. `next` says what each visit, KEYS keys of one part of a head's rows, asks
  // for; of all of them, where they are lanes.
  template <class Next>
  PA_ALWAYS void scores(const char *const *k, int count, Next next) {
    for (int t = 0; t < count; t += KEYS) {
      int64_t offset = key_base;
      for (int h = 0, lane = 0; h < heads; h++, offset += source.key_head) {
        if constexpr (LANED) {
#if defined(PA_PAIR_DOTS)
          lane_dots<T, LANED>(k + t, offset, (const uint32_t *)q + (int64_t)h * LANE_ROWS * ldq, size, copies,
                              s + (int64_t)t * is.lanes + lane, is.lanes, is.parts * ROWS, next());
          lane += is.parts * ROWS;
#endif
          continue;
        }
        for (int part = 0; part < is.parts; part++, lane += ROWS) {
          const float *row = q + (int64_t)lane * ldq;
          vf found;
          if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
            found = pair_dots<T, ROWS>(k + t, offset, (const uint16_t *)row, 2 * ldq, size, next());
#endif
          } else {
            found = dots<T, ROWS>(k + t, offset, row, ldq, size, next());
          }
          put_scores<ROWS>(found, s + (int64_t)t * is.lanes + lane, is.lanes);
        }
      }
    }
  }

  void weigh(int count, int first_key, const Logits &how) {
    const bool masked = item.tokens > 1;  // a single token sees every key that its item was given
    typedef typename DotForms<PAIRS>::Form Form;
    if (!softmax_tile<Form>(s, {is.lanes, W, W}, is.lanes / W, count, first_key, how, lanes, masked, alpha,
                            pairs)) {
      return;
    }
    for (int row = 0; row < used; row++) {
      if (alpha[row] == 1.0f) continue;
      vf by = splat(alpha[row]);
      float *at = o + (int64_t)row * is.ldo;
      for (int i = 0; i < is.ldo; i += W) write(at + i, loadf(at + i) * by);
    }
  }

  // Adds the values of the keys [first, first + count) of a tile. `next` says what a visit asks for: of
  // one head `step` elements from the `c`th on, by one part of its rows.
  template <class Next>
  PA_ALWAYS void add(const char *const *v, int first, int count, Next next) {
    const int most = value_vectors<C, PAIRS>(v_size / W);
    for (int h = 0; h < heads; h++) {
      const int lane = h * is.parts * ROWS;
      const int64_t base = value_base + h * source.value_head;
      for (int c = 0, step; c < v_size; c += step) {
        const int vectors = c + most * W <= v_size ? most : PAIRS ? 2 : 1;
        step = vectors * W;
        for (int part = 0; part < is.parts; part++) {
          const int row = lane + part * ROWS;
          add_some(vectors, v + first, base + c * (int64_t)SIZE, first, count, row, c, next(h, c, step, part));
        }
      }
    }
  }
  template <class Asks>
  PA_ALWAYS void add_some(int vectors, const char *const *v, int64_t offset, int first, int count, int row,
                          int c, Asks asks) {
    switch (vectors) {
      case 8: return add_wide<8>(v, offset, first, count, row, c, asks);
      case 6: return add_wide<6>(v, offset, first, count, row, c, asks);
      case 4: return add_wide<4>(v, offset, first, count, row, c, asks);
      case 2: return add_wide<2>(v, offset, first, count, row, c, asks);
      default: return add_wide<PAIRS ? 2 : 1>(v, offset, first, count, row, c, asks);
    }
  }
  template <int V, class Asks>
  PA_ALWAYS void add_wide(const char *const *v, int64_t offset, int first, int count, int row, int c,
                          Asks asks) {
    float *to = o + (int64_t)row * is.ldo + c;
    if constexpr (V > C) {
      return;
    } else if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
      add_value_pairs<T, ROWS, V>(v, offset, count, pairs + first / 2 * (int64_t)is.lanes + row, is.lanes,
                                  to, is.ldo, v_size - c, asks);
#endif
    } else {
      add_values<T, ROWS, V, SHARE>(v, offset, count, s + first * (int64_t)is.lanes + row, is.lanes, to,
                                    is.ldo, pa_min(W, v_size - c), asks);
    }
  }

  void leave_rows() {
    for (int h = 0; h < heads; h++) {
      for (int r = 0; r < rows; r++) {
        int lane = lane_of(h, r);
        float *sums = o + (int64_t)lane * is.ldo;
        if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
          pairs_together<T>(sums, v_size, value_vectors<C, true>(v_size / W));
#endif
        } else if (Apart<T>::ANY) {
          together<T>(sums, v_size / (2 * W) * (2 * W), v_size);
        }
        leave(run, item, h, r, sums, lanes.m[lane], lanes.l[lane]);
      }
    }
    end_item(run, item, o);
  }

  Logits logits() const {
    Logits how = logits_of(run);
    if (!PAIRS) how.scale /= Apart<T>::FACTOR;
    return how;
  }

  void near_tiles() {
    const Logits how = logits();
    // As many visits ahead as cover the memory's latency: at 5 bytes a cycle 800 cycles.
    const int visits = pa_max(1, DISTANCE / (KEYS * size * SIZE));
    int done = 0;
    Tiles tile = {&item, item.from, DOT_TILE, 0, 0};
    for (; tile.next(); done += tile.count) {
      const int count = tile.count;
      const char *const *k = keys + done, *const *v = values + done;
      KeysAhead<KEYS> ahead(k, v, key_base, source.key_head, value_base, heads, is.parts, count, visits);
      scores(k, count, [&] {
        RowsAhead<SHARE> asks = {ahead.at + ahead.part % SHARE, ahead.offset};
        ahead.next();
        return asks;
      });
      for (int t = KEYS; t < count; t++) {  // of the first visit to the values
        for (int b = 0; b < C * W * SIZE; b += 64) prefetch(v[t] + value_base + b);
      }
      weigh(count, tile.first_key, how);
      const int left = total - done - count;
      const char *const *after = left ? k + count : v;
      add(v, 0, count, [&](int h, int c, int step, int part) {
        const bool ends = c + step >= v_size, last = ends && h + 1 == heads;
        // Values in the keys are in the cache by now: half of the next tile's keys take their place.
        const bool keys_early = in_keys && left && c / step % 2 == 0;
        const int64_t base = value_base + h * source.value_head, byte = c * (int64_t)SIZE;
        if ((last || keys_early) && left < count && left) {  // fewer tokens than are visited
          return RowsAhead<SHARE>{v + part % SHARE, base};
        }
        const char *const *next = last || keys_early ? after : v;
        const int64_t offset = keys_early ? key_base + h * source.key_head + byte
                               : last     ? key_base
                               : ends     ? base + source.value_head
                                          : base + byte + step * SIZE;
        return RowsAhead<SHARE>{next + part % SHARE, offset};
      });
    }
  }

  void latent_tiles() {
    const Logits how = logits();
    first_tokens(run, following_item(run, turn), DOT_TILE, keys + total, values + total);
    int done = 0;
    Tiles tile = {&item, item.from, DOT_TILE, 0, 0};
    for (; tile.next(); done += tile.count) {
      const int count = tile.count;
      const char *const *k = keys + done, *const *v = values + done;
      LatentsAhead latent(k + count, size * SIZE, count);
      scores(k, count, [&] { return latent.for_keys(); });
      weigh(count, tile.first_key, how);
      add(v, 0, count, [&](int, int, int, int) { return latent.for_values(pa_max(1, count / SHARE)); });
    }
  }

  void far_tiles() {
    typedef FarAhead<(ROWS > 4 ? 2 : 1)> Far;
    const Logits how = logits();
    // What is read of each token, by all parts: bytes of keys, and of values.
    const int key_bytes = used / ROWS * size * SIZE, value_bytes = used / ROWS * v_size * SIZE;
    const int lines = KEYS * ((size * SIZE + 63) / 64), visit = KEYS * size * SIZE * (LANED ? is.parts : 1);
    const bool dear = ROWS > (PAIRS ? 2 : 1) * SIZE;  // products of a byte, in cycles
    const int tile_keys = far_keys(layer, SIZE);
    const int at_once = in_keys || dear ? tile_keys : run_keys(layer, tile_keys, SIZE);
    const int asked_bytes = (beside && !in_keys ? size + v_size : size) * SIZE;
    Ahead next_keys(item, source.key_head, asked_bytes), next_values(item, source.value_head, v_size * SIZE);
    if (!turn->asked) {
      next_keys.turn_to(keys, keys, pa_min(tile_keys, total), 1);
      next_keys.all();
    }
    int done = 0;
    Tiles tile = {&item, item.from, tile_keys, 0, 0};
    while (tile.next()) {
      const int count = tile.count;
      const char *const *k = keys + done, *const *v = values + done;
      if (!beside) next_values.turn_to(v, v, count, count * key_bytes);
      done += count;
      auto turn_to_next = [&](int cycles) {  // tile's keys, or the following item's first ones
        int few = pa_min(tile_keys, total - done);
        if (!few) {
          const Item *then = following_item(run, turn);
          few = first_tokens(run, then, tile_keys, keys + total, values + total);
          if (few) next_keys = Ahead(*then, source.key_head, asked_bytes);
          turn->asked_after = few;
        }
        next_keys.turn_to(keys + done, keys + done, few, cycles);
      };
      if (beside) turn_to_next(count * (key_bytes + value_bytes));
      Ahead &beside_keys = beside ? next_keys : next_values;
      scores(k, count, [&] { return Far{beside_keys.take(visit, lines)}; });
      weigh(count, tile.first_key, how);
      if (!beside) turn_to_next(count * value_bytes);
      for (int t = 0; t < count; t += at_once) {
        const int some = pa_min(at_once, count - t);
        add(v, t, some, [&](int, int c, int step, int) {
          const int bytes = pa_min(step, v_size - c) * SIZE;
          return Far{next_keys.take(some * bytes, some / SHARE * pa_max(1, bytes / 64))};
        });
      }
    }
  }

  void all() {
    if (!find_keys()) {
      __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
      return;
    }
    take_rows();
    if (far) {
      if constexpr (MAY_BE_FAR) far_tiles();
    } else if (latents) {
      if constexpr (SHARE > 1) latent_tiles();
    } else {
      if constexpr (!PAIRS) near_tiles();
    }
    leave_rows();
  }
};

#if defined(PA_PAIR_DOTS)
template <class T>
static void pair_item(Run *run, const Item &item, Turn *turn) {
  const int rows = rows_per_head(run->plan->layer, item);
  if (rows <= 1) return Decode<T, 1, 1, true>(run, item, turn).all();
  if (rows <= 2) return Decode<T, 2, 1, true>(run, item, turn).all();
  if (rows <= 4) return Decode<T, 4, 1, true>(run, item, turn).all();
  if (rows <= 8) return Decode<T, 8, 1, true, 2>(run, item, turn).all();
  if (rows <= 12) return Decode<T, 6, 1, true, 1>(run, item, turn).all();
  return Decode<T, 8, 1, true, 1>(run, item, turn).all();
}
#else
template <class T>
static void dot_item(Run *run, const Item &item, Turn *turn) {
  const int per_head = rows_per_head(run->plan->layer, item);
  const DotLayout is(run->plan->layer, item.heads, per_head, FEWER_ROWS<T>);
  if constexpr (W >= 16) {
    if (is.rows == 4 && is.parts > 2) return Decode<T, 4, 4>(run, item, turn).all();
    if (is.rows == 8 && is.parts > 1) return Decode<T, 8, 2>(run, item, turn).all();
  }
  if (is.rows <= 1) return Decode<T, 1, 1>(run, item, turn).all();
  if (is.rows <= 2) return Decode<T, 2, 1>(run, item, turn).all();
  if (is.rows <= 4) return Decode<T, 4, 1>(run, item, turn).all();
  if constexpr (PART_ROWS >= 8) return Decode<T, 8, 1>(run, item, turn).all();
}
#endif
