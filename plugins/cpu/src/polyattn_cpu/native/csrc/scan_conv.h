// Short convolutions. Included by scan.h.

// A short convolution's channels of some sequences. A state holds the last inputs, [channel][columns]:
// those that a token reads, the oldest first, or a ring, with room for drafts that are rejected.
struct Conv {
  const pa_scan &scan;
  const int64_t first, total;  // channels of the item
  const int kept, columns;     // inputs that a token reads, and that a state holds
  int64_t channel;             // of the block that runs, and their number
  int count;
  float *weight, *bias, *out, *rows, *old;

  Conv(const pa_scan &scan, int64_t item, Arena arena)
      : scan(scan), first(item * pa_scan_channels(&scan)),
        total(pa_min((int)pa_scan_channels(&scan), (int)(scan.num_heads - first))), kept((int)scan.rows),
        columns((int)scan.columns) {
    const int padded = pa_round_up((int)total, LD);
    weight = arena.take<float>((int64_t)(kept + 1) * padded);
    bias = arena.take<float>(padded);
    out = arena.take<float>(LD);
    rows = arena.take<float>((int64_t)(kept + SCAN_TOKENS) * LD);
    old = arena.take<float>((int64_t)columns * LD + W);
    __builtin_memset(rows, 0, 4L * (kept + SCAN_TOKENS) * LD);
    for (int c = 0; c < padded; c++) {
      bias[c] = c < total && scan.params[1] ? scan.params[1][first + c] : 0;
      float *of_block = weight + (int64_t)(c / LD) * (kept + 1) * LD + c % LD;
      for (int w = 0; w <= kept; w++) {
        of_block[w * LD] = c < total ? scan.params[0][(first + c) * (kept + 1) + w] : 0;
      }
    }
  }

  PA_NOINLINE void run(const Stretch &seq) {
    const Conv whole = *this;
    for (int64_t c = 0; c < total; c += LD) {
      channel = first + c, count = pa_min(LD, (int)(total - c));
      run_block(seq);
      weight += (kept + 1) * LD, bias += LD;
    }
    weight = whole.weight, bias = whole.bias;
  }

 private:
  static constexpr int LD = PA_SCAN_CHANNELS;
  static constexpr int AHEAD = 8;  // blocks of a state that are asked for before they are read

  void run_block(const Stretch &seq) {
    const int64_t at = seq.slot * scan.state_slot + channel * columns;
    char *state = (char *)scan.states + at * itemsize((int)scan.state_dtype);
    if (seq.last - seq.first == 1 && seq.before && !ring() && step(seq.first, state)) return;
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
  // A single token; false where no loop is compiled for it.
  bool step(int64_t token, char *state) {
    if (scan.inputs[0].dtype != scan.state_dtype) return false;
    switch (scan.state_dtype) {
      case PA_F32: return step_of<float>(token, (uint32_t *)state);
      case PA_BF16: return step_of<bf16>(token, (uint16_t *)state);
      default: return step_of<f16>(token, (uint16_t *)state);
    }
  }
  template <class T, class Bits>
  bool step_of(int64_t token, Bits *state) {
    switch (kept) {
      case 1: return step_kept<T, 1>(token, state);
      case 2: return step_kept<T, 2>(token, state);
      case 3: return step_kept<T, 3>(token, state);
      default: return false;
    }
  }
  // The columns lie apart, each a row of channels, while the token is computed.
  template <class T, int KEPT, class Bits>
  PA_NOINLINE bool step_kept(int64_t token, Bits *state) {
    if (count == LD) step_some<T, KEPT>(token, state, LD);  // whose loops have a known length
    else step_some<T, KEPT>(token, state, count);
    return true;
  }
  template <class T, int KEPT, class Bits>
  PA_ALWAYS void step_some(int64_t token, Bits *__restrict state, const int count) const {
    Bits apart[(KEPT + 1) * LD];
    if (count < LD) __builtin_memset(apart, 0, sizeof apart);
    for (int i = 0; i < KEPT * LD; i += 64 / (int)sizeof(Bits)) prefetch_l2(state + AHEAD * KEPT * LD + i);
    for (int c = 0; c < count; c++) {
      for (int w = 0; w < KEPT; w++) apart[w * LD + c] = state[c * KEPT + w];
    }
    __builtin_memcpy(apart + KEPT * LD, row_at(scan.inputs[0], token, channel), count * sizeof(Bits));
    const float *by = weight, *plus = bias;
    const bool silu = scan.silu;
    float y[LD];
    for (int c = 0; c < LD; c += W) {
      vf sum = loadf(plus + c);
      for (int w = 0; w <= KEPT; w++) sum += loadf(by + w * LD + c) * load((const T *)apart + w * LD + c);
      write(y + c, silu ? siluv(sum) : sum);
    }
    put_out(token, y);
    for (int c = 0; c < count; c++) {
      for (int w = 0; w < KEPT; w++) state[c * KEPT + w] = apart[(w + 1) * LD + c];
    }
  }

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
    put_out(token, out);
  }
  void put_out(int64_t token, const float *y) const {
    char *to = (char *)scan.out + (token * scan.num_heads + channel) * itemsize((int)scan.dtype);
    narrow(y, to, (int)scan.dtype, count);
  }
};
