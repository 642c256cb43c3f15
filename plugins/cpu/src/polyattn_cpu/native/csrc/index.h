// An indexer: scores of a paged cache's keys with a few queries, and the best candidates. Included inside an
// anonymous namespace.
//
// A tile of keys is multiplied with all rows of the item, S [key][row], by the matrix path's engine, or, of few
// rows, by decode's products. Turned in registers, rows are folded to the scores of each choice, [choice][key].
// Of those a choice keeps what is better than the worst that it has, until its list is full; then its best.

#include "ranked.h"

constexpr int INDEX_TILE = MATRIX_TILE;
// Decode's products take a tile's keys from so many places in turn, as prefetchers follow each place, and ask for
// keys so many bytes ahead of their use.
constexpr int INDEX_PLACES = 2, INDEX_AHEAD = 8192;
constexpr int RUN_AHEAD = 4096;  // in keys that lie in runs of memory, a page of 4 KiB
// and for a line of so many later pages at once, once none but so many are left. An ask waits for its address, and what
// is behind it in the program waits with it; addresses of several pages are found at a time.
constexpr int RUN_PAGES = 8, PAGES_LEFT = 2;

// Rows of a token: a whole number of vectors, or a power of two that divides one.
PA_INLINE int index_rows(const pa_index &x) {
  int rows = 1;
  while (rows < x.num_heads && rows < W) rows *= 2;
  return x.num_heads <= W ? rows : pa_round_up(x.num_heads, W);
}
template <class Engine>
PA_INLINE int rows_by(const pa_index &x) {
  return Engine::PLANES ? pa_round_up(x.num_heads, 2 * W) : index_rows(x);
}

PA_INLINE int index_blocks(const pa_index &x, int entries) {
  return x.within ? (entries + x.within_block - 1) / x.within_block : 0;
}

// Entries that follow one another in a page, and are of one block of `within`.
struct Keys {
  int32_t first, count;
  const char *at, *scale;
};

// Keys that are scored together: where they lie, and their scores' factors.
struct KeyGroup {
  Keys runs[INDEX_TILE + 1];  // behind the last one, one of none
  int count;
  float factors[INDEX_TILE + W];
};

struct InOrder {  // asks for lines that follow one another
  const char *next;
  template <int KEYS>
  PA_INLINE void keys(const InOrder &of, int64_t byte) {
    PA_UNROLLED
    for (int k = 0; k < KEYS; k++) prefetch_l2_here(of.next + KEYS * byte + 64 * k);
  }
};

// W words of a query, in its keys' order.
template <class T, class Engine>
struct IndexQuery {
  PA_INLINE vf part(const char *from, int dtype, int d, int size) { return Engine::query_part(from, dtype, d, size); }
};

template <class T, class Engine>
struct Index {
  IndexRun *run;
  const IndexItem &item;
  const IndexCall &x;
  static constexpr int KEY_ROWS = (Engine::PLANES ? 2 : 1) * INDEX_TILE;  // tiles are converted beside products
  const int rows, lanes, vectors, room;
  Sizes is;
  bool few;
  float *weights, *s, *scores, *q;
  uint32_t *packed, *keys;
  const char **at;  // of the group's keys, then of the next one's
  uint32_t *ranks;  // [choice][room]
  int32_t *found;
  Ranked *ranked;
  uint8_t *held, *any_held;  // of each row of `within`; of all

  static pa_layer layer_of(const pa_index &x) {
    pa_layer layer = {};
    layer.head_size = x.head_size;
    layer.v_head_size = W;
    return layer;
  }
  static int room_of(const IndexRun *run) { return 2 * run->most + 4 * INDEX_TILE; }

