// Which lines does decode ask for, beside which products? Included by dot_path.h.

constexpr int DISTANCE = 4096;  // bytes that are asked for ahead of their use
// Where lines are asked for into the second cache: bytes of a tile's keys and values at most, as half of
// these and the other half of the tile before are there at a time; and keys at least.
constexpr int FAR_BYTES = 192 << 10, FAR_KEYS = 16;
// There some keys' values are added to all heads, then the next ones': bytes of those, and keys at least.
constexpr int RUN_BYTES = 16 << 10, RUN_KEYS = 8;

// Keys of a tile where lines are asked for into the second cache: of the layer alone, as bits depend on it.
PA_INLINE int far_keys(const pa_layer &layer, int64_t itemsize) {
  const int64_t token = layer.num_kv_heads * (layer.head_size + layer.v_head_size) * itemsize;
  int keys = DOT_TILE;
  while (keys > FAR_KEYS && keys * token > FAR_BYTES) keys /= 2;
  return keys;
}
// Keys of a tile whose values are added to all heads before the next ones' are. So lines are read much in
// the order of their addresses, which the processor's own prefetchers follow; the sums are stored once for
// each such run, which pays where arithmetic is cheap.
PA_INLINE int run_keys(const pa_layer &layer, int tile, int64_t itemsize) {
  int keys = tile;
  while (keys > RUN_KEYS && keys * layer.num_kv_heads * layer.v_head_size * itemsize > RUN_BYTES) {
    keys /= 2;
  }
  return keys;
}

// The item that the thread does next; NULL where it has none.
PA_ONCE const Item *following_item(Run *run, Turn *turn) {
  const int32_t index = pa_following(turn);
  return index < turn->count ? &run->plan->items[index] : NULL;
}
// The addresses of an item's first tokens, at most `tile`; returns how many.
PA_ONCE int first_tokens(Run *run, const Item *item, int tile, const char **keys, const char **values) {
  if (!item) return 0;
  Tiles first = {item, item->from, tile, 0, 0};
  if (!first.next()) return 0;
  bool fine = token_addresses(source_of(run, item->seq), first.first_key, first.count, keys, values);
  return fine ? first.count : 0;
}

// What a product asks for: lines of `next`, of every SHAREth token where so many parts share that, as
// it reads the same ones of its own tokens.
template <int SHARE>
struct RowsAhead {
  const char *const *next;
  int64_t offset;
  template <int KEYS>
  PA_INLINE void keys(const RowsAhead &of, int64_t byte) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k += SHARE) prefetch(of.next[k] + of.offset + byte);
  }
  template <int BYTES>
  PA_INLINE void values(RowsAhead &of, int t) {
    PA_UNROLLED
    for (int b = 0; b < BYTES; b += 64) prefetch(of.next[t] + of.offset + b);
  }
};

// Where the plan wants lines in the second cache: a tile's values are asked for while its keys are
// multiplied, and the next tile's keys while values are added, both in the order of their addresses.
// A Zen 4 drops what it is asked for while some fifty lines are on their way, so asks keep apart: each
// waits for the one before it, by SPACING multiplications, as more rows take longer.
template <int SPACING>
struct FarAhead {
  Ahead::Lines lines;
  template <int KEYS>
  PA_INLINE void keys(FarAhead &of, int64_t) {
    of.some<KEYS>();
  }
  template <int BYTES>
  PA_INLINE void values(FarAhead &of, int) {
    of.some<BYTES < 64 ? 1 : BYTES / 64>();
  }
  template <int LINES>
  PA_ALWAYS void some() {
    PA_UNROLLED
    for (int i = 0; i < LINES; i++) {
      if (lines.at >= lines.end) return;
      prefetch_l2(*lines.at++);
#if defined(__x86_64__)
      PA_UNROLLED
      for (int j = 0; j < SPACING; j++) __asm__ volatile("imul $1, %0, %0" : "+r"(lines.at));
#endif
    }
  }
};

// Lines of one latent: half of them, one for each two that are read of a key; over values, `each` at a
// time. One run of memory, which the processor's own prefetcher follows, and never many at once: they
// would take the buffers that loads from the second cache need.
struct LatentAhead {
  const char *at, *end;
  int each;
  template <int KEYS>
  PA_INLINE void keys(const LatentAhead &of, int64_t byte) {
    if (!(byte & 64)) prefetch_l2(of.at + byte / 2);
  }
  template <int BYTES>
  PA_INLINE void values(LatentAhead &of, int) {
    for (int i = 0; i < of.each && of.at < of.end; i++, of.at += 64) prefetch_l2(of.at);
  }
};

// The visits to keys, in their order: KEYS tokens of one head, by each part of its rows, then the next
// head, then the next tokens. `at` and `offset` are those of the visit that is asked for now.
template <int KEYS>
struct KeysAhead {
  const char *const *first, *const *at, *const *values;
  int64_t base, head_stride, value_base, offset;
  int heads, parts, count, head = 0, part = 0, token = 0;

  KeysAhead(const char *const *keys, const char *const *values, int64_t base, int64_t head_stride,
            int64_t value_base, int heads, int parts, int count, int visits)
      : first(keys), at(keys), values(values), base(base), head_stride(head_stride),
        value_base(value_base), offset(base), heads(heads), parts(parts), count(count) {
    for (int i = 0; i < visits * parts; i++) next();
  }
  void next() {
    if (++part < parts) return;
    part = 0;
    if (++head == heads) {
      head = 0;
      token += KEYS;
    }
    const bool over = token >= count;  // then come the values, of which the first lines are due anyway
    at = over ? values : first + token;
    offset = over ? value_base : base + head * head_stride;
  }
};

// The latents that follow a tile, as many as it has: half of one for each call that multiplies keys,
// then one for each that adds values.
struct LatentsAhead {
  const char *const *next;
  int64_t lines;  // of a latent
  int count, halves = 0;

  LatentsAhead(const char *const *next, int64_t bytes, int count)
      : next(next), lines((bytes + 63) / 64), count(count) {}
  LatentAhead for_keys() {
    const char *at = next[pa_min(halves / 2, count - 1)] + halves % 2 * ((lines + 1) / 2 * 64);
    halves++;
    return {at, at, 0};
  }
  LatentAhead for_values(int steps) {
    const int token = (halves + 1) / 2;
    halves = 2 * token + 2;
    const char *at = next[pa_min(token, count - 1)];
    return {at, token < count ? at + lines * 64 : at, (int)(lines + steps - 1) / steps};
  }
};
