// The keys' part of decode over rows of bytes: what is known of rows, queries turned as the rows lie, and a tile's
// scores. Included by row_path.h.
#include "row_codes.h"

#if defined(PA_PAIR_DOTS)
#include "row_lanes.h"
#include "row_pairs.h"
#elif defined(__AMX_BF16__)
#include "row_lanes.h"
#include "row_tiles.h"
#endif
#if defined(__AVX2__) && !defined(PA_PAIR_DOTS)
#define PA_INT_DOTS
#include "row_ints.h"
#endif

// Elements [W words][code][word], from or to their order.
PA_ONCE void by_code(float *x, int size, bool back) {
  for (int d = 0; d < size; d += WORD_CODES * W, x += WORD_CODES * W) {
    float each[WORD_CODES * W];
    __builtin_memcpy(each, x, sizeof each);
    for (int i = 0; i < WORD_CODES * W; i++) {
      const int at = i % WORD_CODES * W + i / WORD_CODES;
      if (back) x[i] = each[at];
      else x[at] = each[i];
    }
  }
}

PA_INLINE int code_width(const pa_row_format &f) { return pa_round_up((f.size + WORD_CODES - 1) / WORD_CODES, W); }

constexpr int ROW_TILE = 64;  // keys

// Bytes that tiles take of a format's rows: two of each group, then as many rows of sums, or of weights, and scales.
PA_INLINE int64_t tile_room([[maybe_unused]] const pa_row_format &f) {
#if defined(__AMX_BF16__)
  // Of bytes a tile of each 16 elements, and one of weights.
  return pa_max(pa_round_up(f.size, 4 * TILE_GROUP) / TILE_GROUP * 2 * (TILE_BYTES + PART_ROWS * 64 + 64),
                pa_max((pa_round_up(f.size, 64) / 16 + 1) * TILE_BYTES, ROW_TILE * (f.size + 64)));
#else
  return 0;
#endif
}

// And of queries of int8.
PA_INLINE int64_t query_room([[maybe_unused]] const pa_layer &layer) {
#if defined(__AMX_BF16__)
  if (key_rows(layer).form == PA_ROWS_INT8) return (int64_t)layer.num_kv_heads * (DOT_ROWS / PART_ROWS) * (layer.head_size / 64) * TILE_BYTES;
#endif
  return 0;
}
// Floats of a key beside its tile: its numbers, or its weights as integers, which are up to two vectors.
PA_INLINE int widest_row(const pa_row_format &k, const pa_row_format &v) {
  return pa_max(pa_max(row_width(k), row_width(v)), 2 * W);
}
PA_ONCE int64_t row_scratch(const pa_layer &layer) {
  const pa_row_format k = key_rows(layer), v = value_rows(layer);
  const int64_t widest = widest_row(k, v);
  const int64_t floats = (int64_t)(ROW_TILE + W) * (widest + 2 * pa_max(code_width(k), code_width(v)) + 1) +
                         (int64_t)DOT_ROWS * layer.num_kv_heads * (code_width(k) + W) + row_registers(k) +
                         row_registers(v);
  return 4 * floats + 2 * 8 * (ROW_TILE + W) + 8 * pa_round_up(DOT_ROWS * layer.num_kv_heads, W) + 4 * ROW_TILE / 2 * PART_ROWS * W + tile_room(k) + tile_room(v) + query_room(layer) + Walk::scratch(layer, ROW_TILE + W) + 16 * 64;
}

// What a tile of rows is read with, of keys and of values; and its scores.
template <int ROWS>
struct RowKeys : Decode<float, ROWS, 1> {
  typedef Decode<float, ROWS, 1> Base;
#if defined(PA_PAIR_DOTS)
  static constexpr bool PAIRS = true;
#else
  static constexpr bool PAIRS = false;
#endif
#if defined(__AMX_BF16__)
  static constexpr bool TILES = ROWS > 4;  // fewer waste most of a tile register
#else
  static constexpr bool TILES = false;
#endif
  static constexpr int KEYS = W / ROWS, SCORED = PAIRS || TILES ? W : KEYS < W / 4 ? W / 4 : KEYS, PASS = W / ROWS < 8 ? (W / ROWS < 2 ? 1 : W / ROWS) : 8;
  static constexpr int RUN = 16;  // keys between asks
  using Base::item, Base::layer, Base::heads, Base::is, Base::q, Base::o, Base::s, Base::size, Base::v_size,
      Base::used, Base::arena, Base::source, Base::pairs, Base::key_base, Base::value_base, Base::ldq, Base::run;

