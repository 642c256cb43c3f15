// What do the decode path and the matrix path share? Where keys lie, what rows see, how results are
// finished and merged. Included inside an anonymous namespace.

struct Source {  // of one sequence's keys and values
  const char *key, *value;       // base, in bytes
  const int32_t *table;          // NULL where keys lie packed
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;  // in bytes
  int32_t block_size;
  int64_t num_blocks;
};

// Whether each token's value lies behind its key of so many bytes, as in caches that hold both side by side.
PA_INLINE bool value_follows_key(const Source &s, int64_t key_bytes) {
  return s.value == s.key + key_bytes && s.key_head == s.value_head;
}

// What is left of a cache's strides: bytes, where it holds rows of them.
PA_INLINE int64_t stored_bytes(const pa_layer &layer) {
  return layer.key_format ? 1 : itemsize(layer.cache_dtype);
}
// Whether keys and values have the cache's scales.
PA_INLINE bool is_scaled(const pa_layer &layer) {
  return layer.key_format || layer.cache_dtype >= PA_E4M3;
}

PA_ONCE Source source_of(const Run *run, int seq) {
  const pa_plan *plan = run->plan;
  const pa_tensors &t = run->t;
  int64_t size = stored_bytes(plan->layer);
  Source s = {(const char *)t.key,   (const char *)t.value,  NULL,
              t.key_block * size,    t.key_token * size,     t.key_head * size,
              t.value_block * size,  t.value_token * size,   t.value_head * size,
              plan->block_size,      t.num_blocks};
  if (plan->block_size) {
    s.table = t.block_table + seq * t.table_row;
  } else {
    s.key += plan->key_starts[seq] * s.key_token;
    s.value += plan->key_starts[seq] * s.value_token;
  }
  return s;
}

// Writes the addresses of `count` tokens' first key and value head, from position `first` on.
// False where the block table points outside the cache.
PA_ONCE bool token_addresses(const Source &s, int first, int count, const char **keys,
                               const char **values) {
  if (!s.table) {
    for (int i = 0; i < count; i++) {
      keys[i] = s.key + (first + i) * s.key_token;
      values[i] = s.value + (first + i) * s.value_token;
    }
    return true;
  }
  if (s.block_size == 1) {
    bool fine = true;
    for (int i = 0; i < count; i++) {
      const int64_t number = s.table[first + i];
      fine &= number >= 0 && number < s.num_blocks;
      keys[i] = s.key + number * s.key_block;
      values[i] = s.value + number * s.value_block;
    }
    return fine;
  }
  for (int i = 0; i < count;) {
    int block = (first + i) / s.block_size, at = (first + i) % s.block_size;
    int64_t number = s.table[block];
    if (number < 0 || number >= s.num_blocks) return false;
    const char *key = s.key + number * s.key_block + at * s.key_token;
    const char *value = s.value + number * s.value_block + at * s.value_token;
    int run = pa_min(s.block_size - at, count - i);
    for (int j = 0; j < run; j++, i++, key += s.key_token, value += s.value_token) {
      keys[i] = key;
      values[i] = value;
    }
  }
  return true;
}

// Visible keys [from, to) of an item, in pieces of at most `tile` consecutive ones; `aligned`: that end at
// multiples of it.
struct Tiles {
  const Item *item;
  int32_t at, tile;
  int32_t first_key, count;  // of the current piece
  bool aligned = false;
  int last_border() const { return (item->joined - 1) * item->piece_keys; }
  // Whether the current piece of keys ends a piece of a joined item.
  bool ends_piece() const {
    return item->joined && (at == item->to || (at <= last_border() && at % item->piece_keys == 0));
  }
  bool next() {
    if (at >= item->to) return false;
    int kept = item->kept.hi - item->kept.lo;
    int end = pa_min(item->to, at + tile);
    if (at < kept) {
      end = pa_min(end, kept);
      first_key = item->kept.lo + at;
    } else {
      first_key = item->near.lo + at - kept;
    }
    if (aligned) end = pa_min(end, at + tile - first_key % tile);
    if (at < last_border()) end = pa_min(end, at - at % item->piece_keys + item->piece_keys);
    count = end - at;
    at = end;
    return true;
  }
};

