// The next tile's lines, asked for a few at a time while this one is computed: in proportion to the
// cycles that each step takes, so that the memory has something to do all the time. Included inside
// an anonymous namespace.

struct Ahead {
  const char *const *keys, *const *values;  // of the tile's tokens
  int64_t key_offset, value_offset, key_head, value_head;
  int tokens, heads, key_bytes, value_bytes;  // value_bytes 0: values lie in the keys
  int64_t rate = 0, credit = 0;               // lines per cycle, lines due; both in 2^-32
  int head = 0, token = 0, run = 1;           // what comes next: of so many tokens, from this one on,
  const char *at = NULL, *end = NULL;         // the rest of the key or of the value
  bool value = false;
  enum { LISTED = 128 };
  const char *list[LISTED + 3];

  Ahead(const Source &source, const Item &item, int key_bytes, int value_bytes)
      : keys(NULL), values(NULL), key_offset(item.head0 * source.key_head),
        value_offset(item.head0 * source.value_head), key_head(source.key_head),
        value_head(source.value_head), tokens(0), heads(item.heads), key_bytes(key_bytes),
        value_bytes(value_bytes) {
    if (value_follows_key(source, key_bytes)) {
      this->key_bytes += value_bytes;
      this->value_bytes = 0;
    }
    if (heads > 1 && key_head == this->key_bytes && (!this->value_bytes || value_head == value_bytes)) {
      this->key_bytes *= heads;  // one run of memory
      this->value_bytes *= heads;
      heads = 1;
    }
  }
  // Of keys or of values alone: `bytes` of each head.
  Ahead(const Item &item, int64_t head_stride, int bytes)
      : keys(NULL), values(NULL), key_offset(item.head0 * head_stride), value_offset(key_offset),
        key_head(head_stride), value_head(0), tokens(0), heads(item.heads), key_bytes(bytes),
        value_bytes(0) {
    if (heads > 1 && key_head == bytes) {
      key_bytes *= heads;
      heads = 1;
    }
  }
  // What comes next: `count` tokens, over about `cycles`.
  void turn_to(const char *const *next_keys, const char *const *next_values, int count, int cycles) {
    keys = next_keys;
    values = next_values;
    tokens = count;
    if (count && values[0] + value_offset >= keys[0] + key_offset &&
        values[0] + value_offset + value_bytes <= keys[0] + key_offset + key_bytes) {
      value_bytes = 0;
    }
    int64_t lines = (int64_t)count * heads * ((key_bytes + 63) / 64 + (value_bytes + 63) / 64);
    rate = (lines << 32) / pa_max(cycles, 1);
    credit = 0;
    head = token = 0;
    value = false;
    at = end = NULL;
    if (tokens) key();
  }
  void operator()(int cycles) { ask(due_over(cycles)); }
  void all() { ask(INT32_MAX); }
  // Lines that the caller asks for itself, beside products that take so many cycles and have room for `room`
  // of them. What is due beyond those is asked for now.
  struct Lines {
    const char *const *at, *const *end;
  };
  PA_NOINLINE Lines take(int cycles, int room) {
    const int due = due_over(cycles), most = pa_min(pa_min(due, room), LISTED);
    int count = 0;
    while (count < most && at != end) {
      const int some = pa_min(most - count, (int)((end - at + 63) / 64));
      for (int i = 0; i < some; i += 4) {
        for (int j = 0; j < 4; j++) list[count + i + j] = at + 64 * (i + j);
      }
      count += some;
      at += 64 * some;
      if (at >= end) go_on();
    }
    if (count < due) ask(due - count);
    return {list, list + count};
  }

 private:
  // Whole lines that so many cycles make due; what is left counts for the next ones.
  int due_over(int cycles) {
    credit += cycles * rate;
    const int due = (int)(credit >> 32);
    credit &= 0xffffffff;
    return due;
  }
  PA_ALWAYS void key() {
    at = keys[token] + key_offset + head * key_head;
    end = at + key_bytes;
    // Tokens whose keys lie one after another, and whose values do, are a run of memory each.
    for (run = 1; token + run < tokens && keys[token + run] + key_offset + head * key_head == end; run++) {
      if (value_bytes && values[token + run] != values[token] + run * (int64_t)value_bytes) break;
      end += key_bytes;
    }
  }
  void ask(int due) {
    while (due > 0 && at != end) {
      int lines = pa_min(due, (int)((end - at + 63) / 64));
      due -= lines;
      for (; lines > 0; lines--, at += 64) prefetch_l2(at);
      if (at >= end) turn();
    }
  }
  PA_NOINLINE void turn() { go_on(); }
  PA_ALWAYS void go_on() {
    value = !value && value_bytes;
    if (value) {
      at = values[token] + value_offset + head * value_head;
      end = at + run * (int64_t)value_bytes;
      return;
    }
    token += run;
    if (token == tokens) {
      token = 0;
      head++;
    }
    at = end = NULL;
    if (head < heads) key();
  }
};

