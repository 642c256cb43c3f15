// Decode over rows of bytes: codes and bytes are multiplied in registers, a trace's numbers for a head and
// a tile at a time. Included after dot_path.h.

// to[row] += W words of codes, of which queries lie [W words][code of a word][word], times a row.
template <int ROWS>
PA_INLINE void add_products(vf *to, const Table &table, vu codes, const float *q, int ldq) {
  PA_UNROLLED
  for (int j = 0; j < WORD_CODES; j++) {
    vf x = table(codes >> 4 * j);
    in_register(x);
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) to[r] += x * loadf(q + (int64_t)r * ldq + j * W);
  }
}

// W words of codes, or `count` and zeros.
PA_INLINE vu code_words(const char *p, int count) {
  if (count >= W) return read<vu>(p);
#if defined(__AVX512F__)
  return (vu)_mm512_maskz_loadu_epi32((__mmask16)((1 << count) - 1), p);
#else
  uint32_t padded[W] = {};
  __builtin_memcpy(padded, p, 4 * count);
  return read<vu>(padded);
#endif
}

struct NoAsks {
  template <int KEYS>
  PA_INLINE void keys(const NoAsks &, int64_t) {}
  template <int BYTES>
  PA_INLINE void values(NoAsks &, int) {}
};

// What is known of a head's codes in a tile: per row and W words the lanes' scales, and least numbers.
struct Codes {
  const char *const *rows;
  int64_t offset;
  const float *by, *least;
  int words, ld;  // of a row; floats from one row's scales to the next one's
  int64_t scales;  // where a row's lie
  int groups;
};

// Dot products of W / ROWS keys with ROWS rows that lie as the table says. `sums`: those of each word's elements.
template <int ROWS, bool LEAST>
PA_NOINLINE vf code_dots(const Codes &of, const Table &table, int first, const float *q, int ldq,
                         const float *sums_of, int ldsum) {
  constexpr int KEYS = W / ROWS;
  vf acc[W];
  PA_UNROLLED
  for (int i = 0; i < W; i++) acc[i] = vf{};
  for (int word = 0; word < of.words; word += W) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) {
      const int t = first + k;
      const vu codes = code_words(of.rows[t] + of.offset + 4 * word, of.words - word);
      vf part[ROWS];
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) part[r] = vf{};
      add_products<ROWS>(part, table, codes, q + word * WORD_CODES, ldq);
      const vf by = loadf(of.by + (int64_t)t * of.ld + word);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        vf &sum = acc[k * ROWS + r];
        sum += part[r] * by;
        if (LEAST) sum += loadf(of.least + (int64_t)t * of.ld + word) * loadf(sums_of + r * ldsum + word);
      }
    }
  }
  return sums(acc);
}

// o[row] += weights of `count` keys times codes [j, j + C) of each of W words, from `word` on.
template <int ROWS, int C, bool LEAST>
PA_NOINLINE void add_codes(const Codes &of, const Table &table, int first, int count, const float *p,
                           int ldp, float *o, int ldo, int word, int j) {
  vf acc[ROWS][C], low[ROWS];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    low[r] = vf{};
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + word * WORD_CODES + (j + c) * W);
  }
  for (int t = first; t < first + count; t++) {
    const vu codes = code_words(of.rows[t] + of.offset + 4 * word, of.words - word) >> 4 * j;
    const vf by = loadf(of.by + (int64_t)t * of.ld + word);
    vf weight[ROWS];
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      const vf plain = splat(p[(int64_t)t * ldp + r]);
      weight[r] = plain * by;
      if (LEAST) low[r] += plain * loadf(of.least + (int64_t)t * of.ld + word);
    }
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      vf x = table(codes >> 4 * c);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) acc[r][c] += x * weight[r];
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      write(o + r * ldo + word * WORD_CODES + (j + c) * W, LEAST ? acc[r][c] + low[r] : acc[r][c]);
    }
  }
}

