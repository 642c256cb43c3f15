// How fast does one thread read runs of memory in a given order, where all it does is add them up? Lines are
// asked for into the second cache `ahead` bytes before; 0: never. Built by cpu_native.py.

#include <stdint.h>

typedef int32_t vi __attribute__((vector_size(64)));

extern "C" int64_t read_runs(const char *const *runs, int64_t count, int64_t bytes, int64_t ahead) {
  vi acc[4] = {};
  for (int64_t r = 0; r < count; r++) {
    const int64_t later = r + ahead / bytes, inside = ahead % bytes;
    const char *now = runs[later < count ? later : count - 1] + inside;
    const char *then = runs[later + 1 < count ? later + 1 : count - 1];
    for (int64_t i = 0; i < bytes; i += 256) {
      const char *asked = i < bytes - inside ? now + i : then + (i - (bytes - inside));
      for (int j = 0; j < 4; j++) {
        if (ahead) __builtin_prefetch(asked + 64 * j, 0, 2);
        acc[j] += *(const vi *)(runs[r] + i + 64 * j);
      }
    }
  }
  const vi sum = acc[0] + acc[1] + acc[2] + acc[3];
  int64_t total = 0;
  for (int i = 0; i < 16; i++) total += sum[i];
  return total;
}