  Index(IndexRun *run, const IndexItem &item, Arena arena, int tokens, int entries)
      : run(run), item(item), x(*run->index), rows(rows_by<Engine>(x)), lanes(tokens * rows),
        vectors((lanes + W - 1) / W), room(room_of(run)), is(Engine::sizes(layer_of(x))), few(false) {
    const int width = Engine::VECTORS * W, choices = tokens * x.choices, blocks = index_blocks(x, entries);
    weights = arena.take<float>(vectors * W);
    s = arena.take<float>((int64_t)(INDEX_TILE + W) * width);
    scores = arena.take<float>((int64_t)choices * INDEX_TILE);
    packed = arena.take<uint32_t>((int64_t)vectors * W * pa_max(is.k, pa_round_up(x.head_size, 4 * W)));
    q = (float *)packed;
    keys = arena.take<uint32_t>((int64_t)KEY_ROWS * is.k);
    at = arena.take<const char *>(2 * INDEX_TILE + W);
    ranks = arena.take<uint32_t>((int64_t)choices * room);
    found = arena.take<int32_t>((int64_t)choices * room);
    ranked = arena.take<Ranked>(choices);
    held = arena.take<uint8_t>((int64_t)(choices + 1) * blocks);
    any_held = held + (int64_t)choices * blocks;
    end = arena.at;
  }
  char *end;

  static int64_t scratch(const IndexRun *run, int tokens, int entries) {
    static const IndexItem none = {};
    return (int64_t)Index((IndexRun *)run, none, Room{NULL, INT64_MAX}, tokens, entries).end + 4096;
  }

  const char *query_of(int lane) const {
    const int64_t token = item.token + lane / rows;
    return (const char *)x.query + (token * x.query_token + lane % rows * x.query_head) * itemsize(x.dtype);
  }
  bool is_row(int lane) const { return lane % rows < x.num_heads && lane / rows < item.tokens; }

  void take_weights() {
    __builtin_memset(weights, 0, 4L * vectors * W);
    for (int i = 0; i < item.tokens; i++) {
      const float *from = x.weights ? x.weights + (int64_t)(item.token + i) * x.num_heads : NULL;
      for (int j = 0; j < x.num_heads; j++) weights[i * rows + j] = from ? from[j] : 1.0f;
    }
  }
  // How many vectors a panel has, and which ones the last has.
  int panel_vectors() const {
    const int panels = (vectors + Engine::VECTORS - 1) / Engine::VECTORS;
    return (vectors + panels - 1) / panels;
  }
  void take_queries() {
    const int each = panel_vectors();
    for (int v = 0; v < vectors; v++) {
      const int panel = v / each, ld = Engine::PLANES ? W : pa_min(each, vectors - panel * each) * W;
      uint32_t *to = packed + (Engine::PLANES ? (int64_t)v * W * is.k : (int64_t)panel * each * W * is.k + v % each * W);
      const char *from[W];
      for (int r = 0; r < W; r++) from[r] = is_row(v * W + r) ? query_of(v * W + r) : NULL;
      for (int d = 0; d < is.k; d += W) {
        vf block[W];
        for (int r = 0; r < W; r++) {
          block[r] = from[r] ? IndexQuery<T, Engine>::part(from[r], x.dtype, d, x.head_size) : vf{};
        }
        transpose(block);
        for (int i = 0; i < W; i++) write(to + (int64_t)(d + i) * ld, block[i]);
      }
    }
    if (is.k * Engine::PER_WORD != x.head_size) __builtin_memset(keys, 0, 4L * KEY_ROWS * is.k);
  }

  // Which blocks of entries each choice is given. Numbers of no block are none.
  void take_held(int entries) {
    const int blocks = index_blocks(x, entries);
    __builtin_memset(held, 0, (int64_t)(item.tokens * x.choices) * blocks);
    __builtin_memset(any_held, 0, blocks);
    for (int i = 0; i < item.tokens * x.choices; i++) {
      const int32_t *named = x.within + (item.token + i / x.choices) * x.within_token + i % x.choices * x.within_choice;
      for (int j = 0; j < x.num_within; j++) {
        if (named[j] < 0 || named[j] >= blocks) continue;
        held[(int64_t)i * blocks + named[j]] = any_held[named[j]] = 1;
      }
      ranked[i].held = held + (int64_t)i * blocks;
    }
  }
  void begin() {
    for (int i = 0; i < item.tokens * x.choices; i++) {
      const IndexSight sight = pa_index_sight(run, item.seq, item.position + i / x.choices);
      ranked[i] = {ranks + (int64_t)i * room, found + (int64_t)i * room, NULL, sight, 0, -1, 0.0f, NAN};
    }
    if (x.within) take_held(item.to);
    take_weights();
    if (!Engine::PLANES) __builtin_memset(s, 0, 4L * (INDEX_TILE + W) * Engine::VECTORS * W);
  }

