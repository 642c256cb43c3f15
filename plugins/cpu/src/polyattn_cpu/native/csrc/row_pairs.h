// Decode over rows of codes by products of pairs of bfloat16, which holds a table's numbers. A lane is a key,
// whose sums need no others; of values it is a word. Included by row_keys.h.

// A row's scales, and least numbers, of W words' groups, again and again: [ROWS][group]. TWICE: of two rows, of half as
// many groups each.
template <int SCALE, bool TWICE = false>
PA_INLINE GroupScales spread_scales(const char *from, int groups, const char *other = NULL) {
  constexpr int BYTES = SCALE_BYTES<SCALE>, GROUPS = CODE_GROUPS<SCALE> / (TWICE ? 2 : 1), MOST = BYTES * GROUPS;
  if constexpr (SCALE == PA_STEPS && !TWICE) {
    const __m128i some = groups >= GROUPS ? _mm_loadu_si128((const __m128i *)from)
                                          : _mm_maskz_loadu_epi32((__mmask8)((1 << groups) - 1), from);
    const __m512i both = _mm512_broadcast_i32x4(some);
    return {halves_of(both), halves_of(_mm512_srli_epi32(both, 16))};
  }
  auto scales_at = [=](const char *row) __attribute__((always_inline)) {
    if (groups >= GROUPS) return some_bytes(row, MOST);
    const uint64_t some = some_bytes(row, BYTES * groups);
    // Absent powers are 1: byte 0 is a subnormal number.
    return SCALE == PA_POWERS ? (some | 0x7f7f7f7fu << 8 * groups) & (((uint64_t)1 << 8 * MOST) - 1) : some;
  };
  uint64_t some = scales_at(from);
  if constexpr (SCALE == PA_STEPS) {
    const __m512i both = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)scales_at(other), (long long)some));
    return {halves_of(both), halves_of(_mm512_srli_epi32(both, 16))};
  }
  if (TWICE) some |= scales_at(other) << 8 * MOST % 64;
  if constexpr (SCALE == PA_HALVES) {
    return {(vf)_mm512_cvtph_ps(_mm256_set1_epi64x((long long)some)), vf{}};
  } else if constexpr (SCALE == PA_E4M3S) {
    return {e4m3_scales(_mm_set1_epi64x((long long)some)), vf{}};
  } else {
    return {byte_scales<SCALE>((vu)_mm512_cvtepu8_epi32(_mm_set1_epi32((int)some))), vf{}};
  }
}

// acc += x times one pair, which the multiplication loads itself: an instruction less.
PA_INLINE void add_one_pair(vf &acc, __m512i x, const float *pair) {
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(x), "m"(*pair));
}

// Scores of `count` keys, as whole vectors of W, with USED of ROWS rows: a key's are `lds` on. `sums_of`: a row's of each
// group.
template <int SCALE, int ROWS, int USED, class Asks>
PA_NOINLINE void code_scores(const Codes &of, const PairTable &table, int count, const float *q, const float *sums_of,
                             int ldsum, float *s, int lds, Asks asks) {
  constexpr int GROUPS = CODE_GROUPS<SCALE>, WORDS = W / GROUPS, CHAINS = ROWS > 4 ? 1 : 2;
  const char *const *keys = of.rows, *const *const end = keys + count;
  const int words = of.words;
  const int64_t offset = of.offset;
  vf turned[4];
  auto read = [&](const char *const *from, int word, vf *to) __attribute__((always_inline)) {
    if (word + 4 <= words) turned_words<true>(from, offset + 4 * word, 16, to);
    else turned_words<false>(from, offset + 4 * word, 4 * (words - word), to);
  };
  read(keys, 0, turned);
  for (; keys < end; keys += W, s += W * (int64_t)lds) {
    vf acc[ROWS < 4 ? 4 : ROWS], by[GROUPS], least[GROUPS];
    PA_UNROLLED
    for (int r = 0; r < (ROWS < 4 ? 4 : ROWS); r++) acc[r] = vf{};
    for (int word = 0; word < words; word += 4) {
      const int first = word / WORDS, group = word % W / WORDS, parts = pa_min(4, words - word) / WORDS;
      if (word % W == 0) {
        turned_scales<SCALE>(keys, of.scales + SCALE_BYTES<SCALE> * first, of.groups - first, by, least);
      }
      // Beside products, as loads of so many rows take long: the next words, or the next keys' first ones.
      vf next[4];
      const bool more = word + 4 < words;
      read(more || keys + W >= end ? keys : keys + W, more ? word + 4 : 0, next);
      const float *row = q + word * PairTable::EACH * ROWS;
      PA_UNROLLED
      for (int g = 0; g < 4 / WORDS; g++) {
        if (WORDS < 4 && g >= parts) break;
        vf part[CHAINS][USED];
        PA_UNROLLED
        for (int i = 0; i < CHAINS * USED; i++) part[i / USED][i % USED] = vf{};
        Asks::template keys<2>(asks, 0);
        PA_UNROLLED
        for (int w = 0; w < WORDS; w++) {
          Asks::template keys<1>(asks, 0);
          PA_UNROLLED
          for (int j = 0; j < PairTable::EACH; j++) {
            __m512i x = table((__m512i)turned[g * WORDS + w], j);
            PA_UNROLLED
            for (int r = 0; r < USED; r++) {
              add_one_pair(part[j % CHAINS][r], x, row + ((g * WORDS + w) * PairTable::EACH + j) * ROWS + r);
            }
          }
        }
        PA_UNROLLED
        for (int r = 0; r < USED; r++) {
          acc[r] += (CHAINS == 2 ? part[0][r] + part[CHAINS - 1][r] : part[0][r]) * by[group + g];
          if (SCALE == PA_STEPS) acc[r] += least[group + g] * splat(sums_of[(int64_t)r * ldsum + first + g]);
        }
      }
      PA_UNROLLED
      for (int i = 0; i < 4; i++) turned[i] = next[i];
    }
    put_turned<ROWS>(acc, s, lds);
  }
}

