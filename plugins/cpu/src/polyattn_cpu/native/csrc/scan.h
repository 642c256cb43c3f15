// Recurrences over a state for each sequence, a token after another. Included inside an anonymous
// namespace.
//
// A head's state is a matrix of float32, and its columns, or for Mamba its rows, know nothing of each
// other. So a piece of it that the first cache holds goes through a chunk of tokens; a single token
// goes through the whole where it lies, at the memory's pace.

constexpr int SCAN_TOKENS = 16;   // of a chunk, whose terms are ready before the state is touched
constexpr int SCAN_COLUMNS = 32;  // of a piece of a delta rule's state

PA_INLINE const char *row_at(const pa_rows &rows, int64_t token, int64_t head) {
  return (const char *)rows.data + (token * rows.token + head * rows.head) * itemsize(rows.dtype);
}
PA_INLINE void take_row(const pa_rows &rows, int64_t token, int64_t head, float *to, int count) {
  widen_any(row_at(rows, token, head), rows.dtype, to, count);
}
PA_INLINE float number_at(const pa_rows &rows, int64_t token, int64_t head) {
  float padded[W];
  take_row(rows, token, head, padded, 1);
  return padded[0];
}
PA_INLINE void scale_row(float *x, int count, float by) {
  for (int i = 0; i < count; i++) x[i] *= by;
}
PA_INLINE void exp_row(float *x, int count) {  // of arguments of at most 88; padded to W
  for (int i = 0; i < count; i += W) write(x + i, exp2v(loadf(x + i) * splat(LOG2E)));
}
PA_INLINE vf siluv(vf x) {
  vf y = vmin(x * splat(-LOG2E), splat(126.0f));
  return x / (splat(1.0f) + exp2v(y));
}

// Neighbouring tokens of a sequence, whose state is in a slot: it had `before` tokens.
struct Stretch {
  int64_t first, last, slot;
  int32_t before;
};

// A state's part, [rows][ld], in the cache or a copy.
struct StatePart {
  float *at;
  int64_t ld;
};

// Copies [rows][columns] and back; a sequence that begins has zeros, whatever its slot holds. What pads
// a copied row is zero.
static void copy_in(const float *state, int64_t ld, int rows, int columns, bool fresh, float *to,
                    int to_ld) {
  if (fresh || columns % W) __builtin_memset(to, 0, 4L * rows * to_ld);
  if (fresh) return;
  for (int r = 0; r < rows; r++) __builtin_memcpy(to + (int64_t)r * to_ld, state + r * ld, 4L * columns);
}
static void copy_out(const float *from, int from_ld, int rows, int columns, float *state, int64_t ld) {
  for (int r = 0; r < rows; r++) {
    __builtin_memcpy(state + r * ld, from + (int64_t)r * from_ld, 4L * columns);
  }
}

// What a token does to a state (K, V): with u = v, or beta (v - a state), or a state,
//   state = diag(w) state + b u' (+ c v');  output = r state.
struct KeyTerms {
  float *w, *a, *b, *c, *r;  // K each
  float beta;
};
enum ScanForm { ADDS, DELTA, LOW_RANK };

template <int NV, ScanForm FORM>
PA_NOINLINE void advance(const StatePart &state, int rows, const KeyTerms &is, const float *v, float *out,
                         int64_t ahead) {
  vf u[NV], o[NV];
  for (int i = 0; i < NV; i++) {
    u[i] = FORM == ADDS ? loadf(v + i * W) : vf{};
    o[i] = vf{};
  }
  if constexpr (FORM != ADDS) {
    for (int k = 0; k < rows; k++) {
      const float *at = state.at + k * state.ld;
      vf a = splat(is.a[k]);
      for (int i = 0; i < NV; i++) u[i] += a * loadf(at + i * W);
    }
  }
  if constexpr (FORM == DELTA) {
    for (int i = 0; i < NV; i++) u[i] = (loadf(v + i * W) - u[i]) * splat(is.beta);
  }
  for (int k = 0; k < rows; k++) {
    float *at = state.at + k * state.ld;
    vf w = splat(is.w[k]), b = splat(is.b[k]), r = splat(is.r[k]);
    for (int i = 0; i < NV; i++) {
      vf x = loadf(at + i * W) * w + b * u[i];
      if constexpr (FORM == LOW_RANK) x += splat(is.c[k]) * loadf(v + i * W);
      write(at + i * W, x);
      o[i] += r * x;
      prefetch_l2(at + ahead + i * W);
    }
  }
  for (int i = 0; i < NV; i++) write(out + i * W, o[i]);
}

