// How fast do torch's threads read runs of memory in a given order? They add the lines up, or multiply each one
// `products` times, as a decode of so many query heads for each KV head must at least. Lines are prefetched into
// the second cache `ahead` bytes before; 0: never.
// Built by cpu_native.py.

#include <stdint.h>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*body)(int64_t, int64_t, void *), void *context);

#if defined(__AVX512F__)
typedef float vf __attribute__((vector_size(64)));
#else  // as wide as a register: wider accumulators would go through memory
typedef float vf __attribute__((vector_size(32)));
#endif
enum { W = sizeof(vf) / 4, EACH = 256 / sizeof(vf), FAR = 1 << 14 };

struct Runs {
  const char *const *at;
  int64_t count, bytes, ahead;
};

template <int PRODUCTS>
static float read_all(Runs of) {
  vf acc[PRODUCTS > EACH ? PRODUCTS : EACH] = {}, by[PRODUCTS > 0 ? PRODUCTS : 1];
  for (int k = 0; k < PRODUCTS; k++) by[k] = vf{} + (float)(of.count + k);
  for (int64_t r = 0; r < of.count; r++) {
    const int64_t later = r + of.ahead / of.bytes, inside = of.ahead % of.bytes;
    const char *now = of.at[later < of.count ? later : of.count - 1] + inside;
    const char *then = of.at[later + 1 < of.count ? later + 1 : of.count - 1];
    // Long runs' first lines early and eight at once: their addresses are known when the others are asked for.
    for (int64_t i = r + 2; of.ahead && of.bytes >= FAR && r % 8 == 0 && i < r + 10; i++) {
      __builtin_prefetch(of.at[i < of.count ? i : of.count - 1], 0, 2);
    }
    int64_t i = 0;
    for (; i + 256 <= of.bytes; i += 256) {
      const char *asked = i < of.bytes - inside ? now + i : then + (i - (of.bytes - inside));
#pragma GCC unroll 8
      for (int j = 0; j < EACH; j++) {
        const int byte = j * sizeof(vf);
        if (of.ahead && byte % 64 == 0) __builtin_prefetch(asked + byte, 0, 2);
        const vf x = *(const vf *)(of.at[r] + i + byte);
        if (!PRODUCTS) acc[j] += x;
#pragma GCC unroll 16
        for (int k = 0; k < PRODUCTS; k++) acc[k] += x * by[k];
      }
    }
    for (; i < of.bytes; i += sizeof(vf)) {  // what a run has beyond whole 256 bytes
      if (of.ahead && i % 64 == 0) __builtin_prefetch(i < of.bytes - inside ? now + i : then + (i - (of.bytes - inside)), 0, 2);
      const vf x = *(const vf *)(of.at[r] + i);
      if (!PRODUCTS) acc[0] += x;
#pragma GCC unroll 16
      for (int k = 0; k < PRODUCTS; k++) acc[k] += x * by[k];
    }
  }
  float total = 0;
  for (vf &sum : acc) {
    for (int i = 0; i < W; i++) total += sum[i];
  }
  return total;
}

static volatile float sink;

// `products` of 0, 1, 2, 4, 8, 12 or 16; false of any other.
extern "C" bool read_runs(int64_t threads, const char *const *runs, int64_t count, int64_t bytes, int64_t ahead,
                          int64_t products) {
  struct All {
    const char *const *runs;
    int64_t threads, count, bytes, ahead;
    float (*read)(Runs);
  } all = {runs, threads, count, bytes, ahead, nullptr};
  auto by = [&](float (*read)(Runs)) {
    all.read = read;
    auto one = [](int64_t begin, int64_t end, void *context) {  // each thread's even share of the runs
      const All &all = *(const All *)context;
      const int64_t from = begin * all.count / all.threads, to = end * all.count / all.threads;
      sink = all.read({all.runs + from, to - from, all.bytes, all.ahead});
    };
    torch_parallel_for(0, threads, 1, one, &all);
    return true;
  };
  switch (products) {
    case 0: return by(read_all<0>);
    case 1: return by(read_all<1>);
    case 2: return by(read_all<2>);
    case 4: return by(read_all<4>);
    case 8: return by(read_all<8>);
    case 12: return by(read_all<12>);
    case 16: return by(read_all<16>);
    default: return false;
  }
}
