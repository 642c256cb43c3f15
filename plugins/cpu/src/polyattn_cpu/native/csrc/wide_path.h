// 17 to 128 rows of a KV head where the processor has AMX: absorbed latents, large groups, drafts. Included inside an
// anonymous namespace.
//
// A block is 128 keys. Images of keys and of pairs of values go into rings that stay in the first cache: keys are copied for
// each 32 rows, and values paired beside the outputs' products, as a store that misses the first cache takes five cycles.
// Copies, pairs, weights and results go beside products, a little beside each, as in the indexer of index_tiles.h.
//
// A row's maximum follows only where it grows by 2^8, as FlashAttention-4 does it: see `weigh_by`.

#include "wide_steps.h"

constexpr int WIDE_ROWS = 128;  // of a KV head at most

struct WideLayout {
  int pairs, k, v;  // of units of 16 rows; 32 elements each of keys, an even number, and of values
  WideLayout(const pa_layer &layer, int rows)
      : pairs((rows + 31) / 32), k(pa_round_up(layer.head_size, 64) / 32), v((layer.v_head_size + 31) / 32) {}
  int lanes() const { return pairs * 32; }
  int64_t query_bytes() const { return 2L * pairs * k * IMAGE; }
  int64_t weight_bytes() const { return 2L * pairs * (WIDE_KEYS / WIDE_STEP) * IMAGE; }
  int64_t output_floats() const { return (int64_t)pairs * v * IMAGE; }
  int64_t row_bytes() const { return 64L * pa_max(k, v); }
};

static int64_t wide_scratch(const pa_layer &layer, int rows) {
  const WideLayout is(layer, rows);
  return is.query_bytes() + 2 * WIDE_SLICE + 2 * WIDE_PANELS + is.weight_bytes() + 4 * is.output_floats() +
         4 * 4 * IMAGE + IMAGE + 3 * is.row_bytes() + (4L * (LANE_ARRAYS + 1) + 8) * is.lanes() +
         Walk::scratch(layer, WIDE_KEYS) + 24 * 64;
}

template <class T>
struct Wide {
  static constexpr int KEYS = WIDE_KEYS;
  Run *run;
  const Item &item;
  const pa_layer &layer;
  const WideLayout is;
  const int rows;
  Lanes lanes;
  Logits how;
  char *queries, *slices[2], *panels[2], *weights, *none;  // `none`: a row of zeros
  float *o, *scores[2], *sums[2], *row, *factors;
  uint32_t *pairs;
  char **results;
  Weigh by[2];
  bool first = true;  // no block of the piece is done

  Wide(Run *run, const Item &item, Arena &arena)
      : run(run), item(item), layer(run->plan->layer), is(layer, rows_per_head(layer, item)),
        rows(rows_per_head(layer, item)) {
    queries = arena.take<char>(is.query_bytes());
    for (auto &at : slices) at = arena.take<char>(WIDE_SLICE);
    for (auto &at : panels) at = arena.take<char>(WIDE_PANELS);
    weights = arena.take<char>(is.weight_bytes());
    o = arena.take<float>(is.output_floats());
    for (auto &at : scores) at = arena.take<float>(IMAGE);
    for (auto &at : sums) at = arena.take<float>(IMAGE);
    pairs = arena.take<uint32_t>(IMAGE / 4);
    none = arena.take<char>(is.row_bytes());
    row = arena.take<float>(is.v * 32);
    lanes = lanes_at(arena.take<char>(4L * LANE_ARRAYS * is.lanes()), is.lanes());
    factors = arena.take<float>(is.lanes());
    results = arena.take<char *>(is.lanes());
    how = logits_of(run);
    clear_lanes(lanes, is.lanes());
    __builtin_memset(none, 0, is.row_bytes());
  }

  // Forgets all but the queries.
  void start_over() {
    clear_sums(lanes, is.lanes());
    first = true;
  }

  // Q as [pair of units][32 elements][unit][pair of elements][row].
  PA_NOINLINE void take_queries() {
    for (int u = 0; u < 2 * is.pairs; u++) {
      const char *from[16];
      const int count = pa_max(0, pa_min(16, rows - u * 16));
      for (int r = 0; r < count; r++) from[r] = enter_row(run, item, lanes, u * 16 + r, 0, u * 16 + r);
      char *to = queries + (u / 2 * is.k * 2 + u % 2) * (int64_t)IMAGE;
      for (int c = 0; c < is.k; c++, to += 2 * IMAGE) {
        const int some = pa_max(0, pa_min(32, layer.head_size - 32 * c));
        const __mmask32 valid = some == 32 ? ~0u : (1u << some) - 1;
        vf part[W] = {};
        if (count == 16) {
          PA_UNROLLED
          for (int r = 0; r < W; r++) part[r] = (vf)_mm512_maskz_loadu_epi16(valid, from[r] + 64 * c);
        } else {
          for (int r = 0; r < count; r++) part[r] = (vf)_mm512_maskz_loadu_epi16(valid, from[r] + 64 * c);
        }
        transpose(part);
        PA_UNROLLED
        for (int i = 0; i < W; i++) write(to + i * 64, part[i]);
      }
    }
  }

