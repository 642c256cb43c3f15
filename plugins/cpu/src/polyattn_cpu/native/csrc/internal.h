// What do the planner, the pool and the kernels share? Plain data; no templates, no std types, so
// that nothing compiled for one instruction set can be linked into code of another.

#pragma once

#include "pool.h"
#include "polyattn_cpu.h"

// Keys of a range [lo, hi) of one sequence.
struct Range {
  int32_t lo, hi;
};

// One work item: some query tokens of one sequence, some KV heads, some of the visible keys.
// Visible keys are counted without the gap between kept first tokens and window: first the keys of
// `kept`, then those of `near`; [from, to) counts in that.
struct Item {
  int32_t seq, token0, tokens;
  int32_t head0, heads;
  Range kept, near;
  int32_t from, to;
  int32_t part;   // index of its partial result, or -1: it sees all its keys and writes the output
  int32_t joined, piece_keys;  // so many pieces of so many keys, the last of what is left; 0: it is one
  int32_t group;  // the parts that are merged together
  int64_t cost;
};

static inline int32_t rows_per_head(const pa_layer &layer, const Item &item) {
  return item.tokens * (layer.num_heads / layer.num_kv_heads);
}

struct Group {
  int32_t first_part, parts;
};

struct KernelTable;

struct pa_plan {
  pa_layer layer;
  int32_t num_seqs, block_size, num_threads;
  int32_t *query_starts, *lens, *key_starts;
  const KernelTable *kernels;
  Item *items;
  Group *groups;
  int32_t num_items, num_groups, num_parts;
  int64_t part_floats;     // of one partial result
  int64_t scratch_bytes;   // of one thread, without what joined items keep
  int64_t kept_bytes;      // the partial results of a joined item
  bool far;                // decode asks for lines into the second cache
};

// A call in flight.
struct Run {
  const pa_plan *plan;
  pa_tensors t;
  float *parts;
  int32_t *done;  // per group: parts that are finished
  int32_t bad;    // 0, or what `pa_attend` returns
  const pa_chosen *chosen;  // whose rows the threads write as they take items; NULL: all are there
};

// Some tokens of a sequence with an indexer's entries [from, to) of it.
struct IndexItem {
  int32_t seq, token, tokens;  // the first one's row in the query
  int32_t position;            // of the first token
  int32_t from, to;
  int32_t part;                // of the items of these tokens; -1: this one has all their entries
};

// What an indexer's call reads and writes.
struct IndexCall : pa_index {
  const void *query, *keys;
  const float *weights;
  int32_t *out;
};

// An indexer's call in flight. A part has, for each token and choice, room for a count, `most` ranks and their ids.
struct IndexRun {
  const IndexCall *index;
  const KernelTable *kernels;
  const IndexItem *items;
  const int32_t *groups;  // the first item of each group of parts, and the end of the last group
  uint32_t *parts;
  int64_t part_words;
  int32_t most;           // candidates that are chosen of a row
  int32_t bad;
};

// What one token sees, and how many candidates are chosen of it.
struct IndexSight {
  int32_t visible, there, count, tail;  // entries; candidates; the id of the incomplete group, or -1
};
IndexSight pa_index_sight(const IndexRun *run, int32_t seq, int32_t position);

// Writes the pages of a choice's row, which is a token's for a KV head, and returns how many entries it has; `room`
// of `pa_row_room` bytes.
int32_t pa_write_row(const pa_chosen *chosen, int64_t row, char *room);
static inline int64_t pa_row_room(const pa_chosen *chosen) { return 8L * chosen->width + 64; }
// Ends a row: writes the ids of its candidates.
void pa_write_choice(const IndexRun *run, int32_t row, const IndexSight &sight, const int32_t *ids, int32_t n);