  const pa_row_format key, value;
  const bool in_keys, key_pairs, value_pairs;  // of bfloat16, which holds what is stored
  uint32_t *weights;
  float *by, *least, *row_scales, *floats, *q_sums, *units, *key_units;
  int32_t *registers, *more;
  const char **unpacked, **ones;
  int sum_width;
  Walk walk;
  typedef FarAhead<1> Far;

  RowKeys(Run *run, const Item &item, Turn *turn)
      : Base(run, item, turn), key(key_rows(layer)), value(value_rows(layer)),
        in_keys(source.value == source.key), key_pairs(in_pairs(key)), value_pairs(in_pairs(value)),
        sum_width(code_width(key)),
        walk(run, item, turn, arena, ROW_TILE, ROW_TILE + W, false) {
    const int codes = pa_max(code_width(key), code_width(value));
    by = arena.template take<float>((int64_t)(ROW_TILE + W) * codes);
    least = arena.template take<float>((int64_t)(ROW_TILE + W) * codes);
    row_scales = arena.template take<float>(ROW_TILE + W);
    units = arena.template take<float>(is.lanes);
    more = arena.template take<int32_t>(is.lanes);
    floats = arena.template take<float>((int64_t)(ROW_TILE + W) * widest_row(key, value));
    q_sums = arena.template take<float>((int64_t)used * sum_width);
    registers = arena.template take<int32_t>(row_registers(key) + row_registers(value));
    unpacked = arena.template take<const char *>(ROW_TILE + W);
    ones = arena.template take<const char *>(ROW_TILE + W);
    static constexpr float ONE = 1;
    for (int t = 0; t < ROW_TILE + W; t++) ones[t] = (const char *)&ONE;
    weights = arena.template take<uint32_t>(ROW_TILE / 2 * ROWS * W);
    key_units = arena.template take<float>((int64_t)used / ROWS * (ROWS > 4 ? 2 : 1) * W);
  }
#if defined(PA_INT_DOTS)
  IntTable key_table{key}, value_table{value};
  bool in_ints(const pa_row_format &f, const IntTable &table) const {
    if (layer.dtype == PA_F32) return false;  // which holds more than 16 bits
    if (f.form != PA_CODES) return f.form == PA_ROWS_INT8;
    if (f.scale == PA_STEPS) return table.unit == 1 && table.more == 0 && !table.looks;
    return f.scale != PA_NORM && table.unit > 0;
  }
  const bool key_ints = in_ints(key, key_table), value_ints = in_ints(value, value_table);
#else
  static constexpr bool key_ints = false, value_ints = false;
#endif
#if defined(__AMX_BF16__)
  // Groups of 32, and no least numbers.
  bool in_tiles(const pa_row_format &f, int elements) const {
    return TILES && f.form == PA_CODES && (f.scale == PA_HALVES || f.scale == PA_POWERS) && f.group == TILE_GROUP && elements == f.size;
  }
  const bool key_tiles = in_tiles(key, size), value_tiles = in_tiles(value, v_size);
  // int8, of whole tile registers.
  const bool key_bytes = TILES && key.form == PA_ROWS_INT8 && size == key.size && size % 64 == 0 && size <= 512;
  const bool value_bytes = TILES && value.form == PA_ROWS_INT8 && v_size == value.size && v_size % 16 == 0;
  char *const query_tiles = arena.template take<char>(key_bytes ? (int64_t)used / ROWS * size / 64 * TILE_BYTES : 0);
  int64_t query_bytes() const { return (int64_t)size / 64 * TILE_BYTES; }  // of a part
  void byte_tile_scores_of(const char *const *k, int count) {
    bool even[ROW_TILE / W];
    for (int i = 0; i < ROW_TILE / W; i++) {
      even[i] = true;
      for (int j = 2; j < W; j++) even[i] = even[i] && k[i * W + j] - k[i * W + j - 1] == k[i * W + 1] - k[i * W];
    }
    const int64_t room = size + 64;
    for (int h = 0; h < heads; h++) {
      const int64_t offset = key_base + h * source.key_head;
      ByteRows rows[ROW_TILE / W];
      for (int i = 0; i < ROW_TILE / W; i++) {
        const char *const *from = k + i * W;
        char *copy = key_room + i * W * room;
        rows[i] = {from[0] + offset, from[1] - from[0]};
        if (even[i]) continue;
        rows[i] = {copy, room};
        for (int j = 0; j < W; j++, copy += room) __builtin_memcpy(copy, from[j] + offset, size);
      }
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        byte_tile_scores<ROWS>(rows, scales_of(key, k, offset), size, query_tiles + lane / ROWS * query_bytes(), key_units + lane / ROWS * W, s + lane,
                               is.lanes, ask(count, 128));
      }
    }
  }
  char *const key_room = arena.template take<char>(tile_room(key)), *const value_room = arena.template take<char>(tile_room(value));
  template <class Each>
  static void by_tile_scale(const pa_row_format &f, Each each) {
    if (f.scale == PA_HALVES) each(std::integral_constant<int, PA_HALVES>());
    else each(std::integral_constant<int, PA_POWERS>());
  }
  void tile_scores(int h, const Codes &of, int count) {
    const PairTable table((const float *)key.table);
    const int groups = of.groups, room = pa_round_up(groups, 4);  // as many scales are written
    char *const tiles[2] = {key_room, key_room + (int64_t)groups * TILE_BYTES};
    vf *const scales = (vf *)(key_room + 2L * groups * TILE_BYTES), *const by[2] = {scales, scales + room};
    float *const products = (float *)(scales + 2 * room);
    for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
      auto to = [&](int t) { return products + (int64_t)t / W % 2 * groups * ROWS * W; };
      auto add = [&](int t) { add_tile_scores<ROWS>(to(t), by[t / W % 2], groups, s + (int64_t)t * is.lanes + lane, is.lanes); };
      for (int t = 0; t < count; t += W) {
        const int side = t / W % 2;
        by_tile_scale(key, [&](auto scale) {
          tiles_of_keys<scale()>(of, table, of.rows + t, tiles[side], by[side], ask(W, of.words + of.words / 2));
        });
        if (t) add(t - W);
        tile_products(tiles[side], groups, q + (int64_t)lane * ldq, ldq, ROWS, to(t));
      }
      add((count - 1) / W * W);
    }
  }