#if defined(__AVX2__)
// The larger magnitude; NaN is the largest.
PA_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_epi32((__m512i)a, (__m512i)((vi)b & 0x7fffffff));
#else
  return (vf)_mm256_max_epi32((__m256i)a, (__m256i)((vi)b & 0x7fffffff));
#endif
}
constexpr float INT_LEAST = 0x1p-110f;  // whose reciprocal, times an integer of 16 bits, is finite
#endif

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

template <int ROWS>
struct RowDecode : Decode<float, ROWS, 1> {
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

  RowDecode(Run *run, const Item &item, Turn *turn)
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
  void add_bytes(const char *const *v, int count) {
    for (int h = 0; h < heads; h++) {
      const int64_t offset = value_base + h * source.value_head;
      char *const by = value_room + (int64_t)v_size / 16 * TILE_BYTES;
      tiles_of_bytes(v, offset, v_size, value_room, ask(count * is.parts, 16 * (v_size / 16)));
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        tile_of_byte_weights<ROWS>(scales_of(value, v, offset), count, s + lane, is.lanes, by, units);
        add_byte_tiles<ROWS>(by, units, value_room, v_size, o + (int64_t)lane * is.ldo, is.ldo);
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
  void add_tiles(int h, const Codes &of, int count) {
    const PairTable table((const float *)value.table);
    const int groups = of.groups;
    char *const by = value_room + 2L * groups * TILE_BYTES;
    for (int t = 0; t < count; t += 32) {
      Codes some = of;
      some.rows += t;
      tiles_of_values(some, table, value_room, ask(pa_min(32, count - t) * is.parts, 32));
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        by_tile_scale(value, [&](auto scale) {
          tiles_of_weights<scale(), ROWS>(some, count - t, s + (int64_t)t * is.lanes + lane, is.lanes, by);
        });
        add_tile_values(by, value_room, groups, ROWS, o + (int64_t)lane * is.ldo, is.ldo);
      }
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
  static constexpr int SOME = ROWS < 4 ? ROWS : 4;  // rows whose weights are integers at once
  static constexpr int UNITS = ROWS > 4 ? 2 * W : W;
  template <class Add>
  void add_some_rows(int h, Add add) {
    for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += SOME) {
      add(s + lane, o + (int64_t)lane * is.ldo);
    }
  }
  template <int SCALE, bool LOOKS>
  void add_int_words(int h, const Codes &of, int count) {
    add_some_rows(h, [&](const float *p, float *to) {
      for (int word = 0; word < of.words; word += W) {
        const WordUnits by = code_int_weights<SCALE, SOME>(value, of, count, word, value_table, p, is.lanes, floats, weights);
        auto add = [&](auto j) {
          add_int_codes<SOME, LOOKS, j()>(of, value_table, count, by, weights, to, is.ldo, word,
                                          ask(count * SOME / ROWS * INT_CODES * W / v_size, (count + 1) / 2));
        };
        add(std::integral_constant<int, 0>());
        if constexpr (INT_CODES < 4) add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 4>());
        if constexpr (INT_CODES < 4) add(std::integral_constant<int, 6>());
      }
    });
  }
  void add_int_values(int h, const char *const *v, int64_t offset, const Codes &of, int count) {
    if (value.form == PA_CODES) {
      return by_scale(value, [&](auto scale) {
        value_table.looks ? add_int_words<scale(), true>(h, of, count) : add_int_words<scale(), false>(h, of, count);
      });
    }
    const RowScales scales = scales_of(value, v, offset);
    add_some_rows(h, [&](const float *p, float *to) {
      const IntWeights<1, false> by(
          p, is.lanes, count, floats,
          [&](int t) __attribute__((always_inline)) { return GroupScales{splat(scales[t]), vf{}}; },
          [&](int t, const RowLanes<1> &two) __attribute__((always_inline)) {
            __builtin_memcpy(weights + 2 * t, &two, 16);
          });
      vi *const sums = (vi *)floats;  // which weights don't need any more
      const int run = keys_listed(v_size);
      for (int t = 0; t < count; t += run) {
        const int some = pa_min(run, count - t);
        add_int_bytes<SOME>(v + t, offset, some, weights + 2 * t, v_size, t == 0, sums, ask(some * SOME / ROWS, some * v_size / 64));
      }
      add_int_sums<SOME>(sums, by.unit.of[0], to, is.ldo, v_size);
    });
  }
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
  void add_byte_quads(const char *const *v, int count) {
    constexpr int C = ROWS > 4 ? 1 : ROWS > 2 ? 2 : 4;
    const int per_head = is.parts * ROWS;
    for (int lane = 0; lane < used; lane += W) {
      const int first = lane / per_head, some = pa_min(heads - first, pa_max(1, W / per_head));
      int32_t of_lane[W];
      for (int i = 0; i < W; i++) of_lane[i] = pa_min((lane + i) / per_head - first, some - 1);
      float *to = by;
      for (int t = 0; t < count; t++, to += W) {
        for (int h = 0; h < some; h++) to[h] = scales_of(value, v, value_base + (first + h) * source.value_head)[t];
      }
      quad_weights(s + lane, is.lanes, count, by, _mm512_loadu_si512(of_lane), pairs + lane, is.lanes, units + lane, more + lane);
    }
    for (int lane = 0; lane < used; lane += ROWS) {
      const int64_t offset = value_base + lane / per_head * source.value_head;
      for (int c = 0, step; c < v_size; c += step) {
        const int vectors = c + C * W <= v_size ? C : 1;
        step = vectors * W;
        const Far asks = ask(count * pa_min(step, v_size - c) / v_size, (count + 3) / 4 * (vectors + 1));
        float *to = o + (int64_t)lane * is.ldo + c;
        if (vectors == C) {
          add_value_quads<ROWS, C>(v, offset + c, count, pairs + lane, is.lanes, units + lane, more + lane, to, is.ldo,
                                   v_size - c, asks);
        } else {
          add_value_quads<ROWS, 1>(v, offset + c, count, pairs + lane, is.lanes, units + lane, more + lane, to, is.ldo,
                                   v_size - c, asks);
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

  template <class T>
  void add_elements(int h, const char *const *v, int64_t offset, int count) {
    constexpr int C = Base::C;
    const int most = value_vectors<C, false>(v_size / W);
    for (int c = 0, step; c < v_size; c += step) {
      const int vectors = c + most * W <= v_size ? most : 1;
      step = vectors * W;
      for (int part = 0; part < is.parts; part++) {
        const int lane = (h * is.parts + part) * ROWS;
        float *to = o + (int64_t)lane * is.ldo + c;
        const int64_t at = offset + c * (int64_t)sizeof(T);
        for (int t = 0; t < count; t += RUN) {
          const float *p = s + (int64_t)t * is.lanes + lane;
          const int some = pa_min(RUN, count - t), last = pa_min(W, v_size - c);
          switch (vectors) {
#define PA_WIDE(V) \
  if constexpr (V <= C) add_values<T, ROWS, V, 1>(v + t, at, some, p, is.lanes, to, is.ldo, last, NoAsks{}); \
  break;
            case 8: PA_WIDE(8)
            case 6: PA_WIDE(6)
            case 4: PA_WIDE(4)
            case 2: PA_WIDE(2)
            default: PA_WIDE(1)
#undef PA_WIDE
          }
          walk.ahead(some * step / v_size);
        }
      }
    }
  }
  template <bool LEAST>
  void add_head(int h, const Codes &of, int count) {
    const Table table((const float *)value.table);
    for (int part = 0; part < is.parts; part++) {
      const int lane = (h * is.parts + part) * ROWS;
      for (int word = 0; word < of.words; word += W) {
        for (int j = 0; j < WORD_CODES; j += PASS) {
          for (int t = 0; t < count; t += RUN) {
            const int some = pa_min(RUN, count - t);
            add_codes<ROWS, PASS, LEAST>(of, table, t, some, s + lane, is.lanes, o + (int64_t)lane * is.ldo,
                                         is.ldo, word, j);
            walk.ahead(some * PASS / WORD_CODES);
          }
        }
      }
    }
  }
#if defined(PA_PAIR_DOTS)
  // Of eight rows seven are used by 7, 14, 28 or 56 query heads: products of one fewer.
  template <class Each>
  void by_used(Each each) const {
    if constexpr (ROWS == 8) {
      if (is.each < 8) return each(std::integral_constant<int, 7>());
    }
    each(std::integral_constant<int, ROWS>());
  }
  template <int SCALE, bool TWICE>
  void add_word_pairs(const Codes &of, int count, int word, int lane) {
    constexpr int C = ROWS > 4 ? 2 : 4;
    const PairTable table((const float *)value.table);
    float *to = o + (int64_t)lane * is.ldo;
    code_weights<SCALE, ROWS, TWICE>(of, count, word, s + lane, is.lanes, weights, to, is.ldo);
    const int visits = (count + (TWICE ? 3 : 1)) / (TWICE ? 4 : 2);
    uint32_t *const words = (uint32_t *)floats;
    pair_words<CODE_GROUPS<SCALE>, TWICE>(of, count, word, words, ask(count / 4, visits));
    for (int j = 0; j < WORD_CODES; j += C) {
      by_used([&](auto n) {
        add_code_pairs<CODE_GROUPS<SCALE>, ROWS, n(), C>(table, words, visits, weights, to + word * WORD_CODES, is.ldo, j,
                                                         ask(count * C / WORD_CODES * 3 / 4, visits));
      });
    }
  }
  template <int SCALE>
  void add_head_pairs(int h, const Codes &of, int count) {
    for (int part = 0; part < is.parts; part++) {
      const int lane = (h * is.parts + part) * ROWS;
      for (int word = 0; word < of.words; word += W) {
        in_halves(of.words - word) ? add_word_pairs<SCALE, true>(of, count, word, lane)
                                   : add_word_pairs<SCALE, false>(of, count, word, lane);
      }
    }
  }
  template <class T>
  void add_byte_pairs(const char *const *v, int count) {
    constexpr int C = Base::C;
    const int most = value_vectors<C, true>(v_size / W);
    for (int t = 0; t < count; t += RUN) {
      const int some = pa_min(RUN, count - t);
      for (int lane = 0; lane < used; lane += ROWS) {
        const int64_t offset = value_base + lane / (is.parts * ROWS) * source.value_head;
        weight_pairs<ROWS>(scales_of(value, v, offset).from(t), some, s + (int64_t)t * is.lanes + lane, is.lanes, weights);
        for (int c = 0, step; c < v_size; c += step) {
          const int vectors = c + most * W <= v_size ? most : 2;
          step = vectors * W;
          const Far asks = ask(some * pa_min(step, v_size - c) / v_size, some);
          float *to = o + (int64_t)lane * is.ldo + c;
          switch (vectors) {
#define PA_WIDE(V)                                                                                              \
  if constexpr (V <= C)                                                                                         \
    add_value_pairs<T, ROWS, V>(v + t, offset + c, some, weights, W, to, is.ldo, v_size - c, asks);             \
  break;
            case 8: PA_WIDE(8)
            case 6: PA_WIDE(6)
            case 4: PA_WIDE(4)
            default: PA_WIDE(2)
#undef PA_WIDE
          }
        }
      }
    }
  }
#endif
  void add(const char *const *v, int count) {
#if defined(__AMX_BF16__)
    if (value_tiles) begin_code_tiles(ROWS);
    if (value_bytes) TileEngine::begin();
    if (value_bytes) return add_bytes(v, count);
#endif
#if defined(PA_PAIR_DOTS)
    if (value_pairs && value.form == PA_ROWS_INT8) return add_byte_quads(v, count);
    if (value_pairs && value.form == PA_ROWS_E4M3) return add_byte_pairs<e4m3>(v, count);
#endif
    for (int h = 0; h < heads; h++) {
      const int64_t offset = value_base + h * source.value_head;
      const Codes of = look_at(value, v, offset, count, v_size);
#if defined(__AMX_BF16__)
      if (value_tiles) {
        add_tiles(h, of, count);
        continue;
      }
#endif
#if defined(PA_INT_DOTS)
      if (value_ints) {
        add_int_values(h, v, offset, of, count);
        continue;
      }
#endif
#if defined(PA_PAIR_DOTS)
      if (value_pairs) {
        by_scale(value, [&](auto scale) { add_head_pairs<scale()>(h, of, count); });
        continue;
      }
#endif
      switch (value.form) {
        case PA_CODES: value.scale == PA_STEPS ? add_head<true>(h, of, count) : add_head<false>(h, of, count); break;
        case PA_ROWS_INT8:
          scale_rows(h, count);
          add_elements<int8_t>(h, v, offset, count);
          break;
        case PA_ROWS_E4M3:
          scale_rows(h, count);
          add_elements<e4m3>(h, v, offset, count);
          break;
        default: add_elements<float>(h, unpacked, 0, count);
      }
    }
  }

  void in_order(float *sums) {
#if defined(__AMX_BF16__)
    if (value_tiles) return tile_sums_in_order(sums, v_size);
    if (value_bytes) return;
#endif
#if defined(PA_PAIR_DOTS)
    if (value_pairs && value.form == PA_CODES) {
      return by_scale(value, [&](auto scale) { sums_in_order<CODE_GROUPS<scale()>>(sums, v_size); });
    }
    if (value_pairs && value.form == PA_ROWS_INT8) return;
    if (value_pairs) return pairs_together<e4m3>(sums, v_size, value_vectors<Base::C, true>(v_size / W));
#endif
    switch (value.form) {
      case PA_CODES: return by_code(sums, v_size, true);
      // What a factor takes from sums, row scales have had.
      case PA_ROWS_INT8: if (Apart<int8_t>::ANY) together<bf16>(sums, v_size / (2 * W) * (2 * W), v_size); return;
      case PA_ROWS_E4M3: if (Apart<e4m3>::ANY) together<bf16>(sums, v_size / (2 * W) * (2 * W), v_size); return;
      default: return;
    }
  }

  void all_rows() {
    this->take_rows();
    turn_rows();
    const Logits how = logits_of(run);
    while (walk.step([&](int count) { return 2 * count * heads * is.parts; })) {
      const int count = walk.tile.count;
      for (int t = count; t < (TILES ? ROW_TILE : pa_round_up(count, SCORED)); t++) {
        walk.keys[t] = walk.keys[count - 1];
        walk.values[t] = walk.values[count - 1];
      }
      scores(walk.keys, count);
      this->weigh(count, walk.tile.first_key, how);
      add(in_keys ? walk.keys : walk.values, count);
      walk.ahead.all();
    }
    if (!walk.fine) {
      __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
      return;
    }
#if defined(__AMX_BF16__)
    if (key_tiles || value_tiles || key_bytes || value_bytes) _tile_release();
#endif
    for (int lane = 0; lane < used; lane++) in_order(o + (int64_t)lane * is.ldo);
    this->leave_rows();
  }
};

static void row_item(Run *run, const Item &item, Turn *turn) {
  const DotLayout is(run->plan->layer, item.heads, rows_per_head(run->plan->layer, item), FEWER_ROWS<float>);
  if (is.rows <= 1) return RowDecode<1>(run, item, turn).all_rows();
  if (is.rows <= 2) return RowDecode<2>(run, item, turn).all_rows();
  if (is.rows <= 4) return RowDecode<4>(run, item, turn).all_rows();
  if constexpr (PART_ROWS >= 8) return RowDecode<8>(run, item, turn).all_rows();
}