  // A page's keys; NULL where the table points outside the cache.
  const char *page_of(int32_t page) const {
    const int64_t number = x.table[item.seq * x.table_row + page];
    return number < 0 || number >= x.num_blocks ? NULL : (const char *)x.keys + number * x.page_bytes;
  }
  // The next keys from `entry` on that some choice may have, `most` of them at most. Returns how many: 0 at the
  // end, -1 where the table points outside the cache.
  int keys_from(int32_t &entry, int most, Keys &keys) {
    const int64_t bytes = (int64_t)x.head_size * sizeof(T);
    int32_t stop = item.to;
    for (; x.within && entry < item.to; entry = stop) {
      const int block = entry / x.within_block;
      stop = pa_min(item.to, (block + 1) * x.within_block);
      if (any_held[block]) break;
    }
    if (entry >= item.to) return 0;
    const int page = entry / x.block_size, from = entry - page * x.block_size;
    stop = pa_min(pa_min(stop, entry + most), (page + 1) * x.block_size);
    const char *key = page_of(page);
    if (!key) return -1;
    keys = {entry, stop - entry, key + from * bytes, key + x.block_size * bytes + from * 4L};
    entry = stop;
    return keys.count;
  }
  // A group of them at most; false where the table points outside the cache.
  bool find(int32_t &entry, KeyGroup &group) {
    Keys *run = group.runs;
    int count = 0;
    for (group.count = 0; group.count < INDEX_TILE; group.count += count, run++) {
      count = keys_from(entry, INDEX_TILE - group.count, *run);
      if (count < 0) return false;
      if (!count) break;
      for (int i = 0; x.scaled && i < count + 15; i += 16) prefetch_l2_here(run->scale + 4 * pa_min(i, count - 1));
    }
    *run = {0, 0, NULL, NULL};
    return true;
  }
  void take_factors(KeyGroup &group, float by) const {
    float *to = group.factors;
    for (const Keys *run = group.runs; run->count; to += run->count, run++) {
      for (int i = 0; i < run->count; i += W) {
        const vf scale = x.scaled ? load_part((const float *)run->scale + i, run->count - i) : splat(1.0f);
        write(to + i, scale * splat(by));
      }
    }
  }

  // W keys' sums of `count` rows of one token, from its row `head` on, to scores: a vector of each row.
  PA_ALWAYS void fold_rows(vf *block, int count, int token, int head, int t, vf factor) {
    PA_UNROLLED
    for (int j = 0; j < count; j++) {
      block[j] *= factor;
      if (x.relu) block[j] = vmax(vf{}, block[j]);
    }
    if (x.choices > 1) {
      for (int j = 0; j < count && head + j < x.num_heads; j++) {
        write(scores + (int64_t)(token * x.choices + head + j) * INDEX_TILE + t, block[j]);
      }
      return;
    }
    float *to = scores + (int64_t)token * INDEX_TILE + t;
    vf sum = head ? loadf(to) : vf{};
    for (int j = 0; j < count; j++) sum += block[j] * splat(weights[token * rows + head + j]);
    write(to, sum);
  }
  // Rows of V vectors, from the `first`th on, to scores. s is [key][V * W].
  PA_NOINLINE void fold(const float *s, int V, int first, const KeyGroup &group) {
    for (int t = 0; t < group.count; t += W) {
      const vf factor = loadf(group.factors + t);
      for (int v = 0; v < V; v++) {
        vf block[W];
        for (int i = 0; i < W; i++) block[i] = loadf(s + (int64_t)(t + i) * V * W + v * W);
        transpose(block);
        int lane = (first + v) * W;
        if (rows >= W) {
          if (lane / rows < item.tokens) fold_rows(block, W, lane / rows, lane % rows, t, factor);
          continue;
        }
        for (int i = 0; i < W && lane / rows < item.tokens; i += rows, lane += rows) {
          fold_rows(block + i, rows, lane / rows, 0, t, factor);
        }
      }
    }
  }