#else
  static constexpr bool key_tiles = false, value_tiles = false;
#endif
  static bool in_pairs(const pa_row_format &f) {
    return PAIRS && f.form != PA_TRACED && (f.form != PA_CODES || f.scale != PA_NORM);
  }

  RowScales scales_of(const pa_row_format &f, const char *const *rows, int64_t offset) const {
    return f.bytes > f.size ? RowScales{rows, offset + f.size} : RowScales{ones, 0};
  }
  // What a head's rows in a tile need first.
  PA_NOINLINE Codes look_at(const pa_row_format &f, const char *const *rows, int64_t offset, int count,
                            int elements) {
    const int width = code_width(f);
    Codes of = {rows, offset, by, least, pa_round_up(elements, WORD_CODES) / WORD_CODES, width,
                offset + f.size / 2, f.size / f.group};
    if (&f == &key ? key_ints || key_tiles : value_ints || value_tiles) return of;
    if (f.form == PA_CODES) {
      if (in_pairs(f)) return of;
      switch (f.scale) {
        case PA_HALVES: scales<PA_HALVES>(f, of, count); break;
        case PA_STEPS: scales<PA_STEPS>(f, of, count); break;
        case PA_E4M3S: scales<PA_E4M3S>(f, of, count); break;
        case PA_POWERS: scales<PA_POWERS>(f, of, count); break;
        default: scales<PA_NORM>(f, of, count);
      }
      return of;
    }
    const float part = f.form == PA_ROWS_INT8   ? Apart<int8_t>::FACTOR
                       : f.form == PA_ROWS_E4M3 ? Apart<e4m3>::FACTOR : 1;
    const RowScales scales = scales_of(f, rows, offset);
    for (int t = 0; t < count; t++) {
      if (f.form == PA_TRACED) {
        float *to = floats + (int64_t)t * row_width(f);
        unpack_row(f, rows[t] + offset, elements, to, registers);
        unpacked[t] = (const char *)to;
      } else {
        row_scales[t] = scales[t] * (1 / part);
      }
    }
    return of;
  }
