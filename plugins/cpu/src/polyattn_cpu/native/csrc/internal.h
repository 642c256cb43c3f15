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
// `sinks`, then those of `near`; [from, to) counts in that.
struct Item {
  int32_t seq, token0, tokens;
  int32_t head0, heads;
  Range sinks, near;
  int32_t from, to;
  int32_t part;   // index of its partial result, or -1: it sees all its keys and writes the output
  int32_t group;  // the parts that are merged together
  int64_t cost;
};

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
  int64_t scratch_bytes;   // of one thread
  bool far;                // decode asks for lines into the second cache
};

// A call in flight.
struct Run {
  const pa_plan *plan;
  pa_tensors t;
  float *parts;
  int32_t *done;  // per group: parts that are finished
  int32_t bad;    // set where a block table's entry is outside the cache
};

struct KernelTable {
  const char *name;
  int32_t matrix_rows;                         // rows of one item of the matrix path
  int32_t (*dot_rows)(const pa_layer *layer);  // up to so many rows per KV head: the decode path
  int64_t (*scratch_bytes)(const pa_layer *layer, int32_t max_heads, int32_t max_rows);
  void (*run_item)(Run *run, Turn *turn);
  void (*store)(const pa_scatter *part, int64_t first, int64_t last);
  int64_t (*scan_scratch)(const pa_scan *scan);
  void (*scan)(const pa_scan *scan, int64_t index, char *scratch);
};

// Channels of one item, where they have no heads; sequences of one item of a convolution.
enum { PA_SCAN_CHANNELS = 64, PA_SCAN_SEQS = 16 };

// Items of one sequence of a recurrence, of some of a convolution.
static inline int64_t pa_scan_pieces(const pa_scan *scan) {
  return scan->kind <= PA_MAMBA1 ? (scan->num_heads + PA_SCAN_CHANNELS - 1) / PA_SCAN_CHANNELS
                                 : scan->num_heads;
}

// Keys of one item of the decode path at most; longer ranges are split, and the parts merged.
// The borders depend on the sequence alone, so neither threads nor neighbours change a bit.
enum { SPLIT_KEYS = 512 };

int32_t pa_isa_supported(const char *name);

// What a query at `position` of a sequence of `len` keys sees: `near` and, apart, kept first tokens.
static inline int32_t pa_floor_div(int32_t a, int32_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
static inline int32_t pa_min(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t pa_max(int32_t a, int32_t b) { return a < b ? b : a; }
static inline int32_t pa_round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

static inline void pa_visible(const pa_layer *layer, int32_t position, int32_t len, Range *near,
                              Range *sinks) {
  int64_t lo = 0, hi = len, p = position;
  if (layer->chunk) {
    int64_t chunk = (int64_t)pa_floor_div(position, layer->chunk) * layer->chunk;
    lo = chunk > lo ? chunk : lo;
    hi = chunk + layer->chunk < hi ? chunk + layer->chunk : hi;
  }
  if (layer->causal && p + 1 < hi) hi = p + 1;
  if (hi < 0) hi = 0;
  sinks->lo = (int32_t)lo;
  sinks->hi = (int32_t)(layer->sink_tokens < hi ? layer->sink_tokens : hi);
  if (layer->window) {
    if (p - layer->window + 1 > lo) lo = p - layer->window + 1;
    if (!layer->causal && p + layer->window < hi) hi = p + layer->window;
    if (hi < 0) hi = 0;
  }
  near->lo = (int32_t)(lo < len ? lo : len);
  near->hi = (int32_t)(hi > near->lo ? hi : near->lo);
  if (sinks->hi < sinks->lo) sinks->hi = sinks->lo;
}
