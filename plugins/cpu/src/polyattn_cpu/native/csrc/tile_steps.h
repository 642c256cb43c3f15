// Prefill by AMX tiles: how are products and softmax done at the same time? Included by matrix_path.h.
//
// A tile product takes 16 cycles of a unit of its own, in which the vector units have nothing to do.
// So a panel's visit to a tile is three steps, and those of two visits are interleaved: beside the
// products of this visit's scores their maximum is taken, and beside those of the outputs of the visit
// before this one's weights are computed. Panels are the outer loop, so that a panel's queries and
// outputs stay in the first cache over all tiles that are packed.

// Of the scores that are there, the largest; two keys at a time.
struct Tops {
  const float *s;
  int at = 0, there = 0;  // keys
  vf best[2][2] = {{splat(MASKED), splat(MASKED)}, {splat(MASKED), splat(MASKED)}};

  PA_ALWAYS void operator()() {
    if (at + 2 > there) return;
    PA_UNROLLED
    for (int v = 0; v < 2; v++) {
      const float *from = s + (v * TILE_STEP + at) * W;
      best[v][0] = vmax(best[v][0], loadf(from));
      best[v][1] = vmax(best[v][1], loadf(from + W));
    }
    at += 2;
  }
  PA_ALWAYS void rest(int keys) {
    there = keys;
    while (at + 2 <= keys) (*this)();
    for (int v = 0; at < keys && v < 2; v++) {
      best[v][0] = vmax(best[v][0], loadf(s + (v * TILE_STEP + at) * W));
    }
  }
};

// A visit's scores to weights, two keys at a time.
struct Weights {
  const float *s;
  uint32_t *pairs;
  int keys, at;
  Weigh by[2] = {};
  vf sum[2][2] = {};

  PA_ALWAYS vf of(int v, int key) const {
    return Pairs::exp2(loadf(s + (v * TILE_STEP + key) * W) * by[v].scale - by[v].next);
  }
  PA_ALWAYS uint32_t *to(int v) const {
    return pairs + v * (TILE_STEP / 2) * W;
  }
  PA_ALWAYS void operator()() {
    if (at + 2 > keys) return;
    PA_UNROLLED
    for (int v = 0; v < 2; v++) {
      vf a = of(v, at), b = of(v, at + 1);
      Pairs::put(NULL, W, to(v), at, a, b);
      sum[v][0] += a;
      sum[v][1] += b;
    }
    at += 2;
  }
  // Those that are left; zeros follow, up to a whole tile register.
  PA_ALWAYS void rest(const Lanes &lanes) {
    while (at + 2 <= keys) (*this)();
    const int used = (keys + 1) / 2;
    for (int v = 0; v < 2; v++) {
      if (keys % 2) {
        vf a = of(v, at);
        Pairs::put_last(NULL, W, to(v), at, a);
        sum[v][0] += a;
      }
      __builtin_memset(to(v) + used * W, 0, 4L * (pa_round_up(used, 16) - used) * W);
      float *l = lanes.l + v * W;
      write(l, loadf(l) * by[v].shrink + (sum[v][0] + sum[v][1]));
    }
  }
};

// C[32][32] = or += A B over `depth` tile registers, and `beside` after each product. All lie in whole
// registers' images: A's second row of them `a_step` on, C's columns `c_step`, B's `b_step`.
template <bool ADD, class Beside>
PA_INLINE void tiles(const uint32_t *a, int64_t a_step, const uint32_t *b, int64_t b_step, float *c,
                     int64_t c_step, int depth, Beside &beside) {
  if (ADD) {
    take_sums(c, TILE_WORDS, c_step);
  } else {
    zero_sums();
  }
  for (int i = 0; i < depth; i++, a += TILE_WORDS, b += TILE_WORDS) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    beside();
    _tile_loadd(5, a + a_step, 64);
    _tile_dpbf16ps(1, 5, 6);
    beside();
    _tile_loadd(7, b + b_step, 64);
    _tile_dpbf16ps(2, 4, 7);
    beside();
    _tile_dpbf16ps(3, 5, 7);
    beside();
  }
  put_sums(c, TILE_WORDS, c_step);
}