#if defined(PA_PAIR_DOTS) || defined(PA_INT_DOTS)
  template <class Each>
  static void by_scale(const pa_row_format &f, Each each) {
    switch (f.scale) {
      case PA_HALVES: return each(std::integral_constant<int, PA_HALVES>());
      case PA_STEPS: return each(std::integral_constant<int, PA_STEPS>());
      case PA_E4M3S: return each(std::integral_constant<int, PA_E4M3S>());
      default: return each(std::integral_constant<int, PA_POWERS>());
    }
  }
#endif
  template <int SCALE>
  void scales(const pa_row_format &f, const Codes &of, int count) {
    const int groups = f.size / f.group;
    for (int t = 0; t < count; t++) {
      for (int word = 0; word < of.words; word += W) {
        const GroupScales found = group_scales<SCALE>(f, groups, of.rows[t] + of.offset, word);
        write(by + (int64_t)t * of.ld + word, found.by);
        if (SCALE == PA_STEPS) write(least + (int64_t)t * of.ld + word, found.least);
      }
    }
  }

  void turn_rows() {
#if defined(__AMX_BF16__)
    for (int lane = 0; key_tiles && lane < used; lane++) to_tile_rows(q + (int64_t)lane * ldq, size);
    for (int lane = 0; key_bytes && lane < used; lane += ROWS) {
      tiles_of_queries<ROWS>(q + (int64_t)lane * ldq, ldq, size, query_tiles + lane / ROWS * query_bytes(), key_units + lane / ROWS * W);
    }
    if (key_tiles || key_bytes) return;
#endif
#if defined(PA_INT_DOTS)
    if (key_ints) return turn_to_ints();
#endif
    const int each = key_pairs ? key.group : WORD_CODES;
    __builtin_memset(q_sums, 0, sizeof(float) * used * sum_width);  // products read whole vectors of them
    for (int lane = 0; lane < used; lane++) {
      float *row = q + (int64_t)lane * ldq;
      if (key.form == PA_CODES) {
        for (int i = 0; i < size / each; i++) {
          float sum = 0;
          for (int j = 0; j < each; j++) sum += row[i * each + j];
          q_sums[(int64_t)lane * sum_width + i] = sum;
        }
      }
#if defined(PA_PAIR_DOTS)
      if (key_pairs) {
        switch (key.form) {
          case PA_CODES: to_halves(row, size); break;
          case PA_ROWS_INT8: break;
          default: to_keys<e4m3>(row, size);
        }
        continue;
      }
#endif
      if (key.form == PA_CODES) {
        by_code(row, size, false);
      } else if (key.form == PA_ROWS_INT8 ? Apart<int8_t>::ANY : key.form == PA_ROWS_E4M3 && Apart<e4m3>::ANY) {
        apart(row, size / 64 * 64);
      }
    }
#if defined(PA_PAIR_DOTS)
    for (int lane = 0; key_pairs && lane < used; lane += ROWS) {
      float *row = q + (int64_t)lane * ldq, *sum = q_sums + (int64_t)lane * sum_width;
      if (key.form == PA_CODES) rows_together<ROWS>(row, ldq, size, floats);
      if (key.form == PA_ROWS_INT8) to_quads<ROWS>(row, ldq, size, sum, (int32_t *)sum + 1, sum_width, floats);
    }
#endif
  }

