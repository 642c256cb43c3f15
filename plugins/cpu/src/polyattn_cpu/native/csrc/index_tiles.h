// An indexer's products by AMX tiles: scores of many heads. Included by index.h.
//
// S [key][head] = K Q^T: of 32 keys and 32 heads at a time. A key's sum over heads is then a vector of partial
// sums, and needs no matrix turned. A product takes 16 cycles of a unit of its own; beside it the vector units fold
// the sums of the products before it, and make bfloat16 of a key that comes later.

// The lower (upper, `which`) 16 bits of each lane of two vectors.
PA_INLINE vu halves_of(vu a, vu b, int which) {
  vu place;
  for (int i = 0; i < W; i++) place[i] = (uint32_t)(4 * i + which) | (uint32_t)(4 * i + 2 + which) << 16;
  return (vu)_mm512_permutex2var_epi16((__m512i)a, (__m512i)place, (__m512i)b);
}

// A key's elements as rows of tile registers' images. e4m3 are FACTOR times what they stand for: its exponent's
// bits are then its own below a constant. Zeros, subnormals and NaN are told apart, and are rare.
template <class T>
struct TileKey {
  static constexpr float FACTOR = 1;
  PA_ALWAYS void take(const T *from, uint32_t *to, int size) const {
    for (int d = 0; d < size; d += 32, to += TILE_WORDS) copy_bf16(from + d, (uint16_t *)to, pa_min(32, size - d));
  }
  // Half of 128 elements, of which the first is taken before the second. `seen` is what the second has to know.
  template <int HALF>
  PA_ALWAYS void take_half(const T *from, uint32_t *to, __m512i &) const {
    take(from + HALF * 64, to + HALF * 2 * TILE_WORDS, 64);
  }
};
template <>
struct TileKey<e4m3> {
  static constexpr float FACTOR = Apart<e4m3>::FACTOR;
  static constexpr int APART = 64;  // of so many elements those of even number come first
  static PA_NOINLINE void any(const e4m3 *from, uint32_t *to, int size) {
    for (int d = 0; d < size; d += W) {
      e4m3 some[W] = {};
      __builtin_memcpy(some, from + d, pa_min(W, size - d));
      const vf part = part_256(some);
      write(to + d / 32 * TILE_WORDS + d % 32 / 2, __builtin_convertvector((vu)part >> 16, vh));
    }
  }
  // Of a line that has been taken: its zeros, subnormals and NaN.
  static PA_NOINLINE void mend(const e4m3 *from, uint32_t *to) {
    alignas(64) static constexpr uint16_t RARE[32] = {
        0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7fc0};  // by the bits below the exponent's upper two
    const auto half = [](__m512i upper, uint32_t *to) {
      const __m512i size = _mm512_and_si512(upper, _mm512_set1_epi16(0x7f00)), sign = _mm512_set1_epi16((short)0x8000);
      const __m512i place = _mm512_add_epi16(_mm512_add_epi16(size, size), _mm512_set1_epi16((short)0xf000));
      const __mmask32 rare = _mm512_cmpge_epu16_mask(place, _mm512_set1_epi16((short)0xee00));
      const __m512i some = _mm512_permutexvar_epi16(_mm512_srli_epi16(upper, 8), _mm512_load_si512(RARE));
      _mm512_mask_storeu_epi16(to, rare, _mm512_or_si512(some, _mm512_and_si512(upper, sign)));
    };
    const __m512i x = _mm512_loadu_si512(from);
    half(_mm512_slli_epi16(x, 8), to);
    half(x, to + TILE_WORDS);
  }
  // Bytes and words of these. A compiler that knew them would make them again for each key, by the port that is busy.
  static PA_ALWAYS __m512i splat_bits(uint32_t bits) {
    vf some = (vf)(bits - vu{});
    in_register(some);
    return (__m512i)some;
  }
  const __m512i own = splat_bits(0x87f087f0), bias = splat_bits(0x38003800), lowest = splat_bits(0xf0f0f0f0),
                highest = splat_bits(0xeeeeeeee), sixteen = splat_bits(0x00100010);

