// An indexer's step: which items it has, and which of the candidates that they rank are chosen.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "internal.h"

IndexSight pa_index_sight(const IndexRun *run, int32_t seq, int32_t position) {
  const pa_index &x = *run->index;
  const int32_t seen = pa_max(0, pa_min(position + 1, x.lens[seq]));
  IndexSight sight = {seen / x.tokens_per_entry, 0, run->most, -1};
  sight.there = (sight.visible + x.pool - 1) / x.pool;
  if (x.part > 0) sight.count = pa_min(run->most, (int32_t)std::ceil(sight.there * x.part - 1e-9));
  if (x.tail && seen % x.tokens_per_entry) sight.tail = seen / x.tokens_per_entry;
  return sight;
}

void pa_write_choice(const IndexRun *run, int32_t row, const IndexSight &sight, const int32_t *ids, int32_t n) {
  const IndexCall &x = *run->index;
  int32_t *out = x.out + (int64_t)row * x.width;
  int32_t at = n;
  std::copy(ids, ids + n, out);
  if (sight.tail >= 0) out[at++] = sight.tail;
  std::fill(out + at, out + x.width, -1);
}

namespace {

// Candidates of a part at least, and rows of queries that are scored together.
enum { PART_ENTRIES = 8192, QUERY_ROWS = 1024, QUERY_TOKENS = 64 };

struct Step {
  std::vector<IndexItem> items;
  std::vector<int32_t> groups;  // the first item of those that are cut
  int32_t parts = 0, tokens = 1, entries = 1;

  void block(const IndexRun &run, int32_t seq, int32_t token, int32_t tokens_here, int32_t position, int32_t pieces) {
    const pa_index &x = *run.index;
    const int32_t last = position + tokens_here - 1, end = pa_index_sight(&run, seq, last).visible;
    tokens = pa_max(tokens, tokens_here);
    entries = pa_max(entries, end);
    int32_t each = pa_max(PART_ENTRIES, (end + pieces - 1) / pieces);
    each = pa_round_up(each, x.pool);
    const bool cut = pieces > 1 && each < end;
    if (cut) groups.push_back((int32_t)items.size());
    for (int32_t from = 0; from == 0 || from < end; from += cut ? each : pa_max(end, 1)) {
      const int32_t to = cut ? pa_min(end, from + each) : end;
      items.push_back({seq, token, tokens_here, position, from, to, cut ? parts++ : -1});
    }
    if (cut) groups.push_back((int32_t)items.size());
  }
};

void score(void *context, Turn *turn) {
  IndexRun *run = (IndexRun *)context;
  run->kernels->index_item(run, run->items[turn->index], turn->scratch);
}

void merge(void *context, Turn *turn) {
  const IndexRun *run = (const IndexRun *)context;
  const int32_t *group = run->groups + 2 * turn->index;
  run->kernels->index_merge(run, run->items + group[0], group[1] - group[0], turn->scratch.at);
}

// `n` numbers from 0 to `most`, ascending: in their place or in `room`. By digits, as a comparison of what comes in
// no order costs a misprediction.
const int32_t *sorted(int32_t *numbers, int32_t *room, int32_t n, int64_t most) {
  for (int32_t shift = 0; most >> shift; shift += 8, std::swap(numbers, room)) {
    int32_t at[257] = {};
    for (int32_t i = 0; i < n; i++) at[(numbers[i] >> shift & 255) + 1]++;
    for (int32_t i = 1; i < 256; i++) at[i] += at[i - 1];
    for (int32_t i = 0; i < n; i++) room[at[numbers[i] >> shift & 255]++] = numbers[i];
  }
  return numbers;
}

void write_pages(void *context, Turn *turn) {
  const pa_chosen *chosen = (const pa_chosen *)context;
  for (int32_t i = 0; i < chosen->num_rows; i++) {
    pa_write_row(chosen, (int64_t)turn->index * chosen->num_rows + i, turn->scratch.at);
  }
}

}  // namespace