// Whether so many words are of two rows in a vector: TWICE.
PA_INLINE bool in_halves(int words) { return words <= W / 2; }

// The weights of each two keys of a tile times W words' scales, in pairs, [row][group]. Least numbers are added.
// TWICE: of each four keys, whose rows have half as many groups: the lower ones are the first and the second key's.
template <int SCALE, int ROWS, bool TWICE>
PA_NOINLINE void code_weights(const Codes &of, int count, int word, const float *p, int ldp, uint32_t *weights,
                              float *o, int ldo) {
  constexpr int GROUPS = CODE_GROUPS<SCALE>, IN = W / GROUPS, VECTORS = (ROWS + IN - 1) / IN, KEYS = TWICE ? 4 : 2;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i row = _mm512_srli_epi32(lane, GROUPS == 8 ? 3 : 2);
  const __mmask16 second = GROUPS == 8 ? 0xf0f0 : 0xcccc;
  const int first = word / (W / GROUPS), last = count - 1;
  const int64_t at = of.scales + SCALE_BYTES<SCALE> * first;
  vf low[VECTORS];
  for (int v = 0; v < VECTORS; v++) low[v] = vf{};
  for (int t = 0; t < count; t += KEYS) {
    auto scales_of = [&](int key) __attribute__((always_inline)) {
      const char *from = of.rows[pa_min(key, last)] + at, *other = TWICE ? of.rows[pa_min(key + 2, last)] + at : NULL;
      return spread_scales<SCALE, TWICE>(from, of.groups - first, other);
    };
    const GroupScales a = scales_of(t), b = scales_of(t + 1);
    PA_UNROLLED
    for (int v = 0; v < VECTORS; v++, weights += W) {
      auto of_rows = [&](int key) __attribute__((always_inline)) {
        return key > last ? vf{} : (vf)_mm512_permutexvar_ps(row, _mm512_loadu_ps(p + (int64_t)key * ldp + v * IN));
      };
      vf x = of_rows(t), y = of_rows(t + 1);
      if (TWICE) {
        x = (vf)_mm512_mask_mov_ps((__m512)x, second, (__m512)of_rows(t + 2));
        y = (vf)_mm512_mask_mov_ps((__m512)y, second, (__m512)of_rows(t + 3));
      }
      write(weights, bf16_pairs(x * a.by, y * b.by));
      if (SCALE == PA_STEPS) low[v] += x * a.least + y * b.least;
    }
  }
  if (SCALE != PA_STEPS) return;
  float each[VECTORS * W];
  for (int v = 0; v < VECTORS; v++) write(each + v * W, low[v]);
  for (int r = 0; r < ROWS; r++) {
    const vf sum = (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(each + r * GROUPS));
    for (int j = 0; j < WORD_CODES; j++) {
      float *to = o + (int64_t)r * ldo + word * WORD_CODES + j * W;
      write(to, loadf(to) + sum);
    }
  }
}