  // Signed words of 16 times a byte as bfloat16.
  PA_ALWAYS __m512i normal(__m512i x) const { return _mm512_ternarylogic_epi32(x, own, bias, 0xea); }  // a & b | c
  // Twice a byte has no sign; less 16, that of an unusual one is at least `highest`.
  PA_ALWAYS __m512i unusual(__m512i x) const { return _mm512_add_epi8(_mm512_add_epi8(x, x), lowest); }
  PA_ALWAYS __m512i line(const e4m3 *from, uint32_t *to) const {
    const __m512i x = _mm512_loadu_si512(from);
    write(to, normal(_mm512_maddubs_epi16(sixteen, x)));
    write(to + TILE_WORDS, normal(_mm512_srai_epi16(x, 4)));
    return unusual(x);
  }
  PA_ALWAYS bool are_usual(__m512i x) const {
    return __builtin_expect(_mm512_cmpge_epu8_mask(x, highest) == 0, 1);
  }
  static PA_NOINLINE void mend_both(const e4m3 *from, uint32_t *to) {
    mend(from, to);
    mend(from + 64, to + 2 * TILE_WORDS);
  }
  template <int HALF>
  PA_ALWAYS void take_half(const e4m3 *from, uint32_t *to, __m512i &seen) const {
    const __m512i x = line(from + HALF * 64, to + HALF * 2 * TILE_WORDS);
    if (HALF && !are_usual(_mm512_max_epu8(seen, x))) mend_both(from, to);
    seen = x;
  }
  PA_ALWAYS void take(const e4m3 *from, uint32_t *to, int size) const {
    int d = 0;
    for (; d + 128 <= size; d += 128, to += 4 * TILE_WORDS) {
      __m512i seen;
      take_half<0>(from + d, to, seen);
      take_half<1>(from + d, to, seen);
    }
    for (; d + 64 <= size; d += 64, to += 2 * TILE_WORDS) {
      if (!are_usual(line(from + d, to))) mend(from + d, to);
    }
    if (d < size) any(from + d, to, size - d);
  }
};
template <>
struct IndexQuery<e4m3, TileEngine> {
  PA_INLINE vf part(const char *from, int, int d, int size) {
    const int group = d / 32 * 32;
    if (2 * group + TileKey<e4m3>::APART > size) return pairs_part(from, d, size);
    return (vf)halves_of(read<vu>(from + 4 * group), read<vu>(from + 4 * group + 64), d % 32 / W);
  }
};

// KT tile registers of keys with HT of heads at a time. Beside a visit's products the sums of the visit before are
// folded, and a later step's keys are converted and those of the next group asked for. All that a step touches, and
// what streams through, must stay in the first cache: a second place for the sums made it a third slower.
//
// SIZE: of a key, where the compiler knows it, else 0. Of 128 the products are woven with what is beside them.
template <class Of, class T, int KT, int SIZE>
struct IndexProducts {
  static constexpr int HT = 4 / KT, STEP = KT * 16;  // keys
  static_assert(SIZE == 0 || SIZE == 128, "the products are written out");
  // What is left of some runs.
  struct Cursor {
    const Keys *run;
    const char *at;
    int here;  // keys of the run

    void start(const Keys *first) {
      run = first;
      at = first->at;
      here = first->count;
    }
    // Goes on by keys of one run, `most` of them at most. Returns how many.
    int pass(int most, int bytes) {
      const int count = pa_min(most, here);
      at += count * bytes;
      here -= count;
      if (!here && run->count) start(run + 1);
      return count;
    }
  };
  // A step's keys, one after another; keys, one after another, that are asked for; and where images go.
  struct Next {
    const char *from, *asked;
    uint32_t *to;
  };
  Of &of;
  const int panels, depth, block, bytes;  // of a token; tile registers of a key; keys converted at a time; of a key
  const vf floor;
  float *const partial;                   // [STEP][W]
  char *const room;                       // of a step's keys
  const float *weights;                   // of what is folded
  __mmask16 more = 0;                     // 0: it is of a token's first panel
  Cursor source, later;
  KeyGroup groups[3];                     // to be ranked, multiplied and converted

  explicit IndexProducts(Of &of)
      : of(of), panels(of.rows / (HT * W)), depth(of.is.k / 16), block(of.item.tokens > 1 ? 64 : STEP),
        bytes(of.x.head_size * (int)sizeof(T)), floor(splat(of.x.relu ? 0.0f : -INFINITY)),
        partial(of.s + 4 * TILE_WORDS), room((char *)(of.keys + 2 * block * depth * 16)), weights(of.weights) {}