int32_t pa_write_row(const pa_chosen *chosen, int64_t row, char *room) {
  const pa_chosen &x = *chosen;
  const int64_t token = row / x.num_rows, at = x.first + token;
  const int64_t seq = std::min<int64_t>(std::upper_bound(x.starts + 1, x.starts + x.num_seqs + 1, at) - x.starts, x.num_seqs) - 1;
  const int64_t len = x.lens[seq], seen = x.causal ? std::min(len - x.starts[seq + 1] + at + 1, len) : len;
  const int64_t visible = std::max<int64_t>(seen, 0) / x.tokens_per_entry;
  const int32_t *table = x.table + seq * x.table_row, each = pa_max(1, x.group / x.page_size);
  const int32_t runs = x.block_size / x.page_size;  // pages of a block
  int32_t shift = 0;
  while (1 << shift < runs) shift++;
  const int32_t in_token = (int32_t)(row % x.num_rows);
  const int32_t *from = x.ids + (token * x.choices + (x.choices > 1 ? in_token : 0)) * x.width;
  int32_t *to = x.pages + row * x.pages_row, *ids = (int32_t *)room, n = 0, most = 0;
  int64_t entries = 0;
  bool part = false, ascends = true;  // pages hold an incomplete group, the last one, once
  for (int32_t i = 0; i < x.width; i++) {
    const int64_t entry = (int64_t)from[i] * x.group, shown = x.physical ? x.group : visible - entry;
    if (from[i] < 0 || shown <= 0 || (shown < x.group && part)) continue;
    part |= shown < x.group;
    ids[n++] = from[i];
    ascends &= from[i] >= most;
    most = pa_max(most, from[i]);
    entries += x.physical ? 1 : std::min<int64_t>(shown, x.group);
  }
  const int32_t *groups = ascends ? ids : sorted(ids, ids + x.width, n, most);
  const int64_t head = x.heads[in_token] * x.by_head;
  for (int32_t i = 0, inside = 0; i < n * each; i++) {
    const int64_t page = (int64_t)*groups * each + inside, block = runs == 1 << shift ? page >> shift : page / runs;
    const int64_t stored = x.physical ? block : table[std::min<int64_t>(block, x.blocks - 1)];
    to[i] = (int32_t)(stored * x.by_block + (page - block * runs) * x.by_run + head);
    if (++inside == each) inside = 0, groups++;
  }
  std::fill(to + n * each, to + x.width * each, (int32_t)head);
  return x.counts[row] = (int32_t)entries;
}

int pa_pages(const pa_chosen *chosen, int32_t threads) {
  return pa_parallel(chosen->num_tokens, threads, pa_row_room(chosen), write_pages, (void *)chosen) ? 0 : -1;
}

int pa_choose(const char *isa, const pa_index *index, int32_t threads, const void *query, const void *keys,
              const float *weights, int32_t *out) {
  const IndexCall x = {*index, query, keys, weights, out};
  const KernelTable *kernels = pa_kernels_for(isa);
  if (!kernels) return -2;
  IndexRun run = {&x, kernels, nullptr, nullptr, nullptr, 0, x.width - x.tail, 0};
  const int32_t known = x.num_seqs ? pa_min(x.starts[x.num_seqs], x.num_tokens) : 0;
  std::fill(x.out + (int64_t)known * x.choices * x.width, x.out + (int64_t)x.num_tokens * x.choices * x.width, -1);
  const int32_t most = pa_max(1, pa_min(QUERY_TOKENS, QUERY_ROWS / x.num_heads));
  int64_t blocks = 0;
  for (int32_t i = 0; i < x.num_seqs; i++) blocks += (x.starts[i + 1] - x.starts[i] + most - 1) / most;
  const int32_t pieces = blocks >= 2L * threads || threads < 2 ? 1 : (int32_t)((2L * threads + blocks - 1) / pa_max(1, (int32_t)blocks));
  Step step;
  for (int32_t i = 0; i < x.num_seqs; i++) {
    const int32_t end = pa_min(x.starts[i + 1], known), queries = x.starts[i + 1] - x.starts[i];
    for (int32_t token = x.starts[i]; token < end; token += most) {
      const int32_t position = x.lens[i] - queries + token - x.starts[i];
      step.block(run, i, token, pa_min(most, end - token), position, pieces);
    }
  }
  run.items = step.items.data();
  run.groups = step.groups.data();
  run.part_words = (int64_t)step.tokens * x.choices * (1 + 2 * run.most);
  Buffer *buffer = nullptr;
  if (step.parts) {
    buffer = pa_take_buffer(4 * run.part_words * step.parts);
    if (!buffer) return -1;
    run.parts = (uint32_t *)buffer->memory;
  }
  const int64_t scratch = kernels->index_scratch(&run, step.tokens, step.entries);
  bool fine = pa_parallel((int32_t)step.items.size(), threads, scratch, score, &run);
  if (fine && step.parts && !run.bad) {
    int32_t largest = 0;
    for (size_t i = 0; i < step.groups.size(); i += 2) largest = pa_max(largest, step.groups[i + 1] - step.groups[i]);
    fine = pa_parallel((int32_t)step.groups.size() / 2, threads, 8L * (largest * (int64_t)run.most + 64), merge, &run);
  }
  if (buffer) pa_give_buffer(buffer);
  return !fine ? -1 : run.bad;
}