// W words of each two keys of a tile, from `word` on, their 16 bits in pairs: the lower ones, then the upper ones. Lane
// GROUPS i + g is word i of group g. TWICE: of each four keys, as code_weights has them.
template <int GROUPS, bool TWICE, class Asks>
PA_NOINLINE void pair_words(const Codes &of, int count, int word, uint32_t *to, Asks asks) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i group = _mm512_and_epi32(lane, _mm512_set1_epi32(GROUPS - 1));
  // Which 16 bits of one key's words, and of another's, are a lane's.
  const __m512i half = _mm512_or_epi32(_mm512_slli_epi32(group, GROUPS == 8 ? 2 : 3),
                                       _mm512_slli_epi32(_mm512_srli_epi32(lane, GROUPS == 8 ? 3 : 2), 1));
  const __m512i of_both = _mm512_mullo_epi32(half, _mm512_set1_epi32(0x10001));
  const __m512i lower = _mm512_or_epi32(of_both, _mm512_set1_epi32(0x200000)), upper = _mm512_or_epi32(of_both, _mm512_set1_epi32(0x210001));
  const int last = count - 1, left = of.words - word;
  const int64_t at_word = of.offset + 4 * word;
  auto all = [&](int some) __attribute__((always_inline)) {
    const __mmask8 there = (__mmask8)((1 << some) - 1);
    for (int t = 0; t < count; t += TWICE ? 4 : 2, to += 2 * W) {
      Asks::template values<64>(asks, t);
      auto words = [&](int key) __attribute__((always_inline)) {
        if (!TWICE) return (__m512i)code_words(of.rows[pa_min(key, last)] + at_word, some);
        auto half_of = [&](int key) __attribute__((always_inline)) {
          return _mm256_maskz_loadu_epi32(there, of.rows[pa_min(key, last)] + at_word);
        };
        return _mm512_inserti64x4(_mm512_castsi256_si512(half_of(key)), half_of(key + 2), 1);
      };
      const __m512i a = words(t), b = words(t + 1);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lower, b));
      _mm512_storeu_si512(to + W, _mm512_permutex2var_epi16(a, upper, b));
    }
  };
  if (!TWICE && left >= W) all(W);
  else all(left);
}
// o[row] += `weights` times codes [j, j + C) of each of W words, of `count` vectors that pair_words has written, by USED of
// ROWS rows.
template <int GROUPS, int ROWS, int USED, int C, class Asks>
PA_NOINLINE void add_code_pairs(const PairTable &table, const uint32_t *words, int count, const uint32_t *weights, float *o, int ldo,
                                int j, Asks asks) {
  constexpr int VECTORS = (ROWS * GROUPS + W - 1) / W, HALF = WORD_CODES / 2;
  const __m512i within = _mm512_set1_epi16(j % HALF * 4);
  words += j / HALF * W;
  vf acc[USED][C];
  o += j * W;
  PA_UNROLLED
  for (int r = 0; r < USED; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) acc[r][c] = loadf(o + r * ldo + c * W);
  }
  for (int t = 0; t < count; t++, weights += VECTORS * W, words += 2 * W) {
    Asks::template values<64>(asks, t);
    __m512i two = _mm512_loadu_si512(words);
    if (C < HALF) two = _mm512_srlv_epi16(two, within);
    __m512i weight[USED];
    PA_UNROLLED
    for (int r = 0; r < USED; r++) {
      const uint32_t *from = weights + r * GROUPS;
      weight[r] = GROUPS == 8 ? _mm512_broadcast_i32x8(_mm256_loadu_si256((const __m256i *)from))
                              : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
    }
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      const __m512i x = table(two, c);
      PA_UNROLLED
      for (int r = 0; r < USED; r++) acc[r][c] = add_pairs(acc[r][c], x, weight[r]);
    }
  }
  PA_UNROLLED
  for (int r = 0; r < USED; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) write(o + r * ldo + c * W, acc[r][c]);
  }
}

