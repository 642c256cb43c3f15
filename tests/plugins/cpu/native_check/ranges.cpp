// The planner's own ranges of keys, for a test that compares them with core's: a row of `out` is kept's
// first key and the first after its last, then the same of `near`.

#include "internal.h"

extern "C" PA_EXPORT void ranges(const pa_layer *layer, int64_t count, const int64_t *first, const int64_t *last,
                                 const int64_t *len, int32_t *out) {
  for (int64_t i = 0; i < count; i++, out += 4) {
    const KeyRanges seen = pa_key_ranges(layer, first[i], last[i], len[i]);
    out[0] = seen.kept.lo;
    out[1] = seen.kept.hi;
    out[2] = seen.near.lo;
    out[3] = seen.near.hi;
  }
}
