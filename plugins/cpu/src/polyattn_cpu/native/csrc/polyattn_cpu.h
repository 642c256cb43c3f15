// What does Python call? A plain C interface over pointers and strides; it knows no torch.
//
// Strides count elements. A function that can fail returns 0 or a pointer; else pa_error() says
// what was wrong.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define PA_EXPORT __declspec(dllexport)
#else
#define PA_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PA_ABI 15  // library.py refuses a library of another number

enum pa_dtype { PA_F32, PA_BF16, PA_F16, PA_E4M3, PA_E5M2, PA_INT8, PA_DTYPES };

// How rows of bytes are read. PA_TRACED: by a format's `decode`, a step at a time on all elements of a row;
// the others are told by their numbers: codes of four bits, the first in the low ones, each a number of a
// table times its group's scale; or an e4m3 or an int8 for each element, and the row's float32 behind them.
enum pa_row_form { PA_TRACED, PA_ROWS_INT8, PA_ROWS_E4M3, PA_CODES };
enum pa_code_scale { PA_HALVES, PA_STEPS, PA_E4M3S, PA_POWERS, PA_NORM };

// A step of a trace: the first `count` entries, 32 bits each, of register `to` of registers a, b and c.
enum pa_row_op {
  PA_BYTE, PA_LOOK_UP, PA_TO_FLOAT, PA_TO_INT, PA_HALF, PA_WHERE, PA_AND, PA_OR, PA_XOR, PA_SHL, PA_SHR,
  PA_ADD_INT, PA_SUB_INT, PA_MUL_INT, PA_DIV_INT, PA_MOD_INT, PA_MIN_INT, PA_MAX_INT, PA_LT_INT, PA_LE_INT,
  PA_EQ_INT, PA_ADD, PA_SUB, PA_MUL, PA_DIV, PA_MIN, PA_MAX, PA_LT, PA_LE, PA_EQ, PA_EXP, PA_EXP2, PA_LOG,
  PA_LOG2, PA_SQRT, PA_SIN, PA_COS, PA_TANH, PA_FLOOR, PA_CEIL,
  PA_ELEMENT, PA_GATHER
};
typedef struct {
  int32_t op, to, a, b, c, count;
} pa_row_step;

// The first registers hold `constants`; a step to `look up` reads `table`, `b` on, of `c` entries. Where
// rows are written, `size` is the entries of a register, and `group` a row's elements.
typedef struct {
  int32_t form, scale, group, bytes, size;  // of a row: bytes; elements
  int32_t num_steps, num_registers, num_constants, result;
  float factor;
  const pa_row_step *steps;
  const int32_t *constants, *table;
} pa_row_format;

// What a layer computes. Zero means none for window, chunk, sink_tokens and soft_cap. `invariant`: a row's
// result follows from its own keys alone, whichever other rows of its sequence come with it: all rows take
// the matrix path, in tiles that begin at multiples of their size. PA_MACHINES: by the bits that are specified, of
// float32 alone. Rows of bytes, which have a format, are
// read as elements of `cache_dtype`.
enum { PA_MACHINES = 2 };
typedef struct {
  int32_t num_heads, num_kv_heads, head_size, v_head_size;
  int32_t dtype, cache_dtype;
  int32_t causal, window, chunk, sink_tokens, invariant;
  float scale, soft_cap;
  const pa_row_format *key_format, *value_format;  // both or neither; they outlive the plan
} pa_layer;

// What runs in a step. block_size 0: keys and values lie packed, and sequence i's begin at
// key_starts[i]; else a block table says where they are.
typedef struct {
  int32_t num_seqs, block_size, num_threads;
  const int32_t *query_starts;  // num_seqs + 1
  const int32_t *lens;          // num_seqs: keys of each sequence
  const int32_t *key_starts;    // num_seqs, or NULL
} pa_batch;

// One call's tensors. num_blocks bounds the block table's entries. lse, sinks, alibi may be NULL.
typedef struct {
  const void *query, *key, *value;
  void *out;
  float *lse;
  const int32_t *block_table;
  const float *sinks, *alibi;
  int64_t query_token, query_head;
  int64_t key_block, key_token, key_head;
  int64_t value_block, value_token, value_head;
  int64_t out_token, out_head;
  int64_t lse_token, lse_head;
  int64_t table_row, num_blocks;
  float k_scale, v_scale;
} pa_tensors;

