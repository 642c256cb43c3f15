// An indexer's products by AMX tiles: scores of many heads. Included by index.h.
//
// S [key][head] = K Q^T: of 32 keys and 32 heads at a time. A key's sum over heads is then a vector of partial
// sums, and needs no matrix turned. A product takes 16 cycles of a unit of its own; beside it the vector units fold
// the sums of the products before it, and make bfloat16 of a key that comes later.

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
  static PA_NOINLINE void any(const e4m3 *from, uint32_t *to, int size) {
    for (int d = 0; d < size; d += W) {
      e4m3 some[W] = {};
      __builtin_memcpy(some, from + d, pa_min(W, size - d));
      const vf part = part_256(some);
      write(to + d / 32 * TILE_WORDS + d % 32 / 2, __builtin_convertvector((vu)part >> 16, vh));
    }
  }
  // Bytes and words of these. A compiler that knew them would make them again for each key, by the port that is busy.
  static PA_ALWAYS __m512i splat_bits(uint32_t bits) {
    vf some = (vf)(bits - vu{});
    in_register(some);
    return (__m512i)some;
  }
  const __m512i kept = splat_bits(0x87f087f0), bias = splat_bits(0x38003800), lowest = splat_bits(0xf0f0f0f0),
                highest = splat_bits(0xeeeeeeee);

  PA_ALWAYS __m512i normal(const e4m3 *from) const {
    const __m512i wide = _mm512_cvtepi8_epi16(read<__m256i>(from));
    return _mm512_ternarylogic_epi32(_mm512_slli_epi16(wide, 4), kept, bias, 0xea);  // a & b | c
  }
  PA_ALWAYS bool has_others(const e4m3 *from) const {
    const __m512i x = _mm512_loadu_si512(from);  // twice that has no sign
    return _mm512_cmpge_epu8_mask(_mm512_add_epi8(_mm512_add_epi8(x, x), lowest), highest) != 0;
  }
  PA_ALWAYS void take(const e4m3 *from, uint32_t *to, int size) const {
    int d = 0;
    for (; d + 64 <= size; d += 64, to += 2 * TILE_WORDS) {
      write(to, normal(from + d));
      write(to + TILE_WORDS, normal(from + d + 32));
      if (__builtin_expect(has_others(from + d), 0)) any(from + d, to, 64);
    }
    if (d < size) any(from + d, to, size - d);
  }
};

template <class Of, class T>
struct IndexProducts {
  static constexpr int STEP = 32;  // keys
  static constexpr float FACTOR = TileKey<T>::FACTOR;
  Of &of;
  const int panels, depth, block;  // of a token; tile registers of a key; keys that are converted at a time
  float *const partial;            // [STEP][W]
  int turn = 0;                    // of the block in use
  bool begins = true;

  explicit IndexProducts(Of &of)
      : of(of), panels(of.rows / (2 * W)), depth(of.is.k / 16),
        block(of.item.tokens > 1 ? 2 * STEP : STEP), partial(of.s + 2 * 4 * TILE_WORDS) {}

  // Images of 16 keys each.
  int64_t image_words() const { return depth * TILE_WORDS; }
  uint32_t *block_of(int turn) const { return of.keys + (int64_t)turn * block * depth * 16; }

  // What the vector units do beside a product. SIZE: of a key, where the compiler knows it, else 0.
  template <int SIZE>
  struct Beside {
    const IndexProducts &products;
    const TileKey<T> form;
    const vf floor;
    float *const partial;
    // Sums that are folded, of one panel: [head / 16][key / 16][key][head].
    const float *c;
    vf weight[2];
    __mmask16 more;    // not of a token's first panel
    int key;           // to be folded next
    // Keys that are converted, from the `wait`th product on, and where to.
    const char *const *from, *const *stop;
    const char *const *scale;
    uint32_t *to;
    int wait;
    const char *const *asked, *const *there;  // keys that are asked for

