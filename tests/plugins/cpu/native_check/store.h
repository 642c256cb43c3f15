// Storing: new rows biased, turned, scaled, quantised and scattered.

#pragma once

#include <algorithm>

#include "numbers.h"

// The distance of neighbouring numbers of a storage type at x, and its largest.
static double step_of(int dtype, double x) {
  const int mantissa[] = {23, 7, 10, 3, 2}, smallest[] = {-126, -126, -14, -6, -14};
  if (dtype == PA_INT8) return 1;
  int exponent = x == 0 ? smallest[dtype] : std::max(std::ilogb(x), smallest[dtype]);
  return std::ldexp(1, exponent - mantissa[dtype]);
}
static double saturated(int dtype, double x) {
  const double largest[] = {3.4e38, 3.39e38, 65504, 448, 57344, 127};
  return std::min(std::max(x, -largest[dtype]), largest[dtype]);
}

enum Turn { NO_TURN, HALVES, NEIGHBOURS };
enum Norm { NO_NORM, OF_HEADS, OF_TOKENS };

struct Storing {
  static constexpr int TOKENS = 9, HEADS = 3, BLOCK = 4, BLOCKS = 5, FIRST = 4;
  static constexpr float EPS = 0.25f;
  int dtype, stored, size;
  Turn turn;
  Norm norm;
  bool heads_first;  // (blocks, heads, tokens of a block, size)

  double biased(const Stored &source, const std::vector<float> &bias, int t, int h, int at) const {
    return source[((size_t)t * HEADS + h) * size + at] + bias[(size_t)h * size + at];
  }
  // One over the root mean square of each head, or of the token, with EPS.
  void over_roots(const Stored &source, const std::vector<float> &bias, int t, double *over) const {
    double sums[HEADS] = {}, sum = 0;
    for (int h = 0; h < HEADS; h++) {
      for (int i = 0; i < size; i++) sums[h] += std::pow(biased(source, bias, t, h, i), 2);
      sum += sums[h];
    }
    for (int h = 0; h < HEADS; h++) {
      double mean = norm == OF_TOKENS ? sum / (HEADS * size) : sums[h] / size;
      over[h] = 1 / std::sqrt(mean + EPS);
    }
  }