template <ScanForm FORM>
static void advance_some(const StatePart &state, int rows, int vectors, const KeyTerms &is, const float *v,
                         float *out, int64_t ahead) {
  for (int at = 0; at < vectors;) {
    const StatePart part = {state.at + at * W, state.ld};
    const int left = vectors - at, some = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    switch (some) {
      case 8: advance<8, FORM>(part, rows, is, v + at * W, out + at * W, ahead); break;
      case 4: advance<4, FORM>(part, rows, is, v + at * W, out + at * W, ahead); break;
      case 2: advance<2, FORM>(part, rows, is, v + at * W, out + at * W, ahead); break;
      default: advance<1, FORM>(part, rows, is, v + at * W, out + at * W, ahead);
    }
    at += some;
  }
}

static void advance_any(const pa_scan &scan, const StatePart &state, int vectors, const KeyTerms &is,
                        const float *v, float *out, int64_t ahead) {
  const int rows = (int)scan.rows;
  if (scan.kind == PA_LINEAR) advance_some<ADDS>(state, rows, vectors, is, v, out, ahead);
  else if (scan.kind == PA_RWKV7) advance_some<LOW_RANK>(state, rows, vectors, is, v, out, ahead);
  else advance_some<DELTA>(state, rows, vectors, is, v, out, ahead);
}

PA_INLINE void to_unit(float *x, int count) {
  float sum = 0;
  for (int i = 0; i < count; i++) sum += x[i] * x[i];
  scale_row(x, count, 1.0f / sqrtf(sum + 1e-6f));
}

static void key_terms(const pa_scan &scan, int64_t token, int64_t head, KeyTerms &is) {
  const int size = (int)scan.rows;
  const int64_t group = head / (scan.num_heads / scan.num_groups);
  const pa_rows *in = scan.inputs;
  if (scan.kind == PA_RWKV7) {  // r, w, k, v, a, b
    take_row(in[0], token, head, is.r, size);
    take_row(in[1], token, head, is.w, size);
    take_row(in[2], token, head, is.c, size);
    take_row(in[4], token, head, is.a, size);
    take_row(in[5], token, head, is.b, size);
    exp_row(is.w, size);
    scale_row(is.r, size, scan.scale);
    return;
  }
  take_row(in[0], token, group, is.r, size);  // q, k, v, g, beta
  take_row(in[1], token, group, is.b, size);
  if (scan.unit_keys) {
    to_unit(is.r, size);
    to_unit(is.b, size);
  }
  scale_row(is.r, size, scan.scale);
  if (scan.kind == PA_KDA) {
    take_row(in[3], token, head, is.w, size);
    exp_row(is.w, size);
  } else {
    float decay = expf(scan.kind == PA_LINEAR ? scan.params[0][head] : number_at(in[3], token, head));
    for (int i = 0; i < size; i++) is.w[i] = decay;
  }
  if (scan.kind == PA_LINEAR) return;
  is.beta = number_at(in[4], token, head);
  for (int i = 0; i < size; i++) is.a[i] = is.b[i] * is.w[i];  // reads the state that has decayed
}

