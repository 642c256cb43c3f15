// Decode over rows of codes by tile registers, of groups of 32 elements: one multiplies 16 keys, or as many elements
// of 32 keys, by all rows of a head at once. Codes are numbers of bfloat16; keys' scales are their scores', values'
// are the weights'. Included by row_keys.h.

constexpr int TILE_GROUP = 32;  // elements
constexpr int TILE_BYTES = 1024;
// Tile registers: 0 to 3 are sums, as a product's latency is that of three more; 4 and 5 hold what is stored, 6 and 7
// queries or weights. They aren't renamed: what follows on one waits.

// A query in pairs of bfloat16, [word][j], as PairTable's codes lie; it takes half the room.
PA_ONCE void to_tile_rows(float *x, int size) {
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
  for (int d = 0; d < size; d += TILE_GROUP) {
    const __m512i half = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + d + W), _mm512_loadu_ps(x + d));
    _mm512_storeu_si512(x + d / 2, _mm512_shuffle_epi8(half, pairs));
  }
}
// Sums of values back in their order: of a group they lie [half][code][word].
PA_ONCE void tile_sums_in_order(float *x, int size) {
  for (int d = 0; d < size; d += TILE_GROUP, x += TILE_GROUP) {
    float each[TILE_GROUP];
    __builtin_memcpy(each, x, sizeof each);
    for (int i = 0; i < TILE_GROUP; i++) x[i % 4 * 8 + i / 16 * 4 + i % 16 / 4] = each[i];
  }
}
PA_ONCE void begin_code_tiles(int rows) {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.rows[i] = (uint8_t)(i / 2 == 2 ? 16 : rows);
  load_tile_config(&config);
}

// The numbers of 16 keys as rows of tiles, a tile for each group; and their scales.
template <int SCALE, class Asks>
PA_NOINLINE void tiles_of_keys(const Codes &of, const PairTable &table, const char *const *keys, char *to, vf *by,
                               Asks asks) {
  vf none[4];
  for (int word = 0; word < of.words; word += 4, to += TILE_BYTES) {
    const int group = word / 4;
    if (word % W == 0) turned_scales<SCALE>(keys, of.scales + SCALE_BYTES<SCALE> * group, of.groups - group, by + group, none);
    vf turned[4];
    turned_words<true>(keys, of.offset + 4 * word, 16, turned);
    Asks::template keys<2>(asks, 0);
    PA_UNROLLED
    for (int w = 0; w < 4; w++) {
      Asks::template keys<1>(asks, 0);
      PA_UNROLLED
      for (int j = 0; j < PairTable::EACH; j++) {
        _mm512_storeu_si512(to + (w * PairTable::EACH + j) * 64, table((__m512i)turned[w], j));
      }
    }
  }
}
// The compiler takes tiles to read and write nothing.
PA_INLINE void all_written() { __asm__ volatile("" : : : "memory"); }
// Products of groups with rows of queries: of each group [row][key].
PA_INLINE void tile_products(const char *tiles, int groups, const float *q, int ldq, int rows, float *to) {
  const int64_t step = 4 * (int64_t)ldq;
  all_written();
  for (; groups > 0; groups -= 4, tiles += 4 * TILE_BYTES, q += 2 * TILE_GROUP, to += 4 * rows * W) {
#define PA_GROUP(I, STORED, ROWS)                                    \
  if (groups > I) {                                                  \
    _tile_zero(I);                                                   \
    _tile_loadd(ROWS, q + I * TILE_GROUP / 2, step);                 \
    _tile_loadd(STORED, tiles + I * TILE_BYTES, 64);                 \
    _tile_dpbf16ps(I, ROWS, STORED);                                 \
  }
    PA_GROUP(0, 4, 6)
    PA_GROUP(1, 5, 7)
    PA_GROUP(2, 4, 6)
    PA_GROUP(3, 5, 7)
#undef PA_GROUP
    _tile_stored(0, to, 64);
    if (groups > 1) _tile_stored(1, to + rows * W, 64);
    if (groups > 2) _tile_stored(2, to + 2 * rows * W, 64);
    if (groups > 3) _tile_stored(3, to + 3 * rows * W, 64);
  }
  all_written();
}
template <int ROWS>
PA_NOINLINE void add_tile_scores(const float *products, const vf *by, int groups, float *s, int lds) {
  vf acc[ROWS < 4 ? 4 : ROWS];
  PA_UNROLLED
  for (int r = 0; r < (ROWS < 4 ? 4 : ROWS); r++) acc[r] = vf{};
  for (int g = 0; g < groups; g++, products += ROWS * W) {
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) acc[r] += loadf(products + r * W) * by[g];
  }
  put_turned<ROWS>(acc, s, lds);
}

