// Attention whose bits are specified: docs/invariance.md, "Bits on any machine". Included inside an anonymous
// namespace. Each product is rounded before it is added to anything, so every one is `times`.

struct Exact {
  enum { BLOCK = 32, SEGMENT = 256, VECTORS = BLOCK / W, COLUMNS = 4 * W };

  // What the keys up to here come to, for each of an item's rows.
  struct State {
    float *m, *l, *o;
  };

  Run *run;
  const Item &item;
  const pa_layer &layer;
  const int rows, size, width;  // of keys, of values: padded by zeros
  float *query, *keys, *values;        // (row, size), (size, key), (key, width)
  float scores[BLOCK];
  KeyRanges *seen;
  State part, whole;

  static int size_of(const pa_layer &layer) { return pa_round_up(layer.head_size, 4); }
  static int width_of(const pa_layer &layer) { return pa_round_up(layer.v_head_size, COLUMNS); }
  static int64_t scratch(const pa_layer &layer, int64_t rows) {
    const int64_t row = size_of(layer) + 2 * (width_of(layer) + 2) + (int64_t)sizeof(KeyRanges) / 4;
    return 4 * (rows * row + (int64_t)BLOCK * size_of(layer) + (int64_t)(BLOCK + 1) * width_of(layer)) + 64 * 10;
  }

  Exact(Run *run, const Item &item, Arena arena)
      : run(run), item(item), layer(run->plan->layer), rows(rows_per_head(layer, item)),
        size(size_of(layer)), width(width_of(layer)) {
    query = cleared(arena, (int64_t)rows * size);
    keys = cleared(arena, (int64_t)size * BLOCK);
    values = cleared(arena, (int64_t)(BLOCK + 1) * width);  // the last one is of a key that a row doesn't see
    seen = arena.take<KeyRanges>(rows);
    State *const both[] = {&part, &whole};
    for (State *state : both) {
      *state = {cleared(arena, rows), cleared(arena, rows), cleared(arena, (int64_t)rows * width)};
      for (int row = 0; row < rows; row++) state->m[row] = -INFINITY;
    }
    for (int row = 0; row < rows; row++) {
      const Row is = item_row(layer, item, 0, row);
      const int position = position_of(run, item.seq, is.token);
      __builtin_memcpy(query + (int64_t)row * size, query_row(run, item.seq, is), 4L * layer.head_size);
      seen[row] = pa_key_ranges(&layer, position, position, run->plan->lens[item.seq]);
    }
  }
  static float *cleared(Arena &arena, int64_t count) {
    return (float *)__builtin_memset(arena.take<float>(count), 0, 4 * count);
  }

  // A compiler may not add to what it multiplies by a fused instruction.
  PA_INLINE vf times(vf a, vf b) {
    vf product = a * b;
    in_register(product);
    return product;
  }
  PA_INLINE float times(float a, float b) { return times(splat(a), splat(b))[0]; }
  template <int N>
  PA_INLINE vf polynomial(vf x, const float (&coefficients)[N]) {
    vf y = splat(coefficients[0]);
    for (int i = 1; i < N; i++) y = times(y, x) + splat(coefficients[i]);
    return y;
  }
  static constexpr float LN2_HIGH = 0x1.63p-1f, LN2_LOW = -0x1.bd0106p-13f;
  PA_INLINE vf exponential(vf x) {  // of x <= 0
    const vf rounder = splat(0x1.8p23f), shifted = times(x, splat(0x1.715476p0f)) + rounder, n = shifted - rounder;
    const vf r = (x - times(n, splat(LN2_HIGH))) - times(n, splat(LN2_LOW));
    const vf y = polynomial(r, {0x1.6a23cep-10f, 0x1.123a2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1, 1});
    return x >= splat(-86.0f) ? (vf)((vu)y + ((vu)shifted << 23)) : vf{};
  }
  PA_INLINE float exponential(float x) { return exponential(splat(x))[0]; }
  PA_INLINE float logarithm(float x) {  // of x >= 1
    const vi bits = (vi)splat(x), n = (bits - splati(0x3F3504F3)) >> 23;
    const vf f = (vf)(bits - (n << 23)), t = (f - splat(1)) / (f + splat(1)), z = times(t, t);
    const vf p = polynomial(z, {0x1.c71c72p-3f, 0x1.24924ap-2f, 0x1.99999ap-2f, 0x1.555556p-1f});
    const vf whole = splat((float)n[0]);
    return (times(whole, splat(LN2_HIGH)) + (times(whole, splat(LN2_LOW)) + (times(t, times(p, z)) + (t + t))))[0];
  }

