// Everything that is compiled once per instruction set. PA_ISA names it; PA_TABLE is its table.
//
// All of it has internal linkage: a template that two instruction sets both instantiate would be one
// weak symbol, and the linker might keep the copy that the processor can't run.

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "internal.h"

namespace {

#include "simd.h"
#include "convert.h"
#include "softmax.h"
#include "item.h"
#include "dot_path.h"
#include "matrix_path.h"
#include "store.h"

int64_t scratch_bytes(const pa_layer *layer, int32_t heads, int32_t rows) {
  int64_t dot = dot_scratch(*layer, heads, pa_min(rows, DOT_ROWS));
  int64_t matrix = matrix_scratch<FloatEngine>(*layer, rows);
#if defined(__AVX512BF16__)
  int64_t pairs = matrix_scratch<PairEngine>(*layer, rows);
  matrix = pairs > matrix ? pairs : matrix;
#endif
#if defined(__AMX_BF16__)
  int64_t tiles = matrix_scratch<TileEngine>(*layer, rows);
  matrix = tiles > matrix ? tiles : matrix;
#endif
  return dot > matrix ? dot : matrix;
}

template <class T>
void run_item_of(Run *run, const Item &item, char *scratch) {
  const pa_layer &layer = run->plan->layer;
  if (item.tokens * (layer.num_heads / layer.num_kv_heads) <= DOT_ROWS) {
    return dot_item_of<T>(run, item, scratch);
  }
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) < 4 && !__is_same(T, f16)) {  // what bfloat16 holds exactly
    if (layer.dtype == PA_BF16) {
#if defined(__AMX_BF16__)
      return matrix_item<T, TileEngine>(run, item, scratch);
#else
      return matrix_item<T, PairEngine>(run, item, scratch);
#endif
    }
  }
#endif
  matrix_item<T, FloatEngine>(run, item, scratch);
}

void run_item(Run *run, int32_t index, char *scratch) {
  const Item &item = run->plan->items[index];
  switch (run->plan->layer.cache_dtype) {
    case PA_F32: return run_item_of<float>(run, item, scratch);
    case PA_BF16: return run_item_of<bf16>(run, item, scratch);
    case PA_F16: return run_item_of<f16>(run, item, scratch);
    case PA_E4M3: return run_item_of<e4m3>(run, item, scratch);
    case PA_E5M2: return run_item_of<e5m2>(run, item, scratch);
    default: return run_item_of<int8_t>(run, item, scratch);
  }
}

}  // namespace

extern "C" {
extern const KernelTable PA_TABLE;
const KernelTable PA_TABLE = {PA_ISA, DOT_ROWS, 384, scratch_bytes, run_item, store_tokens};
}