  // Returns the largest error in steps of the storage type; what must stay untouched counts as 1e9.
  double error(const char *isa) const {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const int pairs = turn == NO_TURN ? 0 : (size - FIRST) / 2 - 1;
    const float scale = stored >= PA_E4M3 ? 0.03f : 1.0f;
    Stored source(dtype, (size_t)TOKENS * HEADS * size, random);
    std::vector<float> bias((size_t)HEADS * size), turns((size_t)TOKENS * 2 * pairs), factors(TOKENS);
    for (float &x : bias) x = normal(random);
    for (float &x : factors) x = 0.5f + (float)(random() % 8) / 8;
    for (int t = 0; t < TOKENS; t++) {
      for (int p = 0; p < pairs; p++) {
        float angle = 3 * normal(random);
        turns[(size_t)t * 2 * pairs + p] = std::cos(angle);
        turns[(size_t)t * 2 * pairs + pairs + p] = std::sin(angle);
      }
    }
    std::vector<float> weight((size_t)(norm == OF_TOKENS ? HEADS : 1) * size);
    for (float &x : weight) x = normal(random);
    std::vector<int64_t> slots(BLOCKS * BLOCK);
    for (size_t i = 0; i < slots.size(); i++) slots[i] = (int64_t)i;
    std::shuffle(slots.begin(), slots.end(), random);
    slots[2] = -1;
    Stored cache(stored, (size_t)BLOCKS * BLOCK * HEADS * size, random);
    const std::vector<char> before = cache.bytes;
    Stored out(dtype, (size_t)TOKENS * HEADS * size, random);
    const int64_t token_step = heads_first ? size : (int64_t)HEADS * size;
    const int64_t head_step = heads_first ? (int64_t)BLOCK * size : size;
    pa_scatter part = {source.bytes.data(), cache.bytes.data(), out.bytes.data(), slots.data(),
                       bias.data(), pairs ? turns.data() : nullptr, factors.data(), TOKENS, HEADS,
                       size, BLOCK, BLOCKS * BLOCK, HEADS * size, size, (int64_t)HEADS * size * BLOCK,
                       token_step, head_step, dtype, stored, pairs, FIRST, turn == NEIGHBOURS, scale,
                       nullptr, norm ? weight.data() : nullptr, norm == OF_TOKENS, EPS};
    const int64_t fine = slots[1];
    slots[1] = BLOCKS * BLOCK;
    if (pa_store(isa, &part, 1, 2) != 2 || cache.bytes != before) return 1e9;
    slots[1] = fine;
    if (pa_store(isa, &part, 1, 2)) return 1e9;
    double worst = 0;
    std::vector<char> untouched(BLOCKS * BLOCK, 1);
    for (int t = 0; t < TOKENS; t++) {
      if (slots[t] >= 0) untouched[slots[t]] = 0;
      double over[HEADS];
      over_roots(source, bias, t, over);
      for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < size; i++) {
          auto of = [&](int at) {
            double x = biased(source, bias, t, h, at);
            if (norm) x *= over[h] * weight[(norm == OF_TOKENS ? (size_t)h * size : 0) + at];
            return x;
          };
          double want = of(i), largest = std::fabs(want);
          const int turned = i - FIRST, pair = turn == HALVES ? turned % pairs : turned / 2;
          if (turned >= 0 && turned < 2 * pairs) {
            const bool second = turn == HALVES ? turned >= pairs : turned % 2;
            const int apart = turn == HALVES ? pairs : 1;
            double other = of(i + (second ? -apart : apart));
            const float *angles = &turns[(size_t)t * 2 * pairs];
            want = want * angles[pair] + (second ? other : -other) * angles[pairs + pair];
            largest += std::fabs(other);
          }
          want *= factors[t];
          const double noise = 1e-6 * largest;
          auto judge = [&](double got, double wanted, int kind, double by) {
            double step = step_of(kind, wanted / by) * by;
            double off = std::fabs(got * by - wanted) - noise;
            worst = off == off ? std::max(worst, off / step) : 1e9;
          };
          judge(out[((size_t)t * HEADS + h) * size + i], want, dtype, 1);
          if (slots[t] < 0) continue;
          int64_t at = slots[t] / BLOCK * HEADS * size * BLOCK + slots[t] % BLOCK * token_step +
                       h * head_step + i;
          judge(cache[at], saturated(stored, want / scale) * scale, stored, scale);
        }
      }
    }
    for (int slot = 0; slot < BLOCKS * BLOCK; slot++) {
      for (int h = 0; untouched[slot] && h < HEADS; h++) {
        int64_t at = (int64_t)(slot / BLOCK) * HEADS * size * BLOCK + slot % BLOCK * token_step +
                     h * head_step;
        int bytes = size_of(stored);
        if (std::memcmp(&cache.bytes[at * bytes], &before[at * bytes], (size_t)size * bytes)) worst = 1e9;
      }
    }
    return worst;
  }
};

static void check_store(Tally &tally) {
  for (int dtype = PA_F32; dtype <= PA_F16; dtype++) {
    for (int stored = PA_F32; stored < PA_DTYPES; stored++) {
      if (stored <= PA_F16 && stored != dtype) continue;
      for (Turn turn : {NO_TURN, HALVES, NEIGHBOURS}) {
        for (Norm norm : {NO_NORM, OF_HEADS, OF_TOKENS}) {
          for (int size : {20, 64, 300}) {
            if (tally.skips()) continue;
            Storing is = {dtype, stored, size, turn, norm, size != 64};
            char what[96];
            std::snprintf(what, sizeof what, "storing %s as %s, heads of %d, rotation %d, norm %d",
                          DTYPE_NAMES[dtype], DTYPE_NAMES[stored], size, turn, norm);
            tally.judge(is.error(tally.isa), 0.501, what);
          }
        }
      }
    }
  }
}
