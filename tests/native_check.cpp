// Do the native kernels agree with double precision where no Python is? A program for an emulator:
// random paged steps through the plain C interface; prints each case's error, returns 1 if one is wrong.
// An argument N takes every Nth case: emulated vectors are slow.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "polyattn_cpu.h"

static double half(uint16_t h) {
  int exponent = h >> 10 & 31, mantissa = h & 1023;
  double x = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -x : x;
}
static double bfloat(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
static double e4m3(uint8_t b) {
  int exponent = b >> 3 & 15, mantissa = b & 7;
  double x = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return b & 0x80 ? -x : x;
}
static double e5m2(uint8_t b) { return half((uint16_t)(b << 8)); }

static int size_of(int dtype) { return dtype == PA_F32 ? 4 : dtype <= PA_F16 ? 2 : 1; }

// Random numbers as they are stored: bits that stand for something small and finite.
struct Stored {
  int dtype;
  std::vector<char> bytes;
  Stored(int dtype, size_t count, std::mt19937 &random)
      : dtype(dtype), bytes(count * size_of(dtype)) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; i++) {
      char *at = &bytes[i * size_of(dtype)];
      float x = normal(random);
      uint32_t u;
      std::memcpy(&u, &x, 4);
      uint16_t upper = (uint16_t)(u >> 16);
      uint16_t of_half = (uint16_t)((random() & 0x83ffu) | (12 + random() % 5) << 10);
      uint8_t of_e4m3 = (uint8_t)((random() & 0x87u) | random() % 9 << 3);
      uint8_t of_e5m2 = (uint8_t)((random() & 0x83u) | random() % 17 << 2);
      uint8_t of_int8 = (uint8_t)random();
      if (dtype == PA_F32) std::memcpy(at, &x, 4);
      if (dtype == PA_BF16) std::memcpy(at, &upper, 2);
      if (dtype == PA_F16) std::memcpy(at, &of_half, 2);
      if (dtype == PA_E4M3) std::memcpy(at, &of_e4m3, 1);
      if (dtype == PA_E5M2) std::memcpy(at, &of_e5m2, 1);
      if (dtype == PA_INT8) std::memcpy(at, &of_int8, 1);
    }
  }
  double operator[](size_t i) const {
    const char *at = &bytes[i * size_of(dtype)];
    float x;
    uint16_t h;
    if (dtype == PA_F32) return std::memcpy(&x, at, 4), x;
    if (dtype == PA_BF16) return std::memcpy(&h, at, 2), bfloat(h);
    if (dtype == PA_F16) return std::memcpy(&h, at, 2), half(h);
    uint8_t b = (uint8_t)*at;
    return dtype == PA_E4M3 ? e4m3(b) : dtype == PA_E5M2 ? e5m2(b) : (double)(int8_t)b;
  }
};

struct Shape {
  int heads, kv_heads, size, v_size, window;
};

