// Paged attention and absorbed MLA: random steps through the plain C interface.

#pragma once

#include "numbers.h"

struct Shape {
  int heads, kv_heads, size, v_size, window;
  bool latent;  // the value is the key's first part
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
  Stored own(stored, is.latent ? 0 : (size_t)blocks * block * is.kv_heads * is.v_size, random);
  const Stored &v = is.latent ? k : own;
  std::vector<char> out((size_t)tokens * is.heads * is.v_size * size_of(dtype));
  std::vector<float> lse((size_t)tokens * is.heads);
  const float scale = 1 / std::sqrt((float)is.size), k_scale = stored == PA_INT8 ? 0.02f : 0.5f;
  pa_layer layer = {is.heads, is.kv_heads, is.size, is.v_size, dtype, stored, 1,
                    is.window, 0,          0,       0,         scale, 0};
  pa_batch batch = {sequences, block, 2, starts.data(), lens.data(), nullptr};
  pa_plan *plan = pa_plan_new(isa, &layer, &batch);
  if (!plan) return std::printf("%s\n", pa_error()), 1.0;
  const int64_t v_head = is.latent ? is.size : is.v_size;
  const int64_t row = (int64_t)is.kv_heads * is.size, v_row = is.kv_heads * v_head;
  pa_tensors t = {q.bytes.data(), k.bytes.data(), v.bytes.data(), out.data(), lse.data(),
                  table.data(),   nullptr,        nullptr,        is.heads * is.size, is.size,
                  row * block,    row,            is.size,        v_row * block,  v_row,
                  v_head,         is.heads * is.v_size, is.v_size, is.heads,      1,
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
            sum[d] += weight[key - first] / total * v[at(key, v_row) + kv * v_head + d];
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

static void check_attention(Tally &tally) {
  const Shape shapes[] = {{8, 2, 64, 64, 0, false}, {4, 4, 40, 24, 0, false},
                          {6, 2, 80, 80, 9, false}, {20, 1, 64, 64, 0, false},
                          {5, 1, 576, 512, 0, true}, {16, 1, 96, 80, 0, true}};
  for (const Shape &shape : shapes) {
    for (int dtype = PA_F32; dtype <= PA_F16; dtype++) {
      for (int stored = PA_F32; stored < PA_DTYPES; stored++) {
        if (stored <= PA_F16 && stored != dtype) continue;
        for (int prefill = 0; prefill < 2; prefill++) {
          if ((shape.latent && prefill) || tally.skips()) continue;
          double error = prefill ? error_of(tally.isa, shape, dtype, stored, {30, 3}, {30, 50})
                                 : error_of(tally.isa, shape, dtype, stored, {1, 1, 2}, {70, 1, 600});
          double allowed = dtype == PA_F32 ? 1e-5 : dtype == PA_BF16 ? 8e-3 : 1.5e-3;
          char what[96];
          std::snprintf(what, sizeof what, "%s %d/%d x %d, %s over %s, %s",
                        shape.latent ? "MLA" : "attention", shape.heads, shape.kv_heads, shape.size,
                        DTYPE_NAMES[dtype], DTYPE_NAMES[stored], prefill ? "prefill" : "decode");
          tally.judge(error, allowed, what);
        }
      }
    }
  }
}
