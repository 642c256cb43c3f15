// Short convolutions. Included by scan.h.

// A short convolution's channels of some sequences. A state holds the last inputs, [channel][columns]:
// those that a token reads, the oldest first, or a ring, with room for drafts that are rejected.
struct Conv {
  const pa_scan &scan;
  int64_t channel;
  int count, kept, columns;  // channels; inputs that a token reads, and that a state holds
  float *weight, *bias, *out, *rows, *old;

  Conv(const pa_scan &scan, int64_t item, Arena arena)
      : scan(scan), channel(item * LD), count(pa_min(LD, (int)(scan.num_heads - channel))),
        kept((int)scan.rows), columns((int)scan.columns) {
    weight = arena.take<float>((int64_t)(kept + 1) * LD);
    bias = arena.take<float>(LD);
    out = arena.take<float>(LD);
    rows = arena.take<float>((int64_t)(kept + SCAN_TOKENS) * LD);
    old = arena.take<float>((int64_t)columns * LD + W);
    __builtin_memset(rows, 0, 4L * (kept + SCAN_TOKENS) * LD);
    for (int c = 0; c < LD; c++) {
      bias[c] = c < count && scan.params[1] ? scan.params[1][channel + c] : 0;
      for (int w = 0; w <= kept; w++) {
        weight[w * LD + c] = c < count ? scan.params[0][(channel + c) * (kept + 1) + w] : 0;
      }
    }
  }

  PA_NOINLINE void run(const Stretch &seq) {
    const int64_t at = seq.slot * scan.state_slot + channel * columns;
    char *state = (char *)scan.states + at * itemsize(scan.state_dtype);
    take_state(state, seq.before);
    for (int64_t start = seq.first; start < seq.last; start += SCAN_TOKENS) {
      const int some = (int)(seq.last - start < SCAN_TOKENS ? seq.last - start : SCAN_TOKENS);
      for (int t = 0; t < some; t++) {
        const char *x = row_at(scan.inputs[0], start + t, channel);
        widen_any(x, scan.inputs[0].dtype, rows + (kept + t) * LD, count);
        put_token(start + t, rows + t * LD);
        if (ring()) put_input(seq.before + (start - seq.first) + t, rows + (kept + t) * LD);
      }
      __builtin_memmove(rows, rows + some * LD, 4L * kept * LD);
    }
    for (int w = 0; w < kept && !ring(); w++) put_input(w, rows + w * LD);
    narrow(old, state, (int)scan.state_dtype, count * columns);
  }

 private:
  static constexpr int LD = PA_SCAN_CHANNELS;

  bool ring() const { return columns > kept; }
  // Position p's column; before a sequence's first token lie those that it has not filled, of zeros.
  int column(int64_t position) const {
    return (int)((position % columns + columns) % columns);
  }
  void take_state(const char *state, int32_t before) {
    if (!before) {
      __builtin_memset(rows, 0, 4L * kept * LD);
      __builtin_memset(old, 0, 4L * columns * LD);
      return;
    }
    widen_any(state, (int)scan.state_dtype, old, count * columns);
    for (int w = 0; w < kept; w++) {
      const int from = ring() ? column((int64_t)before - kept + w) : w;
      for (int c = 0; c < count; c++) rows[w * LD + c] = old[c * columns + from];
    }
  }
  void put_input(int64_t position, const float *x) {
    const int to = column(position);
    for (int c = 0; c < count; c++) old[c * columns + to] = x[c];
  }
  void put_token(int64_t token, const float *window) {
    for (int c = 0; c < LD; c += W) {
      vf y = loadf(bias + c);
      for (int w = 0; w <= kept; w++) y += loadf(weight + w * LD + c) * loadf(window + w * LD + c);
      write(out + c, scan.silu ? siluv(y) : y);
    }
    char *to = (char *)scan.out + (token * scan.num_heads + channel) * itemsize((int)scan.dtype);
    narrow(out, to, (int)scan.dtype, count);
  }
};