// Returns the largest difference from double precision, as a share of the largest output.
static double error_of(const char *isa, const Shape &is, int dtype, int stored,
                       const std::vector<int32_t> &queries, const std::vector<int32_t> &lens) {
  std::mt19937 random(7);
  const int block = 8, sequences = (int)lens.size();
  std::vector<int32_t> starts = {0};
  int width = 1, blocks = 0;
  for (int i = 0; i < sequences; i++) {
    starts.push_back(starts[i] + queries[i]);
    width = std::max(width, (lens[i] + block - 1) / block);
    blocks += (lens[i] + block - 1) / block;
  }
  std::vector<int32_t> table((size_t)sequences * width, 1 << 30);  // never to be followed
  for (int i = 0, next = blocks; i < sequences; i++) {
    for (int b = 0; b * block < lens[i]; b++) table[(size_t)i * width + b] = --next;
  }
  const int tokens = starts.back();
  Stored q(dtype, (size_t)tokens * is.heads * is.size, random);
  Stored k(stored, (size_t)blocks * block * is.kv_heads * is.size, random);
  Stored v(stored, (size_t)blocks * block * is.kv_heads * is.v_size, random);
  std::vector<char> out((size_t)tokens * is.heads * is.v_size * size_of(dtype));
  std::vector<float> lse((size_t)tokens * is.heads);
  const float scale = 1 / std::sqrt((float)is.size), k_scale = stored == PA_INT8 ? 0.02f : 0.5f;
  pa_layer layer = {is.heads, is.kv_heads, is.size, is.v_size, dtype, stored,
                    1,        is.window,   0,       0,         scale, 0};
  pa_batch batch = {sequences, block, 2, starts.data(), lens.data(), nullptr};
  pa_plan *plan = pa_plan_new(isa, &layer, &batch);
  if (!plan) return std::printf("%s\n", pa_error()), 1.0;
  const int64_t row = (int64_t)is.kv_heads * is.size, v_row = (int64_t)is.kv_heads * is.v_size;
  pa_tensors t = {q.bytes.data(), k.bytes.data(), v.bytes.data(), out.data(), lse.data(),
                  table.data(),   nullptr,        nullptr,        is.heads * is.size, is.size,
                  row * block,    row,            is.size,        v_row * block,  v_row,
                  is.v_size,      is.heads * is.v_size, is.v_size, is.heads,      1,
                  width,          blocks,         k_scale,        k_scale};
  if (pa_attend(plan, &t)) return std::printf("%s\n", pa_error()), 1.0;
  pa_plan_free(plan);
  const bool scaled = stored >= PA_E4M3;
  double worst = 0, largest = 1e-9;
  for (int i = 0; i < sequences; i++) {
    for (int token = starts[i]; token < starts[i + 1]; token++) {
      const int position = lens[i] - queries[i] + token - starts[i];
      const int first = is.window ? std::max(0, position - is.window + 1) : 0;
      for (int h = 0; h < is.heads; h++) {
        const int kv = h / (is.heads / is.kv_heads);
        auto at = [&](int key, int64_t of) {
          return ((int64_t)table[(size_t)i * width + key / block] * block + key % block) * of;
        };
        std::vector<double> weight, sum(is.v_size);
        double total = 0;
        for (int key = first; key <= position; key++) {
          double dot = 0;
          for (int d = 0; d < is.size; d++) {
            dot += q[((size_t)token * is.heads + h) * is.size + d] * k[at(key, row) + kv * is.size + d];
          }
          weight.push_back(std::exp(dot * scale * (scaled ? k_scale : 1)));
          total += weight.back();
        }
        for (int key = first; key <= position; key++) {
          for (int d = 0; d < is.v_size; d++) {
            sum[d] += weight[key - first] / total * v[at(key, v_row) + kv * is.v_size + d];
          }
        }
        for (int d = 0; d < is.v_size; d++) {
          const char *got = &out[(((size_t)token * is.heads + h) * is.v_size + d) * size_of(dtype)];
          float x;
          uint16_t bits;
          std::memcpy(&x, got, dtype == PA_F32 ? 4 : 0);
          std::memcpy(&bits, got, 2);
          double is_now = dtype == PA_F32 ? x : dtype == PA_BF16 ? bfloat(bits) : half(bits);
          double want = sum[d] * (scaled ? k_scale : 1);
          worst = std::fmax(worst, std::fabs(is_now - want));
          largest = std::fmax(largest, std::fabs(want));
          if (is_now != is_now) worst = 1e9;
        }
        worst = std::fmax(worst, std::fabs(lse[(size_t)token * is.heads + h] - std::log(total)) / 16);
      }
    }
  }
  return worst / largest;
}

int main(int count, char **arguments) {
  const int every = count > 1 ? std::atoi(arguments[1]) : 1;
  const char *names[] = {"float32", "bfloat16", "float16", "e4m3", "e5m2", "int8"};
  const Shape shapes[] = {{8, 2, 64, 64, 0}, {4, 4, 40, 24, 0}, {6, 2, 80, 80, 9}, {20, 1, 64, 64, 0}};
  std::string isas = pa_isas();
  std::printf("instruction sets here: %s\n", isas.c_str());
  std::string isa = isas.substr(0, isas.find(','));
  int wrong = 0, cases = 0, at = 0;
  for (const Shape &shape : shapes) {
    for (int dtype = PA_F32; dtype <= PA_F16; dtype++) {
      for (int stored = PA_F32; stored < PA_DTYPES; stored++) {
        if (stored <= PA_F16 && stored != dtype) continue;
        for (int prefill = 0; prefill < 2; prefill++) {
          if (at++ % every) continue;
          double error = prefill ? error_of(isa.c_str(), shape, dtype, stored, {30, 3}, {30, 50})
                                 : error_of(isa.c_str(), shape, dtype, stored, {1, 1, 2}, {70, 1, 600});
          double allowed = dtype == PA_F32 ? 1e-5 : dtype == PA_BF16 ? 8e-3 : 1.5e-3;
          cases++;
          if (error <= allowed) continue;
          wrong++;
          std::printf("wrong: %d/%d x %d, %s over %s, %s: %.3g > %.3g\n", shape.heads,
                      shape.kv_heads, shape.size, names[dtype], names[stored],
                      prefill ? "prefill" : "decode", error, allowed);
        }
      }
    }
  }
  std::printf("%s: %d cases, %d wrong\n", isa.c_str(), cases, wrong);
  return wrong != 0;
}