  bool is_forced(const Ranked &r, int32_t id) const {
    return id < x.forced_first || id >= r.sight.there - x.forced_last;
  }
  void add(Ranked &r, int32_t id, float score) {
    const bool forced = is_forced(r, id);
    if (!forced && score <= r.floor) return;
    r.put(forced ? 0xffffffffu : ranks_of(splat(score))[0], id);
  }
  // Entries [id, id + n) are candidates of their own.
  void add_entries(Ranked &r, int32_t id, const float *score, int n) {
    if (is_forced(r, id) || is_forced(r, id + n - 1)) {
      for (int j = 0; j < n; j++) add(r, id + j, score[j]);
      return;
    }
    vi place;
    for (int i = 0; i < W; i++) place[i] = i;
    for (int i = 0; i < n; i += W) {
      const vf some = read<vf>(score + i);
      const uint32_t good = lanes_of(~(vi)(some <= splat(r.floor)) & (vi)(place < splati(n - i)));
      r.put_some(good, ranks_of(some), place + splati(id + i));
    }
  }
  void end_candidate(Ranked &r) {
    if (r.candidate >= 0) add(r, r.candidate, r.best);
    r.candidate = -1;
  }
  // Entries [id, id + n) belong to candidates of `pool`.
  void add_pooled(Ranked &r, int32_t id, const float *score, int n) {
    for (int i = 0; i < n;) {
      const int32_t candidate = (id + i) / x.pool;
      const int stop = (int)pa_min(n, (candidate + 1) * x.pool - id);
      if (candidate != r.candidate) {
        end_candidate(r);
        r.candidate = candidate;
        r.best = -INFINITY;
      }
      float best = r.best;
      if (stop - i >= W) {
        vf most = splat(best);
        for (; i + W <= stop; i += W) most = vmax(read<vf>(score + i), most);
        for (int j = 0; j < W; j++) best = most[j] > best ? most[j] : best;
      }
      for (; i < stop; i++) best = score[i] > best ? score[i] : best;
      r.best = best;
    }
  }
  // Entries [id, id + n), of one block of `within`.
  void rank_some(Ranked &r, int32_t id, const float *score, int n) {
    if (x.within && !r.held[id / x.within_block]) return;
    if (r.count + n + W > room) r.shorten();
    n = pa_min(n, r.sight.visible - id);
    if (n <= 0) return;
    if (x.pool > 1) return add_pooled(r, id, score, n);
    add_entries(r, id, score, n);
  }
  PA_NOINLINE void rank(const KeyGroup &group) {
    for (int i = 0; i < item.tokens * x.choices; i++) {
      const float *mine = scores + (int64_t)i * INDEX_TILE;
      if (!x.within) rank_some(ranked[i], group.runs->first, mine, group.count);
      for (const Keys *run = group.runs; x.within && run->count; mine += run->count, run++) {
        rank_some(ranked[i], run->first, mine, run->count);
      }
    }
  }
  void leave() {
    for (int i = 0; i < item.tokens * x.choices; i++) {
      Ranked &r = ranked[i];
      end_candidate(r);
      r.end();
      if (item.part < 0) {
        pa_write_choice(run, item.token * x.choices + i, r.sight, r.ids, r.count);
        continue;
      }
      uint32_t *to = run->parts + item.part * run->part_words + (int64_t)i * (1 + 2 * run->most);
      to[0] = (uint32_t)r.count;
      __builtin_memcpy(to + 1, r.ranks, 4L * r.count);
      __builtin_memcpy(to + 1 + run->most, r.ids, 4L * r.count);
    }
  }

