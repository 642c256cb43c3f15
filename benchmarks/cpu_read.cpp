// How fast does one thread read runs of memory in a given order? Where all it does is add them up, or where it
// multiplies each line `products` times, as a decode of so many query heads for each KV head must at least.
// Lines are asked for into the second cache `ahead` bytes before; 0: never. Built by cpu_native.py.

#include <stdint.h>

typedef float vf __attribute__((vector_size(64)));

template <int PRODUCTS>
static float read_all(const char *const *runs, int64_t count, int64_t bytes, int64_t ahead) {
  vf acc[PRODUCTS > 4 ? PRODUCTS : 4] = {}, by[PRODUCTS > 0 ? PRODUCTS : 1];
  for (int k = 0; k < PRODUCTS; k++) by[k] = vf{} + (float)(count + k);
  for (int64_t r = 0; r < count; r++) {
    const int64_t later = r + ahead / bytes, inside = ahead % bytes;
    const char *now = runs[later < count ? later : count - 1] + inside;
    const char *then = runs[later + 1 < count ? later + 1 : count - 1];
    for (int64_t i = 0; i < bytes; i += 256) {
      const char *asked = i < bytes - inside ? now + i : then + (i - (bytes - inside));
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        if (ahead) __builtin_prefetch(asked + 64 * j, 0, 2);
        const vf x = *(const vf *)(runs[r] + i + 64 * j);
        if (!PRODUCTS) acc[j] += x;
#pragma GCC unroll 16
        for (int k = 0; k < PRODUCTS; k++) acc[k] += x * by[k];
      }
    }
  }
  float total = 0;
  for (vf &sum : acc) {
    for (int i = 0; i < 16; i++) total += sum[i];
  }
  return total;
}

// `products` of 0, 1, 2, 4, 8, 12 or 16; -1 of any other.
extern "C" float read_runs(const char *const *runs, int64_t count, int64_t bytes, int64_t ahead,
                           int64_t products) {
  switch (products) {
    case 0: return read_all<0>(runs, count, bytes, ahead);
    case 1: return read_all<1>(runs, count, bytes, ahead);
    case 2: return read_all<2>(runs, count, bytes, ahead);
    case 4: return read_all<4>(runs, count, bytes, ahead);
    case 8: return read_all<8>(runs, count, bytes, ahead);
    case 12: return read_all<12>(runs, count, bytes, ahead);
    case 16: return read_all<16>(runs, count, bytes, ahead);
    default: return -1;
  }
}
