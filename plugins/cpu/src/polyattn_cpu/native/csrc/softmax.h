// Online softmax over a tile of scores. Included inside an anonymous namespace.
//
// Scores lie as (keys, lanes): a lane is one row, that is one query token's one head, so all of a
// row's softmax is vertical. Logits are in units of log 2. What a row knows of itself:

constexpr float MASKED = -2e30f, LOWEST = -1e30f;  // finite: inf - inf would be NaN
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Lanes {
  float *m, *l;                              // largest logit so far, sum of weights
  float *slope, *position;                   // ALiBi
  int32_t *near_lo, *near_hi, *kept_lo, *kept_hi;  // keys that it sees
};
constexpr int LANE_ARRAYS = 8;

PA_INLINE Lanes lanes_at(char *memory, int count) {
  float *f = (float *)memory;
  int32_t *i = (int32_t *)(f + 4 * count);
  return {f, f + count, f + 2 * count, f + 3 * count, i, i + count, i + 2 * count, i + 3 * count};
}
PA_INLINE Lanes lanes_from(const Lanes &a, int at) {
  return {a.m + at,       a.l + at,       a.slope + at,   a.position + at,
          a.near_lo + at, a.near_hi + at, a.kept_lo + at, a.kept_hi + at};
}
// Forgets what the keys so far came to.
PA_INLINE void clear_sums(const Lanes &a, int count) {
  for (int i = 0; i < count; i++) {
    a.m[i] = LOWEST;
    a.l[i] = 0;
  }
}
PA_ONCE void clear_lanes(const Lanes &a, int count) {
  clear_sums(a, count);
  for (int i = 0; i < count; i++) {
    a.slope[i] = a.position[i] = 0;
    a.near_lo[i] = a.near_hi[i] = a.kept_lo[i] = a.kept_hi[i] = 0;
  }
}

struct Logits {  // how a logit comes of a dot product
  float scale;   // without a cap, times log2(e)
  float cap;     // times log2(e); 0: none
  bool alibi;
};

template <bool EXTRAS>
PA_INLINE vf logit(vf dot, const Logits &how, vf slope, vf distance) {
  vf x = dot * splat(how.scale);
  if constexpr (EXTRAS) {
    if (how.cap != 0) x = splat(how.cap) * tanhv(x);
    if (how.alibi) x = x + slope * distance;
  }
  return x;
}

// Turns dot products into logits in place; returns the largest. `masked`: some row doesn't see some
// key of the tile.
template <bool EXTRAS>
PA_NOINLINE vf to_logits(float *s, int ld, int keys, int first_key, const Logits &how,
                       const Lanes &rows, bool masked) {
  vf best[4] = {splat(MASKED), splat(MASKED), splat(MASKED), splat(MASKED)};
  vf slope = loadf(rows.slope), position = loadf(rows.position);
  vi lo = read<vi>(rows.near_lo), hi = read<vi>(rows.near_hi);
  vi kept_lo = read<vi>(rows.kept_lo), kept_hi = read<vi>(rows.kept_hi);
  auto one = [&](int t, vf &top) {
    float *at = s + (int64_t)t * ld;
    vf x = logit<EXTRAS>(loadf(at), how, slope, splat((float)(first_key + t)) - position);
    if (masked) {
      vi key = splati(first_key + t);
      vi seen = ((key >= lo) & (key < hi)) | ((key >= kept_lo) & (key < kept_hi));
      x = seen ? x : splat(MASKED);
    }
    write(at, x);
    top = vmax(top, x);
  };
  int t = 0;
  for (; t + 4 <= keys; t += 4) {
    for (int u = 0; u < 4; u++) one(t + u, best[u]);
  }
  for (; t < keys; t++) one(t, best[0]);
  return vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
}

PA_INLINE vf largest(const float *s, int ld, int keys) {
  vf best[4] = {splat(MASKED), splat(MASKED), splat(MASKED), splat(MASKED)};
  int t = 0;
  for (; t + 4 <= keys; t += 4) {
    for (int u = 0; u < 4; u++) best[u] = vmax(best[u], loadf(s + (int64_t)(t + u) * ld));
  }
  for (; t < keys; t++) best[0] = vmax(best[0], loadf(s + (int64_t)t * ld));
  return vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
}

// How weights leave: as float32, in the scores' place; or rounded to bfloat16, two keys' in each
// 32-bit element, as the bfloat16 products take them.
struct Floats {
  PA_INLINE vf exp2(vf x) { return exp2v(x); }
  PA_INLINE void put(float *s, int ld, uint32_t *, int t, vf a, vf b) {
    write(s + (int64_t)t * ld, a);
    write(s + (int64_t)(t + 1) * ld, b);
  }
  PA_INLINE void put_last(float *s, int ld, uint32_t *, int t, vf a) {
    write(s + (int64_t)t * ld, a);
  }
};

