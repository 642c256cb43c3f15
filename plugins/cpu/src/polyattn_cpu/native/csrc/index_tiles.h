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
// SIZE: of a key, where the compiler knows it, else 0. Of 128 the products are written out, and addresses are constants.
template <class Of, class T, int KT, int SIZE>
struct IndexProducts {
  static constexpr int HT = 4 / KT, STEP = KT * 16;  // keys
  static constexpr bool WOVEN = SIZE && KT == 1;
  static_assert(SIZE == 0 || SIZE == 128, "the products are written out");
  // Keys that are scored together: where they lie, and their scores' factors.
  struct Group {
    Keys runs[INDEX_TILE + 1];  // behind the last one, one of none
    int count;
    float factors[INDEX_TILE + W];
  };
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
  Group groups[3];                        // to be ranked, multiplied and converted

  explicit IndexProducts(Of &of)
      : of(of), panels(of.rows / (HT * W)), depth(of.is.k / 16), block(of.item.tokens > 1 ? 64 : STEP),
        bytes(of.x.head_size * (int)sizeof(T)), floor(splat(of.x.relu ? 0.0f : -INFINITY)),
        partial(of.s + 4 * TILE_WORDS), room((char *)(of.keys + 2 * block * depth * 16)), weights(of.weights) {}

