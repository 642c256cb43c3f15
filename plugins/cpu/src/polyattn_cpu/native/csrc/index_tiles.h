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
    if (size != APART) return;
    const vu a = read<vu>(to), b = read<vu>(to + TILE_WORDS);
    write(to, halves_of(a, b, 0));
    write(to + TILE_WORDS, halves_of(a, b, 1));
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
  PA_ALWAYS void take(const e4m3 *from, uint32_t *to, int size) const {
    int d = 0;
    for (; d + 128 <= size; d += 128, to += 4 * TILE_WORDS) {
      if (are_usual(_mm512_max_epu8(line(from + d, to), line(from + d + 64, to + 2 * TILE_WORDS)))) continue;
      any(from + d, to, 64);
      any(from + d + 64, to + 2 * TILE_WORDS, 64);
    }
    for (; d + 64 <= size; d += 64, to += 2 * TILE_WORDS) {
      if (!are_usual(line(from + d, to))) any(from + d, to, 64);
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

// KT tile registers of keys with HT of heads at a time. A step's sums are folded beside the next one's products, its
// successor's keys are converted there, and those of the next group are asked for. All that a step touches, and what
// streams through, must stay in the first cache: a second place for the sums made it a third slower.
template <class Of, class T, int KT>
struct IndexProducts {
  static constexpr int HT = 4 / KT, STEP = KT * 16;  // keys
  static constexpr int LINES = 2 * KT * (int)sizeof(T);  // that are asked for beside a product
  // Keys that are scored together: where they lie, and their scores' factors.
  struct Group {
    Keys runs[INDEX_TILE + 1];  // behind the last one, one of none
    int count;
    float factors[INDEX_TILE + W];
  };
  Of &of;
  const int panels, depth, block;  // of a token; tile registers of a key; keys that are converted at a time
  float *const partial;            // [STEP][W]
  Group groups[3];                 // to be ranked, multiplied and converted

  explicit IndexProducts(Of &of)
      : of(of), panels(of.rows / (HT * W)), depth(of.is.k / 16), block(of.item.tokens > 1 ? 64 : STEP),
        partial(of.s + 4 * TILE_WORDS) {}

  // What the vector units do beside a product. SIZE: of a key, where the compiler knows it, else 0.
  template <int SIZE>
  struct Beside {
    const TileKey<T> form;
    const vf floor;
    const float *const sums;        // of one panel: [head / 16][key][head]
    float *const partial;
    const int size_, image;         // of a key; words of 16 keys' images
    // What is folded: the panel's weights, and the next key.
    vf weight[HT] = {};
    __mmask16 more = 0;             // not of a token's first panel
    int key = 0;
    // Keys that are converted: `here` of a run from `from` on. `turn` counts from below 0, where it waits, to `count`.
    const Keys *run = NULL;
    const char *from = NULL;
    int here = 0, turn = 0, count = 0;
    uint32_t *to = NULL;
    // Lines that are asked for: the rest of a run.
    const Keys *asked = NULL;
    const char *line = NULL, *end = NULL;

    PA_ALWAYS int size() const { return SIZE ? SIZE : size_; }
    PA_ALWAYS int depth() const { return SIZE ? SIZE / 32 : image / TILE_WORDS; }
    PA_ALWAYS int image_words() const { return depth() * TILE_WORDS; }
    PA_ALWAYS int bytes() const { return size() * (int)sizeof(T); }
    PA_ALWAYS void fold_key() {
      vf sum = (vf)_mm512_maskz_loadu_ps(more, partial + key * W);
      PA_UNROLLED
      for (int i = 0; i < HT; i++) sum += vmax(floor, loadf(sums + key * W + KT * i * TILE_WORDS)) * weight[i];
      write(partial + key * W, sum);
      key++;
    }
    PA_ALWAYS void fold_rest() {
      while (key < STEP) fold_key();
    }
    PA_ALWAYS void convert_from(const Keys *first) {
      run = first;
      from = first->at;
      here = first->count;
    }
    // Keys for images at `where`, beside the products from the `wait`th on.
    PA_ALWAYS void convert_to(uint32_t *where, int keys, int wait) {
      to = where;
      count = keys;
      turn = -wait;
    }
    PA_ALWAYS void convert() {
      form.take((const T *)from, to, size());
      to += 16;
      if ((++turn & 15) == 0) to += image_words() - TILE_WORDS;
      from += bytes();
      if (--here == 0) convert_from(run + 1);
    }
    PA_ALWAYS void convert_rest() {
      for (turn = pa_max(turn, 0); turn < count;) convert();
    }
    PA_ALWAYS void ask_from(const Keys *first) {
      asked = first;
      line = first->at;
      end = line + (int64_t)first->count * bytes();
    }
    PA_ALWAYS void operator()() {
      PA_UNROLLED
      for (int i = 0; i < KT; i++) {
        if (SIZE == 128 || key < STEP) fold_key();
      }
      if (line < end) {
        PA_UNROLLED
        for (int i = 0; i < LINES; i++) prefetch_l2_here(line + 64 * i);
        line += 64 * LINES;
        if (line >= end) ask_from(asked + 1);
      }
      PA_UNROLLED
      for (int i = 0; i < KT; i++) {
        if (turn < 0) {
          turn++;
          break;
        }
        if (turn < count) convert();
      }
    }
  };

  // Of a step's keys and a panel's heads: the products of their images.
  template <class Beside>
  PA_ALWAYS void multiply(const uint32_t *k, const uint32_t *q, float *to, Beside &beside) const {
    const int64_t image = beside.image_words();
    zero_sums();
    PA_UNROLLED
    for (int i = 0; i < beside.depth(); i++, k += TILE_WORDS, q += TILE_WORDS) {
      _tile_loadd(4, k, 64);
      _tile_loadd(6, q, 64);
      _tile_dpbf16ps(0, 4, 6);
      beside();
      if (KT == 1) {
        _tile_loadd(7, q + image, 64);
        _tile_dpbf16ps(1, 4, 7);
        beside();
        _tile_loadd(6, q + 2 * image, 64);
        _tile_dpbf16ps(2, 4, 6);
        beside();
        _tile_loadd(7, q + 3 * image, 64);
        _tile_dpbf16ps(3, 4, 7);
        beside();
      } else {
        _tile_loadd(5, k + image, 64);
        _tile_dpbf16ps(1, 5, 6);
        beside();
        _tile_loadd(7, q + image, 64);
        _tile_dpbf16ps(2, 4, 7);
        beside();
        _tile_dpbf16ps(3, 5, 7);
        beside();
      }
    }
    beside.fold_rest();
    put_sums(to, TILE_WORDS, 2 * TILE_WORDS);
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
  void turn_signs(const float *factors, uint32_t *images) const {
    for (int t = 0; t < block; t += W) {
      uint32_t negative = lanes_of((vi)(read<vi>(factors + t) < vi{}));
      for (; __builtin_expect(negative != 0, 0); negative &= negative - 1) {
        uint32_t *key = images + t * depth * 16 + __builtin_ctz(negative) * 16;
        for (int i = 0; i < depth; i++, key += TILE_WORDS) write(key, read<vu>(key) ^ 0x80008000u);
      }
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

  // All keys, a group after another. What is folded is of the panel before, which may be the last group's.
  template <int SIZE>
  PA_NOINLINE bool choose(float by) {
    const int tokens = of.item.tokens;
    const int64_t image = depth * TILE_WORDS, panel_words = HT * image, block_words = block * depth * 16;
    Beside<SIZE> beside = {{}, splat(of.x.relu ? 0.0f : -INFINITY), of.s, partial, of.x.head_size, (int)image};
    int32_t entry = of.item.from;
    const Group *folded = NULL;
    int token = 0, t = 0, panel = 0, turn = 0;  // of what is folded; of the block in use
    const auto end_fold = [&]() __attribute__((always_inline)) {
      if (!folded || panel < panels - 1) return;
      leave(token, t, folded->factors);
      if (token == tokens - 1 && t + STEP >= folded->count) rank(*folded);
    };
    if (!find(entry, groups[0])) return false;
    beside.convert_from(groups->runs);
    beside.convert_to(of.keys, pa_min(block, groups->count), 0);
    beside.convert_rest();
    by /= TileKey<T>::FACTOR;
    for (int g = 0; groups[g].count > 0; g = (g + 1) % 3) {
      Group &group = groups[g], &next = groups[(g + 1) % 3];
      if (!find(entry, next)) return false;
      take_factors(group, by);
      beside.ask_from(next.runs);
      for (int from = 0; from < group.count; from += block, turn ^= 1) {
        const int later = from + block;
        uint32_t *keys = of.keys + turn * block_words;
        if (later >= group.count) beside.convert_from(next.runs);
        beside.convert_to(of.keys + (turn ^ 1) * block_words,
                          pa_min(block, later < group.count ? group.count - later : next.count),
                          pa_max(0, 4 * depth * panels * tokens * (block / STEP) - block));
        if (of.x.scaled) turn_signs(group.factors + from, keys);
        for (int i = 0; i < tokens; i++) {
          for (int step = 0; step < block && from + step < group.count; step += STEP) {
            for (int p = 0; p < panels; p++) {
              multiply(keys + step * depth * 16, of.packed + (i * panels + p) * panel_words, of.s, beside);
              end_fold();
              folded = &group;
              token = i;
              t = from + step;
              panel = p;
              beside.more = p ? 0xffff : 0;
              beside.key = 0;
              PA_UNROLLED
              for (int v = 0; v < HT; v++) beside.weight[v] = loadf(of.weights + i * of.rows + (HT * p + v) * W);
            }
          }
        }
        beside.convert_rest();
      }
    }
    beside.fold_rest();
    end_fold();
    return true;
  }
};

template <class T>
static bool choose_by_registers(Index<T, TileEngine> &of, float by) {
  const auto by_shape = [&](auto keys) {
    IndexProducts<Index<T, TileEngine>, T, keys()> products(of);
    return of.x.head_size == 128 ? products.template choose<128>(by) : products.template choose<0>(by);
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