  template <int V>
  PA_NOINLINE void multiply(int first, const KeyGroup &group, Ahead &ahead) {
    const uint32_t *from = packed + (int64_t)first * W * is.k;
    Engine::template scores<V>(keys, from, s, group.count, is, ahead);
    fold(s, V, first, group);
  }
  void multiply_all(const KeyGroup &group, Ahead &ahead) {
    for (int i = 0; i < group.count; i++) {
      ahead(is.k / 8);
      Engine::pack_key((const T *)at[i], keys, i, x.head_size, is);
    }
    const int each = panel_vectors();
    for (int first = 0; first < vectors; first += each) {
      switch (pa_min(each, vectors - first)) {
        case 1: multiply<1>(first, group, ahead); break;
        case 2: multiply<2>(first, group, ahead); break;
        default: multiply<Engine::VECTORS>(first, group, ahead);
      }
    }
  }

#if defined(PA_PAIR_DOTS) || !defined(PA_BASE)
#if defined(PA_PAIR_DOTS)
  static constexpr float FACTOR = 1;
  int row_floats() const { return pa_round_up(x.head_size, 4 * W) / 2; }
#else
  static constexpr float FACTOR = IndexApart<T>::FACTOR;
  int row_floats() const { return pa_round_up(x.head_size, 2 * W); }
#endif
  void take_few_rows() {
    __builtin_memset(q, 0, 4L * rows * row_floats());
    for (int lane = 0; lane < x.num_heads; lane++) {
      float *to = q + (int64_t)lane * row_floats();
#if defined(PA_PAIR_DOTS)
      __builtin_memcpy(to, query_of(lane), 2L * x.head_size);
      turn_to_keys<T>((uint16_t *)to, x.head_size);
#else
      constexpr int LINE = 64 / (int)sizeof(T);
      widen_any(query_of(lane), x.dtype, to, x.head_size);
      if (IndexApart<T>::ANY) apart(to, x.head_size / LINE * LINE);
#endif
    }
  }
  template <int ROWS>
  PA_NOINLINE void dot_all(const KeyGroup &group, int next) {
    constexpr int KEYS = W / ROWS;
    const int count = group.count, there = count + next, places = count == INDEX_TILE ? INDEX_PLACES : 1, each = count / places;
    for (int i = there; i < there + W; i++) at[i] = at[there - 1];
    const int bytes = x.head_size * (int)sizeof(T), ld = row_floats();
    const int distance = pa_round_up(pa_min(INDEX_AHEAD / bytes + 1, each), W);
    for (int i = 0; i < each; i += W) {
      vf block[INDEX_PLACES][ROWS];
      const int later = i + distance < each ? i + distance : i + distance - each + count;  // or the next tile's
      for (int r = 0; r < ROWS; r++) {
        for (int p = 0; p < places; p++) {
          const char *some[KEYS];
          for (int k = 0; k < KEYS; k++) some[k] = at[p * each + i + r + k * ROWS];
          const char *const *ask = at + pa_min(p * each + later, there) + r * KEYS;
          for (int k = 0; k < KEYS; k++) {
            for (int b = 0; b < bytes; b += 64) prefetch_l2(ask[k] + b);
          }
#if defined(PA_PAIR_DOTS)
          block[p][r] = pair_dots<T, ROWS>(some, 0, (const uint16_t *)q, 2 * ld, x.head_size, NoAsks());
#else
          block[p][r] = dots_here<T, ROWS, IndexApart<T>>(some, 0, q, ld, x.head_size, NoAsks());
#endif
        }
      }
      for (int p = 0; p < places; p++) {
        transpose<ROWS>(block[p]);
        fold_rows(block[p], ROWS, 0, 0, p * each + i, loadf(group.factors + p * each + i));
      }
    }
  }
  // Asks for a line of each page from this one on; returns the page behind them.
  PA_NOINLINE int32_t ask_pages(int32_t page) {
    for (int i = 0; i < RUN_PAGES && page * x.block_size < item.to; i++) {
      if (const char *line = page_of(page++)) prefetch_l2_here(line);
    }
    return page;
  }
  // Keys whose size the compiler knows, in runs of memory: each run's are ranked when it is done, so that memory
  // isn't idle for long. False where the table points outside the cache. Aligned, as where the loop lies is worth 1 %.
  template <int ROWS, int SIZE>
  __attribute__((aligned(64))) PA_NOINLINE bool choose_runs(float by) {
    constexpr int KEYS = W / ROWS, BYTES = SIZE * (int)sizeof(T);
    Keys some = {}, ask = {};
    int32_t entry = item.from, asked = item.from;
    const auto ask_further = [&]() __attribute__((always_inline)) {
      ask.at += W * BYTES;
      ask.count -= W;
      if (ask.count <= 0) keys_from(asked, INDEX_TILE, ask);
    };
    int32_t next_page = ask_pages(item.from / x.block_size);
    for (int i = 0; i < RUN_AHEAD / BYTES / W; i++) ask_further();
    int count;
    while ((count = keys_from(entry, INDEX_TILE, some)) > 0) {
      const int32_t page = some.first / x.block_size;
      if (page + PAGES_LEFT >= next_page) next_page = ask_pages(pa_max(page, next_page));
      for (int t = 0; t < count; t += W) {
        alignas(64) char copied[W * BYTES];
        const char *run = some.at + t * BYTES;
        if (count - t < W) run = (const char *)__builtin_memcpy(copied, run, (count - t) * BYTES);
        ask_further();
        vf part[ROWS][ROWS], block[ROWS];  // [row][visit]
        PA_ROLLED
        for (int v = 0; v < ROWS; v++) {
          const float *mine = q;
          __asm__ volatile("" : "+r"(mine));  // else all rows are loaded before, and spilled
          const char *keys[KEYS];
          for (int k = 0; k < KEYS; k++) keys[k] = run + (v * KEYS + k) * BYTES;
          vf acc[W];
          multiply_keys<T, ROWS, IndexApart<T>, SIZE>(keys, 0, mine, SIZE, SIZE, InOrder{ask.at + v * KEYS * BYTES}, acc);
          PA_UNROLLED
          for (int r = 0; r < ROWS; r++) {
            vf row[KEYS];
            PA_UNROLLED
            for (int k = 0; k < KEYS; k++) row[k] = acc[k * ROWS + r];
            part[r][v] = sums<1, KEYS>(row);
          }
        }
        PA_UNROLLED
        for (int r = 0; r < ROWS; r++) block[r] = sums<KEYS, ROWS>(part[r]);
        fold_rows(block, ROWS, 0, 0, t, splat(by));
      }
      for (int i = 0; i < x.choices; i++) rank_some(ranked[i], some.first, scores + (int64_t)i * INDEX_TILE, count);
    }
    return count == 0;
  }
  // The rows of a vector's part, as a constant.
  template <class Each>
  auto by_rows(Each each) {
    if (rows <= 1) return each(std::integral_constant<int, 1>());
    if (rows <= 2) return each(std::integral_constant<int, 2>());
    if (PART_ROWS < 8 || rows <= 4) return each(std::integral_constant<int, 4>());
    return each(std::integral_constant<int, PART_ROWS>());
  }
  static constexpr int SIZE = IndexApart<T>::SIZE;
  bool in_runs() const {
    return few && x.head_size == SIZE && x.block_size % W == 0 && (!x.within || x.within_block % W == 0);
  }
#endif

