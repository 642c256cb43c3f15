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
  float *weights, *biases, *rows, *input, *old, *out;  // out: of a token, of all of the item's channels

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
    out = arena.take<float>(padded);
    __builtin_memset(rows, 0, 4 * (2L * kept + 1) * LD);
    if (total < padded) __builtin_memset(weights, 0, 4 * (kept + 1) * padded);
    __builtin_memset(biases, 0, 4 * padded);
    for (int64_t c = 0; c < total; c += LD) {
      const int some = pa_min(LD, (int)(total - c));
      if (scan.params[1]) __builtin_memcpy(biases + c, scan.params[1] + first + c, 4 * some);
      const float *from = scan.params[0] + (first + c) * (kept + 1);
      float *to = weights + c * (kept + 1);
      for (int w = 0; w <= kept; w++, to += LD) {
        for (int i = 0; i < some; i++) to[i] = from[i * (kept + 1) + w];
      }
    }
  }

  // Its tokens from `low` to `high`. Those that read the state come with the first, with what the sequence
  // leaves there: no other item reads or writes it. Others read tokens before them.
  PA_NOINLINE void run(const Stretch &seq, int64_t low, int64_t high) {
    if (seq.first >= low) {
      bool stepped = false;
      for (int64_t c = 0; c < total; c += LD) {
        take_block(c);
        stepped = begin(seq);
      }
      if (stepped) put_out(seq.first, 0, total);
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
  // Whether it was a step, whose output is left to do.
  bool begin(const Stretch &seq) {
    const int64_t at = seq.slot * scan.state_slot + channel * columns, tokens = seq.last - seq.first;
    char *state = (char *)scan.states + at * itemsize((int)scan.state_dtype);
    if (tokens == 1 && seq.before && !ring() && step(seq.first, state)) return true;
    take_state(state, seq.before);
    for (int64_t t = 0; t < tokens && t < kept; t++) {
      take_input(seq.first + t, rows + (kept + t) * LD);
      add_token(rows + t * LD, LD);
      put_out(seq.first + t, channel - first, count);
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
    return false;
  }
  template <class T>
  PA_NOINLINE void put_tokens(int64_t low, int64_t high) {
    for (int64_t token = low; token < high; token++) {
      for (int64_t c = 0; c < total; c += LD) {
        take_block(c);
        if (count == LD) {
          add_token((const T *)row_at(scan.inputs[0], token - kept, channel), scan.inputs[0].token);
          continue;
        }
        for (int w = 0; w <= kept; w++) take_input(token - kept + w, rows + w * LD);
        add_token(rows, LD);
      }
      put_out(token, 0, total);
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
    float *to = out + (channel - first);
    for (int c = 0; c < LD; c += W) {
      vf sum = loadf(plus + c);
      for (int w = 0; w <= KEPT; w++) sum += loadf(by + w * LD + c) * load((const T *)apart + w * LD + c);
      write(to + c, sum);
    }
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
  PA_ALWAYS void add_token(const T *window, int64_t row) const {
    vf sums[LD / W];
    for (int i = 0; i < LD / W; i++) sums[i] = loadf(bias + i * W);
    for (int w = 0; w <= kept; w++) {
      for (int i = 0; i < LD / W; i++) {
        sums[i] += loadf(weight + w * LD + i * W) * load(window + w * row + i * W);
      }
    }
    for (int i = 0; i < LD / W; i++) write(out + (channel - first) + i * W, sums[i]);
  }
  // A token's outputs, of `some` channels of the item from `at` on: apart from the sums, as a SiLU's chain of
  // dependent instructions is long, so that many must be on their way.
  PA_NOINLINE void put_out(int64_t token, int64_t at, int64_t some) const {
    const bool silu = scan.silu;
    for (int64_t c = at; silu && c < at + some; c += W) write(out + c, siluv(loadf(out + c)));
    char *to = (char *)scan.out + (token * scan.num_heads + first + at) * itemsize((int)scan.dtype);
    narrow(out + at, to, (int)scan.dtype, (int)some);
  }
};