  // Keys [lo, hi) of the block at `first`, of this item's head. False where the block table is broken.
  bool take(const Source &source, int first, int lo, int hi) {
    const char *key[BLOCK], *value[BLOCK];
    if (lo >= hi) return true;
    if (!token_addresses(source, lo, hi - lo, key + lo - first, value + lo - first)) return false;
    for (int i = lo - first; i < hi - first; i++) {
      key[i] += item.head0 * source.key_head;
      __builtin_memcpy(values + (int64_t)i * width, value[i] + item.head0 * source.value_head, 4L * layer.v_head_size);
    }
    int d = 0;
    for (; lo == first && hi == first + BLOCK && d + W <= layer.head_size; d += W) {
      for (int i = 0; i < BLOCK; i += W) {
        vf square[W];
        for (int j = 0; j < W; j++) square[j] = read<vf>(key[i + j] + 4 * d);
        transpose(square);
        for (int j = 0; j < W; j++) write(keys + (d + j) * BLOCK + i, square[j]);
      }
    }
    for (int i = lo - first; i < hi - first; i++) {
      for (int j = d; j < layer.head_size; j++) keys[j * BLOCK + i] = ((const float *)key[i])[j];
    }
    return true;
  }

  static bool meets(const KeyRanges &ranges, int first) {
    auto in = [first](const Range &range) { return range.lo < first + BLOCK && first < range.hi; };
    return in(ranges.near) || in(ranges.kept);
  }

  // A row's scores of the block at `first`; returns the largest, -inf where it sees no key.
  PA_NOINLINE float score(int row, int first) {
    const Range near = seen[row].near, kept = seen[row].kept;
    const float *q = query + (int64_t)row * size;
    float top = -INFINITY;
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    for (int at = 0; at < BLOCK; at += W) {
      vf sums[4] = {};
      for (int d = 0; d < size; d += 4) {
        PA_UNROLLED
        for (int i = 0; i < 4; i++) sums[i] = sums[i] + times(splat(q[d + i]), loadf(keys + (d + i) * BLOCK + at));
      }
      vf x = times((sums[0] + sums[1]) + (sums[2] + sums[3]), splat(layer.scale));
      const vi key = lanes + splati(first + at);
      if (run->t.alibi) {
        const Row is = item_row(layer, item, 0, row);
        const vf distance = __builtin_convertvector(key - splati(position_of(run, item.seq, is.token)), vf);
        x = x + times(splat(run->t.alibi[is.head]), distance);
      }
      const vi mask = ((key >= splati(near.lo)) & (key < splati(near.hi))) |
                      ((key >= splati(kept.lo)) & (key < splati(kept.hi)));
      x = mask ? x : splat(-INFINITY);
      write(scores + at, x);
    }
    for (int i = 0; i < BLOCK; i++) top = scores[i] > top ? scores[i] : top;
    return top;
  }