  template <bool MORE>
  PA_ALWAYS static void fold_key(const vf *weight, vf floor, __mmask16 more, const float *sums, float *to) {
    vf sum = vmax(floor, loadf(sums)) * weight[0];
    if (MORE) sum = (vf)_mm512_maskz_loadu_ps(more, to) + vmax(floor, loadf(sums)) * weight[0];
    in_register(sum);  // the order of additions
    PA_UNROLLED
    for (int i = 1; i < HT; i++) sum += vmax(floor, loadf(sums + KT * i * TILE_WORDS)) * weight[i];
    write(to, sum);
  }
  PA_ALWAYS void take_weights(vf *to) const {
    PA_UNROLLED
    for (int i = 0; i < HT; i++) to[i] = loadf(weights + i * W);
  }
  PA_NOINLINE void fold_all() const {
    vf weight[HT];
    take_weights(weight);
    for (int i = 0; i < STEP; i++) fold_key<true>(weight, floor, more, of.s + i * W, partial + i * W);
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

  // Of a step's keys and a panel's heads: the products of their images. MORE: what is folded may follow other panels.
  // `next` is a copy: its addresses stay in registers, while any store may change memory that is referred to.
  template <bool CONVERTS, bool MORE>
  PA_NOINLINE void multiply(const uint32_t *k, const uint32_t *q, Next next) const {
    const int64_t image = SIZE ? SIZE / 32 * TILE_WORDS : depth * TILE_WORDS;
    const TileKey<T> form;
    const vf lowest = floor;
    const __mmask16 more = this->more;
    const float *const s = of.s;
    float *const to = partial;
    vf weight[HT];
    take_weights(weight);
    if (!SIZE) fold_all();
    if (!SIZE && CONVERTS) convert_all(next);
    const auto beside = [&](int product) __attribute__((always_inline)) {
      PA_UNROLLED
      for (int key = KT * product; SIZE && key < KT * (product + 1); key++) {
        fold_key<MORE>(weight, lowest, more, s + key * W, to + key * W);
        if (!CONVERTS) continue;
        constexpr int BYTES = SIZE * (int)sizeof(T);
        PA_UNROLLED
        for (int b = 0; b < BYTES; b += 64) prefetch_l2_here(next.asked + key * BYTES + b);
        form.take((const T *)(next.from + key * BYTES), image_of(next.to, key, SIZE / 32), SIZE);
      }
    };
    const auto multiply_at = [&](int i) __attribute__((always_inline)) {
      const uint32_t *a = k + i * TILE_WORDS, *b = q + i * TILE_WORDS;
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      beside(4 * i);
      if (KT == 1) {
        _tile_loadd(7, b + image, 64);
        _tile_dpbf16ps(1, 4, 7);
        beside(4 * i + 1);
        _tile_loadd(6, b + 2 * image, 64);
        _tile_dpbf16ps(2, 4, 6);
        beside(4 * i + 2);
        _tile_loadd(7, b + 3 * image, 64);
        _tile_dpbf16ps(3, 4, 7);
      } else {
        _tile_loadd(5, a + image, 64);
        _tile_dpbf16ps(1, 5, 6);
        beside(4 * i + 1);
        _tile_loadd(7, b + image, 64);
        _tile_dpbf16ps(2, 4, 7);
        beside(4 * i + 2);
        _tile_dpbf16ps(3, 5, 7);
      }
      beside(4 * i + 3);
    };
    zero_sums();
    if (SIZE) {
      multiply_at(0);
      multiply_at(1);
      multiply_at(2);
      multiply_at(3);
    } else {
      for (int i = 0; i < depth; i++) multiply_at(i);
    }
    put_sums(of.s, TILE_WORDS, 2 * TILE_WORDS);
  }

  // Keys [KEY, END) of the step before, in a stream: sums over heads of each, of four, then of all.
  template <int KEY, int END>
  PA_ALWAYS static void fold_beside(const vf *weight, vf floor, const float *s, vf *four, vf *quarter) {
    if constexpr (KEY < END) {
      vf sum = vmax(floor, loadf(s + KEY * W)) * weight[0];
      in_register(sum);  // the order of additions
      PA_UNROLLED
      for (int i = 1; i < HT; i++) sum += vmax(floor, loadf(s + KEY * W + i * TILE_WORDS)) * weight[i];
      four[KEY % 4] = sum;
      if (KEY % 4 == 3) quarter[KEY / 4] = sums<1, 4>(four);
      fold_beside<KEY + 1, END>(weight, floor, s, four, quarter);
    }
  }
  // How many of them are folded beside a step's first products: none while sums leave their registers.
  static constexpr int folded_by(int product) { return product < 4 ? 0 : (product - 4) * 4 / 3; }
  // Asks for a key of a later step, and for one of the step after the next into the first cache.
  PA_ALWAYS static void ask(const char *far, const char *near) {
    PA_UNROLLED
    for (int b = 0; b < SIZE * (int)sizeof(T); b += 64) {
      prefetch_l2_here(far + b);
      prefetch(near + b);
    }
  }
  // `multiply` of a step in a stream. Between each two products, whose unit is busy for 16 cycles, lie half a key's
  // conversion, what is folded and the other half. The sums of the step before leave their registers beside the first
  // products, for those that stood behind the last ones would leave the unit idle. Returns that step's sums over heads.
  PA_NOINLINE static vf weave(const uint32_t *k, const uint32_t *q, float *s, const float *weights, vf floor, Next next,
                              const char *near) {
    constexpr int image = SIZE / 32 * TILE_WORDS, bytes = SIZE * (int)sizeof(T);
    const TileKey<T> form;
    vf weight[HT], four[4] = {}, quarter[4] = {};
    for (int i = 0; i < HT; i++) weight[i] = loadf(weights + i * W);
    __m512i seen = {};
#define PA_WOVEN(I, J, B)                                                                     \
  {                                                                                           \
    constexpr int key = 4 * I + J;                                                            \
    const T *from = (const T *)(next.from + key * bytes);                                     \
    _tile_loadd(B, q + J * image + I * TILE_WORDS, 64);                                       \
    form.template take_half<0>(from, image_of(next.to, key, SIZE / 32), seen);                \
    if (I == 0) {                                                                             \
      _tile_stored(J, s + J * TILE_WORDS, 64);                                                \
      _tile_zero(J);                                                                          \
    }                                                                                         \
    _tile_dpbf16ps(J, 4, B);                                                                  \
    fold_beside<folded_by(key), folded_by(key + 1)>(weight, floor, s, four, quarter);         \
    ask(next.asked + key * bytes, near + key * bytes);                                        \
    form.template take_half<1>(from, image_of(next.to, key, SIZE / 32), seen);                \
  }
#define PA_WOVEN_ROW(I)                       \
  _tile_loadd(4, k + I * TILE_WORDS, 64);     \
  PA_WOVEN(I, 0, 6) PA_WOVEN(I, 1, 7) PA_WOVEN(I, 2, 6) PA_WOVEN(I, 3, 7)
    PA_WOVEN_ROW(0)
    PA_WOVEN_ROW(1)
    PA_WOVEN_ROW(2)
    PA_WOVEN_ROW(3)
#undef PA_WOVEN_ROW
#undef PA_WOVEN
    return sums<4, 4>(quarter);
  }

  // The next ones; false where the table points outside the cache.
  bool find(int32_t &entry, Group &group) {
    Keys *run = group.runs;
    int count = 0;
    for (group.count = 0; group.count < INDEX_TILE; group.count += count, run++) {
      count = of.keys_from(entry, INDEX_TILE - group.count, *run);
      if (count < 0) return false;
      if (!count) break;
      for (int i = 0; of.x.scaled && i < count + 15; i += 16) prefetch_l2_here(run->scale + 4 * pa_min(i, count - 1));
    }
    *run = {0, 0, NULL, NULL};
    return true;
  }
  void take_factors(Group &group, float by) const {
    float *to = group.factors;
    for (const Keys *run = group.runs; run->count; to += run->count, run++) {
      for (int i = 0; i < run->count; i += W) {
        const __mmask16 there = (__mmask16)((1u << pa_min(W, run->count - i)) - 1);
        const vf scale = of.x.scaled ? (vf)_mm512_maskz_loadu_ps(there, (const float *)run->scale + i) : splat(1.0f);
        write(to + i, scale * splat(by));
      }
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
  PA_NOINLINE void leave(int token, int t, const float *factors) const {
    for (int i = 0; i < STEP; i += W) {
      vf sum[W];
      PA_UNROLLED
      for (int j = 0; j < W; j++) sum[j] = loadf(partial + (i + j) * W);
      const vf factor = (vf)(read<vu>(factors + t + i) & 0x7fffffffu);
      write(of.scores + (int64_t)token * INDEX_TILE + t + i, sums(sum) * factor);
    }
  }
  PA_NOINLINE void rank(const Group &group) {
    for (int i = 0; i < of.item.tokens; i++) {
      const float *mine = of.scores + (int64_t)i * INDEX_TILE;
      if (!of.x.within) of.rank_some(of.ranked[i], group.runs->first, mine, group.count);
      for (const Keys *run = group.runs; of.x.within && run->count; mine += run->count, run++) {
        of.rank_some(of.ranked[i], run->first, mine, run->count);
      }
    }
  }

  // One token's keys with heads of one panel: a step after another, whichever runs they are of. What is folded is of
  // the step before.
  bool in_stream() const {
    return SIZE && of.item.tokens == 1 && panels == 1 && !of.x.within && of.x.block_size % W == 0;
  }
  PA_NOINLINE bool choose_stream(float by) {
    constexpr int MOST = 8, RING = 16;  // runs that lines are asked for ahead; that are known
    struct Scored {
      const Keys *run;
      int t;
      vf factor[KT];
    };
    Keys runs[RING];
    int32_t entry = of.item.from;
    const int ahead = pa_max(1, pa_min(MOST, INDEX_TILE / of.x.block_size));
    uint32_t *const images = of.keys;
    const int64_t words = KT * depth * TILE_WORDS;
    int known = 0, turn = 0;
    by /= TileKey<T>::FACTOR;
    const auto find_to = [&](int last) {
      for (; known <= last; known++) {
        Keys &run = runs[known % RING];
        const int count = of.keys_from(entry, INDEX_TILE, run);
        if (count < 0) return false;
        if (!count) run = {0, 0, NULL, room};
        for (int i = 0; of.x.scaled && i < count; i += 16) prefetch_l2_here(run.scale + 4 * i);
      }
      return true;
    };
    const auto piece = [&](const Keys &run, int t) {  // STEP keys from `t` on
      const char *from = run.at + (int64_t)t * bytes;
      const int count = run.count - t;
      return count >= STEP ? from : count > 0 ? (const char *)__builtin_memcpy(room, from, (int64_t)count * bytes) : room;
    };
    const auto end = [&](const Scored &of_run, const vf *woven) __attribute__((always_inline)) {
      for (int i = 0; i < KT; i++) {
        vf sum[W];
        PA_UNROLLED
        for (int j = 0; j < W && !woven; j++) sum[j] = loadf(partial + (i * W + j) * W);
        const vf all = woven ? *woven : sums(sum);
        write(of.scores + of_run.t + i * W, all * (vf)((vu)of_run.factor[i] & 0x7fffffffu));
      }
      if (of_run.t + STEP >= of_run.run->count) of.rank_some(*of.ranked, of_run.run->first, of.scores, of_run.run->count);
    };
    if (!find_to(ahead)) return false;
    convert_all({piece(runs[0], 0), NULL, images});
    Scored before = {NULL, 0, {}};
    for (int r = 0; runs[r % RING].count; r++) {
      if (!find_to(r + ahead + 1)) return false;
      const Keys &run = runs[r % RING], &next = runs[(r + 1) % RING], &far = runs[(r + ahead) % RING];
      for (int t = 0; t < run.count; t += STEP, turn ^= 1) {
        Scored now = {&run, t, {}};
        uint32_t *const image = images + turn * words;
        for (int i = 0; i < KT; i++) {
          const int left = run.count - t - i * W;
          const __mmask16 there = left >= W ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
          const vf scale = of.x.scaled ? (vf)_mm512_maskz_loadu_ps(there, (const float *)run.scale + t + i * W) : splat(1.0f);
          now.factor[i] = scale * splat(by);
          turn_signs(now.factor[i], image + i * depth * TILE_WORDS);
        }
        const char *from = t + STEP < run.count ? piece(run, t + STEP) : piece(next, 0);
        const Next then = {from, far.count ? far.at + (int64_t)t * bytes : room, images + (turn ^ 1) * words};
        if constexpr (WOVEN) {
          const int later = t + 2 * STEP - run.count;  // of the next run
          const char *near = later < 0 ? run.at + (int64_t)(t + 2 * STEP) * bytes : next.count ? next.at + (int64_t)later * bytes : room;
          const vf sum = weave(image, of.packed, of.s, weights, floor, then, near);
          if (before.run) end(before, &sum);
        } else {
          multiply<true, false>(image, of.packed, then);
          if (before.run) end(before, NULL);
        }
        before = now;
      }
    }
    if (WOVEN) put_sums(of.s, TILE_WORDS, 2 * TILE_WORDS);
    fold_all();
    if (before.run) end(before, NULL);
    return true;
  }

  // All keys, a group after another. What is folded is of the visit before, which may be the last group's.
  PA_NOINLINE bool choose(float by) {
    const int tokens = of.item.tokens;
    const int64_t panel_words = HT * depth * TILE_WORDS, block_words = block * depth * 16;
    int32_t entry = of.item.from;
    const Group *folded = NULL;
    if (in_stream()) return choose_stream(by);
    int token = 0, t = 0, panel = 0, turn = 0;  // of what is folded; of the block in use
    const auto end_fold = [&]() __attribute__((always_inline)) {
      if (!folded || panel < panels - 1) return;
      leave(token, t, folded->factors);
      if (token == tokens - 1 && t + STEP >= folded->count) rank(*folded);
    };
    if (!find(entry, groups[0])) return false;
    source.start(groups->runs);
    later = source;
    const auto convert = [&](uint32_t *to, int left) {
      for (; left > 0; left -= STEP, to += KT * depth * TILE_WORDS) convert_all(next_step(to, pa_min(STEP, left)));
    };
    convert(of.keys, pa_min(block, groups->count));
    by /= TileKey<T>::FACTOR;
    for (int g = 0; groups[g].count > 0; g = (g + 1) % 3) {
      Group &group = groups[g], &next = groups[(g + 1) % 3];
      if (!find(entry, next)) return false;
      take_factors(group, by);
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
                panels == 1 ? multiply<true, false>(k, q, some) : multiply<true, true>(k, q, some);
                left -= STEP;
                to += KT * depth * TILE_WORDS;
              } else {
                multiply<false, true>(k, q, Next());
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
    fold_all();
    end_fold();
    return true;
  }
};

template <class T>
static bool choose_by_registers(Index<T, TileEngine> &of, float by) {
  const auto by_shape = [&](auto keys) {
    using Of = Index<T, TileEngine>;
    if (of.x.head_size == 128) return IndexProducts<Of, T, keys(), 128>(of).choose(by);
    return IndexProducts<Of, T, keys(), 0>(of).choose(by);
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
