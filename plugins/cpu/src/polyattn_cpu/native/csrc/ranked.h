// What an indexer's choice has so far. Included by index.h.

// Numbers that compare as scores do; NaN is the least, and zero has one sign.
PA_INLINE vu ranks_of(vf score) {
  const vu bits = (vu)(score == score ? score + vf{} : splat(-INFINITY));
  return bits ^ ((vu)((vi)bits >> 31) | 0x80000000u);
}

// Keeps, in their order, the numbers from some rank on: `count` of n and few more. Returns that rank, or 0 where those
// would be too many, as of equal scores.
static uint32_t keep_about(uint64_t *numbers, int32_t &n, int32_t count) {
  constexpr int BINS = 1024;
  const auto rank_of = [&](int32_t i) { return (uint32_t)(numbers[i] >> 32); };
  uint32_t least = ~0u, most = 0;
  for (int32_t i = 0; i < n; i++) {
    least = rank_of(i) < least ? rank_of(i) : least;
    most = rank_of(i) > most ? rank_of(i) : most;
  }
  int shift = 0;
  while ((most - least) >> shift >= BINS) shift++;
  int32_t bins[BINS] = {}, bin = BINS, more = -count;
  for (int32_t i = 0; i < n; i++) bins[(rank_of(i) - least) >> shift]++;
  while (more < 0) more += bins[--bin];
  if (more > (n - count) / 2) return 0;
  const uint32_t from = least + ((uint32_t)bin << shift);
  int32_t place = 0;
  for (int32_t i = 0; i < n; i++) {  // each is written, as which one stays is hard to predict
    const uint64_t each = numbers[i];
    numbers[place] = each;
    place += (uint32_t)(each >> 32) >= from;
  }
  n = place;
  return from;
}

// One token's choice among what was ranked so far.
struct Ranked {
  uint64_t *numbers;
  const uint8_t *held;  // NULL, or which blocks of entries count
  IndexSight sight;
  int32_t count;        // of numbers
  int32_t candidate;    // whose entries are being read, or -1
  float best, floor;    // its best score; what a further one must be above (NaN: any will do)

  // Makes room, and raises the floor. `spare` has room for all numbers.
  PA_NOINLINE void shorten(uint64_t *spare) {
    uint32_t rank = 0;
    if (sight.count > 0 && count > sight.count) rank = keep_about(numbers, count, sight.count);
    if (!rank) {
      count = pa_keep_best(numbers, count, sight.count, spare);
      uint64_t least = ~(uint64_t)0;
      for (int i = 0; i < count; i++) least = numbers[i] < least ? numbers[i] : least;
      rank = (uint32_t)(least >> 32);
    }
    rank ^= rank >> 31 ? 0x80000000u : 0xffffffffu;
    __builtin_memcpy(&floor, &rank, 4);
    if (!count || (rank > 0x7f800000u && rank < 0x80000000u)) floor = INFINITY;  // all of them were forced
  }
};