  // Scores and weights of a block, 32 rows and 32 keys at a time. While 64 elements of keys are multiplied, the next are
  // copied, and what was scored before is weighed.
  template <bool WHOLE>
  PA_NOINLINE WideAsks score(const Walk &walk, bool masked, WideClaims claims, WideAsks asks) {
    const int count = walk.tile.count;
    WideSlice<T, WHOLE> slice = {walk.keys, walk.key_offset, layer.head_size, slices[0]};
    WideWeights weigh;
    slice.all();
    int turn = 0, step = 0;
    for (int p = 0; p < is.pairs; p++) {
      for (int t = 0; t < count; t += WIDE_STEP) {
        const char *q = queries + (int64_t)p * is.k * 2 * IMAGE;
        float *to = scores[step ^= 1];
        zero_sums();
        for (int c = 0; c < is.k; c += 2, q += 4 * IMAGE) {
          const char *k = slices[turn];
          turn ^= 1;
          const bool more = c + 2 < is.k;
          const int next = more ? t : t + WIDE_STEP < count ? t + WIDE_STEP : 0, d = more ? 32 * (c + 2) : 0;
          slice = {walk.keys + next, walk.key_offset + d * (int64_t)sizeof(T), layer.head_size - d, slices[turn]};
          auto beside = [&](auto which) __attribute__((always_inline)) {
            constexpr int i = which();
            slice(2 * i);
            slice(2 * i + 1);
            if (i % 4 == 1) weigh();
            if (i % 2 == 0) asks();
            if (i % 4 == 3) claims();
          };
          auto products = [&](auto half) __attribute__((always_inline)) {
            constexpr int i = half();
            _tile_loadd(6, q + i * 2 * IMAGE, 64);
            _tile_loadd(4, k + i * 2 * IMAGE, 64);
            _tile_dpbf16ps(0, 4, 6);
            beside(std::integral_constant<int, 4 * i>());
            _tile_loadd(5, k + (i * 2 + 1) * IMAGE, 64);
            _tile_dpbf16ps(1, 5, 6);
            beside(std::integral_constant<int, 4 * i + 1>());
            _tile_loadd(7, q + (i * 2 + 1) * IMAGE, 64);
            _tile_dpbf16ps(2, 4, 7);
            beside(std::integral_constant<int, 4 * i + 2>());
            _tile_dpbf16ps(3, 5, 7);
            beside(std::integral_constant<int, 4 * i + 3>());
          };
          products(std::integral_constant<int, 0>());
          products(std::integral_constant<int, 1>());
        }
        put_sums(to, 256, 512);
        while (!weigh.ended()) weigh();
        weigh = weigh_step(to, p, t, count, walk.tile.first_key, masked);
      }
    }
    while (!weigh.ended()) weigh();
    return asks;
  }

  // Brings the maxima of 32 rows up to date with 32 keys; what was weighed before shrinks where they grow.
  PA_NOINLINE WideWeights weigh_step(float *s, int p, int t, int count, int first_key, bool masked) {
    const int there = pa_min(WIDE_STEP, count - t);
    for (int u = 0; u < 2; u++) {
      float *at = s + u * WIDE_STEP * W;
      const vf best = weighs_scores(how, masked) ? largest(at, W, there) : vf{};
      by[u] = weigh_by(best, at, W, there, first_key + t, how, lanes_from(lanes, p * 32 + u * W), masked);
      if (any(by[u].shrink != splat(1.0f))) shrink(2 * p + u, t, by[u].shrink);
    }
    WideWeights weigh;
    weigh.scores = s;
    weigh.by = by;
    weigh.l = lanes.l + p * 32;
    weigh.pairs = pairs;
    weigh.step = WIDE_KEYS / WIDE_STEP * IMAGE;
    weigh.to = weights + 2 * p * weigh.step + t / WIDE_STEP * IMAGE;
    weigh.keys = there;
    weigh.unit = 0;
    return weigh;
  }

  // A unit's sums, and the weights of the block's keys before `t`.
  PA_NOINLINE void shrink(int u, int t, vf by) {
    write(lanes.l + u * W, loadf(lanes.l + u * W) * by);
    for (int r = 0; r < W; r++) {
      const vf f = splat(by[r]);
      char *w = weights + (int64_t)u * (WIDE_KEYS / WIDE_STEP) * IMAGE + r * 64;
      for (int i = 0; i < t; i += WIDE_STEP, w += IMAGE) {
        const vu x = read<vu>(w);
        write(w, bf16_pairs((vf)(x << 16) * f, (vf)(x & 0xffff0000u) * f));
      }
      if (first) continue;
      float *at = o + u / 2 * 1024 + u % 2 * 512 + r * W;
      for (int d = 0; d < is.v; d++, at += is.pairs * 1024) {
        write(at, loadf(at) * f);
        write(at + 256, loadf(at + 256) * f);
      }
    }
  }

