// Decode: few rows per KV head, so memory sets the pace. Included inside an anonymous namespace.
//
// All KV heads of a range of keys are one item: the rows of a token lie one after another, and only
// the scores are kept. Each load of a row prefetches the same line of the row that is read a few
// visits later, so that the memory is never idle while there is arithmetic to do; where rows have
// several parts and values lie in the keys, lines of the next tile, in the order of their addresses.

constexpr int PART_ROWS = W < 8 ? W : 8;   // rows that share a load of a key or a value
constexpr int DOT_ROWS = 2 * PART_ROWS;    // per KV head at most: parts, all but one out of the cache
// Of more rows than a part has: where elements need no conversion, 4 rows and 4 keys are multiplied with
// fewer loads than 8 and 2.
template <class T>
constexpr int FEWER_ROWS = W >= 16 && sizeof(T) == 4 ? 4 : PART_ROWS;
constexpr int DOT_KEYS = 2 * SPLIT_KEYS;   // of an item at most
constexpr int DOT_TILE = 64;             // keys whose scores are kept
constexpr int DISTANCE = 4096;           // bytes that are asked for ahead of their use
// Where lines are asked for into the second cache: bytes of a tile's keys and values at most, as half of
// these and the other half of the tile before are there at a time; and keys at least.
constexpr int FAR_BYTES = 192 << 10, FAR_KEYS = 16;
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

// Dot products of W / ROWS keys with ROWS rows, as one vector, [key][row].
template <class T, int ROWS, class Asks>
PA_NOINLINE vf dots(const char *const *keys, int64_t offset, const float *q, int ldq, int size,
                  Asks asks) {
  constexpr int KEYS = W / ROWS, LINE = 64 / (int)sizeof(T);
  vf acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  int d = 0;
  auto row_at = [&](int r, int at) __attribute__((always_inline)) {
    vf row = loadf(q + r * ldq + at);
    if (KEYS > 1) in_register(row);
    return row;
  };
  auto two = [&](int at) __attribute__((always_inline)) {  // vectors of elements, which may be apart
    if constexpr (KEYS <= 2) {
      vf x[KEYS][2];
      PA_UNROLLED
      for (int k = 0; k < KEYS; k++) Apart<T>::both((const T *)(keys[k] + offset) + at, x[k]);
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
        Apart<T>::both((const T *)(keys[k] + offset) + at, x);
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
      vf x = some < W ? load_some<Apart<T>>(key, some) : Apart<T>::some(key);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[k * ROWS + r] += x * row[r];
    }
  };
  for (; d + LINE <= size; d += LINE) {
    Asks::template keys<KEYS>(asks, d * sizeof(T));
    PA_UNROLLED
    for (int at = 0; at < LINE; at += Apart<T>::ANY ? 2 * W : W) {
      if constexpr (Apart<T>::ANY) {
        two(d + at);
      } else {
        step(d + at, W);
      }
    }
  }
  if (d < size) {
    Asks::template keys<KEYS>(asks, d * sizeof(T));
    for (; d + W <= size; d += W) step(d, W);
    if (d < size) step(d, size - d);
  }
  return sums(acc);
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
        lanes(pa_round_up(heads * parts * rows, W)), ldq(pa_round_up(layer.head_size, 2 * W)),
        ldo(pa_round_up(layer.v_head_size, 2 * W)) {}
};

static int64_t dot_scratch(const pa_layer &layer, int heads, int rows) {
  DotLayout is(layer, heads, rows, PART_ROWS);  // smaller parts need no more
  int64_t floats = (int64_t)heads * is.parts * is.rows * (is.ldq + is.ldo) +
                   (int64_t)(DOT_TILE + W) * is.lanes + (LANE_ARRAYS + 1) * (int64_t)is.lanes +
                   (int64_t)DOT_TILE / 2 * is.lanes;
  return floats * 4 + 2 * (DOT_KEYS + DOT_TILE) * (int64_t)sizeof(char *) + 16 * 64;
}

template <bool PAIRS>
struct DotForms {
  typedef Floats Form;
};
#if defined(PA_PAIR_DOTS)
#include "pair_dots.h"
#endif

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

// The addresses of the first tokens, at most `tile`, that the thread's next item reads, where it has one;
// returns how many.
PA_ONCE int following_addresses(Run *run, Turn *turn, int tile, const char **keys, const char **values) {
  const int32_t index = pa_following(turn);
  if (index >= turn->count) return 0;
  const Item &item = run->plan->items[index];
  Tiles first = {&item, item.from, tile, 0, 0};
  if (!first.next()) return 0;
  bool fine = token_addresses(source_of(run, item.seq), first.first_key, first.count, keys, values);
  return fine ? first.count : 0;
}