typedef struct pa_plan pa_plan;

PA_EXPORT int pa_abi(void);
PA_EXPORT const char *pa_error(void);

// An item finds NaN in its scratch from here on: what it reads before it writes it shows.
PA_EXPORT void pa_poison(void);

// The instruction sets that were built and that this processor has, best first, comma-separated; after a
// semicolon those that it has and that the compiler failed at, where there are any.
PA_EXPORT const char *pa_isas(void);

PA_EXPORT pa_plan *pa_plan_new(const char *isa, const pa_layer *layer, const pa_batch *batch);
PA_EXPORT void pa_plan_free(pa_plan *plan);

// What a plan holds, for whoever checks it. `numbers`: items, groups, parts, floats of a part, bytes of a
// thread's scratch and how many its largest item needs. `items`, NULL or of PA_ITEM_FIELDS each: sequence,
// first token, tokens, first KV head, KV heads, kept keys from and to, near keys from and to, of these
// visible ones from and to, part or -1, group. `groups`, NULL or of two each: first part, parts.
enum { PA_ITEM_FIELDS = 13 };
PA_EXPORT void pa_plan_list(const pa_plan *plan, int64_t *numbers, int32_t *items, int32_t *groups);

// Returns 0; 1 where a block table's entry points outside the cache (its item is left unwritten); 2 where memory is
// short.
PA_EXPORT int pa_attend(const pa_plan *plan, const pa_tensors *tensors);

// A step's new rows, (num_tokens, num_heads, head_size): a bias is added, an RMS norm of each head or of
// all of a token's follows, pairs of a head turn by the token's angles, its factor multiplies; then cache[slot] = saturate(row / scale), slot -1 skips.
typedef struct {
  const void *source;
  void *cache;           // NULL: nothing is stored
  void *out;             // NULL, or where the rows go too: contiguous, of `dtype`, each token's
  const int64_t *slots;
  const float *bias;     // NULL, or (num_heads, head_size)
  const float *turns;    // (num_tokens, 2 * num_pairs): a token's cosines, then its sines
  const float *factors;  // NULL, or (num_tokens)
  int64_t num_tokens, num_heads, head_size, block_size, num_slots;
  int64_t source_token, source_head;
  int64_t cache_block, cache_token, cache_head;
  int32_t dtype, cache_dtype;
  // Pair i is elements i and i + num_pairs behind first_turned; with `neighbours` 2 i and 2 i + 1.
  int32_t num_pairs, first_turned, neighbours;
  float scale;
  const pa_row_format *rows;  // NULL, or how rows of bytes are written
  const float *norm;          // NULL, or the norm's weight: (head_size), or (num_heads, head_size)
  int32_t whole;              // whether the norm is of all heads as one row
  float eps;
} pa_scatter;

// Returns 0, or 1 + the index of the first slot that points outside the cache (nothing is written).
PA_EXPORT int64_t pa_store(const char *isa, const pa_scatter *parts, int32_t count,
                           int32_t threads);

enum pa_scan_kind {
  PA_SHORT_CONV, PA_MAMBA1, PA_MAMBA2, PA_LINEAR, PA_GDN, PA_KDA, PA_RWKV7, PA_RWKV6
};

// (num_tokens, heads, size), or (num_tokens, heads): strides in elements, the last one 1.
typedef struct {
  const void *data;
  int64_t token, head;
  int64_t dtype;
} pa_rows;

// A step of a recurrence. A slot of `states`, float32, is (num_heads, rows, columns): key and value size,
// for Mamba-2 head and state size; for Mamba-1 (num_heads, columns); for a convolution likewise, the
// last inputs, in `state_dtype`: of `rows` that a token reads, the oldest first, or, where columns are
// more, position p's in column p modulo their number. Inputs as the layer's form orders them, Mamba's
// gate last (NULL: none), parameters float32: Mamba A, D or NULL, dt_bias or NULL; linear attention
// decay; RWKV-6 u (num_heads, rows); a convolution weight, bias or NULL.
typedef struct {
  int64_t kind, dtype, state_dtype;
  int64_t num_seqs, num_heads, num_groups, rows, columns;
  const int32_t *starts;   // num_seqs + 1
  const int64_t *slots;    // num_seqs; -1: a padding row
  const int32_t *before;   // num_seqs: tokens that it had; of none it begins from zero
  const int64_t *targets;  // NULL, or (num_seqs, target_row): where the state after each token goes
  int64_t target_row;
  pa_rows inputs[6];
  const float *params[3];
  void *states, *out;      // out: contiguous, of `dtype`
  int64_t num_slots, state_slot;  // elements of a slot
  int32_t softplus, unit_keys, silu;
  float scale;
} pa_scan;

