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
      lay_out(scan.params[0] + (first + c) * (kept + 1), weights + c * (kept + 1), some);
    }
  }

  // Its tokens from `low` to `high`. Those that read the state come with the first, with what the sequence
  // leaves there: no other item reads or writes it. Others read tokens before them.
  PA_NOINLINE void run(const Stretch &seq, int64_t low, int64_t high) {
    if (seq.first >= low) {
      if (seq.last - seq.first == 1 && seq.before && !ring() && step(seq)) {
        put_out(seq.first, 0, total);
      } else {
        for (int64_t c = 0; c < total; c += LD) {
          take_block(c);
          begin(seq);
        }
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

  // Some channels' weights by rows.
  void lay_out(const float *from, float *to, int some) const {
    if (kept == 3 && some == LD) {
      for (int i = 0; i < LD; i += W, from += 4 * W) {
        vf row[4];
        for (int w = 0; w < 4; w++) row[w] = loadf(from + w * W);
        apart_by_turns<4>(row);
        for (int w = 0; w < 4; w++) write(to + w * LD + i, row[w]);
      }
      return;
    }
    for (int w = 0; w <= kept; w++) {
      for (int i = 0; i < some; i++) to[w * LD + i] = from[i * (kept + 1) + w];
    }
  }
  void take_block(int64_t c) {
    channel = first + c, count = pa_min(LD, (int)(total - c));
    weight = weights + (kept + 1) * c, bias = biases + c;
  }
  char *state_of(const Stretch &seq, int64_t channel) const {
    return (char *)scan.states + (seq.slot * scan.state_slot + channel * columns) * itemsize((int)scan.state_dtype);
  }
  char *out_of(int64_t token, int64_t at) const {
    return (char *)scan.out + (token * scan.num_heads + first + at) * itemsize((int)scan.dtype);
  }
  void begin(const Stretch &seq) {
    char *state = state_of(seq, channel);
    const int64_t tokens = seq.last - seq.first;
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
  // The sums of a single token; false where no loop is compiled for it.
  bool step(const Stretch &seq) {
    if (scan.inputs[0].dtype != scan.state_dtype) return false;
    switch (scan.state_dtype) {
      case PA_F32: return step_of<float, uint32_t>(seq);
      case PA_BF16: return step_of<bf16, uint16_t>(seq);
      default: return step_of<f16, uint16_t>(seq);
    }
  }
  template <class T, class Bits>
  bool step_of(const Stretch &seq) {
    switch (kept) {
      case 1: return step_kept<T, Bits, 1>(seq);
      case 2: return step_kept<T, Bits, 2>(seq);
      case 3: return step_kept<T, Bits, 3>(seq);
      default: return false;
    }
  }
  template <class T, class Bits, int KEPT>
  PA_NOINLINE bool step_kept(const Stretch &seq) const {
    Bits *state = (Bits *)state_of(seq, first);
    const Bits *x = (const Bits *)row_at(scan.inputs[0], seq.first, first);
    const char *result = out_of(seq.first, 0);
    const float *by = weights, *plus = biases;
    float *to = out;
    int64_t left = total;
    for (; left >= LD; left -= LD) {
      ask(state + AHEAD * KEPT * LD, KEPT * LD * sizeof(Bits));
      ask(x + AHEAD * LD, LD * sizeof(Bits));
      ask(result + AHEAD * LD * sizeof(Bits), LD * sizeof(Bits));
      step_some<T, KEPT>(x, state, by, plus, to, LD);  // whose loops have a known length
      x += LD, state += KEPT * LD, by += (KEPT + 1) * LD, plus += LD, to += LD, result += LD * sizeof(Bits);
    }
    if (left) step_some<T, KEPT>(x, state, by, plus, to, (int)left);
    return true;
  }
  PA_ALWAYS static void ask(const void *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) prefetch_l2((const char *)from + i);
  }
#if defined(__AVX512F__)
  // How 32 channels' bfloat16 states are permuted. `column`: sixteen of its elements go to the upper halves of 32 bits,
  // which makes them float32. A state moves on by an element, but for a token's `input`.
  template <int KEPT>
  struct Moves {
    alignas(64) uint16_t column[2][KEPT][32] = {}, input[KEPT][32] = {};
    uint32_t is_input[KEPT] = {};
    constexpr Moves() {
      for (int i = 0; i < 32; i++) {
        const int half = i / 16, at = i * KEPT - 32 * first(half);
        for (int w = 0; w < KEPT; w++) column[half][w][i % 16 * 2 + 1] = (uint16_t)(at + w);
      }
      for (int i = 0; i < 32 * KEPT; i++) {
        input[i / 32][i % 32] = (uint16_t)(i / KEPT);
        is_input[i / 32] |= (uint32_t)(i % KEPT == KEPT - 1) << i % 32;
      }
    }
    static constexpr int first(int half) { return half * KEPT / 2; }  // vector, of two, that half a column is in
  };
  template <int KEPT>
  static constexpr Moves<KEPT> MOVES = Moves<KEPT>();
  template <int KEPT>
  PA_ALWAYS static void step_32(const uint16_t *x, uint16_t *state, const float *by, const float *plus, float *to) {
    constexpr __mmask32 UPPER = 0xaaaaaaaa;
    constexpr const Moves<KEPT> &moves = MOVES<KEPT>;
    const __m512i inputs = _mm512_loadu_si512(x);
    __m512i old[KEPT + 1];
    PA_UNROLLED
    for (int k = 0; k < KEPT; k++) old[k] = _mm512_loadu_si512(state + 32 * k);
    old[KEPT] = old[0];  // no element of it goes anywhere
    PA_UNROLLED
    for (int half = 0; half < 2; half++, by += W, plus += W, to += W) {
      const __m512i *from = old + moves.first(half), which = _mm512_load_si512(MOVES<1>.column[half][0]);
      vf sum = loadf(plus);
      PA_UNROLLED
      for (int w = 0; w < KEPT; w++) {
        const __m512i column = _mm512_load_si512(moves.column[half][w]);
        sum += loadf(by + w * LD) * (vf)_mm512_maskz_permutex2var_epi16(UPPER, from[0], column, from[1]);
      }
      write(to, sum + loadf(by + KEPT * LD) * (vf)_mm512_maskz_permutexvar_epi16(UPPER, which, inputs));
    }
    PA_UNROLLED
    for (int k = 0; k < KEPT; k++) {
      const __m512i later = _mm512_slli_epi32(_mm512_alignr_epi32(old[k + 1], old[k], 1), 16);
      const __m512i moved = _mm512_or_si512(_mm512_srli_epi32(old[k], 16), later);
      const __m512i input = _mm512_load_si512(moves.input[k]);
      _mm512_storeu_si512(state + 32 * k, _mm512_mask_permutexvar_epi16(moved, moves.is_input[k], input, inputs));
    }
  }
#endif
  // The columns lie apart, each a row of channels, while the token is computed.
  template <class T, int KEPT, class Bits>
  PA_ALWAYS static void step_some(const Bits *__restrict x, Bits *__restrict state, const float *__restrict by,
                                  const float *__restrict plus, float *__restrict to, const int count) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, bf16>) {
      for (int c = 0; count == LD && c < LD; c += 32) step_32<KEPT>(x + c, state + c * KEPT, by + c, plus + c, to + c);
      if (count == LD) return;
    }
#endif
    Bits apart[(KEPT + 1) * LD];
    if (count < LD) __builtin_memset(apart, 0, sizeof apart);
    for (int c = 0; c < count; c++) {
      for (int w = 0; w < KEPT; w++) apart[w * LD + c] = state[c * KEPT + w];
    }
    __builtin_memcpy(apart + KEPT * LD, x, count * sizeof(Bits));
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
    narrow(out + at, out_of(token, at), (int)scan.dtype, (int)some);
  }
};