PA_ONCE Logits logits_of(const Run *run) {
  const pa_layer &layer = run->plan->layer;
  float scale = layer.scale * (is_scaled(layer) ? run->t.k_scale : 1.0f);
  if (layer.soft_cap > 0) {
    return {scale / layer.soft_cap, layer.soft_cap * LOG2E, run->t.alibi != NULL};
  }
  return {scale * LOG2E, 0.0f, run->t.alibi != NULL};
}

// What a row of an item is of: the query token, of its sequence, and the query head.
struct Row {
  int token, head;
};
PA_INLINE Row item_row(const pa_layer &layer, const Item &item, int kv_head, int row) {
  const int ratio = layer.num_heads / layer.num_kv_heads;
  return {item.token0 + row / ratio, (item.head0 + kv_head) * ratio + row % ratio};
}
PA_INLINE const char *query_row(const Run *run, int seq, Row row) {
  const pa_tensors &t = run->t;
  const int64_t at = (run->plan->query_starts[seq] + row.token) * t.query_token + row.head * t.query_head;
  return (const char *)t.query + at * itemsize(run->plan->layer.dtype);
}
PA_INLINE char *output_row(const Run *run, int seq, Row row) {
  const pa_tensors &t = run->t;
  const int64_t at = (run->plan->query_starts[seq] + row.token) * t.out_token + row.head * t.out_head;
  return (char *)t.out + at * itemsize(run->plan->layer.dtype);
}
PA_INLINE int position_of(const Run *run, int seq, int token) {
  const pa_plan *plan = run->plan;
  return plan->lens[seq] - (plan->query_starts[seq + 1] - plan->query_starts[seq]) + token;
}

// What a row knows of itself.
PA_ONCE void set_lane(const Run *run, const Item &item, const Lanes &rows, int lane, Row row) {
  const int position = position_of(run, item.seq, row.token);
  const KeyRanges seen = pa_key_ranges(&run->plan->layer, position, position, run->plan->lens[item.seq]);
  rows.near_lo[lane] = seen.near.lo;
  rows.near_hi[lane] = seen.near.hi;
  rows.kept_lo[lane] = seen.kept.lo;
  rows.kept_hi[lane] = seen.kept.hi;
  rows.position[lane] = (float)position;
  if (run->t.alibi) rows.slope[lane] = run->t.alibi[row.head] * LOG2E;
}
// The same of a row behind the one in the lane before, which knows it where both are of one token. Returns its query.
PA_INLINE const char *enter_row(const Run *run, const Item &item, const Lanes &rows, int lane, int kv_head, int row) {
  const pa_layer &layer = run->plan->layer;
  const Row is = item_row(layer, item, kv_head, row);
  if (row % (layer.num_heads / layer.num_kv_heads)) {
    rows.near_lo[lane] = rows.near_lo[lane - 1];
    rows.near_hi[lane] = rows.near_hi[lane - 1];
    rows.kept_lo[lane] = rows.kept_lo[lane - 1];
    rows.kept_hi[lane] = rows.kept_hi[lane - 1];
    rows.position[lane] = rows.position[lane - 1];
    if (run->t.alibi) rows.slope[lane] = run->t.alibi[is.head] * LOG2E;
  } else {
    set_lane(run, item, rows, lane, is);
  }
  return query_row(run, item.seq, is);
}

PA_INLINE float v_scale_of(const Run *run) {
  return is_scaled(run->plan->layer) ? run->t.v_scale : 1.0f;
}

// By what one row's sums are multiplied in the end; joins a learned sink, and writes the LSE.
PA_ONCE float finish_sum(const Run *run, int seq, Row row, float m, float l) {
  const pa_tensors &t = run->t;
  const bool seen = l > 0 || l != l;  // else it has no key, and a learned sink alone is nothing
  float factor = seen ? v_scale_of(run) : 0.0f, weight = l, top = m;
  if (t.sinks && seen) {
    float sink = t.sinks[row.head] * LOG2E;
    top = m > sink ? m : sink;
    float shrink = exp2f(m - top);
    weight = l * shrink + exp2f(sink - top);
    factor *= shrink;
  }
  if (t.lse) {
    const int64_t token = run->plan->query_starts[seq] + row.token;
    t.lse[token * t.lse_token + row.head * t.lse_head] = seen ? (top + log2f(weight)) * LN2 : -INFINITY;
  }
  return seen ? factor / weight : factor;
}

