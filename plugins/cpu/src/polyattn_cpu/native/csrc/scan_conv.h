// Short convolutions. Included by scan.h.

// A short convolution's channels of some sequences. A state holds the last inputs, [channel][columns]:
// those that a token reads, the oldest first, or a ring, with room for drafts that are rejected.
struct Conv {
  const pa_scan &scan;
  const int64_t first, total;  // channels of the item
  const int kept, columns;     // inputs that a token reads, and that a state holds
  int64_t channel;             // of the block that runs, and their number
  int count;
  const float *weight, *bias;  // of the block
  float *weights, *biases, *rows, *input, *old;

  Conv(const pa_scan &scan, int64_t item, Arena arena)
      : scan(scan), first(item * pa_scan_channels(&scan)),
        total(pa_min((int)pa_scan_channels(&scan), (int)(scan.num_heads - first))), kept((int)scan.rows),
        columns((int)scan.columns) {
    const int padded = pa_round_up((int)total, LD);
    weights = arena.take<float>((int64_t)(kept + 1) * padded);
    biases = arena.take<float>(padded);
    rows = arena.take<float>((2L * kept + 1) * LD);
    input = arena.take<float>(LD);
    old = arena.take<float>((int64_t)columns * LD + W);
    __builtin_memset(rows, 0, 4 * (2L * kept + 1) * LD);
    for (int c = 0; c < padded; c++) {
      biases[c] = c < total && scan.params[1] ? scan.params[1][first + c] : 0;
      float *of_block = weights + (int64_t)(c / LD) * (kept + 1) * LD + c % LD;
      for (int w = 0; w <= kept; w++) {
        of_block[w * LD] = c < total ? scan.params[0][(first + c) * (kept + 1) + w] : 0;
      }
    }
  }

  // Its tokens from `low` to `high`. Those that read the state come with the first, with what the sequence
  // leaves there: no other item reads or writes it. Others read tokens before them.
  PA_NOINLINE void run(const Stretch &seq, int64_t low, int64_t high) {
    if (seq.first >= low) {
      for (int64_t c = 0; c < total; c += LD) {
        take_block(c);
        begin(seq);
      }
    }
    if (low < seq.first + kept) low = seq.first + kept;
    if (high > seq.last) high = seq.last;
    switch (scan.inputs[0].dtype) {
      case PA_F32: return put_tokens<float>(low, high);
      case PA_BF16: return put_tokens<bf16>(low, high);
      default: return put_tokens<f16>(low, high);
    }
  }

 private:
  static constexpr int LD = PA_SCAN_CHANNELS;
  static constexpr int AHEAD = 8;  // blocks of a state that are asked for before they are read

  void take_block(int64_t c) {
    channel = first + c, count = pa_min(LD, (int)(total - c));
    weight = weights + (kept + 1) * c, bias = biases + c;
  }
  void begin(const Stretch &seq) {
    const int64_t at = seq.slot * scan.state_slot + channel * columns, tokens = seq.last - seq.first;
    char *state = (char *)scan.states + at * itemsize((int)scan.state_dtype);
    if (tokens == 1 && seq.before && !ring() && step(seq.first, state)) return;
    take_state(state, seq.before);
    for (int64_t t = 0; t < tokens && t < kept; t++) {
      take_input(seq.first + t, rows + (kept + t) * LD);
      put_token(seq.first + t, rows + t * LD, LD);
    }
    for (int64_t t = tokens < columns ? 0 : tokens - columns; ring() && t < tokens; t++) {
      take_input(seq.first + t, input);
      put_input(seq.before + t, input);
    }
    for (int w = 0; w < kept && !ring(); w++) {
      if (tokens + w >= kept) take_input(seq.last - kept + w, input);
      put_input(w, tokens + w < kept ? rows + (tokens + w) * LD : input);
    }
    narrow(old, state, (int)scan.state_dtype, count * columns);
  }
  template <class T>
  PA_NOINLINE void put_tokens(int64_t low, int64_t high) {
    for (int64_t token = low; token < high; token++) {
      for (int64_t c = 0; c < total; c += LD) {
        take_block(c);
        if (count == LD) {
          put_token(token, (const T *)row_at(scan.inputs[0], token - kept, channel), scan.inputs[0].token);
          continue;
        }
        for (int w = 0; w <= kept; w++) take_input(token - kept + w, rows + w * LD);
        put_token(token, rows, LD);
      }
    }
  }
  void take_input(int64_t token, float *to) const {
    take_row(scan.inputs[0], token, channel, to, count);
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
  template <class T>
  PA_ALWAYS void put_token(int64_t token, const T *window, int64_t row) const {
    vf sums[LD / W];
    for (int i = 0; i < LD / W; i++) sums[i] = loadf(bias + i * W);
    for (int w = 0; w <= kept; w++) {
      for (int i = 0; i < LD / W; i++) {
        sums[i] += loadf(weight + w * LD + i * W) * load(window + w * row + i * W);
      }
    }
    float y[LD];
    for (int i = 0; i < LD / W; i++) write(y + i * W, scan.silu ? siluv(sums[i]) : sums[i]);
    put_out(token, y);
  }
  void put_out(int64_t token, const float *y) const {
    char *to = (char *)scan.out + (token * scan.num_heads + channel) * itemsize((int)scan.dtype);
    narrow(y, to, (int)scan.dtype, count);
  }
};