// Keys of a tile where lines are asked for into the second cache: of the layer alone, as bits depend on it.
PA_INLINE int far_keys(const pa_layer &layer, int64_t itemsize) {
  const int64_t token = layer.num_kv_heads * (layer.head_size + layer.v_head_size) * itemsize;
  int keys = DOT_TILE;
  while (keys > FAR_KEYS && keys * token > FAR_BYTES) keys /= 2;
  return keys;
}

// How many vectors of a value are added at a time where so many whole ones are left. A vector of a few
// elements, or a last one, goes alone; of pairs two do, as they hold the elements of one load.
template <int VECTORS_>
struct Wide {
  static constexpr int VECTORS = VECTORS_;
};
template <int C, bool PAIRS>
PA_INLINE int value_vectors(int whole) {
  for (int each = C; each > 1; each -= 2) {
    if (whole > 1 && whole / 2 * 2 % each == 0) return each;
  }
  return PAIRS ? 2 : 1;
}

// PAIRS: products of bfloat16, of pairs of elements.
template <class T, int ROWS, int SHARE, bool PAIRS = false>
static void dot_item(Run *run, const Item &item, Turn *turn) {
  constexpr int LINE = 64 / (int)sizeof(T);
  constexpr int C = (W >= 16 ? 16 : 8) / ROWS > 8 ? 8 : (W >= 16 ? 16 : 8) / ROWS;
  const pa_plan *plan = run->plan;
  const pa_layer &layer = plan->layer;
  const int ratio = layer.num_heads / layer.num_kv_heads, rows = item.tokens * ratio;
  const DotLayout is(layer, item.heads, rows, FEWER_ROWS<T>);
  const int heads = item.heads, size = layer.head_size, v_size = layer.v_head_size;
  const int used = heads * is.parts * ROWS;  // lanes
  Arena arena = {turn->scratch};
  float *q = arena.take<float>((int64_t)used * is.ldq);
  float *o = arena.take<float>((int64_t)used * is.ldo);
  float *s = arena.take<float>((int64_t)(DOT_TILE + W) * is.lanes);
  uint32_t *pairs = arena.take<uint32_t>((int64_t)DOT_TILE / 2 * is.lanes);
  float *alpha = arena.take<float>(is.lanes);
  Lanes lanes = lanes_at(arena.take<char>(4L * LANE_ARRAYS * is.lanes), is.lanes);
  const char **keys = arena.take<const char *>(DOT_KEYS + DOT_TILE);
  const char **values = arena.take<const char *>(DOT_KEYS + DOT_TILE);

  const int total = item.to - item.from;
  const Source source = source_of(run, item.seq);
  {
    Tiles piece = {&item, item.from, DOT_KEYS, 0, 0};
    for (int at = 0; piece.next(); at += piece.count) {
      if (!token_addresses(source, piece.first_key, piece.count, keys + at, values + at)) {
        __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
        return;
      }
    }
    for (int i = total; total && i < total + DOT_TILE; i++) {  // a visit may reach over the end
      keys[i] = keys[total - 1];
      values[i] = values[total - 1];
    }
  }
  const bool in_keys = values_in_keys(source, layer, sizeof(T)), latents = SHARE > 1 && in_keys;
  const bool far = PAIRS || (MAY_BE_FAR && plan->far && !latents);
  if (latents) following_addresses(run, turn, DOT_TILE, keys + total, values + total);
  clear_lanes(lanes, is.lanes);
  __builtin_memset(q, 0, sizeof(float) * used * is.ldq);
  __builtin_memset(o, 0, sizeof(float) * used * is.ldo);
  if (is.lanes > used) {  // lanes of no row: nothing else writes them
    __builtin_memset(s, 0, sizeof(float) * (pa_min(total, DOT_TILE) + W) * is.lanes);
  }
  const int64_t query_row = plan->query_starts[item.seq] + item.token0;
  auto lane_of = [&](int h, int r) { return (h * is.parts + r / is.each) * ROWS + r % is.each; };
  for (int h = 0; h < heads; h++) {
    for (int r = 0; r < rows; r++) {
      int head = (item.head0 + h) * ratio + r % ratio, lane = lane_of(h, r);
      int64_t at = (query_row + r / ratio) * run->t.query_token + head * run->t.query_head;
      const char *from = (const char *)run->t.query + at * itemsize(layer.dtype);
      float *to = q + (int64_t)lane * is.ldq;
      if constexpr (PAIRS) {
        __builtin_memcpy(to, from, 2 * size);
      } else {
        widen_any(from, layer.dtype, to, size);
        if (Apart<T>::ANY) apart(to, size / LINE * LINE);
      }
      set_lane(run, item, lanes, lane, item.token0 + r / ratio, head);
    }
  }
  Logits how = logits_of(run);
  if (!PAIRS) how.scale /= Apart<T>::FACTOR;
  constexpr int KEYS = W / ROWS;
  const int64_t key_base = item.head0 * source.key_head;
  const int64_t value_base = item.head0 * source.value_head;
  // As many visits ahead as cover the memory's latency: at 5 bytes a cycle 800 cycles.
  const int visits = pa_max(1, DISTANCE / (KEYS * size * (int)sizeof(T)));
  const int each = value_vectors<C, PAIRS>(v_size / W);
  const bool one_row = rows == ratio && item.tokens == 1;
  // What is read of each token, by all parts: bytes of keys, and of values.
  const int key_bytes = used / ROWS * size * (int)sizeof(T);
  const int value_bytes = used / ROWS * v_size * (int)sizeof(T);
  Ahead next_keys(item, source.key_head, size * (int)sizeof(T));
  Ahead next_values(item, source.value_head, v_size * (int)sizeof(T));
  const int tile_keys = far ? far_keys(layer, sizeof(T)) : DOT_TILE;
  if (far && !turn->asked) {
    next_keys.turn_to(keys, keys, pa_min(tile_keys, total), 1);
    next_keys.all();
  }
  int done = 0;
  Tiles tile = {&item, item.from, tile_keys, 0, 0};
  while (tile.next()) {
    const int count = tile.count, left = pa_min(tile_keys, total - done - count);
    Ahead &beside_keys = in_keys ? next_keys : next_values;
    if (far) {
      const char *const *next = in_keys ? keys + done + count : values + done;
      beside_keys.turn_to(next, next, in_keys ? left : count, count * key_bytes);
    }
    const char *const *k = keys + done, *const *v = values + done;
    KeysAhead<KEYS> ahead(k, v, key_base, source.key_head, value_base, heads, is.parts, count,
                          visits);
    LatentsAhead latent(k + count, size * (int)sizeof(T), count);
    for (int t = 0; t < count; t += KEYS) {
      for (int lane = 0; lane < used; lane += ROWS, ahead.next()) {
        const int64_t offset = key_base + lane / ROWS / is.parts * source.key_head;
        auto dots_of = [&](auto asks) {
          const float *rows = q + (int64_t)lane * is.ldq;
          if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
            return pair_dots<T, ROWS>(k + t, offset, (const uint16_t *)rows, 2 * is.ldq, size, asks);
#endif
          } else {
            return dots<T, ROWS>(k + t, offset, rows, is.ldq, size, asks);
          }
        };
        RowsAhead<SHARE> rows_ahead = {ahead.at + ahead.part % SHARE, ahead.offset};
        vf found;
        if (far) {
          if constexpr (MAY_BE_FAR) found = dots_of(FarAhead{&beside_keys});
        } else if constexpr (SHARE > 1) {
          found = latents ? dots_of(latent.for_keys()) : dots_of(rows_ahead);
        } else if constexpr (!PAIRS) {
          found = dots_of(rows_ahead);
        }
        float each[W];
        write(each, found);
        for (int i = 0; i < KEYS; i++) {
          __builtin_memcpy(s + (int64_t)(t + i) * is.lanes + lane, each + i * ROWS, 4 * ROWS);
        }
      }
    }
    for (int t = KEYS; !far && !latents && t < count; t++) {  // of the first visit to the values
      for (int b = 0; b < C * W * (int)sizeof(T); b += 64) prefetch(v[t] + value_base + b);
    }
    // A single query token sees every key that its item was given.
    bool changed = softmax_tile<typename DotForms<PAIRS>::Form>(s, {is.lanes, W, W}, is.lanes / W, count,
                                                               tile.first_key, how, lanes, !one_row,
                                                               alpha, pairs);
    if (changed) {
      for (int row = 0; row < used; row++) {
        if (alpha[row] == 1.0f) continue;
        vf by = splat(alpha[row]);
        float *at = o + (int64_t)row * is.ldo;
        for (int i = 0; i < is.ldo; i += W) write(at + i, loadf(at + i) * by);
      }
    }
    done += count;
    if (far && !in_keys) {
      const int few = left ? left : following_addresses(run, turn, tile_keys, keys + total, values + total);
      next_keys.turn_to(keys + done, keys + done, few, count * value_bytes);
      turn->asked_after = !left && few;
    }
    const char *const *after = done < total ? keys + done : v;
    for (int h = 0; h < heads; h++) {
      const int lane = h * is.parts * ROWS;
      const int64_t base = value_base + h * source.value_head;
      for (int c = 0; c < v_size;) {
        const int vectors = c + each * W <= v_size ? each : PAIRS ? 2 : 1, step = vectors * W;
        bool ends = c + step >= v_size, last = ends && h + 1 == heads;
        // Values in the keys are in the cache by now: half of the next tile's keys take their place.
        bool keys_early = in_keys && done < total && c / step % 2 == 0;
        const char *const *next = last || keys_early ? after : v;
        int64_t next_offset = keys_early ? key_base + h * source.key_head + c * (int64_t)sizeof(T)
                              : last     ? key_base
                              : ends     ? base + source.value_head
                                         : base + (c + step) * (int64_t)sizeof(T);
        int few = next != v && done < total ? pa_min(count, total - done) : count;
        const char *const *safe = few < count ? v : next;
        int64_t safe_offset = few < count ? base : next_offset;
        int64_t offset = base + c * (int64_t)sizeof(T);
        for (int part = 0; part < is.parts; part++) {
          const float *p = s + lane + part * ROWS;
          float *to = o + (int64_t)(lane + part * ROWS) * is.ldo + c;
          RowsAhead<SHARE> rows_ahead = {safe + part % SHARE, safe_offset};
          auto add = [&](auto asks) {
            auto some = [&](auto wide) __attribute__((always_inline)) {
              constexpr int V = decltype(wide)::VECTORS;
              if constexpr (V > C) {
                return;
              } else if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
                add_value_pairs<T, ROWS, V>(v, offset, count, pairs + lane + part * ROWS, is.lanes, to,
                                            is.ldo, v_size - c, asks);
#endif
              } else {
                add_values<T, ROWS, V, SHARE>(v, offset, count, p, is.lanes, to, is.ldo,
                                              pa_min(W, v_size - c), asks);
              }
            };
            switch (vectors) {
              case 8: return some(Wide<8>{});
              case 6: return some(Wide<6>{});
              case 4: return some(Wide<4>{});
              case 2: return some(Wide<2>{});
              default: return some(Wide<PAIRS ? 2 : 1>{});
            }
          };
          if (far) {
            if constexpr (MAY_BE_FAR) add(FarAhead{&next_keys});
          } else if constexpr (SHARE > 1) {
            latents ? add(latent.for_values(pa_max(1, count / SHARE))) : add(rows_ahead);
          } else if constexpr (!PAIRS) {
            add(rows_ahead);
          }
        }
        c += step;
      }
    }
  }
  for (int h = 0; h < heads; h++) {
    for (int r = 0; r < rows; r++) {
      int lane = lane_of(h, r);
      float *sums = o + (int64_t)lane * is.ldo;
      if constexpr (PAIRS) {
#if defined(PA_PAIR_DOTS)
        pairs_together(sums, v_size);
#endif
      } else if (Apart<T>::ANY) {
        together<T>(sums, v_size / (2 * W) * (2 * W), v_size);
      }
      leave(run, item, h, r, sums, lanes.m[lane], lanes.l[lane]);
    }
  }
  end_item(run, item, o);
}

