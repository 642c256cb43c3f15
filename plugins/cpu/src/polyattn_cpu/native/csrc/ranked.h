// What an indexer's choice has so far. Included by index.h.

// Numbers that compare as scores do; NaN is the least, and zero has one sign.
PA_INLINE vu ranks_of(vf score) {
  const vu bits = (vu)(score == score ? score + vf{} : splat(-INFINITY));
  return bits ^ ((vu)((vi)bits >> 31) | 0x80000000u);
}

// One token's choice among what was ranked so far.
struct Ranked {
  uint32_t *ranks;      // of candidates, in the order of their ids
  int32_t *ids;
  const uint8_t *held;  // NULL, or which blocks of entries count
  IndexSight sight;
  int32_t count;        // of candidates
  int32_t candidate;    // whose entries are being read, or -1
  float best, floor;    // its best score; what a further one must be above (NaN: any will do)

  void put(uint32_t rank, int32_t id) {
    ranks[count] = rank;
    ids[count++] = id;
  }
  // Those whose bit is set. W places behind the last one are written, too.
  PA_ALWAYS void put_some(uint32_t good, vu rank, vi id) {
#if defined(__AVX512F__)
    write(ranks + count, _mm512_maskz_compress_epi32((__mmask16)good, (__m512i)rank));
    write(ids + count, _mm512_maskz_compress_epi32((__mmask16)good, (__m512i)id));
    count += __builtin_popcount(good);
#elif PA_W == 8 && defined(__AVX2__)  // whether there are any is hard to predict, and seldom worth it
    write(ranks + count, lanes_together((__m256i)rank, good));
    write(ids + count, lanes_together((__m256i)id, good));
    count += __builtin_popcount(good);
#else
    if (!good) return;
    PA_UNROLLED
    for (int i = 0; i < W; i++) {  // each is written; what isn't good is written over
      ranks[count] = rank[i];
      ids[count] = id[i];
      count += good >> i & 1;
    }
#endif
  }
  // How many of them reach a rank; of each `step`th vector alone, if there are several.
  int32_t reaching(uint32_t rank, int32_t step = 1) const {
    vu some = {};
    int32_t i = 0;
    for (; i + W <= count; i += step * W) some -= (vu)(read<vu>(ranks + i) >= rank);
    int32_t n = 0;
    for (int j = 0; j < W; j++) n += (int32_t)some[j];
    for (; step == 1 && i < count; i++) n += ranks[i] >= rank;
    return n;
  }
  // A rank that about `wanted` of them reach, by some of them, between two ranks.
  uint32_t about(int32_t wanted, uint32_t from, uint32_t last) const {
    constexpr int STEP = 8, NEAR = 4;
    wanted /= STEP;
    while (from < last) {
      const uint32_t middle = last - (last - from) / 2;
      const int32_t some = reaching(middle, STEP);
      if (some >= wanted - NEAR && some <= wanted + NEAR) return middle;
      if (some < wanted) {
        last = middle - 1;
      } else {
        from = middle;
      }
    }
    return from;
  }
  // Keeps the best: `least` of them, or some more, `most` in all. Returns a rank that all of these reach.
  uint32_t keep(int32_t least, int32_t most) {
    uint32_t from = ~0u, last = 0;
    for (int32_t i = 0; i < count; i++) {
      from = ranks[i] < from ? ranks[i] : from;
      last = ranks[i] > last ? ranks[i] : last;
    }
    int32_t there = count, above = 0;  // from `from` on; above `last`
    bool sampled = most - least >= 64;
    while (there > most && from < last) {
      uint32_t middle = last - (last - from) / 2;
      if (sampled) middle = about((least + most) / 2, from + 1, last);
      sampled = false;
      const int32_t some = reaching(middle);
      if (some < least) {
        last = middle - 1;
        above = some;
      } else {
        from = middle;
        there = some;
      }
    }
    int32_t equal = there > most ? least - above : there;  // of the last rank, the first ones
    const int32_t n = count;
    Ranked best = *this;  // a copy stays in registers
    best.count = 0;
    for (int32_t i = 0; i < n; i += W) {
      const vu rank = read<vu>(ranks + i);
      const vi id = read<vi>(ids + i);
      uint32_t good = lanes_of((vi)(rank >= from));
      if (n - i < W) good &= (1u << (n - i)) - 1;
      if (there > most) {
        for (uint32_t same = good & lanes_of((vi)(rank == from)); same; same &= same - 1) {
          if (equal-- <= 0) good &= ~(same & -same);
        }
      }
      best.put_some(good, rank, id);
    }
    count = best.count;
    return from;
  }
  // Makes room, and raises the floor.
  PA_NOINLINE void shorten() {
    floor = INFINITY;
    if (sight.count <= 0) return end();
    uint32_t rank = keep(sight.count, sight.count + (count - sight.count) / 8);
    rank ^= rank >> 31 ? 0x80000000u : 0xffffffffu;
    if (rank <= 0x7f800000u || rank >= 0x80000000u) __builtin_memcpy(&floor, &rank, 4);  // else all of them were forced
  }
  // The best of what there is.
  void end() {
    if (sight.count <= 0) count = 0;
    if (count > sight.count) keep(sight.count, sight.count);
  }
};

// The best of the parts of some tokens.
static void index_merge(const IndexRun *run, const IndexItem *first, int32_t parts, char *scratch) {
  const pa_index &x = *run->index;
  Ranked r = {};
  r.ranks = (uint32_t *)scratch;
  r.ids = (int32_t *)(r.ranks + (int64_t)parts * run->most + W);
  for (int32_t i = 0; i < first->tokens * x.choices; i++) {
    r.sight = pa_index_sight(run, first->seq, first->position + i / x.choices);
    r.count = 0;
    for (int32_t part = first->part; part < first->part + parts; part++) {
      const uint32_t *from = run->parts + part * run->part_words + (int64_t)i * (1 + 2 * run->most);
      __builtin_memcpy(r.ranks + r.count, from + 1, 4L * from[0]);
      __builtin_memcpy(r.ids + r.count, from + 1 + run->most, 4L * from[0]);
      r.count += (int32_t)from[0];
    }
    r.end();
    pa_write_choice(run, first->token * x.choices + i, r.sight, r.ids, r.count);
  }
}