// A query in pairs, as code_scores takes them; it takes half the room.
PA_ONCE void to_halves(float *x, int size) {
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
  for (int d = 0; d < size; d += WORD_CODES * W) {
    vf word[4];
    for (int i = 0; i < 4; i++) {
      const float *at = x + d + 2 * W * i;
      const __m512i half = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + W), _mm512_loadu_ps(at));
      word[i] = (vf)_mm512_shuffle_epi8(half, pairs);
    }
    turn_by_quarters(word);
    turn_quarters(word);
    for (int i = 0; i < 4; i++) write(x + d / 2 + i * W, word[i]);
  }
}
// ROWS such queries as one: [word][j][row].
template <int ROWS>
PA_ONCE void rows_together(float *q, int ldq, int size, float *room) {
  const int pairs = pa_round_up(size, WORD_CODES * W) / 2;
  for (int i = 0; i < pairs; i++) {
    const int word = i / (PairTable::EACH * W) * W + i % W, j = i / W % PairTable::EACH;
    for (int r = 0; r < ROWS; r++) room[(word * PairTable::EACH + j) * ROWS + r] = q[(int64_t)r * ldq + i];
  }
  __builtin_memcpy(q, room, sizeof(float) * ROWS * pairs);
}
// Sums back in their order, whose lanes are as add_code_pairs says.
template <int GROUPS>
PA_ONCE void sums_in_order(float *x, int size) {
  const __m512i word = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  constexpr int SHIFT = GROUPS == 8 ? 1 : 2;  // of words of a group
  const __m512i within = _mm512_and_epi32(word, _mm512_set1_epi32(W / GROUPS - 1));
  const __m512i lane = _mm512_or_epi32(_mm512_slli_epi32(within, 4 - SHIFT), _mm512_srli_epi32(word, SHIFT));
  for (int d = 0; d < size; d += WORD_CODES * W, x += WORD_CODES * W) {
    vf code[WORD_CODES];
    for (int j = 0; j < WORD_CODES; j++) {
      __m512 sum = _mm512_loadu_ps(x + j * W);
      if (in_halves((size - d) / WORD_CODES)) {
        sum = _mm512_add_ps(sum, GROUPS == 8 ? _mm512_shuffle_f32x4(sum, sum, 0xb1) : _mm512_permute_ps(sum, 0x4e));
      }
      code[j] = (vf)_mm512_permutexvar_ps(lane, sum);
    }
    for (int j = 0; j < WORD_CODES; j += 4) {
      turn_quarters(code + j);
      for (int m = 0; m < 4; m++) {
        float each[W];
        write(each, code[j + m]);
        for (int i = 0; i < 4; i++) __builtin_memcpy(x + (4 * i + m) * WORD_CODES + j, each + 4 * i, 16);
      }
    }
  }
}

// Products of int8 by vpdpbusd, four elements of a word at once, exact in 32 bits: what is stored is taken as 128 more.
PA_INLINE __m512i stored_quads(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
PA_INLINE __m512i add_quads(__m512i acc, __m512i stored, __m512i by) { return _mm512_dpbusd_epi32(acc, stored, by); }
// By four bytes that the multiplication loads itself: an instruction less.
PA_INLINE void add_one_quad(__m512i &acc, __m512i stored, const uint32_t *by) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(stored), "m"(*by));
}
// Of sums by upper and by lower bytes.
PA_INLINE vf quad_sums(__m512i high, __m512i low) {
  return (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

// ROWS queries as one, [word][byte][row], in their place; their units, and what to add to their sums.
template <int ROWS>
PA_ONCE void to_quads(float *q, int ldq, int size, float *unit, int32_t *more, int step, float *room) {
  const int words = pa_round_up(size, 16) / 4;
  uint32_t *to = (uint32_t *)room;
  for (int r = 0; r < ROWS; r++) {
    const float *row = q + (int64_t)r * ldq;
    vf most = {};
    for (int i = 0; i < size; i += W) most = larger(most, loadf(row + i));  // beyond them are zeros
    const ByteUnit is(most);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < size; i += W) {
      const __mmask16 some = (__mmask16)(size - i >= W ? 0xffff : (1 << (size - i)) - 1);
      const __m512i x = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(some, _mm512_loadu_ps(row + i), _mm512_set1_ps(is.by)));
      sum = _mm512_add_epi32(sum, x);
      uint32_t each[2][4];
      _mm_storeu_si128((__m128i *)each[0], upper_bytes(x));
      _mm_storeu_si128((__m128i *)each[1], lower_bytes(x));
      for (int w = 0; w < 8; w++) to[((i / 4 + w / 2) * 2 + w % 2) * ROWS + r] = is.by != 0 ? each[w % 2][w / 2] : 0;
    }
    unit[(int64_t)r * step] = is.unit;
    more[(int64_t)r * step] = is.by != 0 ? -128 * _mm512_reduce_add_epi32(sum) : 0;
  }
  __builtin_memcpy(q, to, (int64_t)words * 2 * ROWS * 4);
}

