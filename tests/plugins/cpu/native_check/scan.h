// Recurrences: random steps, a token after another in double precision, as the papers write them.

#pragma once

#include <algorithm>

#include "numbers.h"

struct Recurrence {
  const char *name;
  pa_scan_kind kind;
  int heads, groups, rows, columns;  // rows and columns of a head's state
  bool option;  // softplus of the steps, keys of unit length, or SiLU
  int drafts = 0;  // inputs that a convolution's state has room for beyond those that a token reads
  bool targets = false;  // each token's state goes to a slot of its own
};

// One input of a step, (tokens, heads, size).
struct Rows {
  Stored data;
  int heads, size;
  pa_rows given(int64_t dtype) const {
    return {data.bytes.data(), (int64_t)heads * size, size, dtype};
  }
  double operator()(int token, int head, int i = 0) const {
    return data[((size_t)token * heads + head) * size + i];
  }
};

struct Scan {
  // Sequences of so many tokens, into slots of which one is nobody's; the last is padding.
  static constexpr int SEQS = 4, SLOTS = 5, LONGEST = 35;
  const int32_t starts[SEQS + 1] = {0, 35, 36, 36, 38};
  const int64_t slots[SEQS] = {3, 0, 4, -1};
  const int32_t before[SEQS] = {0, 2, 70, 0};
  std::vector<int64_t> goals;
  const Recurrence &is;
  int dtype;
  std::mt19937 random{11};
  std::vector<Rows> in;
  std::vector<std::vector<float>> params;
  std::vector<double> state, out;
  double scale = 0.25;

  Scan(const Recurrence &is, int dtype) : is(is), dtype(dtype) {
    const bool mamba = is.kind == PA_MAMBA1 || is.kind == PA_MAMBA2;
    switch (is.kind) {
      case PA_SHORT_CONV:
        take({{is.heads, 1}});
        number({is.heads * (is.columns - is.drafts + 1), is.heads});
        break;
      case PA_MAMBA1:
        take({{is.heads, 1}, {is.heads, 1}, {1, is.columns}, {1, is.columns}});
        if (is.option) take({{is.heads, 1}});
        number({is.heads * is.columns, is.heads, is.heads});
        break;
      case PA_MAMBA2:
        take({{is.heads, is.rows}, {is.heads, 1}, {is.groups, is.columns}, {is.groups, is.columns}});
        if (is.targets) take({{is.heads, is.rows}});
        number({is.heads, is.heads, is.heads});
        break;
      case PA_LINEAR:
        take({{is.groups, is.rows}, {is.groups, is.rows}, {is.heads, is.columns}});
        number({is.heads});
        break;
      case PA_RWKV7: {
        const int k = is.rows;
        take({{is.heads, k}, {is.heads, k}, {is.heads, k}, {is.heads, is.columns}, {is.heads, k},
              {is.heads, k}});
        break;
      }
      case PA_RWKV6:
        take({{is.heads, is.rows}, {is.heads, is.rows}, {is.heads, is.rows}, {is.heads, is.columns}});
        number({is.heads * is.rows});
        break;
      default:
        take({{is.groups, is.rows}, {is.groups, is.rows}, {is.heads, is.columns},
              {is.heads, is.kind == PA_KDA ? is.rows : 1}, {is.heads, 1}});
    }
    // Rates of decay are below zero, steps above, and what a delta rule adds is small: nothing grows.
    if (mamba || is.kind == PA_LINEAR) {
      for (float &x : params[0]) x = -0.1f - 0.5f * std::fabs(x);
    }
    if (mamba && !is.option) {
      calm(1, 0.3);
      for (float &x : params[2]) x = 0.1f * std::fabs(x);
    }
    if (is.kind == PA_GDN || is.kind == PA_KDA) calm(3, -0.3), calm(4, 0.2), calm(1, 0.1);
    if (is.kind == PA_RWKV7) calm(1, -0.5), calm(4, 0.1), calm(5, 0.1);
    if (is.kind == PA_RWKV6) calm(1, -0.5);
  }