  PA_ALWAYS static void take_weights(const float *from, vf *to) {
    PA_UNROLLED
    for (int i = 0; i < HT; i++) to[i] = loadf(from + i * W);
  }
  // A key's products by lanes of heads: `sums`, of several PANELS of heads with those before, where `more` says so.
  template <bool PANELS>
  PA_ALWAYS static vf fold_key(const vf *weight, vf floor, const float *sums, __mmask16 more, const float *before) {
    vf sum = vmax(floor, loadf(sums)) * weight[0];
    if (PANELS) sum = (vf)_mm512_maskz_loadu_ps(more, before) + vmax(floor, loadf(sums)) * weight[0];
    in_register(sum);  // the order of additions
    PA_UNROLLED
    for (int i = 1; i < HT; i++) sum += vmax(floor, loadf(sums + KT * i * TILE_WORDS)) * weight[i];
    return sum;
  }
  // Keys [KEY, END) of a visit: sums over heads of each, of four, then of 16; of several PANELS to `partial`.
  template <bool PANELS, int KEY, int END>
  PA_ALWAYS static void fold_keys(const vf *weight, vf floor, const float *s, __mmask16 more, float *partial, vf *four,
                                  vf *quarter, vf *sum) {
    if constexpr (KEY < END) {
      four[KEY % 4] = fold_key<PANELS>(weight, floor, s + KEY * W, more, partial + KEY * W);
      if (PANELS) write(partial + KEY * W, four[KEY % 4]);
      if (!PANELS && KEY % 4 == 3) quarter[KEY / 4 % 4] = sums<1, 4>(four);
      if (!PANELS && KEY % 16 == 15) sum[KEY / 16] = sums<4, 4>(quarter);
      fold_keys<PANELS, KEY + 1, END>(weight, floor, s, more, partial, four, quarter, sum);
    }
  }
  PA_NOINLINE void fold_all() const {
    vf weight[HT];
    take_weights(weights, weight);
    for (int i = 0; i < STEP; i++) {
      write(partial + i * W, fold_key<true>(weight, floor, of.s + i * W, more, partial + i * W));
    }
  }
  PA_NOINLINE void sum_all(vf *sum) const {  // over lanes of what is folded
    for (int i = 0; i < KT; i++) {
      vf of_key[W];
      PA_UNROLLED
      for (int j = 0; j < W; j++) of_key[j] = loadf(partial + (i * W + j) * W);
      sum[i] = sums(of_key);
    }
  }
  PA_ALWAYS static uint32_t *image_of(uint32_t *to, int key, int depth) {
    return to + key / 16 * depth * TILE_WORDS + key % 16 * 16;
  }
  PA_NOINLINE void convert_all(const Next &next) const {
    const TileKey<T> form;
    for (int i = 0; i < STEP; i++) {
      form.take((const T *)(next.from + i * bytes), image_of(next.to, i, depth), of.x.head_size);
    }
  }
  // The next step's `count` keys, and the keys that are then asked for.
  Next next_step(uint32_t *to, int count) {
    Next next = {source.at, later.at, to};
    if (count < STEP || source.here < STEP) {
      next.from = room;
      for (int i = 0, some; i < count; i += some) {
        const char *from = source.at;
        some = source.pass(count - i, bytes);
        __builtin_memcpy(room + i * bytes, from, (int64_t)some * bytes);
      }
    } else {
      source.pass(STEP, bytes);
    }
    if (SIZE && later.here >= STEP) {
      later.pass(STEP, bytes);
      return next;
    }
    next.asked = room;
    for (int i = 0, some; i < STEP; i += some) {
      const char *line = later.at;
      some = later.pass(STEP - i, bytes);
      if (!some) break;
      for (int b = 0; b < some * bytes; b += 64) prefetch_l2_here(line + b);
    }
    return next;
  }