// Divides one row by its sum, joins a learned sink, and writes output and LSE. Scales `o` in place.
PA_ONCE void finish_row(const Run *run, int seq, Row row, float *o, float m, float l) {
  const pa_layer &layer = run->plan->layer;
  const float factor = finish_sum(run, seq, row, m, l);
  int size = layer.v_head_size, i = 0;
  vf by = splat(factor);
  for (; i + W <= size; i += W) write(o + i, loadf(o + i) * by);
  for (; i < size; i++) o[i] *= factor;
  narrow(o, output_row(run, seq, row), layer.dtype, size);
}

// A partial result: per KV head and row, v_head_size sums; then all m, then all l.
struct Part {
  float *o, *m, *l;
};
PA_INLINE Part part_at(const Run *run, int part, int rows) {
  float *o = run->parts + part * run->plan->part_floats;
  float *m = o + (int64_t)rows * run->plan->layer.v_head_size;
  return {o, m, m + rows};
}

// The parts of one group into its output, in the order of their keys: the same bits whoever comes
// last.
PA_ONCE void merge_parts(const Run *run, const Item &item, const Group &group, float *o) {
  const pa_layer &layer = run->plan->layer;
  const int per_head = rows_per_head(layer, item), rows = item.heads * per_head, size = layer.v_head_size;
  for (int row = 0; row < rows; row++) {
    float m = LOWEST, l = 0;
    for (int i = 0; i < group.parts; i++) {
      Part part = part_at(run, group.first_part + i, rows);
      if (part.l[row] != 0 && (part.m[row] > m || m != m)) m = part.m[row];
    }
    for (int i = 0; i < size; i++) o[i] = 0;
    for (int i = 0; i < group.parts; i++) {
      Part part = part_at(run, group.first_part + i, rows);
      if (part.l[row] == 0) continue;  // sees none of its keys
      float by = exp2f(part.m[row] - m);
      l += part.l[row] * by;
      const float *from = part.o + (int64_t)row * size;
      for (int j = 0; j < size; j++) o[j] += from[j] * by;
    }
    finish_row(run, item.seq, item_row(layer, item, row / per_head, row % per_head), o, m, l);
  }
}

// One row's result leaves its item: to the output, or to the item's partial result.
PA_ONCE void leave(const Run *run, const Item &item, int head, int row, float *o, float m, float l) {
  const pa_layer &layer = run->plan->layer;
  if (item.part < 0) return finish_row(run, item.seq, item_row(layer, item, head, row), o, m, l);
  const int per_head = rows_per_head(layer, item), index = head * per_head + row;
  Part part = part_at(run, item.part, item.heads * per_head);
  part.m[index] = m;
  part.l[index] = l;
  __builtin_memcpy(part.o + (int64_t)index * layer.v_head_size, o, layer.v_head_size * sizeof(float));
}

// The last part of a group to finish merges all of it.
PA_ONCE void end_item(Run *run, const Item &item, float *o) {
  if (item.part < 0) return;
  const Group &group = run->plan->groups[item.group];
  if (__atomic_add_fetch(&run->done[item.group], 1, __ATOMIC_ACQ_REL) == group.parts) {
    merge_parts(run, item, group, o);
  }
}

// Scratch memory, cut in pieces that start at a cache line. A formula that made it too small ends the process:
// what would be written behind it is another's.
struct Arena : Room {
  Arena(const Room &room) : Room(room) {}
  template <class T>
  T *take(int64_t count) {
    T *piece = (T *)at;
    const int64_t bytes = (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    at += bytes;
    left -= bytes;
    if (left < 0) __builtin_trap();
    return piece;
  }
};
