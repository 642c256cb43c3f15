// Mamba-1 and Mamba-2. Included by scan.h.

// What a token brings to Mamba's state (rows, N): the row's step x, and its decay: one for all rows, or,
// where each element decays on its own, the row's step.
struct MambaTerms {
  float *entering, *steps, *B, *C, *skip, *out;
  float decay;
};

// W rows of the state at a time, whose outputs are as many sums; of them `SOME` that share the loads of
// B and C. A row after another is the order in which memory is read ahead; `ahead`: also asked for.
template <bool EACH, int SOME>
PA_NOINLINE void advance_mamba(const StatePart &state, int rows, int vectors, const MambaTerms &is,
                               const float *A, int64_t lda, int64_t ahead) {
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
        for (int r = 0; r < SOME; r++) {
          write(at[r] + i * W, x[r]);
          if (SOME == 1) prefetch_l2(at[r] + ahead + i * W);
        }
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
  for (int64_t t = 0; t < SCAN_TOKENS && t < last - first; t++) {
    MambaTerms &is = terms[t];
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
        if (each) advance_mamba<true, 4>(here, these, wide / W, is, A + (int64_t)r * wide, wide, 0);
        else if (last - first > 1) advance_mamba<false, 4>(here, these, wide / W, is, NULL, 0, 0);
        else advance_mamba<false, 1>(here, these, wide / W, is, NULL, 0, (int64_t)scan.rows * columns);
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
