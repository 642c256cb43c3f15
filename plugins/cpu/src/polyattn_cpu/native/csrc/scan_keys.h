// Linear attention and delta rules: states of (key, value). Included by scan.h.

// What a token does to a state (K, V): with u = v, or beta (v - a state), or a state,
//   state = diag(w) state + b u' (+ c v');  output = r state, or, of the state before, r state + beta v.
struct KeyTerms {
  float *w, *a, *b, *c, *r;  // K each
  float beta;
};
enum ScanForm { ADDS, DELTA, LOW_RANK, BONUS };

template <int NV, ScanForm FORM>
PA_NOINLINE void advance(const StatePart &state, int rows, const KeyTerms &is, const float *v, float *out,
                         int64_t ahead) {
  vf u[NV], o[NV];
  for (int i = 0; i < NV; i++) {
    u[i] = FORM == ADDS || FORM == BONUS ? loadf(v + i * W) : vf{};
    o[i] = FORM == BONUS ? splat(is.beta) * u[i] : vf{};
  }
  if constexpr (FORM == DELTA || FORM == LOW_RANK) {
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
      const vf before = loadf(at + i * W);
      vf x = before * w + b * u[i];
      if constexpr (FORM == LOW_RANK) x += splat(is.c[k]) * loadf(v + i * W);
      write(at + i * W, x);
      o[i] += r * (FORM == BONUS ? before : x);
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
  else if (scan.kind == PA_RWKV6) advance_some<BONUS>(state, rows, vectors, is, v, out, ahead);
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
  if (scan.kind == PA_RWKV6) {  // r, w, k, v
    const float *u = scan.params[0] + head * size;
    take_row(in[0], token, head, is.r, size);
    take_row(in[1], token, head, is.w, size);
    take_row(in[2], token, head, is.b, size);
    exp_row(is.w, size);
    scale_row(is.r, size, scan.scale);
    is.beta = 0;
    for (int i = 0; i < size; i++) is.beta += is.r[i] * u[i] * is.b[i];
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
  const pa_rows &values = scan.inputs[scan.kind == PA_RWKV7 || scan.kind == PA_RWKV6 ? 3 : 2];
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