#if defined(PA_INT_DOTS)
  void turn_to_ints() {
    const bool codes = key.form == PA_CODES;
    const float step = codes ? key_table.unit / 256 : 1;
    __builtin_memset(q_sums, 0, sizeof(float) * used * sum_width);
    for (int lane = 0; lane < used; lane++) {
      float *sums = q_sums + (int64_t)lane * sum_width;
      const float unit = step * query_ints(q + (int64_t)lane * ldq, pa_round_up(size, W), codes, sums);
      const int each = codes && ROWS > 4 ? 4 : ROWS;
      float *units = key_units + lane / ROWS * UNITS + lane % ROWS / each * W;
      for (int i = lane % each; i < W; i += each) units[i] = unit;
      for (int i = 0; codes && i < sum_width; i++) sums[i] /= step;
    }
  }
  // Keys of int8 beside whose products all lines that are due have room in a list: whole runs.
  static int keys_listed(int elements) { return pa_max(RUN, Ahead::LISTED * 64 / elements / RUN * RUN); }
  void int_scores(int h, const char *const *k, int64_t offset, const Codes &of, int count) {
    for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
      const float *row = q + (int64_t)lane * ldq, *sums = q_sums + (int64_t)lane * sum_width;
      const float *units = key_units + lane / ROWS * UNITS;
      const int run = key.form == PA_ROWS_INT8 ? keys_listed(size) : RUN;
      for (int t = 0; t < count; t += run) {
        const int some = pa_min(run, count - t);
        float *to = s + (int64_t)t * is.lanes + lane;
        if (key.form == PA_ROWS_INT8) {
          byte_int_scores<ROWS>(k + t, some, offset, scales_of(key, k, offset).from(t), row, ldq, size, units, to, is.lanes,
                                ask(some, (some + KEYS - 1) / KEYS * ((KEYS + 1) / 2) * (size / 32)));
          continue;
        }
        by_scale(key, [&](auto scale) {
          code_int_scores<scale(), ROWS>(of, key_table, t, some, row, ldq, sums, sum_width, units, to, is.lanes,
                                         ask(some, some * of.words / W));
        });
      }
    }
  }
  static constexpr int UNITS = ROWS > 4 ? 2 * W : W;
#endif

  // A tile's scores times its rows' scales; its weights likewise.
  void scale_rows(int h, int count) {
    float *at = s + h * is.parts * ROWS;
    for (int t = 0; t < count; t++, at += is.lanes) {
      for (int part = 0; part < is.parts; part++) {
        for (int r = 0; r < ROWS; r++) at[part * ROWS + r] *= row_scales[t];
      }
    }
  }

  template <class Product>
  PA_ALWAYS void each_visit(int h, int count, Product product) {
    for (int t = 0; t < count; t += KEYS) {
      for (int part = 0; part < is.parts; part++) {
        const int lane = (h * is.parts + part) * ROWS;
        put_scores<ROWS>(product(t, lane), s + (int64_t)t * is.lanes + lane, is.lanes);
        walk.ahead(KEYS);
      }
    }
  }
  // Products ask for so many lines at most; more than are due, so that none are left at a run's end.
  Far ask(int cycles, int room) { return {walk.ahead.take(cycles, room)}; }
