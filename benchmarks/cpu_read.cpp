// How fast do torch's threads read runs of memory in a given order? Where all they do is add them up, where they
// multiply each line `products` times, as a decode of so many query heads for each KV head must at least, or
// where tile registers multiply it. Lines are asked for into the second cache `ahead` bytes before; 0: never.
// Built by cpu_native.py.

#include <stdint.h>

#include <vector>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*body)(int64_t, int64_t, void *), void *context);

typedef float vf __attribute__((vector_size(64)));

struct Runs {
  const char *const *at;
  int64_t count, bytes, ahead;
};

template <int PRODUCTS>
static float read_all(Runs of) {
  vf acc[PRODUCTS > 4 ? PRODUCTS : 4] = {}, by[PRODUCTS > 0 ? PRODUCTS : 1];
  for (int k = 0; k < PRODUCTS; k++) by[k] = vf{} + (float)(of.count + k);
  for (int64_t r = 0; r < of.count; r++) {
    const int64_t later = r + of.ahead / of.bytes, inside = of.ahead % of.bytes;
    const char *now = of.at[later < of.count ? later : of.count - 1] + inside;
    const char *then = of.at[later + 1 < of.count ? later + 1 : of.count - 1];
    for (int64_t i = 0; i < of.bytes; i += 256) {
      const char *asked = i < of.bytes - inside ? now + i : then + (i - (of.bytes - inside));
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        if (of.ahead) __builtin_prefetch(asked + 64 * j, 0, 2);
        const vf x = *(const vf *)(of.at[r] + i + 64 * j);
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

// Each thread's even share of `count`, in units.
template <class Body>
static void share(int64_t threads, int64_t count, const Body &body) {
  struct All {
    int64_t threads, count;
    const Body &body;
  } all = {threads, count, body};
  auto one = [](int64_t begin, int64_t end, void *context) {
    const All &all = *(const All *)context;
    all.body(begin * all.count / all.threads, end * all.count / all.threads);
  };
  torch_parallel_for(0, threads, 1, one, &all);
}

static volatile float sink;

// `products` of 0, 1, 2, 4, 8, 12 or 16; false of any other.
extern "C" bool read_runs(int64_t threads, const char *const *runs, int64_t count, int64_t bytes, int64_t ahead,
                          int64_t products) {
  auto by = [&](float (*read)(Runs)) {
    share(threads, count, [&](int64_t from, int64_t to) { sink = read({runs + from, to - from, bytes, ahead}); });
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

#if defined(__AMX_BF16__)
// Sixteen queries with an item's rows of bfloat16: `keys` keys, then as many values. Keys of an even stride are
// tile registers as they lie, others are copied; pairs of values are interleaved, as a product must have them.
// Scores don't become weights. Asks: the same line of the row that lies `ahead` bytes further on in the list.
struct TileItem {
  static constexpr int TILE = 128, LD = 32;  // keys; a tile register's row, in elements
  const char *const *rows;
  int64_t keys, bytes, ahead;
  alignas(64) uint16_t query[16 * 512], copies[64 * 544], pairs[2][4 * 512];
  alignas(64) float scores[TILE * 16], sums[4 * 256];

  void ask(int64_t row, int64_t byte) const {
    const int64_t later = row + ahead / bytes;
    if (ahead && later < 2 * keys) __builtin_prefetch(rows[later] + byte, 0, 2);
  }
  void score(int64_t first) {
    const char *at[4];
    int64_t stride[4];
    for (int k = 0; k < 4; k++) {
      const char *const *group = rows + first + 16 * k;
      at[k] = group[0];
      stride[k] = group[1] - group[0];
      for (int i = 2; i < 16; i++) {
        if (group[i] - group[0] != i * stride[k]) stride[k] = 0;
      }
      if (stride[k]) continue;
      uint16_t *to = copies + k * 16 * (bytes / 2 + 32);
      for (int i = 0; i < 16; i++) {
        for (int64_t b = 0; b < bytes; b += 64) {
          _mm512_storeu_si512((char *)to + i * (bytes + 64) + b, _mm512_loadu_si512(group[i] + b));
        }
      }
      at[k] = (const char *)to;
      stride[k] = bytes + 64;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < bytes; b += 64) {
      for (int i = 0; i < 64; i++) ask(first + i, b);
      _tile_loadd(6, query + b / 64 * 512, 64);
      _tile_loadd(4, at[0] + b, stride[0]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, at[1] + b, stride[1]);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, at[2] + b, stride[2]);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, at[3] + b, stride[3]);
      _tile_dpbf16ps(3, 5, 6);
    }
    float *to = scores + first % TILE * 16;
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
  }
  void pair(int64_t first, int64_t byte, uint16_t *to) {
    for (int i = 0; i < 32; i += 2, to += LD) {
      ask(first + i, byte), ask(first + i + 1, byte);
      ask(first + i, byte + 64), ask(first + i + 1, byte + 64);
      for (int half = 0; half < 2; half++) {
        const __m512i a = _mm512_loadu_si512(rows[first + i] + byte + 64 * half);
        const __m512i b = _mm512_loadu_si512(rows[first + i + 1] + byte + 64 * half);
        _mm512_store_si512(to + half * 1024, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + half * 1024 + 512, _mm512_unpackhi_epi16(a, b));
      }
    }
  }
  void weigh(int64_t first) {
    for (int64_t b = 0; b < bytes; b += 128) {
      pair(first, b, pairs[0]);
      _tile_loadd(0, sums, 64);
      _tile_loadd(1, sums + 256, 64);
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
      for (int t = 0; t < TILE; t += 32) {
        if (t + 32 < TILE) pair(first + t + 32, b, pairs[(t / 32 + 1) % 2]);
        const uint16_t *from = pairs[t / 32 % 2];
        _tile_loadd(6, (const uint16_t *)scores + t * 16, 64);
        _tile_loadd(4, from, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(5, from + 512, 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(4, from + 1024, 64);
        _tile_dpbf16ps(2, 6, 4);
        _tile_loadd(5, from + 1536, 64);
        _tile_dpbf16ps(3, 6, 5);
      }
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + 256, 64);
      _tile_stored(2, sums + 512, 64);
      _tile_stored(3, sums + 768, 64);
    }
  }
};

// Items of `keys` keys, a multiple of 128, and as many values each, a row of `bytes` each.
extern "C" bool read_tiles(int64_t threads, const char *const *rows, int64_t items, int64_t keys, int64_t bytes,
                           int64_t ahead) {
  share(threads, items, [&](int64_t from, int64_t to) {
    struct {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    std::vector<TileItem> item(1);
    for (; from < to; from++) {
      item[0].rows = rows + from * 2 * keys;
      item[0].keys = keys, item[0].bytes = bytes, item[0].ahead = ahead;
      for (int64_t t = 0; t < keys; t += TileItem::TILE) {
        item[0].score(t);
        item[0].score(t + 64);
        item[0].weigh(keys + t);
      }
    }
    _tile_release();
    sink = item[0].sums[0];
  });
  return true;
}
#else
extern "C" bool read_tiles(int64_t, const char *const *, int64_t, int64_t, int64_t, int64_t) { return false; }
#endif