  // Outputs of a block, 32 rows and 32 elements at a time. Meanwhile the next elements are paired. `last`: sums are results.
  // SOME: pairs beside a product.
  template <int SOME>
  PA_NOINLINE WideAsks weigh_values(const Walk &walk, bool last, WideAsks asks) {
    const int depth = (walk.tile.count + WIDE_STEP - 1) / WIDE_STEP;
    const int each = (7 + depth) / depth;  // rows of results beside a product
    WideResults result;
    result.whole = item.part < 0;
    result.v = layer.v_head_size;
    auto pairs_of = [&](int d) {
      return WidePairs<T>{walk.values, walk.value_offset + 32L * d * (int64_t)sizeof(T), pa_min(32, layer.v_head_size - 32 * d),
                          panels[d % 2], d < is.v ? depth * WIDE_STEP / 2 : 0};
    };
    pairs_of(0).all();
    float *to = o;
    int turn = 0;
    for (int d = 0; d < is.v; d++) {
      WidePairs<T> pair = pairs_of(d + 1);
      for (int p = 0; p < is.pairs; p++, to += 1024) {
        const char *v = panels[d % 2], *w = weights + 2L * p * (WIDE_KEYS / WIDE_STEP) * IMAGE;
        if (first) {
          zero_sums();
        } else {
          take_sums(to, 256, 512);
        }
        auto beside = [&](bool even) __attribute__((always_inline)) {
          PA_UNROLLED
          for (int i = 0; i < SOME; i++) pair();
          if (even) asks();
          for (int i = 0; i < each && !result.ended(); i++) result();
        };
        for (int g = 0; g < depth; g++, w += IMAGE, v += 2 * IMAGE) {
          _tile_loadd(6, w, 64);
          _tile_loadd(4, v, 64);
          _tile_dpbf16ps(0, 6, 4);
          beside(true);
          _tile_loadd(5, v + IMAGE, 64);
          _tile_dpbf16ps(1, 6, 5);
          beside(false);
          _tile_loadd(7, w + WIDE_KEYS / WIDE_STEP * IMAGE, 64);
          _tile_dpbf16ps(2, 7, 4);
          beside(true);
          _tile_dpbf16ps(3, 7, 5);
          beside(false);
        }
        while (!result.ended()) result();
        float *sum = last ? sums[turn ^= 1] : to;
        put_sums(sum, 256, 512);
        if (!last) continue;
        result.sums = sum;
        result.to = results + p * 32;
        result.by = factors + p * 32;
        result.d = d * 32;
        result.row = 0;
        result.rows = pa_min(32, rows - p * 32);
      }
      pair.all();
    }
    while (!result.ended()) result();
    first = false;
    return asks;
  }

  // Where each row's results go.
  PA_NOINLINE WideClaims address_results() {
    for (int r = 0; r < rows; r++) {
      results[r] = item.part < 0 ? output_row(run, item.seq, item_row(layer, item, 0, r))
                                 : (char *)(part_at(run, item.part, rows).o + (int64_t)r * layer.v_head_size);
    }
    return {results, results + rows, layer.v_head_size * (item.part < 0 ? 2 : 4)};
  }
  // What results are multiplied by, where they are whole; else what a part says of its sums.
  PA_NOINLINE void end_sums() {
    for (int r = 0; r < rows; r++) {
      if (item.part < 0) {
        factors[r] = finish_sum(run, item.seq, item_row(layer, item, 0, r), lanes.m[r], lanes.l[r]);
        continue;
      }
      const Part part = part_at(run, item.part, rows);
      part.m[r] = lanes.m[r];
      part.l[r] = lanes.l[r];
    }
  }

  // Results of rows that see no key.
  PA_NOINLINE void put_empty() {
    __builtin_memset(row, 0, 4L * is.v * 32);
    for (int r = 0; r < rows; r++) leave(run, item, 0, r, row, lanes.m[r], lanes.l[r]);
  }

  // A block. Whole steps of 32 keys: those beyond the last are zeros.
  void attend(Walk &walk, bool masked, bool last) {
    const int count = walk.tile.count, steps = (count + WIDE_STEP - 1) / WIDE_STEP;
    for (int i = count; i < steps * WIDE_STEP; i++) {
      walk.keys[i] = none - walk.key_offset;
      walk.values[i] = none - walk.value_offset;
    }
    WideAsks asks(walk.ahead, 2 * steps * is.pairs * (is.k + is.v));
    const WideClaims claims = last ? address_results() : WideClaims{NULL, NULL, 0};
    asks = layer.head_size % 64 ? score<false>(walk, masked, claims, asks) : score<true>(walk, masked, claims, asks);
    if (last) end_sums();
    const auto weigh = is.pairs == 1 ? &Wide::weigh_values<4> : is.pairs < 4 ? &Wide::weigh_values<2> : &Wide::weigh_values<1>;
    (this->*weigh)(walk, last, asks).rows.all();
  }
};