  // Of a step's keys and a panel's heads: the products of their images.
  PA_NOINLINE void multiply(const uint32_t *k, const uint32_t *q, const Next *next) const {
    const int64_t image = depth * TILE_WORDS;
    fold_all();
    if (next) convert_all(*next);
    zero_sums();
    for (int i = 0; i < depth; i++, k += TILE_WORDS, q += TILE_WORDS) {
      _tile_loadd(4, k, 64);
      _tile_loadd(6, q, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (KT == 1) {
        _tile_loadd(7, q + image, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, q + 2 * image, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, q + 3 * image, 64);
        _tile_dpbf16ps(3, 4, 7);
      } else {
        _tile_loadd(5, k + image, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, q + image, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    put_sums(of.s, TILE_WORDS, 2 * TILE_WORDS);
  }

  // How many keys are folded beside a visit's first products: none while sums leave their registers.
  static constexpr int folded_by(int product) { return product < 4 ? 0 : (product - 4) * 4 * KT / 3; }
  // The first or second part of the keys that are converted beside a product.
  template <int PRODUCT, int PART>
  PA_ALWAYS static void convert_part(const TileKey<T> &form, const Next &next, __m512i &seen) {
    constexpr int KEY = KT * PRODUCT + (KT > 1) * PART;
    const T *from = (const T *)next.from + KEY * SIZE;
    uint32_t *to = image_of(next.to, KEY, SIZE / 32);
    if (KT > 1 || !PART) form.template take_half<0>(from, to, seen);
    if (KT > 1 || PART) form.template take_half<1>(from, to, seen);
  }
  // `multiply` of SIZE. Between each two products, whose unit is busy for 16 cycles, lie half of the keys that are
  // converted there, what is folded and the other half. The sums of the visit before leave their registers beside the
  // first products, for those that stood behind the last ones would leave the unit idle. Leaves that visit's sums over
  // heads, one panel's. `near` (NULL: none): keys that are asked for once more, into the first cache.
  // `next` is a copy: its addresses stay in registers, while any store may change memory that is referred to.
  template <bool CONVERTS, bool PANELS, bool NEAR>
  PA_ALWAYS static void weave(const TileKey<T> &form, const uint32_t *k, const uint32_t *q, float *s, const vf *weight, vf floor,
                              __mmask16 more, float *partial, Next next, const char *near, vf *sum) {
    constexpr int image = SIZE / 32 * TILE_WORDS, BYTES = KT * SIZE * (int)sizeof(T);
    vf four[4] = {}, quarter[4] = {};
    __m512i seen = {};
#define PA_WOVEN(I, J, HEADS, KEYS2, HEADS2)                                                  \
  {                                                                                           \
    constexpr int product = 4 * I + J;                                                        \
    if (J == 0) _tile_loadd(4, k + I * TILE_WORDS, 64);                                       \
    if (KT > 1 && J == 1) _tile_loadd(5, k + image + I * TILE_WORDS, 64);                     \
    if (KT == 1) _tile_loadd(HEADS, q + J * image + I * TILE_WORDS, 64);                      \
    if (KT > 1 && J % 2 == 0) _tile_loadd(HEADS2, q + J / 2 * image + I * TILE_WORDS, 64);    \
    if (CONVERTS) convert_part<product, 0>(form, next, seen);                                 \
    if (I == 0) {                                                                             \
      _tile_stored(J, s + J * TILE_WORDS, 64);                                                \
      _tile_zero(J);                                                                          \
    }                                                                                         \
    if (KT == 1) _tile_dpbf16ps(J, 4, HEADS);                                                 \
    if (KT > 1) _tile_dpbf16ps(J, KEYS2, HEADS2);                                             \
    fold_keys<PANELS, folded_by(product), folded_by(product + 1)>(weight, floor, s, more, partial, four, quarter, sum); \
    PA_UNROLLED                                                                               \
    for (int b = product * BYTES; CONVERTS && b < (product + 1) * BYTES; b += 64) {           \
      prefetch_l2_here(next.asked + b);                                                       \
      if (NEAR) prefetch(near + b);                                                           \
    }                                                                                         \
    if (CONVERTS) convert_part<product, 1>(form, next, seen);                                 \
  }
#define PA_WOVEN_ROW(I) PA_WOVEN(I, 0, 6, 4, 6) PA_WOVEN(I, 1, 7, 5, 6) PA_WOVEN(I, 2, 6, 4, 7) PA_WOVEN(I, 3, 7, 5, 7)
    PA_WOVEN_ROW(0)
    PA_WOVEN_ROW(1)
    PA_WOVEN_ROW(2)
    PA_WOVEN_ROW(3)
#undef PA_WOVEN_ROW
#undef PA_WOVEN
  }
  template <bool CONVERTS, bool PANELS>
  PA_NOINLINE void weave_visit(const uint32_t *k, const uint32_t *q, Next next, vf *sum) const {
    vf weight[HT], some[KT];
    take_weights(weights, weight);
    weave<CONVERTS, PANELS, false>(TileKey<T>(), k, q, of.s, weight, floor, more, partial, next, NULL, some);
    for (int i = 0; !PANELS && i < KT; i++) sum[i] = some[i];
  }
  // A visit, and what it converts, if anything. Leaves sums over heads of the visit before, of one panel of SIZE.
  PA_ALWAYS void visit(const uint32_t *k, const uint32_t *q, const Next *next, vf *sum) const {
    if (!SIZE) return multiply(k, q, next);
    if constexpr (SIZE > 0) {
      if (panels > 1) return next ? weave_visit<true, true>(k, q, *next, sum) : weave_visit<false, true>(k, q, {}, sum);
      next ? weave_visit<true, false>(k, q, *next, sum) : weave_visit<false, false>(k, q, {}, sum);
    }
  }

  // A key's products are of the other sign where its scale is negative, as ReLU needs.
  PA_ALWAYS void turn_signs(vf factors, uint32_t *images) const {
    uint32_t negative = lanes_of((vi)factors);
    for (; __builtin_expect(negative != 0, 0); negative &= negative - 1) {
      uint32_t *key = images + __builtin_ctz(negative) * 16;
      for (int i = 0; i < depth; i++, key += TILE_WORDS) write(key, read<vu>(key) ^ 0x80008000u);
    }
  }
  // Sums over heads of a token's keys from `t` on, as scores.
  PA_ALWAYS void leave(int token, int t, const float *factors, const vf *sum) const {
    for (int i = 0; i < KT; i++) {
      const vf factor = (vf)(read<vu>(factors + t + i * W) & 0x7fffffffu);
      write(of.scores + (int64_t)token * INDEX_TILE + t + i * W, sum[i] * factor);
    }
  }

  // One token's keys with heads of one panel: a step after another, whichever runs they are of.
  bool in_stream() const {
    return SIZE && of.item.tokens == 1 && panels == 1 && !of.x.within && of.x.block_size % STEP == 0;
  }
  // A step's keys, and those that are known: some further than what is asked for. Behind the last ones come none.
  struct Step {
    const char *keys, *scale;
    int32_t first, count;
  };
  // Keys that are asked for ahead; pages whose addresses are found at a time, as an ask waits for its address, and what
  // is behind it waits with it.
  static constexpr int AHEAD = 256 / STEP, BURST = 512 / STEP, RING = 128;
  struct Steps {
    Step ring[RING];
    int32_t entry;
    int known, copied;
    const Step &operator[](int i) const { return ring[i % RING]; }
  };
  // Finds those up to `last`; false where the table points outside the cache.
  PA_NOINLINE bool find_steps(Steps &steps, int last) const {
    while (steps.known <= last) {
      Keys run;
      const int count = of.keys_from(steps.entry, INDEX_TILE, run);
      if (count < 0) return false;
      if (!count) steps.ring[steps.known++ % RING] = {room, NULL, 0, 0};
      for (int t = 0; t < count; t += STEP) {
        Step step = {run.at + (int64_t)t * bytes, run.scale + 4 * t, run.first + t, pa_min(STEP, count - t)};
        for (int i = 0; of.x.scaled && i < STEP; i += W) prefetch_l2_here(step.scale + 4 * i);
        if (t * bytes % 4096 == 0) prefetch_l2_here(step.keys);
        if (step.count < STEP) {  // at the end of an item, or of its first page
          char *to = room + ++steps.copied * STEP * bytes;
          step.keys = (const char *)__builtin_memcpy(to, step.keys, (int64_t)step.count * bytes);
        }
        steps.ring[steps.known++ % RING] = step;
      }
    }
    return true;
  }
  PA_ALWAYS vf factor_of(const Step &step, int i, vf by) const {
    if (!of.x.scaled) return by;
    const int left = pa_max(0, pa_min(W, step.count - i * W));
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1), (const float *)step.scale + i * W) * by;
  }
  PA_NOINLINE void rank_ends(const Step &step) const { of.rank_some(*of.ranked, step.first, of.scores, step.count); }

  PA_ALWAYS bool choose_stream(float scale) {
    Steps steps;
    steps.entry = of.item.from;
    steps.known = steps.copied = 0;
    if (!find_steps(steps, AHEAD + BURST)) return false;
    uint32_t *const images = of.keys;
    const int64_t words = KT * (SIZE / 32) * TILE_WORDS;
    convert_all({steps[0].keys, NULL, images});
    Ranked &ranked = *of.ranked;
    // Candidates of their own, that are neither forced nor behind the last one.
    const int32_t plain = of.x.pool > 1 ? INT32_MAX : of.x.forced_first;
    const int32_t end = pa_min(of.item.to, pa_min(ranked.sight.visible, ranked.sight.there - of.x.forced_last)) - STEP;
    const vf by = splat(scale / TileKey<T>::FACTOR);
    vf weight[HT], factor[KT], sum[KT];
    take_weights(weights, weight);
    vi place;
    for (int i = 0; i < W; i++) place[i] = i;
    const TileKey<T> form;
    Step before = {NULL, NULL, 0, 0};
    const auto rank = [&]() __attribute__((always_inline)) {
      for (int i = 0; i < KT; i++) sum[i] *= (vf)((vu)factor[i] & 0x7fffffffu);
      if (before.count < STEP || before.first < plain || before.first > end) {
        for (int i = 0; i < KT; i++) write(of.scores + i * W, sum[i]);
        if (before.count) rank_ends(before);
        return;
      }
      if (ranked.count + STEP + W > of.room) ranked.shorten();
      for (int i = 0; i < KT; i++) {
        const uint32_t good = lanes_of(~(vi)(sum[i] <= splat(ranked.floor)));
        ranked.put_some(good, ranks_of(sum[i]), place + splati(before.first + i * W));
      }
    };
    for (int i = 0; steps[i].count; i++) {
      if (steps.known <= i + AHEAD && !find_steps(steps, i + AHEAD + BURST)) return false;
      const Step now = steps[i];
      uint32_t *const image = images + i % 2 * words;
      vf by_key[KT];
      for (int j = 0; j < KT; j++) {
        by_key[j] = factor_of(now, j, by);
        turn_signs(by_key[j], image + j * (SIZE / 32) * TILE_WORDS);
      }
      const Next next = {steps[i + 1].keys, steps[i + AHEAD].keys, images + (i + 1) % 2 * words};
      weave<true, false, true>(form, image, of.packed, of.s, weight, floor, 0, partial, next, steps[i + 2].keys, sum);
      rank();
      before = now;
      for (int j = 0; j < KT; j++) factor[j] = by_key[j];
    }
    put_sums(of.s, TILE_WORDS, 2 * TILE_WORDS);
    fold_all();
    sum_all(sum);
    rank();
    return true;
  }

  PA_NOINLINE static bool stream(IndexProducts &of, float scale) { return of.choose_stream(scale); }
  // What the first steps touch, before queries are packed: else one line after another is waited for.
  static void ask_first(Of &of) {
    constexpr int CODE = 8192;
    for (int i = 0; i < of.item.tokens * of.x.num_heads && of.item.tokens == 1; i++) {
      for (int b = 0; b < of.x.head_size * 2; b += 64) prefetch_l2_here(of.query_of(i) + b);
    }
    for (int b = 0; b < CODE; b += 64) prefetch_l2_here((const char *)(const void *)&stream + b);
    int32_t entry = of.item.from;
    Keys some;
    for (int n = AHEAD * STEP; !of.x.within && n > 0 && of.keys_from(entry, n, some) > 0; n -= some.count) {
      for (int b = 0; b < some.count * of.x.head_size * (int)sizeof(T); b += 64) prefetch_l2_here(some.at + b);
    }
    // The first candidates are all written down, and a store that waits for its line holds up those behind it.
    for (int i = 0; i < of.room && of.item.tokens == 1; i += W) {
      __asm__ volatile("prefetchw %0" : : "m"(of.ranks[i]));
      __asm__ volatile("prefetchw %0" : : "m"(of.found[i]));
    }
  }

  // All keys, a group after another. What is folded is of the visit before, which may be the last group's.
  PA_NOINLINE bool choose(float by) {
    const int tokens = of.item.tokens;
    const int64_t panel_words = HT * depth * TILE_WORDS, block_words = block * depth * 16;
    int32_t entry = of.item.from;
    const KeyGroup *folded = NULL;
    if constexpr (SIZE > 0) {
      if (in_stream()) return stream(*this, by);
    }
    int token = 0, t = 0, panel = 0, turn = 0;  // of what is folded; of the block in use
    vf sum[KT];
    const auto end_fold = [&]() __attribute__((always_inline)) {
      if (!folded || panel < panels - 1) return;
      if (!SIZE || panels > 1) sum_all(sum);
      leave(token, t, folded->factors, sum);
      if (token == tokens - 1 && t + STEP >= folded->count) of.rank(*folded);
    };
    if (!of.find(entry, groups[0])) return false;
    source.start(groups->runs);
    later = source;
    const auto convert = [&](uint32_t *to, int left) {
      for (; left > 0; left -= STEP, to += KT * depth * TILE_WORDS) convert_all(next_step(to, pa_min(STEP, left)));
    };
    convert(of.keys, pa_min(block, groups->count));
    by /= TileKey<T>::FACTOR;
    for (int g = 0; groups[g].count > 0; g = (g + 1) % 3) {
      KeyGroup &group = groups[g], &next = groups[(g + 1) % 3];
      if (!of.find(entry, next)) return false;
      of.take_factors(group, by);
      later.start(next.runs);
      for (int from = 0; from < group.count; from += block, turn ^= 1) {
        const uint32_t *keys = of.keys + turn * block_words;
        uint32_t *to = of.keys + (turn ^ 1) * block_words;
        const int here = pa_min(block, group.count - from), behind = group.count - from - here;
        if (!behind) source.start(next.runs);
        int left = pa_min(block, behind ? behind : next.count);            // keys to convert
        int visits = tokens * panels * ((here + STEP - 1) / STEP);
        for (int t = 0; of.x.scaled && t < block; t += W) {
          turn_signs(loadf(group.factors + from + t), of.keys + turn * block_words + t * depth * 16);
        }
        for (int i = 0; i < tokens; i++) {
          for (int step = 0; step < here; step += STEP) {
            for (int p = 0; p < panels; p++) {
              const uint32_t *k = keys + step * depth * 16, *q = of.packed + (i * panels + p) * panel_words;
              if (STEP * visits-- <= left + STEP - 1) {
                const Next some = next_step(to, pa_min(STEP, left));
                visit(k, q, &some, sum);
                left -= STEP;
                to += KT * depth * TILE_WORDS;
              } else {
                visit(k, q, NULL, sum);
              }
              end_fold();
              folded = &group;
              token = i;
              t = from + step;
              panel = p;
              more = p ? 0xffff : 0;
              weights = of.weights + i * of.rows + HT * p * W;
            }
          }
        }
        convert(to, left);
      }
    }
    if (SIZE) put_sums(of.s, TILE_WORDS, 2 * TILE_WORDS);
    fold_all();
    sum_all(sum);
    end_fold();
    return true;
  }
};

// All of an item, but for what is left of it. False where the table points outside the cache.
template <class T>
static bool choose_by_registers(Index<T, TileEngine> &of, float by) {
  using Of = Index<T, TileEngine>;
  const auto choose = [&](auto keys, auto size) {
    using Products = IndexProducts<Of, T, keys(), size()>;
    if (size()) Products::ask_first(of);
    of.begin();
    of.take_queries();
    return Products(of).choose(by);
  };
  const auto by_shape = [&](auto keys) {
    return of.x.head_size == 128 ? choose(keys, std::integral_constant<int, 128>()) : choose(keys, std::integral_constant<int, 0>());
  };
  return of.rows % (4 * W) ? by_shape(std::integral_constant<int, 2>()) : by_shape(std::integral_constant<int, 1>());
}

// Many heads fill tile registers; fewer, and what bfloat16 doesn't hold, are the other instruction sets'.
static int64_t index_scratch(const IndexRun *run, int32_t tokens, int32_t entries) {
  return index_scratch_beside<TileEngine>(pa_kernels_avx512_bf16, run, tokens, entries);
}
static void index_item(IndexRun *run, const IndexItem &item, const Room &scratch) {
  const pa_index &x = *run->index;
  const bool wanted = x.choices <= 1 && index_rows(x) >= W;
  index_item_beside<TileEngine>(pa_kernels_avx512_bf16, wanted, run, item, scratch);
}