// Returns 0; -1 where memory is short, -2 for an unknown instruction set; or 1 + the index of the first
// slot that is out of range (nothing is written).
PA_EXPORT int64_t pa_scan_step(const char *isa, const pa_scan *scan, int32_t threads);

// A step of an indexer: which entries of a paged cache of index keys does each token attend to? All heads share
// a key. A page's keys lie one after another; with `scaled` their float32 scales follow.
typedef struct {
  const int32_t *within;   // NULL, or (num_tokens, choices or 1, num_within): blocks of entries that count
  const int32_t *table;    // (num_seqs, blocks)
  const int32_t *starts;   // num_seqs + 1
  const int32_t *lens;     // num_seqs: tokens
  int64_t query_token, query_head, page_bytes, num_blocks, table_row;
  int64_t within_token, within_choice;  // the latter 0: all choices share a row
  double part;             // 0, or the part of the visible candidates that is chosen, rounded up
  int32_t num_tokens, num_seqs, num_heads, head_size, choices, width;
  int32_t dtype, cache_dtype, block_size, scaled, relu;
  int32_t tokens_per_entry, pool, forced_first, forced_last, tail;
  int32_t within_block, num_within;
  float scale;
} pa_index;

// `query`: (num_tokens, num_heads, head_size); `weights`: (num_tokens, num_heads), contiguous, or NULL: heads count
// alike; `out`: (num_tokens, choices, width): ascending ids, -1 behind them.
// Returns 0; -1 where memory is short, -2 for an unknown instruction set, 1 where the table points outside the
// cache (these tokens are left unwritten).
PA_EXPORT int pa_choose(const char *isa, const pa_index *index, int32_t threads, const void *query, const void *keys,
                        const float *weights, int32_t *out);

// A choice that becomes decodes over pages: each of a token's rows, a KV head each, gets a block table and a length.
typedef struct {
  const int32_t *ids;      // (num_tokens, choices, width), contiguous: groups of entries, in any order; -1: none
  const int32_t *table;    // (num_seqs, blocks)
  const int32_t *starts;   // num_seqs + 1
  const int32_t *lens;     // num_seqs: tokens
  const int64_t *heads;    // num_rows
  int32_t *pages;          // (num_tokens * num_rows, pages): ascending groups' ones, then the head's first page
  int32_t *counts;         // num_tokens * num_rows: entries
  int64_t table_row, pages_row;
  int64_t by_block, by_run, by_head;  // pages between neighbouring blocks, pages of a block, and heads
  int32_t first, num_tokens, num_seqs, choices, width, num_rows, blocks;  // first: the token that ids begin with
  int32_t group, tokens_per_entry, block_size, page_size, causal, physical;
} pa_chosen;

// Returns 0, or -1 where memory is short.
PA_EXPORT int pa_pages(const pa_chosen *chosen, int32_t threads);

// What differs between the calls of a step over choices of one shape.
typedef struct {
  const void *query, *key, *value;
  void *out;
  float *lse;
  const int32_t *ids;
  int64_t num_blocks;
  float k_scale, v_scale;
} pa_call;

// `pa_pages` and `pa_attend` in one region of threads; what `call` has counts. The plan has a sequence for each of the
// choice's rows. Returns 0; 1 as `pa_attend`; 2 where memory is short; or 3 where some row is of another length than
// the plan's: the call then is to be repeated with a plan of their lengths, as `pa_pages` counts them.
enum { PA_OTHER_LENGTHS = 3 };
PA_EXPORT int pa_attend_chosen(const pa_plan *plan, const pa_tensors *alike, const pa_chosen *chosen, const pa_call *call);

#ifdef __cplusplus
}
#endif