// The weights of 16 keys, a vector of each row.
template <int ROWS>
PA_INLINE void turned_weights(const float *p, int ldp, vf *to) {
  PA_UNROLLED
  for (int r = 0; r < ROWS; r += 4) {
    PA_UNROLLED
    for (int i = 0; i < 4; i++) {
      auto key = [&](int m) __attribute__((always_inline)) { return (const char *)(p + (int64_t)(4 * m + i) * ldp + r); };
      to[r + i] = (vf)four_rows<true>(key(0), key(1), key(2), key(3), 16);
    }
    turn_quarters(to + r);
  }
}
// The weights of 32 keys, of which `count` are, times each group's scales, as rows of a tile for each group.
template <int SCALE, int ROWS>
PA_NOINLINE void tiles_of_weights(const Codes &of, int count, const float *p, int ldp, char *to) {
  constexpr int SOME = ROWS < 4 ? 4 : ROWS;
  for (int group = 0; group < of.groups; group += 4) {
    const int some = pa_min(4, of.groups - group);
    vf by[2][4], none[4], weight[2][SOME];
    PA_UNROLLED
    for (int half = 0; half < 2; half++) {
      const int first = half * W;
      turned_scales<SCALE>(of.rows + first, of.scales + SCALE_BYTES<SCALE> * group, of.groups - group, by[half], none);
      turned_weights<SOME>(p + (int64_t)first * ldp, ldp, weight[half]);
    }
    const __mmask32 there = count >= 32 ? ~0u : (1u << count) - 1;
    for (int g = 0; g < some; g++) {
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)(weight[1][r] * by[1][g]), (__m512)(weight[0][r] * by[0][g]));
        _mm512_storeu_si512(to + ((group + g) * ROWS + r) * 64, _mm512_maskz_mov_epi16(there, both));
      }
    }
  }
}
// The numbers of 32 keys' values, two tiles for each group.
template <class Asks>
PA_NOINLINE void tiles_of_values(const Codes &of, const PairTable &table, char *to, Asks asks) {
  const __m512i code = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                        0x0004000400040004, 0x0004000400040004, 0, 0);
  for (int t = 0; t < 32; t += 2, to += 64) {
    Asks::template values<128>(asks, t);
    const char *a = of.rows[t] + of.offset, *b = of.rows[t + 1] + of.offset;
    for (int g = 0; g < of.words / 4; g++) {
      const __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(a + 16 * g)));
      const __m512i y = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(b + 16 * g)));
      const __m512i lower = _mm512_mask_blend_epi16(0xaaaaaaaau, x, _mm512_slli_epi32(y, 16));
      const __m512i upper = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y);
      _mm512_storeu_si512(to + 2 * g * TILE_BYTES, _mm512_permutexvar_epi16(_mm512_srlv_epi16(lower, code), table.all));
      _mm512_storeu_si512(to + (2 * g + 1) * TILE_BYTES, _mm512_permutexvar_epi16(_mm512_srlv_epi16(upper, code), table.all));
    }
  }
}
// o[row] += weights times values of 32 keys, a tile for each 16 elements.
PA_INLINE void add_tile_values(const char *weights, const char *values, int groups, int rows, float *o, int ldo) {
  const int64_t step = 4 * (int64_t)ldo;
  all_written();
  for (; groups > 0; groups -= 2, weights += 2 * rows * 64, values += 4 * TILE_BYTES, o += 4 * W) {
#define PA_PART(I, STORED, ROWS)                  \
  _tile_loadd(I, o + I * W, step);                \
  _tile_loadd(STORED, values + I * TILE_BYTES, 64); \
  _tile_dpbf16ps(I, ROWS, STORED);
    _tile_loadd(6, weights, 64);
    PA_PART(0, 4, 6)
    PA_PART(1, 5, 6)
    if (groups > 1) {
      _tile_loadd(7, weights + rows * 64, 64);
      PA_PART(2, 4, 7)
      PA_PART(3, 5, 7)
    }
#undef PA_PART
    _tile_stored(0, o, step);
    _tile_stored(1, o + W, step);
    if (groups > 1) {
      _tile_stored(2, o + 2 * W, step);
      _tile_stored(3, o + 3 * W, step);
    }
  }
  all_written();
}

