// What is done beside the products of a wide decode? Streams, each of which does a little at each call. Included by
// wide_path.h.

constexpr int WIDE_KEYS = 128;  // of a block
constexpr int WIDE_STEP = 32;   // keys whose scores are computed at a time
constexpr int IMAGE = 1024;     // bytes of a tile register
constexpr int WIDE_SLICE = 4 * IMAGE;                         // 64 elements of a step's keys
constexpr int WIDE_PANELS = WIDE_KEYS / WIDE_STEP * 2 * IMAGE;  // 32 elements of a block's values

// 64 elements of a step's keys as tile registers take them: of 16 keys and 32 elements each. A call copies two keys.
template <class T, bool WHOLE>
struct WideSlice {
  const char *const *rows;
  int64_t offset;   // of the first element
  int left;         // elements from that one on
  char *to;

  PA_ALWAYS void operator()(int i) const {
    const Halves a = at(rows[2 * i]), b = at(rows[2 * i + 1]);
    char *put = to + i / 8 * IMAGE + i % 8 * 128;
    PA_UNROLLED
    for (int j = 0; j < 2; j++) {
      _mm512_storeu_si512(put + j * 2 * IMAGE, a.part[j]);
      _mm512_storeu_si512(put + j * 2 * IMAGE + 64, b.part[j]);
    }
  }
  void all() const {
    for (int i = 0; i < WIDE_STEP / 2; i++) (*this)(i);
  }

 private:
  PA_ALWAYS Halves at(const char *row) const { return halves((const T *)(row + offset), WHOLE ? 64 : left); }
};

// 32 elements of a block's values as pairs of keys, in two panels of 16 elements for each 32 keys. The first panel has those
// whose number is 0 to 3 modulo 8. A call pairs two keys.
template <class T>
struct WidePairs {
  const char *const *rows;
  int64_t offset;   // of the first element
  int some;         // of 32
  char *to;
  int count, i = 0;  // pairs; the next one

  PA_ALWAYS void operator()() {
    if (i == count) return;
    const __m512i a = at(rows[2 * i]), b = at(rows[2 * i + 1]);
    char *put = to + i / 16 * 2 * IMAGE + i % 16 * 64;
    _mm512_storeu_si512(put, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(put + IMAGE, _mm512_unpackhi_epi16(a, b));
    i++;
  }
  void all() {
    while (i < count) (*this)();
  }

 private:
  PA_ALWAYS __m512i at(const char *row) const {
    const T *from = (const T *)(row + offset);
    return some == 32 ? halves(from, 32).part[0] : halves(from, some).part[0];
  }
};

// The next block's rows, spread over so many calls.
struct WideAsks {
  RowAsks rows;
  int rate, credit = 0;  // of the rows' calls for each of these, in 2^-8

  WideAsks(Ahead &ahead, int calls)
      : rows(ahead), rate((ahead.tokens * ((ahead.key_bytes + 255) / 256 + (ahead.value_bytes + 255) / 256) << 8) / calls + 1) {}
  PA_ALWAYS void operator()() {
    for (credit += rate; credit >= 256; credit -= 256) rows();
  }
};

// Scores of 32 keys as weights: in bfloat16, a row's pairs of keys one after another, as a tile register takes them. A
// call does a quarter of a unit's keys, or turns its weights.
struct WideWeights {
  const float *scores;    // [unit][key][16 rows]
  const Weigh *by;        // of both units
  float *l;
  uint32_t *pairs;        // of a unit
  char *to;               // the first unit's image
  int64_t step;           // to the next unit's
  int keys;
  int unit = 2, part = 0;  // what comes next
  vf sum = {};

  PA_ALWAYS bool ended() const { return unit == 2; }
  PA_ALWAYS void operator()() {
    constexpr int some = WIDE_STEP / 4;
    if (ended()) return;
    if (part == 4) return turn();
    const float *from = scores + (unit * WIDE_STEP + part * some) * W;
    uint32_t *put = pairs + part * (some / 2) * W;
    const vf scale = by[unit].scale, next = by[unit].next;
    vf all = part ? sum : vf{};
    PA_UNROLLED
    for (int i = 0; i < some; i += 2) {
      vf a = Pairs::exp2(loadf(from + i * W) * scale - next), b = Pairs::exp2(loadf(from + (i + 1) * W) * scale - next);
      if (keys < WIDE_STEP) {
        if (part * some + i >= keys) a = vf{};
        if (part * some + i + 1 >= keys) b = vf{};
      }
      write(put + i / 2 * W, bf16_pairs(a, b));
      all += a + b;
    }
    sum = all;
    part++;
  }

 private:
  PA_ALWAYS void turn() {
    vf block[W];
    PA_UNROLLED
    for (int i = 0; i < W; i++) block[i] = read<vf>(pairs + i * W);
    transpose(block);
    PA_UNROLLED
    for (int i = 0; i < W; i++) write(to + i * 64, block[i]);
    write(l + unit * W, loadf(l + unit * W) + sum);
    to += step;
    unit++;
    part = 0;
  }
};

// Lines that results go to, asked for to be written: else each store of the last sums waits for its line. Eight at a call.
struct WideClaims {
  char *const *row, *const *end;
  int bytes, byte = 0;

  PA_ALWAYS void operator()() {
    if (row == end) return;
    for (int i = 0; i < 512; i += 64) __builtin_prefetch(*row + byte + i, 1, 3);
    byte += 512;
    if (byte < bytes) return;
    byte = 0;
    row++;
  }
};

// The last sums of two units' 32 elements to where a row's results go: divided and in bfloat16, or,
// of a piece of the keys, as they are. A call does a row.
struct WideResults {
  const float *sums;      // four images: of 16 rows and 16 elements
  char *const *to;        // of each row
  const float *by;
  bool whole;
  int v, d = 0;           // elements of a row; the first of these
  int row = 0, rows = 0;  // what comes next

  PA_ALWAYS bool ended() const { return row == rows; }
  PA_ALWAYS void operator()() {
    if (ended()) return;
    const float *from = sums + row / 16 * 512 + row % 16 * 16;
    put(from, from + 256);
    row++;
  }

 private:
  PA_ALWAYS void put(const float *a, const float *b) const {
    const int left = pa_min(32, v - d);
    const uint32_t valid = left == 32 ? ~0u : (1u << left) - 1;
    if (whole) {
      const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
      const __m512 f = _mm512_set1_ps(by[row]);
      const __m512i x = _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_loadu_ps(b), f), _mm512_mul_ps(_mm512_loadu_ps(a), f)));
      _mm512_mask_storeu_epi16(to[row] + 2 * d, valid, x);
      return;
    }
    const PairedOrder x(a, b);
    float *const p = (float *)to[row] + d;
    _mm512_mask_storeu_ps(p, (__mmask16)valid, x.first);
    _mm512_mask_storeu_ps(p + 16, (__mmask16)(valid >> 16), x.second);
  }
};