#if defined(PA_PAIR_DOTS)
template <class T>
static void pair_item(Run *run, const Item &item, Turn *turn) {
  const int rows = rows_per_head(run->plan->layer, item);
  if (rows <= 1) return dot_item<T, 1, 1, true>(run, item, turn);
  if (rows <= 2) return dot_item<T, 2, 1, true>(run, item, turn);
  if (rows <= 4) return dot_item<T, 4, 1, true>(run, item, turn);
  return dot_item<T, 8, 1, true>(run, item, turn);
}
#else
template <class T>
static void dot_item_of(Run *run, const Item &item, Turn *turn) {
  const int per_head = rows_per_head(run->plan->layer, item);
  const DotLayout is(run->plan->layer, item.heads, per_head, FEWER_ROWS<T>);
  if constexpr (W >= 16) {
    if (is.rows == 4 && is.parts > 2) return dot_item<T, 4, 4>(run, item, turn);
    if (is.rows == 8 && is.parts > 1) return dot_item<T, 8, 2>(run, item, turn);
  }
  if (is.rows <= 1) return dot_item<T, 1, 1>(run, item, turn);
  if (is.rows <= 2) return dot_item<T, 2, 1>(run, item, turn);
  if (is.rows <= 4) return dot_item<T, 4, 1>(run, item, turn);
  if constexpr (PART_ROWS >= 8) return dot_item<T, 8, 1>(run, item, turn);
}
#endif