// Rows of int8 by products of bytes, exact in 32 bits. An integer's upper and lower byte are columns or rows r and 8 + r
// of a tile register.

// ROWS queries as tiles of 64 elements each, and their units.
template <int ROWS>
PA_ONCE void tiles_of_queries(const float *q, int ldq, int size, char *to, float *units) {
  __builtin_memset(to, 0, (int64_t)size / 64 * TILE_BYTES);
  __builtin_memset(units, 0, 8 * sizeof *units);  // of no row: what lies there may be subnormal, and slow
  for (int r = 0; r < ROWS; r++, q += ldq) {
    vf most = vf{};
    for (int d = 0; d < size; d += W) most = larger(most, loadf(q + d));
    const ByteUnit is(most);
    units[r] = is.unit;
    for (int d = 0; d < size; d += W) {
      const __m512i x = _mm512_cvtps_epi32((__m512)(loadf(q + d) * splat(is.by)));
      char each[2][16];
      _mm_storeu_si128((__m128i *)each[0], upper_bytes(x));
      _mm_storeu_si128((__m128i *)each[1], lower_bytes(x));
      for (int i = 0; i < 4; i++) {
        char *row = to + (int64_t)(d + 4 * i) / 4 * 64;
        __builtin_memcpy(row + 4 * r, each[0] + 4 * i, 4);
        __builtin_memcpy(row + 32 + 4 * r, each[1] + 4 * i, 4);
      }
    }
  }
}
PA_INLINE void store_sums(int32_t (*to)[16][16]) {
  _tile_stored(0, to[0], 64);
  _tile_stored(1, to[1], 64);
  _tile_stored(2, to[2], 64);
  _tile_stored(3, to[3], 64);
}
// Rows of 16 keys, `step` bytes apart.
struct ByteRows {
  const char *at;
  int64_t step;
};
// Scores of 64 keys with ROWS queries.
template <int ROWS, class Asks>
PA_NOINLINE void byte_tile_scores(const ByteRows *keys, RowScales scales, int size, const char *queries, const float *units,
                                  float *s, int lds, Asks asks) {
  alignas(64) int32_t sums[4][16][16];
  all_written();
  zero_sums();
  for (int d = 0; d < size; d += 64, queries += TILE_BYTES) {
    _tile_loadd(6, queries, 64);
    _tile_loadd(4, keys[0].at + d, keys[0].step);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, keys[1].at + d, keys[1].step);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(4, keys[2].at + d, keys[2].step);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(5, keys[3].at + d, keys[3].step);
    _tile_dpbssd(3, 5, 6);
  }
  store_sums(sums);
  all_written();
  const __m256 unit = _mm256_loadu_ps(units);
  for (int i = 0; i < 64; i++, s += lds) {
    Asks::template keys<2>(asks, 0);
    const int32_t *from = sums[i / 16][i % 16];
    const __m256i high = _mm256_load_si256((const __m256i *)from), low = _mm256_load_si256((const __m256i *)(from + 8));
    const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low));
    const __m256 by = _mm256_mul_ps(unit, _mm256_set1_ps(scales[i]));
    _mm256_mask_storeu_ps(s, (__mmask8)((1 << ROWS) - 1), _mm256_mul_ps(sum, by));
  }
}
// The weights of up to 64 keys times their scales, as a tile; and their units.
template <int ROWS>
PA_NOINLINE void tile_of_byte_weights(RowScales scales, int count, const float *p, int ldp, char *to, float *units) {
  constexpr int SOME = ROWS < 4 ? 4 : ROWS;
  vf weight[4][SOME], most[ROWS];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) most[r] = vf{};
  for (int part = 0; part < 4; part++) {
    const int first = part * W, left = pa_max(0, count - first);
    const __mmask16 there = (__mmask16)(left >= W ? 0xffff : (1 << left) - 1);
    if (!there) {
      for (int r = 0; r < SOME; r++) weight[part][r] = vf{};
      continue;
    }
    const vf by = one_of_each(scales.from(first));
    turned_weights<SOME>(p + (int64_t)first * ldp, ldp, weight[part]);
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      weight[part][r] = (vf)_mm512_maskz_mul_ps(there, (__m512)weight[part][r], (__m512)by);
      most[r] = larger(most[r], weight[part][r]);
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    const ByteUnit is(most[r]);
    units[r] = is.unit;
    PA_UNROLLED
    for (int part = 0; part < 4; part++) {
      const __m512i x = _mm512_cvtps_epi32((__m512)(weight[part][r] * splat(is.by)));
      _mm_storeu_si128((__m128i *)(to + r * 64 + part * 16), upper_bytes(x));
      _mm_storeu_si128((__m128i *)(to + (8 + r) * 64 + part * 16), lower_bytes(x));
    }
  }
}
// 16 elements of each four of 64 keys' values beside one another, a tile for each.
template <class Asks>
PA_NOINLINE void tiles_of_bytes(const char *const *rows, int64_t offset, int size, char *to, Asks asks) {
  const __m512i turn = _mm512_set_epi32(0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a, 0x39291909, 0x38281808,
                                        0x37271707, 0x36261606, 0x35251505, 0x34241404, 0x33231303, 0x32221202, 0x31211101, 0x30201000);
  for (int t = 0; t < 64; t += 4, to += 64) {
    for (int d = 0; d < size; d += 16) {
      Asks::template values<64>(asks, t);
      const __m512i x = four_rows<true>(rows[t] + offset + d, rows[t + 1] + offset + d, rows[t + 2] + offset + d, rows[t + 3] + offset + d, 16);
      _mm512_storeu_si512(to + d / 16 * TILE_BYTES, _mm512_permutexvar_epi8(turn, x));
    }
  }
}
template <int ROWS>
PA_NOINLINE void add_byte_tiles(const char *weights, const float *units, const char *values, int size, float *o, int ldo) {
  alignas(64) int32_t sums[4][16][16];
  all_written();
  _tile_loadd(6, weights, 64);
  for (; size > 0; size -= 4 * W, values += 4 * TILE_BYTES, o += 4 * W) {
#define PA_PART(I, STORED)                            \
  if (size > I * W) {                                 \
    _tile_zero(I);                                    \
    _tile_loadd(STORED, values + I * TILE_BYTES, 64); \
    _tile_dpbssd(I, 6, STORED);                       \
  }
    PA_PART(0, 4)
    PA_PART(1, 5)
    PA_PART(2, 4)
    PA_PART(3, 5)
#undef PA_PART
    store_sums(sums);
    all_written();
    for (int part = 0; part < pa_min(4, size / W); part++) {
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const __m512i high = _mm512_load_si512(sums[part][r]), low = _mm512_load_si512(sums[part][8 + r]);
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
        float *to = o + (int64_t)r * ldo + part * W;
        write(to, loadf(to) + (vf)_mm512_cvtepi32_ps(sum) * splat(units[r]));
      }
    }
  }
}