    PA_ALWAYS int size() const { return SIZE ? SIZE : products.of.x.head_size; }
    PA_ALWAYS void fold_key() {
      const float *mine = c + key * W;
      vf sum = (vf)_mm512_maskz_loadu_ps(more, partial + key * W);
      PA_UNROLLED
      for (int i = 0; i < 2; i++) sum += vmax(floor, loadf(mine + 2 * i * TILE_WORDS)) * weight[i];
      write(partial + key * W, sum);
      key++;
    }
    PA_ALWAYS void convert() {
      form.take((const T *)*from, to, size());
      if (scale) {
        int32_t bits;
        __builtin_memcpy(&bits, *scale, 4);
        if (__builtin_expect(bits < 0, 0)) products.negate(to);
        scale++;
      }
      from++;
      to += 16;
      if (((to - products.of.keys) & (TILE_WORDS - 1)) == 0) to += products.image_words() - TILE_WORDS;
    }
    PA_ALWAYS void operator()() {
      if (key < STEP) {
        fold_key();
        fold_key();
      }
      if (asked < there) {
        const char *next = *asked++;
        for (int b = 0; b < size() * (int)sizeof(T); b += 64) prefetch_l2_here(next + b);
      }
      if (--wait < 0 && from < stop) convert();
    }
  };

  // A key's products are then of the other sign, and its scale has none.
  PA_NOINLINE void negate(uint32_t *to) const {
    for (int i = 0; i < depth; i++, to += TILE_WORDS) write(to, read<vu>(to) ^ 0x80008000u);
  }
  // Sums over heads of a token's keys from `t` on, as scores.
  PA_NOINLINE void leave(int token, int t) const {
    for (int i = 0; i < STEP; i += W) {
      vf sum[W];
      PA_UNROLLED
      for (int j = 0; j < W; j++) sum[j] = loadf(partial + (i + j) * W);
      const vf factor = (vf)(read<vu>(of.factors + t + i) & 0x7fffffffu);
      write(of.scores + (int64_t)token * INDEX_TILE + t + i, sums(sum) * factor);
    }
  }

  // Scores of a tile's `count` keys; the first of the `next` ones behind it are converted, too.
  void score(int count, int next) {
    of.x.head_size == 128 ? score_by<128>(count, next) : score_by<0>(count, next);
  }
  template <int SIZE>
  PA_NOINLINE void score_by(int count, int next) {
    const int tokens = of.item.tokens;
    Beside<SIZE> beside = {*this, {}, splat(of.x.relu ? 0.0f : -INFINITY), partial, NULL, {}, 0, STEP,
                     of.at, of.at + pa_min(block, count), of.x.scaled ? of.scale_at : NULL, block_of(turn),
                     0, of.at + count, of.at + count + next};
    if (begins) {
      while (beside.from < beside.stop) beside.convert();
      begins = false;
    }
    int token = -1, t = 0, panel = 0, visit = 0;  // of what is folded
    const auto end_fold = [&]() __attribute__((always_inline)) {
      while (beside.key < STEP) beside.fold_key();
      if (token >= 0 && panel == panels - 1) leave(token, t);
    };
    for (int from = 0; from < count; from += block, turn ^= 1) {
      const int later = pa_min(from + block, count + next);
      beside.from = of.at + later;
      if (of.x.scaled) beside.scale = of.scale_at + later;
      beside.stop = of.at + pa_min(later + block, count + next);
      beside.to = block_of(turn ^ 1);
      beside.wait = pa_max(0, 4 * depth * panels * tokens * (block / STEP) - block);
      for (int i = 0; i < tokens; i++) {
        for (int step = 0; step < block && from + step < count; step += STEP) {
          for (int p = 0; p < panels; p++, visit++) {
            float *c = of.s + visit % 2 * 4 * TILE_WORDS;
            const uint32_t *q = of.packed + (int64_t)(i * panels + p) * 2 * image_words();
            const uint32_t *k = block_of(turn) + step / 16 * image_words();
            tiles<false>(k, image_words(), q, image_words(), c, 2 * TILE_WORDS, depth, beside);
            end_fold();
            token = i;
            t = from + step;
            panel = p;
            beside.c = c;
            beside.more = p ? 0xffff : 0;
            beside.key = 0;
            for (int v = 0; v < 2; v++) beside.weight[v] = loadf(of.weights + i * of.rows + (2 * p + v) * W);
          }
        }
      }
      while (beside.from < beside.stop) beside.convert();
    }
    end_fold();
  }
};

// Many heads fill tile registers; fewer, and what bfloat16 doesn't hold, are the other instruction sets'.
static int64_t index_scratch(const IndexRun *run, int32_t tokens, int32_t entries) {
  return index_scratch_beside<TileEngine>(pa_kernels_avx512_bf16, run, tokens, entries);
}
static void index_item(IndexRun *run, const IndexItem &item, const Room &scratch) {
  const pa_index &x = *run->index;
  const bool wanted = x.choices <= 1 && index_rows(x) >= W;
  index_item_beside<TileEngine>(pa_kernels_avx512_bf16, wanted, run, item, scratch);
}