constexpr int PAGE = 4096;  // bytes, the smallest that a processor has

// An item's tiles one after another. The next tile's addresses are known before this one is worked
// on, and `ahead` asks for its lines; over the last tile, for those of the item that the thread does
// next, so that the memory has no rest between the two.
struct Walk {
  Source source;
  Tiles tile, next;             // `tile` is the current one
  const char **keys, **values;  // of its tokens
  const char **next_keys, **next_values;
  int64_t key_offset, value_offset;  // of the item's first head
  bool more, fine, touches = true;   // `touches`: a line of each page is asked for first
  Ahead ahead;
  Unpacked unpacked;

  static int64_t scratch(const pa_layer &layer, int tile) {
    return 4 * (tile * (int64_t)sizeof(char *) + 64) + Unpacked::scratch(layer, tile);
  }

  Walk(Run *run, const Item &item, Turn *turn, Arena &arena, int tile_keys, int room, bool unpacks)
      : source(source_of(run, item.seq)), next({&item, item.from, tile_keys, 0, 0, run->plan->layer.invariant != 0}),
        key_offset(item.head0 * source.key_head), value_offset(item.head0 * source.value_head),
        ahead(lines_of(run, source, item)), run(run), turn(turn) {
    keys = arena.take<const char *>(room);
    values = arena.take<const char *>(room);
    next_keys = arena.take<const char *>(room);
    next_values = arena.take<const char *>(room);
    if (unpacks) unpacked = Unpacked(run->plan->layer, arena, tile_keys);
    look();
    if (more && fine && !turn->asked) {
      ahead.turn_to(next_keys, next_values, next.count, 1);
      ahead.all();
    }
  }
  Walk(Run *run, const Item &item, Turn *turn, Arena &arena, int tile_keys)
      : Walk(run, item, turn, arena, tile_keys, tile_keys, true) {}
  // Goes on to the next tile, over which the one after it is asked for; `cost` says how many cycles
  // a tile of so many keys takes. False at the end, and where the block table is broken.
  template <class Cost>
  bool step(Cost cost) {
    if (!more || !fine) {
      ahead.all();
      return false;
    }
    tile = next;
    const char **k = keys, **v = values;
    keys = next_keys;
    values = next_values;
    next_keys = k;
    next_values = v;
    look();
    const int count = !fine ? 0 : more ? next.count : look_beyond();
    ahead.turn_to(next_keys, next_values, count, cost(tile.count));
    if (touches) {
      touch_pages(next_keys, key_offset, count);
      touch_pages(next_values, value_offset, count);
    }
    if (unpacked) {  // of one head
      const bool in_keys = source.value == source.key;
      unpacked.tile(keys, source.key_head * tile.item->head0, values, source.value_head * tile.item->head0,
                    tile.count, in_keys);
      key_offset = value_offset = 0;
    }
    return fine;
  }

 private:
  Run *run;
  Turn *turn;

  static Ahead lines_of(const Run *run, const Source &source, const Item &item) {
    const pa_layer &layer = run->plan->layer;
    if (layer.key_format) return {source, item, layer.key_format->bytes, layer.value_format->bytes};
    const int size = itemsize(layer.cache_dtype);
    return {source, item, layer.head_size * size, layer.v_head_size * size};
  }
  // A line of each page, all at once: so the processor looks several addresses up at a time. A later ask
  // would wait for its own.
  static void touch_pages(const char *const *rows, int64_t offset, int count) {
    uintptr_t page = 0;
    for (int t = 0; t < count; t++) {
      const char *at = rows[t] + offset;
      if ((uintptr_t)at / PAGE == page) continue;
      page = (uintptr_t)at / PAGE;
      prefetch_l2(at);
    }
  }
  void look() {
    more = next.next();
    fine = !more || token_addresses(source, next.first_key, next.count, next_keys, next_values);
  }
  // The thread's next item takes the place of the next tile; returns how many keys to ask for.
  PA_NOINLINE int look_beyond() {
    const int32_t index = pa_following(turn);
    if (index >= turn->count) return 0;
    const Item &item = run->plan->items[index];
    const Source then = source_of(run, item.seq);
    Tiles first = {&item, item.from, next.tile, 0, 0, next.aligned};
    if (!first.next() ||
        !token_addresses(then, first.first_key, first.count, next_keys, next_values)) {
      return 0;
    }
    ahead = lines_of(run, then, item);
    turn->asked_after = true;
    return first.count;
  }
};