#if defined(PA_PAIR_DOTS)
  // Of eight rows seven are used by 7, 14, 28 or 56 query heads: products of one fewer.
  template <class Each>
  void by_used(Each each) const {
    if constexpr (ROWS == 8) {
      if (is.each < 8) return each(std::integral_constant<int, 7>());
    }
    each(std::integral_constant<int, ROWS>());
  }
  // All heads of some keys, then the next ones: in the order of their addresses.
  template <class T>
  void byte_scores(const char *const *k, int count) {
    for (int t = 0; t < count; t += KEYS) {
      for (int h = 0; h < heads; h++) {
        const int64_t offset = key_base + h * source.key_head;
        const vf by = byte_row_scales<ROWS>(scales_of(key, k, offset).from(t));
        for (int part = 0; part < is.parts; part++) {
          const int lane = (h * is.parts + part) * ROWS;
          const uint16_t *row = (const uint16_t *)(q + (int64_t)lane * ldq);
          const vf found = pair_dots<T, ROWS>(k + t, offset, row, 2 * ldq, size, ask(KEYS, size / 64 * KEYS));
          put_scores<ROWS>(found * by, s + (int64_t)t * is.lanes + lane, is.lanes);
        }
      }
    }
  }
  void byte_quad_scores(const char *const *k, int count) {
    for (int t = 0; t < count; t += W) {
      for (int h = 0; h < heads; h++) {
        const int64_t offset = key_base + h * source.key_head;
        const RowScales scales = scales_of(key, k, offset);
        for (int part = 0; part < is.parts; part++) {
          const int lane = (h * is.parts + part) * ROWS;
          const float *sum = q_sums + (int64_t)lane * sum_width;
          quad_scores<ROWS>(k + t, offset, size, scales.from(t), (const uint32_t *)(q + (int64_t)lane * ldq), sum,
                            (const int32_t *)sum + 1, sum_width, s + (int64_t)t * is.lanes + lane, is.lanes,
                            ask(W, size / 16 * 5));
        }
      }
    }
  }
  void code_pair_scores(int h, int count, const Codes &of) {
    const PairTable table((const float *)key.table);
    by_scale(key, [&](auto scale) {
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        by_used([&](auto n) {
          code_scores<scale(), ROWS, n()>(of, table, count, q + (int64_t)lane * ldq, q_sums + (int64_t)lane * sum_width, sum_width,
                                          s + lane, is.lanes, ask(count, pa_round_up(count, W) / W * (of.words + of.words / 2)));
        });
      }
    });
  }
#endif
  void scores(const char *const *k, int count) {
#if defined(__AMX_BF16__)
    if (key_tiles) begin_code_tiles(ROWS);
    if (key_bytes) TileEngine::begin();
    if (key_bytes) return byte_tile_scores_of(k, count);
#endif
#if defined(PA_PAIR_DOTS)
    if (key_pairs && key.form == PA_ROWS_INT8) return byte_quad_scores(k, count);
    if (key_pairs && key.form == PA_ROWS_E4M3) return byte_scores<e4m3>(k, count);
#endif
    for (int h = 0; h < heads; h++) {
      const int64_t offset = key_base + h * source.key_head;
      const Codes of = look_at(key, k, offset, pa_round_up(count, SCORED), size);
#if defined(__AMX_BF16__)
      if (key_tiles) {
        tile_scores(h, of, count);
        continue;
      }
#endif
#if defined(PA_INT_DOTS)
      if (key_ints) {
        int_scores(h, k, offset, of, count);
        continue;
      }
#endif
      auto row = [&](int lane) { return q + (int64_t)lane * ldq; };
#if defined(PA_PAIR_DOTS)
      if (key_pairs) {
        code_pair_scores(h, count, of);
        continue;
      }
#endif
      switch (key.form) {
        case PA_CODES: {
          const Table table((const float *)key.table);
          each_visit(h, count, [&](int t, int lane) {
            const float *sum = q_sums + (int64_t)lane * sum_width;
            return key.scale == PA_STEPS ? code_dots<ROWS, true>(of, table, t, row(lane), ldq, sum, sum_width)
                                         : code_dots<ROWS, false>(of, table, t, row(lane), ldq, sum, sum_width);
          });
          break;
        }
        case PA_ROWS_INT8:
          each_visit(h, count, [&](int t, int lane) {
            return dots<int8_t, ROWS>(k + t, offset, row(lane), ldq, size, NoAsks{});
          });
          break;
        case PA_ROWS_E4M3:
          each_visit(h, count, [&](int t, int lane) {
            return dots<e4m3, ROWS>(k + t, offset, row(lane), ldq, size, NoAsks{});
          });
          break;
        default:
          each_visit(h, count, [&](int t, int lane) {
            return dots<float, ROWS>(unpacked + t, 0, row(lane), ldq, size, NoAsks{});
          });
      }
      if (key.form == PA_ROWS_INT8 || key.form == PA_ROWS_E4M3) scale_rows(h, count);
    }
  }

};