// One head of one sequence: linear attention, delta rules.
static void scan_keys(const pa_scan &scan, const Stretch &seq, int64_t head, Arena arena) {
  const int rows = (int)scan.rows, columns = (int)scan.columns, wide = pa_round_up(columns, W);
  const int64_t first = seq.first, last = seq.last;
  const bool fresh = !seq.before, whole = last - first == 1 && columns % W == 0;
  const pa_rows &values = scan.inputs[scan.kind == PA_RWKV7 ? 3 : 2];
  float *state = (float *)scan.states + seq.slot * scan.state_slot + head * rows * columns;
  KeyTerms terms[SCAN_TOKENS];
  for (KeyTerms &is : terms) {
    float **const all[] = {&is.w, &is.a, &is.b, &is.c, &is.r};
    for (float **each : all) *each = arena.take<float>(rows + W);
  }
  float *v = arena.take<float>((int64_t)SCAN_TOKENS * wide), *out = arena.take<float>((int64_t)SCAN_TOKENS * wide);
  float *copy = arena.take<float>((int64_t)rows * (wide + SCAN_COLUMNS));
  auto piece = [&](int c) { return copy + (int64_t)rows * c; };
  auto width = [&](int c) { return pa_min(SCAN_COLUMNS, wide - c); };
  if (whole && fresh) __builtin_memset(state, 0, 4L * rows * columns);
  for (int c = 0; !whole && c < wide; c += SCAN_COLUMNS) {
    copy_in(state + c, columns, rows, pa_min(SCAN_COLUMNS, columns - c), fresh, piece(c), width(c));
  }
  for (int64_t start = first; start < last; start += SCAN_TOKENS) {
    const int count = (int)(last - start < SCAN_TOKENS ? last - start : SCAN_TOKENS);
    for (int t = 0; t < count; t++) {
      key_terms(scan, start + t, head, terms[t]);
      take_row(values, start + t, head, v + (int64_t)t * wide, columns);
    }
    if (whole) {
      advance_any(scan, {state, columns}, wide / W, terms[0], v, out, (int64_t)rows * columns);
    }
    for (int c = 0; !whole && c < wide; c += SCAN_COLUMNS) {
      for (int t = 0; t < count; t++) {
        const int64_t at = (int64_t)t * wide + c;
        advance_any(scan, {piece(c), width(c)}, width(c) / W, terms[t], v + at, out + at, 0);
      }
    }
    for (int t = 0; t < count; t++) {
      int64_t to = ((start + t) * scan.num_heads + head) * columns;
      narrow(out + (int64_t)t * wide, (char *)scan.out + to * itemsize(scan.dtype), scan.dtype, columns);
    }
  }
  for (int c = 0; !whole && c < wide; c += SCAN_COLUMNS) {
    copy_out(piece(c), width(c), rows, pa_min(SCAN_COLUMNS, columns - c), state + c, columns);
  }
}

// What a token brings to Mamba's state (rows, N): the row's step x, and its decay: one for all rows, or,
// where each element decays on its own, the row's step.
struct MambaTerms {
  float *entering, *steps, *B, *C, *skip, *out;
  float decay;
};

// W rows of the state at a time, whose outputs are as many sums; of them four that share the loads of
// B and C.
template <bool EACH>
PA_NOINLINE void advance_mamba(const StatePart &state, int rows, int vectors, const MambaTerms &is,
                               const float *A, int64_t lda) {
  constexpr int SOME = 4;
  for (int first = 0; first < rows; first += W) {
    vf sum[W];
    for (int r = 0; r < W; r++) sum[r] = vf{};
    for (int part = 0; part < W && first + part < rows; part += SOME) {
      const int row = first + part;
      const float *a[SOME];
      float *at[SOME];
      vf enters[SOME], step[SOME], o[SOME];
      for (int r = 0; r < SOME; r++) {  // the last row again where there are no more
        const int here = pa_min(row + r, rows - 1);
        at[r] = state.at + here * state.ld;
        a[r] = A + here * lda;
        enters[r] = splat(is.entering[here]);
        step[r] = splat(EACH ? is.steps[here] * LOG2E : is.decay);
        o[r] = vf{};
      }
      for (int i = 0; i < vectors; i++) {
        vf b = loadf(is.B + i * W), c = loadf(is.C + i * W), x[SOME];
        for (int r = 0; r < SOME; r++) {
          vf decay = EACH ? exp2v(step[r] * loadf(a[r] + i * W)) : step[r];
          x[r] = loadf(at[r] + i * W) * decay + enters[r] * b;
          o[r] += x[r] * c;
        }
        for (int r = 0; r < SOME; r++) write(at[r] + i * W, x[r]);
      }
      for (int r = 0; r < SOME; r++) sum[part + r] = o[r];
    }
    write(is.out + first, sums(sum) + loadf(is.skip + first));
  }
}