struct KernelTable {
  const char *name;
  int32_t matrix_rows;                         // rows of one item of the matrix path
  int32_t (*dot_rows)(const pa_layer *layer);  // up to so many rows per KV head: the decode path
  bool (*joins)(const pa_layer *layer, int32_t rows);  // whether items of so many rows per KV head have several pieces
  int64_t (*scratch_bytes)(const pa_layer *layer, int32_t max_heads, int32_t max_rows);
  void (*run_item)(Run *run, Turn *turn);
  void (*store)(const pa_scatter *part, int64_t first, int64_t last);
  int64_t (*scan_scratch)(const pa_scan *scan);
  void (*scan)(const pa_scan *scan, int64_t index, const Room &scratch);
  int64_t (*index_scratch)(const IndexRun *run, int32_t tokens, int32_t entries);
  void (*index_item)(IndexRun *run, const IndexItem &item, const Room &scratch);
  void (*index_merge)(const IndexRun *run, const IndexItem *first, int32_t parts, char *scratch);
};

// The instruction set's kernels where this processor has it, else NULL: those that multiply best.
const KernelTable *pa_kernels_for(const char *isa);

// Channels of one item, where they have no heads; of a convolution, a run of memory that the processor
// reads ahead.
enum { PA_SCAN_CHANNELS = 64, PA_CONV_CHANNELS = 2048 };

static inline int64_t pa_scan_channels(const pa_scan *scan) {
  if (scan->kind != PA_SHORT_CONV) return PA_SCAN_CHANNELS;
  return scan->starts[scan->num_seqs] > scan->num_seqs ? PA_CONV_CHANNELS : PA_CONV_CHANNELS / 4;
}

// Tokens of one item of a convolution: more where their states don't have to come from memory.
static inline int64_t pa_conv_tokens(const pa_scan *scan) {
  return scan->starts[scan->num_seqs] > scan->num_seqs ? 128 : 32;
}

// Items of one sequence of a recurrence, of some tokens of a convolution.
static inline int64_t pa_scan_pieces(const pa_scan *scan) {
  const int64_t channels = pa_scan_channels(scan);
  return scan->kind <= PA_MAMBA1 ? (scan->num_heads + channels - 1) / channels : scan->num_heads;
}

// Keys of one item of the decode path at most; longer ranges are split, and the parts merged.
// The borders depend on the sequence alone, so neither threads nor neighbours change a bit.
enum { SPLIT_KEYS = 512, KEPT_BYTES = 1 << 18 };

// Into how many pieces so many keys are cut; the last one has up to an eighth more.
static inline int32_t pa_pieces(int32_t keys, int32_t split) {
  const int32_t pieces = (keys - split / 8 + split - 1) / split;
  return pieces > 1 ? pieces : 1;
}

int32_t pa_isa_supported(const char *name);

static inline int32_t pa_min(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t pa_max(int32_t a, int32_t b) { return a < b ? b : a; }
static inline int32_t pa_round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

// What queries see: kept first tokens, and the keys near the queries, right of those. No key is in both.
struct KeyRanges {
  Range kept, near;
};

// What the queries at positions `first` to `last` see of `len` keys: `polyattn.spec.key_ranges`, formula
// by formula. Positions below zero are of queries before the first key. Ranges that touch are one, `near`.
static inline KeyRanges pa_key_ranges(const pa_layer *layer, int64_t first, int64_t last, int64_t len) {
  auto min = [](int64_t a, int64_t b) { return a < b ? a : b; };
  auto max = [](int64_t a, int64_t b) { return a < b ? b : a; };
  auto floor = [](int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); };
  int64_t start = 0, stop = len;
  if (layer->chunk) {
    start = max(start, floor(first, layer->chunk) * layer->chunk);
    stop = min(stop, (floor(last, layer->chunk) + 1) * layer->chunk);
  }
  if (layer->causal) stop = min(stop, last + 1);
  start = min(start, len);
  stop = max(stop, start);
  int64_t kept = start, near = start, end = stop;
  if (layer->window) {
    near = min(max(near, first - layer->window + 1), stop);
    if (!layer->causal) end = min(end, last + layer->window);
    end = max(end, near);
    if (layer->sink_tokens) kept = max(min(stop, layer->sink_tokens), start);
    near = max(near, kept);
    end = max(end, near);
  }
  if (near == kept) near = kept = start;
  return {{(int32_t)start, (int32_t)kept}, {(int32_t)near, (int32_t)end}};
}
