// What do stored numbers stand for? Each storage type in double precision.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
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

static const char *const DTYPE_NAMES[] = {"float32", "bfloat16", "float16", "e4m3", "e5m2", "int8"};

// What one instruction set has run, and how often it was wrong; of all cases every Nth is run.
struct Tally {
  const char *isa;
  int every, at = 0, cases = 0, wrong = 0;

  bool skips() { return at++ % every != 0; }
  void judge(double error, double allowed, const std::string &what) {
    cases++;
    if (error <= allowed) return;  // a NaN is wrong, too
    wrong++;
    std::printf("wrong: %s by %s: %.3g > %.3g\n", what.c_str(), isa, error, allowed);
  }
};