  double error(const char *isa) {
    const int each = is.kind == PA_SHORT_CONV || is.kind == PA_MAMBA1 ? 1 : is.rows;
    const int64_t slot = (int64_t)is.heads * each * is.columns, slots_of = SLOTS + (is.targets ? starts[SEQS - 1] : 0);
    const int wide = is.kind <= PA_MAMBA1 ? 1 : is.kind == PA_MAMBA2 ? is.rows : is.columns;
    const int kept = is.kind == PA_SHORT_CONV ? dtype : (int)PA_F32;
    Stored states(kept, (size_t)slots_of * slot, random);
    state.clear();
    for (int64_t i = 0; i < slots_of * slot; i++) state.push_back(states[i]);
    Stored got(dtype, (size_t)starts[SEQS] * is.heads * wide, random);
    out.assign((size_t)starts[SEQS] * is.heads * wide, 0);
    pa_scan scan = {};
    scan.kind = is.kind, scan.dtype = dtype, scan.state_dtype = kept;
    scan.num_seqs = SEQS, scan.num_heads = is.heads, scan.num_groups = is.groups;
    scan.rows = is.kind == PA_SHORT_CONV ? is.columns - is.drafts : each, scan.columns = is.columns;
    scan.starts = starts, scan.slots = slots, scan.before = before;
    goals.assign(SEQS * LONGEST, -1);
    for (int seq = 0, next = SLOTS; seq < SEQS - 1; seq++) {
      for (int t = starts[seq]; t < starts[seq + 1]; t++) goals[seq * LONGEST + t - starts[seq]] = next++;
    }
    if (is.targets) scan.targets = goals.data(), scan.target_row = LONGEST;
    for (size_t i = 0; i < in.size(); i++) scan.inputs[i] = in[i].given(dtype);
    for (size_t i = 0; i < params.size(); i++) scan.params[i] = params[i].data();
    scan.states = states.bytes.data(), scan.out = got.bytes.data();
    scan.num_slots = slots_of, scan.state_slot = slot;
    scan.softplus = scan.unit_keys = scan.silu = is.option;
    scan.scale = (float)scale;
    if (pa_scan_step(isa, &scan, 2)) return 1e9;
    for (int seq = 0; seq < SEQS; seq++) {
      if (slots[seq] < 0) continue;
      std::vector<double> mine(&state[slots[seq] * slot], &state[slots[seq] * slot] + slot);
      if (!before[seq]) std::fill(mine.begin(), mine.end(), 0.0);
      for (int t = starts[seq]; t < starts[seq + 1]; t++) {
        position = before[seq] + t - starts[seq];
        for (int h = 0; h < is.heads; h++) token(t, h, &mine[(int64_t)h * each * is.columns], wide);
        const int64_t to = is.targets ? goals[seq * LONGEST + t - starts[seq]] : slots[seq];
        std::copy(mine.begin(), mine.end(), &state[to * slot]);
      }
    }
    double worst = 0, largest = 1e-9, worst_state = 0, largest_state = 1e-9;
    for (size_t i = 0; i < out.size(); i++) {
      if ((int)(i / wide / is.heads) >= starts[SEQS - 1]) break;  // padding
      worst = std::max(worst, off(got[i], out[i]));
      largest = std::max(largest, std::fabs(out[i]));
    }
    for (size_t i = 0; i < state.size(); i++) {
      worst_state = std::max(worst_state, off(states[i], state[i]));
      largest_state = std::max(largest_state, std::fabs(state[i]));
    }
    return std::max(worst / largest, worst_state / largest_state);
  }

 private:
  int position = 0;  // of the token under way

  static double off(double a, double b) { return a - b == a - b ? std::fabs(a - b) : 1e9; }
  static double silu(double x) { return x / (1 + std::exp(-x)); }

