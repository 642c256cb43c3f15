// Everything that is compiled once per instruction set. PA_ISA names it; PA_TABLE is its table.
//
// All of it has internal linkage: a template that two instruction sets both instantiate would be one
// weak symbol, and the linker might keep the copy that the processor can't run.

#include <math.h>
#include <type_traits>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_SVE)
#include <arm_sve.h>
#endif
#endif

#include "internal.h"

#if defined(PA_BASE)
extern "C" {
extern const KernelTable PA_BASE;
#if defined(__AMX_BF16__)
extern const KernelTable pa_kernels_avx512_bf16;  // whose index of few heads is the faster: it multiplies keys as they lie
#endif
}
#endif

namespace {

#include "simd.h"
#include "convert.h"
#if defined(PA_BASE) && defined(__aarch64__)
#include "arm_bf16.h"
#endif
#include "softmax.h"
#include "item.h"
#include "rows.h"
#include "ahead.h"
#if defined(__AVX512BF16__)
#include "halves.h"
#endif
#include "matrix_path.h"
#if defined(__AMX_BF16__)
#include "tile_path.h"
#include "wide_path.h"
#define PA_ENGINE TileEngine
#elif defined(PA_BASE)
#define PA_ENGINE PairEngine
#endif
#if defined(PA_BASE) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define PA_PAIR_DOTS 1
#endif
#if !defined(PA_BASE) || defined(__AVX512BF16__)
#include "dot_path.h"
#include "row_path.h"
#endif
#if !defined(PA_BASE)
#include "exact.h"
#include "store.h"
#include "scan.h"
#endif
#include "index.h"

#if defined(PA_BASE)
// Above so few rows its products are faster than converting once for all of them.
constexpr int FEW_ROWS = 16;

// bfloat16 products for what they are good for; all else is the base instruction set's.
int64_t scratch_bytes(const pa_layer *layer, int32_t heads, int32_t rows) {
  int64_t base = PA_BASE.scratch_bytes(layer, heads, rows);
  if (layer->invariant == PA_MACHINES) return base;
  int64_t own = matrix_scratch<PA_ENGINE>(*layer, rows);
#if defined(__AMX_BF16__)
  int64_t few = tile_scratch(*layer, heads, pa_min(rows, TILE_ROWS));
  int64_t one = wide_scratch(*layer, pa_min(rows, WIDE_ROWS));
  own = own > few ? own : few;
  own = own > one ? own : one;
  if (layer->key_format) {
    const int64_t bytes = dot_scratch(*layer, heads, pa_min(rows, DOT_ROWS)) + row_scratch(*layer);
    own = own > bytes ? own : bytes;
  }
#elif defined(PA_PAIR_DOTS)
  int64_t dot = dot_scratch(*layer, heads, pa_min(rows, FEW_ROWS));
  own = own > dot ? own : dot;
#endif
  return base > own ? base : own;
}

// A row whose bits must not depend on other rows has all its keys in the same pairs: where they begin with
// the sequence's first.
bool keeps_pairs([[maybe_unused]] const pa_layer &layer) {
#if defined(PA_PAIR_DOTS)
  return !layer.window && !layer.chunk;
#else
  return false;
#endif
}

bool multiplies_bf16(const pa_layer &layer) {  // the query is, and bfloat16 holds what is stored
  return (!layer.invariant || keeps_pairs(layer)) && layer.dtype == PA_BF16 && layer.cache_dtype != PA_F32 && layer.cache_dtype != PA_F16;
}

int32_t dot_rows(const pa_layer *layer) {
  if (layer->invariant || !multiplies_bf16(*layer)) return PA_BASE.dot_rows(layer);
#if defined(__AMX_BF16__)
  return TILE_ROWS;
#else
  return FEW_ROWS;
#endif
}

#if defined(__AMX_BF16__)
// Rows of bytes that are decoded here, as this instruction set multiplies integers at the best rate.
bool few_bytes(const pa_layer &layer, const Item &item) { return !layer.invariant && is_few(layer, item, DOT_ROWS); }
#endif

template <class T>
void run_item_of(Run *run, const Item &item, Turn *turn) {
#if defined(__AMX_BF16__)
  if (run->plan->layer.key_format) {
    if (few_bytes(run->plan->layer, item)) return row_item(run, item, turn);
  } else if (const int rows = rows_per_head(run->plan->layer, item); rows <= WIDE_ROWS) {
    return rows <= TILE_ROWS ? tiled_item<Tile<T>>(run, item, turn) : tiled_item<Wide<T>>(run, item, turn);
  }
#elif defined(PA_PAIR_DOTS)
  const pa_layer &layer = run->plan->layer;
  if (!layer.invariant && is_few(layer, item, FEW_ROWS)) {
    if constexpr (std::is_same_v<T, int8_t>) return row_item(run, item, turn);
    else return layer.key_format ? row_item(run, item, turn) : pair_item<T>(run, item, turn);
  }
#endif
  matrix_item<T, PA_ENGINE>(run, item, turn);
}

#if defined(__AMX_BF16__)
// Few rows waste a tile register, and are worth it where each element costs more to make.
bool wastes_tiles(const pa_layer &layer, int32_t rows) {
  const bool dear = layer.cache_dtype == PA_E4M3 || layer.cache_dtype == PA_E5M2;
  return !dear && rows <= 4;
}
#endif

// Whether items of so many rows per KV head may have several pieces of keys.
bool joins([[maybe_unused]] const pa_layer *layer, [[maybe_unused]] int32_t rows) {
#if defined(__AMX_BF16__)
  return multiplies_bf16(*layer) && !layer->key_format && rows <= WIDE_ROWS && !wastes_tiles(*layer, rows);
#else
  return false;
#endif
}

// Whether the base instruction set is the faster with an item whose bfloat16 this one could multiply.
bool is_bases([[maybe_unused]] const pa_layer &layer, [[maybe_unused]] const Item &item) {
#if defined(__AMX_BF16__)
  if (layer.key_format) return !layer.invariant && rows_per_head(layer, item) <= dot_rows(&layer) && !few_bytes(layer, item);
#elif !defined(PA_PAIR_DOTS)
  if (layer.key_format) return !layer.invariant && rows_per_head(layer, item) <= dot_rows(&layer);
#endif
#if defined(__AMX_BF16__)
  return wastes_tiles(layer, rows_per_head(layer, item));
#elif defined(PA_PAIR_DOTS)
  return false;
#else
  return rows_per_head(layer, item) <= FEW_ROWS;
#endif
}

void run_item(Run *run, Turn *turn) {
  const Item &item = run->plan->items[turn->index];
  const pa_layer &layer = run->plan->layer;
  if (!multiplies_bf16(layer) || is_bases(layer, item)) return PA_BASE.run_item(run, turn);
  switch (layer.cache_dtype) {
    case PA_BF16: return run_item_of<bf16>(run, item, turn);
    case PA_E4M3: return run_item_of<e4m3>(run, item, turn);
    case PA_E5M2: return run_item_of<e5m2>(run, item, turn);
    default: return run_item_of<int8_t>(run, item, turn);
  }
}

void store(const pa_scatter *part, int64_t first, int64_t last) {
  PA_BASE.store(part, first, last);
}
int64_t scan_scratch(const pa_scan *scan) { return PA_BASE.scan_scratch(scan); }
void scan_item(const pa_scan *scan, int64_t index, const Room &scratch) {
  PA_BASE.scan(scan, index, scratch);
}
#else
int64_t scratch_bytes(const pa_layer *layer, int32_t heads, int32_t rows) {
  if (layer->invariant == PA_MACHINES) return Exact::scratch(*layer, rows);
  int64_t dot = dot_scratch(*layer, heads, pa_min(rows, DOT_ROWS));
  int64_t matrix = matrix_scratch<FloatEngine>(*layer, rows);
  if (in_rows(*layer)) dot += row_scratch(*layer);
  return dot > matrix ? dot : matrix;
}

int32_t dot_rows(const pa_layer *layer) { return layer->invariant ? 0 : DOT_ROWS; }
bool joins(const pa_layer *, int32_t) { return false; }

// Whether int8 is multiplied as integers: by what has 16 bits, and by several rows, which share the work on weights.
template <class T>
bool multiplies_ints([[maybe_unused]] const pa_layer &layer, [[maybe_unused]] const Item &item) {
#if defined(PA_INT_DOTS)
  return std::is_same_v<T, int8_t> && layer.dtype != PA_F32 && rows_per_head(layer, item) > 1;
#else
  return false;
#endif
}

template <class T>
void run_item_of(Run *run, const Item &item, Turn *turn) {
  const pa_layer &layer = run->plan->layer;
  if (!layer.invariant && is_few(layer, item, DOT_ROWS)) {
    return layer.key_format || multiplies_ints<T>(layer, item) ? row_item(run, item, turn) : dot_item<T>(run, item, turn);
  }
  matrix_item<T, FloatEngine>(run, item, turn);
}

void run_item(Run *run, Turn *turn) {
  const Item &item = run->plan->items[turn->index];
  if (run->plan->layer.invariant == PA_MACHINES) return exact_item(run, item, turn);
  switch (run->plan->layer.cache_dtype) {
    case PA_F32: return run_item_of<float>(run, item, turn);
    case PA_BF16: return run_item_of<bf16>(run, item, turn);
    case PA_F16: return run_item_of<f16>(run, item, turn);
    case PA_E4M3: return run_item_of<e4m3>(run, item, turn);
    case PA_E5M2: return run_item_of<e5m2>(run, item, turn);
    default: return run_item_of<int8_t>(run, item, turn);
  }
}

void store(const pa_scatter *part, int64_t first, int64_t last) { store_tokens(part, first, last); }
#endif

}  // namespace

extern "C" {
extern const KernelTable PA_TABLE;
const KernelTable PA_TABLE = {PA_ISA,   MATRIX_ROWS, dot_rows,     joins, scratch_bytes,
                              run_item, store,       scan_scratch, scan_item,
                              index_scratch, index_item, index_merge};
}