#if defined(__AVX512BF16__)
// Lane i is a[i] below b[i], rounded to nearest even.
PA_INLINE vu bf16_pairs(vf a, vf b) {
  const __m512i turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vu)_mm512_permutexvar_epi16(turn, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
#endif

#if defined(PA_BASE)
struct Pairs {
#if defined(__AVX512BF16__)
  PA_INLINE vf exp2(vf x) {  // to 8e-5 of it, a fiftieth of bfloat16's rounding
    vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);
    vf p = splat(7.802452e-2f) * f + splat(2.2606716e-1f);
    p = p * f + splat(6.9583354e-1f);
    p = p * f + splat(9.9992522e-1f);
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
  }
#else
  PA_INLINE vf exp2(vf x) { return exp2v(x); }
#endif
  PA_INLINE void put(float *, int ld, uint32_t *pairs, int t, vf a, vf b) {
    write(pairs + (int64_t)(t / 2) * ld, bf16_pairs(a, b));
  }
  PA_INLINE void put_last(float *s, int ld, uint32_t *pairs, int t, vf a) {
    put(s, ld, pairs, t, a, vf{});
  }
};
#endif

// Where the scores and the weights of a tile's vectors of rows lie: a key is `ld` on, the next vector
// `step` and, of pairs of keys, `pair_step`.
struct Grid {
  int ld;
  int64_t step, pair_step;
};

// How W rows' scores of a tile become weights: 2^(score * scale - next). `shrink` is by how much what
// was summed before does.
struct Weigh {
  vf scale, next, shrink;
};

// Are scores weighed as they are, with the scale as a factor? Else logits take their place.
PA_INLINE bool weighs_scores(const Logits &how, bool masked) {
  return !how.alibi && how.cap == 0 && !masked && how.scale > 0;
}

// Brings the rows' maximum up to date. `best` is the largest score where scores are weighed as they are.
// The maximum follows only where it grows by 2^8: what is summed stays far from overflow, and rescaling
// is rare.
PA_INLINE Weigh weigh_by(vf best, float *at, int ld, int keys, int first_key, const Logits &how,
                         const Lanes &lane, bool masked) {
  // Beyond 2^29, what rounds a logit away is too much for an exponential: its product isn't left to an FMA then.
  const vf top = best * splat(how.scale), most = splat(0x1p29f);
  const bool plain = weighs_scores(how, masked) && !any((top > most) | (top < -most));
  const vf scale = splat(plain ? how.scale : 1.0f);
  best = plain ? top
         : how.alibi || how.cap != 0
             ? to_logits<true>(at, ld, keys, first_key, how, lane, masked)
             : to_logits<false>(at, ld, keys, first_key, how, lane, masked);
  vf m = loadf(lane.m);
  vf next = best > m + splat(8.0f) ? best : m;
  write(lane.m, next);
  return {scale, next, exp2v(m - next)};
}

// What fills the time of a step, where nothing does.
struct Idle {
  PA_ALWAYS void operator()() {}
};

// One tile of `vectors` * W rows: scores to weights, m and l brought up to date, and `alpha`, by
// which what was summed before shrinks. `beside` is called for each two keys. Returns whether any alpha isn't 1.
template <class Form, class Beside>
PA_NOINLINE bool softmax_tile(float *s, const Grid &grid, int vectors, int keys, int first_key,
                            const Logits &how, const Lanes &rows, bool masked, float *alpha,
                            uint32_t *pairs, Beside &beside) {
  const int ld = grid.ld;
  bool changed = false;
  for (int v = 0; v < vectors; v++) {
    float *at = s + v * grid.step;
    uint32_t *to = pairs + v * grid.pair_step;
    Lanes lane = lanes_from(rows, v * W);
    const vf best = weighs_scores(how, masked) ? largest(at, ld, keys) : vf{};
    const Weigh by = weigh_by(best, at, ld, keys, first_key, how, lane, masked);
    write(alpha + v * W, by.shrink);
    changed |= any(by.shrink != splat(1.0f));
    vf sum[2] = {vf{}, vf{}};
    int t = 0;
    for (; t + 2 <= keys; t += 2) {
      vf a = Form::exp2(loadf(at + (int64_t)t * ld) * by.scale - by.next);
      vf b = Form::exp2(loadf(at + (int64_t)(t + 1) * ld) * by.scale - by.next);
      Form::put(at, ld, to, t, a, b);
      sum[0] += a;
      sum[1] += b;
      beside();
    }
    if (t < keys) {
      vf a = Form::exp2(loadf(at + (int64_t)t * ld) * by.scale - by.next);
      Form::put_last(at, ld, to, t, a);
      sum[0] += a;
    }
    write(lane.l, loadf(lane.l) * by.shrink + (sum[0] + sum[1]));
  }
  return changed;
}
template <class Form>
PA_INLINE bool softmax_tile(float *s, const Grid &grid, int vectors, int keys, int first_key,
                            const Logits &how, const Lanes &rows, bool masked, float *alpha,
                            uint32_t *pairs) {
  Idle idle;
  return softmax_tile<Form>(s, grid, vectors, keys, first_key, how, rows, masked, alpha, pairs, idle);
}