  void take(std::vector<std::pair<int, int>> shapes) {
    for (auto &shape : shapes) {
      Stored data(dtype, (size_t)starts[SEQS] * shape.first * shape.second, random);
      in.push_back({data, shape.first, shape.second});
    }
  }
  void number(std::vector<int> counts) {
    std::normal_distribution<float> normal;
    for (int count : counts) {
      params.emplace_back(count);
      for (float &x : params.back()) x = normal(random);
    }
  }
  // Makes an input small, of `by`'s sign where that is negative: its bits' upper half, times `by`.
  void calm(int index, double by) {
    Stored &data = in[index].data;
    const int bytes = size_of(dtype);
    for (size_t i = 0; i < data.bytes.size() / bytes; i++) {
      float x = (float)(by * std::min(2.0, std::fabs(data[i])));
      uint32_t u;
      std::memcpy(&u, &x, 4);
      uint16_t upper = (uint16_t)(u >> 16);
      // A float16 of the same sign, its mantissa cut; the numbers are normal ones.
      uint16_t of_half = (uint16_t)((u >> 16 & 0x8000) | (((u >> 23 & 255) - 112) << 10) | (u >> 13 & 1023));
      if (std::fabs(x) < 1e-4) of_half = 0;
      if (dtype == PA_F32) std::memcpy(&data.bytes[4 * i], &x, 4);
      else std::memcpy(&data.bytes[2 * i], dtype == PA_BF16 ? &upper : &of_half, 2);
    }
  }
  double step_size(double dt, int at) const {
    dt += params[2][at];
    return is.option ? std::log1p(std::exp(dt)) : dt;
  }
  void token(int t, int h, double *mine, int wide) {
    double *y = &out[((size_t)t * is.heads + h) * wide];
    if (is.kind == PA_SHORT_CONV) convolve(t, h, mine, y);
    else if (is.kind <= PA_MAMBA2) mamba(t, h, mine, y);
    else if (is.kind == PA_RWKV6) bonus(t, h, mine, y);
    else keys(t, h, mine, y);
  }
  void convolve(int t, int h, double *mine, double *y) {
    const int kept = is.columns - is.drafts;
    const float *weight = &params[0][(size_t)h * (kept + 1)];
    double sum = params[1][h] + weight[kept] * in[0](t, h);
    auto place = [&](int i) {  // of the i-th input that a token reads
      return is.drafts ? (position - kept + i + is.columns) % is.columns : i;
    };
    for (int i = 0; i < kept; i++) sum += weight[i] * mine[place(i)];
    *y = is.option ? silu(sum) : sum;
    if (!is.drafts) std::copy(mine + 1, mine + is.columns, mine);
    mine[is.drafts ? position % is.columns : kept - 1] = in[0](t, h);
  }
  void mamba(int t, int h, double *mine, double *y) {
    const bool one = is.kind == PA_MAMBA1;
    const int group = one ? 0 : h / (is.heads / is.groups);
    const double dt = step_size(in[1](t, h), h);
    const bool gated = in.size() == 5;
    for (int r = 0; r < (one ? 1 : is.rows); r++) {
      const double x = in[0](t, h, r);
      y[r] = params[1][h] * x;
      for (int n = 0; n < is.columns; n++) {
        double &s = mine[r * is.columns + n];
        s = std::exp(dt * params[0][one ? h * is.columns + n : h]) * s + dt * in[2](t, group, n) * x;
        y[r] += s * in[3](t, group, n);
      }
      if (gated) y[r] *= silu(in[4](t, h, r));
    }
  }
  // The key's length where it is made a unit, else 1.
  double length(int input, int t, int group) const {
    double sum = 1e-6;
    for (int k = 0; k < is.rows; k++) sum += in[input](t, group, k) * in[input](t, group, k);
    return is.option && is.kind != PA_LINEAR && is.kind != PA_RWKV7 ? std::sqrt(sum) : 1;
  }
  void bonus(int t, int h, double *mine, double *y) {
    for (int c = 0; c < is.columns; c++) {
      y[c] = 0;
      for (int k = 0; k < is.rows; k++) {
        double &s = mine[k * is.columns + c];
        const double fresh = in[2](t, h, k) * in[3](t, h, c);
        y[c] += scale * in[0](t, h, k) * (s + params[0][h * is.rows + k] * fresh);
        s = std::exp(in[1](t, h, k)) * s + fresh;
      }
    }
  }
  void keys(int t, int h, double *mine, double *y) {
    const bool low_rank = is.kind == PA_RWKV7;
    const int group = h / (is.heads / is.groups);
    const Rows &values = in[low_rank ? 3 : 2];
    const double q_by = length(0, t, group), k_by = low_rank ? 1 : length(1, t, group);
    auto decay = [&](int k) {
      if (is.kind == PA_LINEAR) return std::exp((double)params[0][h]);
      return std::exp(low_rank ? in[1](t, h, k) : in[3](t, h, is.kind == PA_KDA ? k : 0));
    };
    for (int c = 0; c < is.columns; c++) {
      double read = 0, sum = 0;
      for (int k = 0; k < is.rows; k++) {
        const double s = mine[k * is.columns + c];
        if (low_rank) read += in[4](t, h, k) * s;
        else if (is.kind != PA_LINEAR) read += in[1](t, group, k) / k_by * decay(k) * s;
      }
      for (int k = 0; k < is.rows; k++) {
        double &s = mine[k * is.columns + c];
        const double v = values(t, h, c);
        s *= decay(k);
        if (low_rank) s += in[5](t, h, k) * read + in[2](t, h, k) * v;
        else if (is.kind == PA_LINEAR) s += in[1](t, group, k) * v;
        else s += in[1](t, group, k) / k_by * in[4](t, h) * (v - read);
        sum += in[0](t, low_rank ? h : group, k) / q_by * s;
      }
      y[c] = scale * sum;
    }
  }
};