  // Puts the addresses of a group's keys to the places from `to` on.
  void take_addresses(const KeyGroup &group, const char **to) const {
    for (const Keys *run = group.runs; run->count; run++) {
      for (int i = 0; i < run->count; i++) *to++ = run->at + (int64_t)i * x.head_size * (int)sizeof(T);
    }
  }
  // A group of keys after another. False where the table points outside the cache.
  bool choose_groups(float by) {
    Item whole = {};
    whole.heads = 1;
    Ahead ahead(whole, 0, x.head_size * (int)sizeof(T));
    KeyGroup groups[2];
    int32_t entry = item.from;
    if (!find(entry, groups[0])) return false;
    take_addresses(groups[0], at);
    for (int turn = 0; groups[turn].count; turn ^= 1) {
      KeyGroup &group = groups[turn], &later = groups[turn ^ 1];
      if (!find(entry, later)) return false;
      const int count = group.count, next = later.count;
      take_addresses(later, at + count);
      take_factors(group, by);
#if defined(PA_PAIR_DOTS) || !defined(PA_BASE)
      if (few) {
        by_rows([&](auto rows) { dot_all<rows()>(group, next); });
      } else
#endif
      {
        const int steps = (count + Engine::STEP - 1) / Engine::STEP;
        ahead.turn_to(at + count, at + count, next, count * is.k / 8 + steps * Engine::cost(is.k, vectors));
        multiply_all(group, ahead);
      }
      rank(group);
      __builtin_memmove(at, at + count, next * sizeof *at);
    }
    return true;
  }

