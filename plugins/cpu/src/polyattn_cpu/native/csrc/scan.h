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

#include "scan_keys.h"
#include "scan_mamba.h"
#include "scan_conv.h"

static int64_t scan_scratch(const pa_scan *scan) {
  const int64_t wide = pa_round_up((int)scan->columns, W), rows = scan->rows + PA_SCAN_CHANNELS + 2 * W;
  const int64_t terms = SCAN_TOKENS * (6 * rows + 4 * (wide + W) + 12 * 16);
  const int64_t conv = scan->kind == PA_SHORT_CONV ? PA_SCAN_CHANNELS * (wide + 2 * scan->rows + 8) +
                                                         PA_CONV_CHANNELS * (scan->rows + 3) : 0;
  return 4 * (terms + 2 * rows * (wide + SCAN_COLUMNS) + conv) + 64 * 64;
}

// The elements of a slot that an item holds: `count` behind `first`.
struct Piece {
  int64_t first, count;
};
static Piece piece_of(const pa_scan &scan, int64_t item) {
  if (scan.kind > PA_MAMBA1) return {item * scan.rows * scan.columns, scan.rows * scan.columns};
  const int64_t most = pa_scan_channels(&scan), channel = item * most;
  const int channels = pa_min((int)most, (int)(scan.num_heads - channel));
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

static void scan_item(const pa_scan *scan, int64_t index, const Room &scratch) {
  const int64_t pieces = pa_scan_pieces(scan), seq = index / pieces, item = index % pieces;
  const Arena arena = scratch;
  if (scan->kind == PA_SHORT_CONV) {
    Conv conv(*scan, item, arena);
    const int64_t low = seq * pa_conv_tokens(scan), high = low + pa_conv_tokens(scan);
    int64_t i = 0;  // the last sequence that begins by then
    for (int64_t end = scan->num_seqs; end - i > 1;) {
      const int64_t middle = (i + end) / 2;
      (scan->starts[middle] <= low ? i : end) = middle;
    }
    for (; i < scan->num_seqs && scan->starts[i] < high; i++) {
      if (scan->targets && scan->starts[i] < low) continue;
      each_stretch(*scan, i, item, [&](const Stretch &is) {
        if (scan->targets) conv.run(is, is.first, is.last);
        else conv.run(is, low, high);
      });
    }
    return;
  }
  each_stretch(*scan, seq, item, [&](const Stretch &is) {
    if (scan->kind <= PA_MAMBA2) scan_mamba(*scan, is, item, arena);
    else scan_keys(*scan, is, item, arena);
  });
}