static void check_scan(Tally &tally) {
  const Recurrence all[] = {{"convolution", PA_SHORT_CONV, 70, 1, 1, 3, true},
                            {"convolution", PA_SHORT_CONV, 70, 1, 1, 1, true},
                            {"convolution", PA_SHORT_CONV, 70, 1, 1, 2, false},
                            {"convolution, drafts", PA_SHORT_CONV, 70, 1, 1, 7, true, 4},
                            {"convolution, targets", PA_SHORT_CONV, 70, 1, 1, 3, true, 0, true},
                            {"Mamba-1, gated", PA_MAMBA1, 70, 1, 1, 16, true},
                            {"Mamba-1, targets", PA_MAMBA1, 70, 1, 1, 16, false, 0, true},
                            {"Mamba-2, gated, targets", PA_MAMBA2, 2, 1, 24, 64, true, 0, true},
                            {"gated delta rule, targets", PA_GDN, 4, 2, 21, 21, true, 0, true},
                            {"Mamba-1", PA_MAMBA1, 9, 1, 1, 7, false},
                            {"Mamba-2", PA_MAMBA2, 4, 2, 24, 64, true},
                            {"Mamba-2", PA_MAMBA2, 2, 1, 9, 10, true},
                            {"linear attention", PA_LINEAR, 4, 2, 40, 40, false},
                            {"gated delta rule", PA_GDN, 4, 2, 48, 64, true},
                            {"gated delta rule", PA_GDN, 2, 2, 21, 21, false},
                            {"delta rule by channels", PA_KDA, 3, 3, 48, 48, true},
                            {"RWKV-6", PA_RWKV6, 3, 3, 64, 64, false},
                            {"RWKV-6, targets", PA_RWKV6, 2, 2, 21, 21, false, 0, true},
                            {"RWKV-7", PA_RWKV7, 3, 3, 64, 64, false}};
  for (const Recurrence &is : all) {
    for (int dtype = PA_F32; dtype <= PA_F16; dtype++) {
      if (tally.skips()) continue;
      double allowed = dtype == PA_F32 ? 2e-5 : dtype == PA_BF16 ? 8e-3 : 1.5e-3;
      char what[96];
      std::snprintf(what, sizeof what, "%s, state of %d x %d, %s", is.name, is.rows, is.columns,
                    DTYPE_NAMES[dtype]);
      tally.judge(Scan(is, dtype).error(tally.isa), allowed, what);
    }
  }
}