PA_INLINE float step_size(const pa_scan &scan, float dt, int64_t head) {
  if (scan.params[2]) dt += scan.params[2][head];
  if (!scan.softplus) return dt;
  return dt > 20.0f ? dt : log1pf(expf(dt));
}

// Multiplies a token's outputs by their gates' SiLU; its steps are used up.
static void gate(const char *z, int64_t dtype, int rows, MambaTerms &is) {
  widen_any(z, dtype, is.steps, rows);
  for (int r = 0; r < rows; r += W) write(is.out + r, loadf(is.out + r) * siluv(loadf(is.steps + r)));
}

// One head of one sequence of Mamba-2, or so many channels of Mamba-1.
static void scan_mamba(const pa_scan &scan, const Stretch &seq, int64_t item, Arena arena) {
  const bool each = scan.kind == PA_MAMBA1;
  const int64_t row0 = each ? item * PA_SCAN_CHANNELS : 0, head = each ? 0 : item;
  const int rows = each ? pa_min(PA_SCAN_CHANNELS, (int)(scan.num_heads - row0)) : (int)scan.rows;
  const int columns = (int)scan.columns, wide = pa_round_up(columns, W), tall = pa_round_up(rows, W);
  const int64_t first = seq.first, last = seq.last, group = head / (each ? 1 : scan.num_heads / scan.num_groups);
  const pa_rows *in = scan.inputs;  // x, dt, B, C
  const bool copied = columns % W;
  float *state = (float *)scan.states + seq.slot * scan.state_slot +
                 (each ? row0 : head * scan.rows) * columns;
  MambaTerms terms[SCAN_TOKENS];
  for (MambaTerms &is : terms) {
    float **const of_rows[] = {&is.entering, &is.steps, &is.skip, &is.out};
    float **const of_columns[] = {&is.B, &is.C};
    for (float **term : of_rows) *term = arena.take<float>(tall + W);
    for (float **term : of_columns) *term = arena.take<float>(wide);
    for (int i = 0; i < wide; i++) is.B[i] = is.C[i] = 0;
    for (int i = 0; i < tall; i++) is.skip[i] = 0;
  }
  float *copy = arena.take<float>((int64_t)rows * wide), *A = arena.take<float>((int64_t)rows * wide);
  StatePart part = {copied ? copy : state, copied ? wide : columns};
  if (copied) copy_in(state, columns, rows, columns, !seq.before, copy, wide);
  else if (!seq.before) __builtin_memset(state, 0, 4L * rows * columns);
  if (each) copy_in(scan.params[0] + row0 * columns, columns, rows, columns, false, A, wide);
  for (int64_t start = first; start < last; start += SCAN_TOKENS) {
    const int count = (int)(last - start < SCAN_TOKENS ? last - start : SCAN_TOKENS);
    for (int t = 0; t < count; t++) {
      MambaTerms &is = terms[t];
      take_row(in[2], start + t, group, is.B, columns);
      take_row(in[3], start + t, group, is.C, columns);
      if (each) {
        widen_any(row_at(in[0], start + t, row0), in[0].dtype, is.entering, rows);
        widen_any(row_at(in[1], start + t, row0), in[1].dtype, is.steps, rows);
        for (int r = 0; r < rows; r++) is.steps[r] = step_size(scan, is.steps[r], row0 + r);
      } else {
        take_row(in[0], start + t, head, is.entering, rows);
        float dt = step_size(scan, number_at(in[1], start + t, head), head);
        is.decay = expf(dt * scan.params[0][head]);
        for (int r = 0; r < rows; r++) is.steps[r] = dt;
      }
      for (int r = 0; r < rows; r++) {
        if (scan.params[1]) is.skip[r] = is.entering[r] * scan.params[1][each ? row0 + r : head];
        is.entering[r] *= is.steps[r];
      }
    }
    // Rows that the first cache holds go through all tokens of the chunk.
    const int some = pa_max(W, 4096 / wide / W * W);
    for (int r = 0; r < rows; r += some) {
      for (int t = 0; t < count; t++) {
        MambaTerms is = terms[t];
        is.entering += r, is.steps += r, is.skip += r, is.out += r;
        const StatePart here = {part.at + r * part.ld, part.ld};
        const int these = pa_min(some, rows - r);
        if (each) advance_mamba<true>(here, these, wide / W, is, A + (int64_t)r * wide, wide);
        else advance_mamba<false>(here, these, wide / W, is, NULL, 0);
      }
    }
    for (int t = 0; t < count; t++) {
      if (in[4].data) gate(row_at(in[4], start + t, each ? row0 : head), in[4].dtype, rows, terms[t]);
      int64_t to = each ? (start + t) * scan.num_heads + row0 : ((start + t) * scan.num_heads + head) * rows;
      narrow(terms[t].out, (char *)scan.out + to * itemsize(scan.dtype), scan.dtype, rows);
    }
  }
  if (copied) copy_out(copy, wide, rows, columns, state, columns);
}

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