struct TileSteps {
  Matrix<TileEngine> &matrix;
  const Tiles &packed;
  Ahead &ahead;
  int panel = 0, tile = -1;

  // Goes on to the next tile of which a panel sees something; false where there is none.
  bool next(Visit &visit) {
    for (;;) {
      if (++tile * TILE_STEP >= packed.count) {
        tile = 0;
        panel++;
      }
      if (panel >= matrix.panels.count) return false;
      visit = matrix.visit_of(panel, tile, packed);
      if (visit.keys > 0) return true;
    }
  }

  PA_NOINLINE void scores(const Visit &visit, Weigh *by) {
    const Sizes &is = matrix.is;
    const uint32_t *k = matrix.k_of(visit.tile), *q = matrix.q_of(visit.panel);
    Tops tops = {matrix.s};
    for (int t = 0; t < visit.keys; t += 32) {
      tops.there = t;
      tiles<false>(k + (int64_t)t * is.k, W * is.k, q, W * is.k, matrix.s + t * W, TILE_STEP * W,
                   is.k / 16, tops);
      ahead(TileEngine::cost(is.k, 2));
    }
    tops.rest(visit.keys);
    for (int v = 0; v < 2; v++) {
      by[v] = weigh_by(vmax(tops.best[v][0], tops.best[v][1]), matrix.s + v * TILE_STEP * W, W, visit.keys,
                       visit.first_key, matrix.how, lanes_from(matrix.lanes_of(visit.panel), v * W),
                       visit.masked);
    }
  }

  template <class Beside>
  PA_INLINE void outputs(const TileSteps &at, const Visit &visit, const uint32_t *pairs, Beside &beside) {
    constexpr int half = TILE_STEP / 2;
    const Sizes &is = at.matrix.is;
    const uint32_t *v = at.matrix.v_of(visit.tile);
    float *o = at.matrix.o_of(visit.panel);
    for (int d = 0; d < is.v; d += 32) {
      tiles<true>(v + (int64_t)d * half, W * half, pairs, W * half, o + d * W, (int64_t)is.v * W,
                  (visit.keys + 31) / 32, beside);
      at.ahead(TileEngine::cost(visit.keys / 2, 2));
    }
  }

  // The weights of `now`, beside the outputs of the visit `before`.
  PA_NOINLINE void weights(const Visit *before, const Visit &now, const Weigh *by, int turn) {
    uint32_t *pairs[2] = {matrix.pairs, matrix.pairs + TILE_STEP * W};
    Weights some = {matrix.s, pairs[turn & 1], now.keys, 0, {by[0], by[1]}};
    if (before) outputs(*this, *before, pairs[~turn & 1], some);
    some.rest(matrix.lanes_of(now.panel));
    if (any((by[0].shrink != splat(1.0f)) | (by[1].shrink != splat(1.0f)))) {
      write(matrix.alpha, by[0].shrink);
      write(matrix.alpha + W, by[1].shrink);
      matrix.template rescale<2>(matrix.o_of(now.panel));
    }
  }
  PA_NOINLINE void last(const Visit &visit, int turn) {
    Idle idle;
    outputs(*this, visit, matrix.pairs + (turn & 1) * TILE_STEP * W, idle);
  }
};

static void attend_tiles(Matrix<TileEngine> &matrix, const Tiles &packed, Ahead &ahead) {
  TileSteps steps = {matrix, packed, ahead};
  Visit before, now;
  Weigh by[2];
  int turn = 0;
  for (; steps.next(now); turn++, before = now) {
    steps.scores(now, by);
    steps.weights(turn ? &before : NULL, now, by, turn);
  }
  if (turn) steps.last(before, turn - 1);
}