// Scores of W keys with ROWS rows: a key's are `lds` on.
template <int ROWS, class Asks>
PA_NOINLINE void quad_scores(const char *const *keys, int64_t offset, int size,
                             RowScales scales, const uint32_t *q, const float *unit, const int32_t *more, int step,
                             float *s, int lds, Asks asks) {
  constexpr int CHAINS = ROWS > 2 ? 1 : 2;
  __m512i high[CHAINS][ROWS], low[CHAINS][ROWS];
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int i = 0; i < CHAINS; i++) high[i][r] = low[i][r] = _mm512_setzero_si512();
    low[0][r] = _mm512_set1_epi32(more[(int64_t)r * step]);
  }
  vf turned[4];
  auto read = [&](int d, vf *to) __attribute__((always_inline)) {
    if (d + 16 <= size) turned_words<true>(keys, offset + d, 16, to);
    else turned_words<false>(keys, offset + d, size - d, to);
  };
  read(0, turned);
  for (int d = 0; d < size; d += 16) {
    vf next[4];  // beside products: loads of as many rows take long
    read(d + 16 < size ? d + 16 : d, next);
    Asks::template keys<1>(asks, d);
    PA_UNROLLED
    for (int w = 0; w < 4; w++, q += 2 * ROWS) {
      Asks::template keys<1>(asks, d);
      const __m512i x = stored_quads((__m512i)turned[w]);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) add_one_quad(high[w % CHAINS][r], x, q + r);
      PA_UNROLLED
      for (int r = 0; r < ROWS; r++) add_one_quad(low[w % CHAINS][r], x, q + ROWS + r);
    }
    PA_UNROLLED
    for (int w = 0; w < 4; w++) turned[w] = next[w];
  }
  vf by, acc[ROWS < 4 ? 4 : ROWS];
  by = one_of_each(scales);
  PA_UNROLLED
  for (int r = 0; r < (ROWS < 4 ? 4 : ROWS); r++) acc[r] = vf{};
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    if (CHAINS == 2) {
      high[0][r] = _mm512_add_epi32(high[0][r], high[CHAINS - 1][r]);
      low[0][r] = _mm512_add_epi32(low[0][r], low[CHAINS - 1][r]);
    }
    acc[r] = quad_sums(high[0][r], low[0][r]) * (by * splat(unit[(int64_t)r * step]));
  }
  put_turned<ROWS>(acc, s, lds);
}

// W rows' weights of a tile, times their values' scales `by`, W from one key to the next, as bytes of integers:
// of each four keys, 0 2 1 3, the upper ones, then the lower ones, `ld` on. `unit` is of one; `more` is what to
// add to the sums.
PA_NOINLINE void quad_weights(float *p, int ldp, int count, const float *by, __m512i of_lane, uint32_t *weights,
                              int ld, float *unit, int32_t *more) {
  vf most = {};
  __m512i sum = _mm512_setzero_si512();
  for (int t = 0; t < count; t++, by += W) {
    const vf x = loadf(p + (int64_t)t * ldp) * (vf)_mm512_permutexvar_ps(of_lane, _mm512_loadu_ps(by));
    write(p + (int64_t)t * ldp, x);
    most = larger(most, x);
  }
  const vf scale = most > splat(INT_LEAST) ? splat((float)BYTE_MOST) / most : vf{};
  write(unit, most * splat(1.0f / BYTE_MOST));
  for (int t = 0; t < count; t += 4, weights += 2 * ld) {
    __m512i each[4];
    PA_UNROLLED
    for (int i = 0; i < 4; i++) {
      const vf x = t + i < count ? loadf(p + (int64_t)(t + i) * ldp) : vf{};
      each[i] = _mm512_cvtps_epi32((__m512)(x * scale));
      sum = _mm512_add_epi32(sum, each[i]);
    }
    const __m512i half = _mm512_set1_epi16(128), upper = _mm512_set1_epi16((short)0xff00);
    const __m512i a = _mm512_mask_blend_epi16(0xaaaaaaaau, each[0], _mm512_slli_epi32(each[1], 16));
    const __m512i b = _mm512_mask_blend_epi16(0xaaaaaaaau, each[2], _mm512_slli_epi32(each[3], 16));
    const __m512i c = _mm512_add_epi16(a, half), d = _mm512_add_epi16(b, half);
    // Bits of the second where `upper` has them, else of the first.
    _mm512_storeu_si512(weights, _mm512_ternarylogic_epi32(upper, d, _mm512_srli_epi16(c, 8), 0xca));
    _mm512_storeu_si512(weights + ld, _mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(b, 8), a, 0xca));
  }
  _mm512_storeu_si512(more, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum), 7));
}