  // False where the table points outside the cache.
  bool choose() {
#if defined(__AMX_BF16__)
    return choose_by_registers(*this, x.scale);
#else
    float by = x.scale;
    begin();
#if defined(PA_PAIR_DOTS) || !defined(PA_BASE)
    few = item.tokens == 1 && rows <= PART_ROWS;
    if (few) {
      take_few_rows();
      by /= FACTOR;
    }
    if constexpr (SIZE > 0) {
      if (in_runs()) return by_rows([&](auto rows) { return choose_runs<rows(), SIZE>(by); });
    }
#endif
    if (!few) take_queries();
    return choose_groups(by);
#endif
  }
  void all() {
    Engine::begin();
    const bool fine = choose();
    Engine::end();
    if (fine) return leave();
    __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
  }
};

template <class Engine, class T>
static void index_with(IndexRun *run, const IndexItem &item, const Room &scratch) {
  Index<T, Engine>(run, item, scratch, item.tokens, item.to).all();
}

#if defined(PA_BASE)
// An instruction set that serves some indexers; the rest are another one's, `other`.
template <class Engine>
static int64_t index_scratch_beside(const KernelTable &other, const IndexRun *run, int32_t tokens, int32_t entries) {
  const int64_t rest = other.index_scratch(run, tokens, entries);
  const int64_t own = Index<bf16, Engine>::scratch(run, tokens, entries);
  return rest > own ? rest : own;
}
// bfloat16 products of bfloat16 queries, as keys of 8 bits are exact in it, where `wanted`.
template <class Engine>
static void index_item_beside(const KernelTable &other, bool wanted, IndexRun *run, const IndexItem &item,
                              const Room &scratch) {
  const pa_index &x = *run->index;
  const bool own = x.dtype == PA_BF16 && (x.cache_dtype == PA_BF16 || x.cache_dtype == PA_E4M3);
  if (!own || !wanted) return other.index_item(run, item, scratch);
  if (x.cache_dtype == PA_BF16) return index_with<Engine, bf16>(run, item, scratch);
  index_with<Engine, e4m3>(run, item, scratch);
}
#endif

#if defined(__AMX_BF16__)
#include "index_tiles.h"
#elif defined(PA_BASE)
static int64_t index_scratch(const IndexRun *run, int32_t tokens, int32_t entries) {
  return index_scratch_beside<PairEngine>(PA_BASE, run, tokens, entries);
}
static void index_item(IndexRun *run, const IndexItem &item, const Room &scratch) {
  bool wanted = true;
#if !defined(PA_PAIR_DOTS)
  wanted = index_rows(*run->index) > 8;
#endif
  index_item_beside<PairEngine>(PA_BASE, wanted, run, item, scratch);
}
#else
static int64_t index_scratch(const IndexRun *run, int32_t tokens, int32_t entries) {
  return Index<float, FloatEngine>::scratch(run, tokens, entries);
}
static void index_item(IndexRun *run, const IndexItem &item, const Room &scratch) {
  switch (run->index->cache_dtype) {
    case PA_F32: return index_with<FloatEngine, float>(run, item, scratch);
    case PA_BF16: return index_with<FloatEngine, bf16>(run, item, scratch);
    case PA_F16: return index_with<FloatEngine, f16>(run, item, scratch);
    default: index_with<FloatEngine, e4m3>(run, item, scratch);
  }
}
#endif