  PA_NOINLINE void attend(int row, int first) {
    const float *zeros = values + (int64_t)BLOCK * width, *from[BLOCK];
    if (!meets(seen[row], first)) return;
    float top = score(row, first);
    if (top == -INFINITY) return;  // it sees none
    float &m = part.m[row], &l = part.l[row];
    top = m > top ? m : top;
    const float shrink = exponential(m - top);
    m = top;
    l = times(l, shrink);
    for (int i = 0; i < BLOCK; i++) from[i] = scores[i] == -INFINITY ? zeros : values + (int64_t)i * width;
    for (int at = 0; at < BLOCK; at += W) write(scores + at, exponential(loadf(scores + at) - splat(top)));
    for (int i = 0; i < BLOCK; i++) l += scores[i];
    for (int d = 0; d < width; d += COLUMNS) {
      float *o = part.o + (int64_t)row * width + d;
      vf sums[4];
      PA_UNROLLED
      for (int j = 0; j < 4; j++) sums[j] = times(loadf(o + j * W), splat(shrink));
      for (int i = 0; i < BLOCK; i++) {
        PA_UNROLLED
        for (int j = 0; j < 4; j++) sums[j] = sums[j] + times(splat(scores[i]), loadf(from[i] + d + j * W));
      }
      PA_UNROLLED
      for (int j = 0; j < 4; j++) write(o + j * W, sums[j]);
    }
  }

  // Joins a state (m, l, o) to a row's; o NULL: zeros.
  PA_NOINLINE void join(int row, float m, float l, const float *o) {
    float *sums = whole.o + (int64_t)row * width;
    if (m == -INFINITY) return;
    if (whole.m[row] == -INFINITY) {
      whole.m[row] = m;
      whole.l[row] = l;
      __builtin_memcpy(sums, o, 4L * width);
      return;
    }
    const float top = whole.m[row] > m ? whole.m[row] : m;
    const float by = exponential(whole.m[row] - top), its = exponential(m - top);
    whole.m[row] = top;
    whole.l[row] = times(whole.l[row], by) + times(l, its);
    for (int d = 0; d < width; d += W) {
      write(sums + d, times(loadf(sums + d), splat(by)) + (o ? times(loadf(o + d), splat(its)) : vf{}));
    }
  }

  void end_segment() {
    for (int row = 0; row < rows; row++) {
      float *o = part.o + (int64_t)row * width;
      join(row, part.m[row], part.l[row], o);
      part.m[row] = -INFINITY;
      part.l[row] = 0;
      __builtin_memset(o, 0, 4L * width);
    }
  }

  void finish(int row) {
    const pa_tensors &t = run->t;
    const bool blind = whole.m[row] == -INFINITY;
    const Row is = item_row(layer, item, 0, row);
    if (t.sinks && !blind) join(row, t.sinks[is.head], 1, NULL);
    float *o = whole.o + (int64_t)row * width;
    const float l = whole.l[row];
    for (int d = 0; d < width && !blind; d += W) write(o + d, loadf(o + d) / splat(l));
    __builtin_memcpy(output_row(run, item.seq, is), o, 4L * layer.v_head_size);
    if (!t.lse) return;
    const int64_t at = (run->plan->query_starts[item.seq] + is.token) * t.lse_token + is.head * t.lse_head;
    t.lse[at] = blind ? -INFINITY : whole.m[row] + logarithm(l);
  }

  bool all() {
    const Source source = source_of(run, item.seq);
    const Range near = item.near, kept = item.kept;
    for (int first = (kept.lo < kept.hi ? kept.lo : near.lo) / BLOCK * BLOCK; first < near.hi; first += BLOCK) {
      if (first % SEGMENT == 0) end_segment();
      if (!meets({kept, near}, first)) continue;
      const int end = first + BLOCK;
      if (!take(source, first, pa_max(first, kept.lo), pa_min(end, kept.hi))) return false;
      if (!take(source, first, pa_max(first, near.lo), pa_min(end, near.hi))) return false;
      for (int row = 0; row < rows; row++) attend(row, first);
    }
    end_segment();
    for (int row = 0; row < rows; row++) finish(row);
    return true;
  }
};

PA_ONCE void exact_item(Run *run, const Item &item, Turn *turn) {
  if (!Exact(run, item, Arena(turn->scratch)).all()) __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
}