// o[row][0 .. C * W) += weights of `count` keys times their values, four keys at a time. `some` < 16: the
// last elements.
template <int ROWS, int C, class Asks>
PA_NOINLINE void add_value_quads(const char *const *values, int64_t offset, int count, const uint32_t *weights, int ld,
                                 const float *unit, const int32_t *more, float *o, int ldo, int some, Asks asks) {
  __m512i high[ROWS][C], low[ROWS][C];
  PA_UNROLLED
  for (int i = 0; i < ROWS * C; i++) {
    high[i / C][i % C] = _mm512_setzero_si512();
    low[i / C][i % C] = _mm512_set1_epi32(more[i / C]);
  }
  alignas(64) static constexpr uint8_t TURNS[64] = {
      0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
      37, 53, 6, 22, 38, 54, 7, 23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
      11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  const __m512i turn = _mm512_load_si512(TURNS);
  for (int t = 0; t < count; t += 4, weights += 2 * ld) {
    Asks::template values<64 * (ROWS < 4 ? C + 1 : 1)>(asks, t);
    const char *row[4];
    PA_UNROLLED
    for (int i = 0; i < 4; i++) row[i] = values[pa_min(t + i, count - 1)] + offset;
    __m512i x[C];
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      x[c] = C > 1 || some >= 16 ? four_rows<true>(row[0] + c * W, row[2] + c * W, row[1] + c * W, row[3] + c * W, 16)
                                 : four_rows<false>(row[0], row[2], row[1], row[3], some);
      x[c] = stored_quads(_mm512_permutexvar_epi8(turn, x[c]));
    }
    PA_UNROLLED
    for (int r = 0; r < ROWS; r++) {
      if (ROWS >= 4 && r && r * (C + 1) / ROWS > (r - 1) * (C + 1) / ROWS) Asks::template values<64>(asks, t);
      const __m512i by_high = _mm512_set1_epi32((int)weights[r]), by_low = _mm512_set1_epi32((int)weights[ld + r]);
      PA_UNROLLED
      for (int c = 0; c < C; c++) {
        high[r][c] = add_quads(high[r][c], x[c], by_high);
        low[r][c] = add_quads(low[r][c], x[c], by_low);
      }
    }
  }
  PA_UNROLLED
  for (int r = 0; r < ROWS; r++) {
    PA_UNROLLED
    for (int c = 0; c < C; c++) {
      float *to = o + (int64_t)r * ldo + c * W;
      write(to, loadf(to) + quad_sums(high[r][c], low[r][c]) * splat(unit[r]));
    }
  }
}

// Weights of each two keys in pairs, times their rows' scales.
template <int ROWS>
PA_INLINE void weight_pairs(RowScales scales, int count, const float *p, int ldp, uint32_t *pairs) {
  for (int t = 0; t < count; t += 2, pairs += W) {
    const bool both = t + 1 < count;
    const vf a = loadf(p + (int64_t)t * ldp) * splat(scales[t]);
    const vf b = both ? loadf(p + (int64_t)(t + 1) * ldp) * splat(scales[t + 1]) : vf{};
    _mm512_mask_storeu_epi32(pairs, (__mmask16)((1 << ROWS) - 1), (__m512i)bf16_pairs(a, b));
  }
}

// A query in pairs, as pair_dots takes it of keys of bytes.
template <class T>
PA_ONCE void to_keys(float *x, int size) {
  uint16_t *half = (uint16_t *)x;
  narrow_bf16(x, half, size);
  __builtin_memset(half + size, 0, 2 * size);
  turn_to_keys<T>(half, size);
}