static int64_t scan_scratch(const pa_scan *scan) {
  const int64_t wide = pa_round_up((int)scan->columns, W), rows = scan->rows + PA_SCAN_CHANNELS + 2 * W;
  const int64_t terms = SCAN_TOKENS * (6 * rows + 4 * (wide + W) + 12 * 16);
  const int64_t conv = 4L * PA_SCAN_CHANNELS * (wide + scan->rows + SCAN_TOKENS + 8);
  return 4 * (terms + 2 * rows * (wide + SCAN_COLUMNS) + conv) + 64 * 64;
}

// The elements of a slot that an item holds: `count` behind `first`.
struct Piece {
  int64_t first, count;
};
static Piece piece_of(const pa_scan &scan, int64_t item) {
  if (scan.kind > PA_MAMBA1) return {item * scan.rows * scan.columns, scan.rows * scan.columns};
  const int64_t channel = item * PA_SCAN_CHANNELS;
  const int channels = pa_min(PA_SCAN_CHANNELS, (int)(scan.num_heads - channel));
  return {channel * scan.columns, channels * scan.columns};
}

// Runs a sequence's tokens; with targets one after another, each on a copy of the state before.
template <class Run>
static void each_stretch(const pa_scan &scan, int64_t seq, int64_t item, Run run) {
  Stretch is = {scan.starts[seq], scan.starts[seq + 1], scan.slots[seq], scan.before[seq]};
  if (is.slot < 0 || is.first == is.last) return;
  if (!scan.targets) {
    run(is);
    return;
  }
  const Piece piece = piece_of(scan, item);
  const int64_t bytes = itemsize((int)scan.state_dtype), last = is.last;
  auto at = [&](int64_t slot) {
    return (char *)scan.states + (slot * scan.state_slot + piece.first) * bytes;
  };
  for (const int64_t *to = scan.targets + seq * scan.target_row; is.first < last; to++) {
    if (is.before && *to != is.slot) __builtin_memcpy(at(*to), at(is.slot), piece.count * bytes);
    is.slot = *to, is.last = is.first + 1;
    run(is);
    is.first++, is.before++;
  }
}

static void scan_item(const pa_scan *scan, int64_t index, char *scratch) {
  const int64_t pieces = pa_scan_pieces(scan), seq = index / pieces, item = index % pieces;
  Arena arena = {scratch};
  if (scan->kind == PA_SHORT_CONV) {
    Conv conv(*scan, item, arena);
    for (int64_t i = seq * PA_SCAN_SEQS; i < (seq + 1) * PA_SCAN_SEQS && i < scan->num_seqs; i++) {
      each_stretch(*scan, i, item, [&](const Stretch &is) { conv.run(is); });
    }
    return;
  }
  each_stretch(*scan, seq, item, [&](const Stretch &is) {
    if (scan->kind <= PA_MAMBA2) scan_mamba(*scan, is, item, arena);
    else scan_keys(*scan, is, item, arena);
  });
}
