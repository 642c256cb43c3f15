// A step's new rows into the paged cache: norm, turn, divide by the scale, saturate, round to nearest even.
// Included inside an anonymous namespace.

// A float to 8 bits of `mantissa` bits and an exponent of `bias`, saturated at `largest`; `nan` for NaN.
PA_INLINE uint8_t round_float8(float x, int mantissa, int bias, float largest, uint8_t nan) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  uint8_t sign = (uint8_t)((u >> 24) & 0x80u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint8_t)(sign | nan);
  float magnitude;
  __builtin_memcpy(&magnitude, &u, 4);
  if (magnitude > largest) magnitude = largest;
  // Adding 2^k rounds to the last place of the format's subnormals; above them the integer way.
  int smallest = 1 - bias;  // exponent of the smallest normal number
  float normal = (float)(1 << (smallest + 30)) * 0x1p-30f;
  if (magnitude < normal) {
    float aligned = magnitude + normal * (float)(1 << (23 - mantissa));
    uint32_t bits;
    __builtin_memcpy(&bits, &aligned, 4);
    return (uint8_t)(sign | (bits & 0xffu));
  }
  __builtin_memcpy(&u, &magnitude, 4);
  int drop = 23 - mantissa;
  u += (1u << (drop - 1)) - 1u + ((u >> drop) & 1u);
  u -= (uint32_t)(127 - bias) << 23;
  return (uint8_t)(sign | (u >> drop));
}

PA_INLINE void quantise(float *x, void *to, int dtype, int count, float scale) {
  if (dtype <= PA_F16) return narrow(x, to, dtype, count);
  for (int i = 0; i < count; i++) x[i] /= scale;
  if (dtype == PA_E4M3) {
    for (int i = 0; i < count; i++) {
      ((uint8_t *)to)[i] = round_float8(x[i], 3, 7, 448.0f, 0x7f);
    }
  } else if (dtype == PA_E5M2) {
    for (int i = 0; i < count; i++) {
      ((uint8_t *)to)[i] = round_float8(x[i], 2, 15, 57344.0f, 0x7f);
    }
  } else {
    const float magic = 12582912.0f;  // 1.5 * 2^23: rounds to nearest even
    for (int i = 0; i < count; i++) {
      float y = x[i] < -127.0f ? -127.0f : x[i] > 127.0f ? 127.0f : x[i];
      y = y != y ? 0.0f : (y + magic) - magic;
      ((int8_t *)to)[i] = (int8_t)y;
    }
  }
}

// Where the elements of one token's head come from and where they go: to the cache, to `out`, or both.
struct HeadRow {
  const char *source;
  char *cache, *out;   // either may be NULL
  float *whole;        // or NULL; over the scale, what becomes a row of bytes
  const float *bias;   // or NULL
  float factor;
  const float *norm;  // or NULL: the weight that multiplies what is over the root mean square
  float over;
};

constexpr int PIECE = 256;  // elements that are floats at a time

PA_INLINE void read_piece(const pa_scatter *part, const HeadRow &row, int64_t at, int count, float *x) {
  widen_any(row.source + at * itemsize(part->dtype), part->dtype, x, count);
  if (row.bias) {
    for (int i = 0; i < count; i++) x[i] += row.bias[at + i];
  }
  if (row.norm) {
    for (int i = 0; i < count; i++) x[i] *= row.over * row.norm[at + i];
  }
}

static float sum_of_squares(const pa_scatter *part, const HeadRow &row) {
  constexpr int LANES = 16;
  float x[PIECE], sums[LANES] = {};
  for (int64_t at = 0; at < part->head_size; at += PIECE) {
    int count = (int)(part->head_size - at < PIECE ? part->head_size - at : PIECE);
    read_piece(part, row, at, count, x);
    while (count % LANES) x[count++] = 0;
    for (int i = 0; i < count; i += LANES) {
      for (int lane = 0; lane < LANES; lane++) sums[lane] += x[i + lane] * x[i + lane];
    }
  }
  for (int half = LANES / 2; half; half /= 2) {
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

PA_INLINE float over_root(const pa_scatter *part, float sum, int64_t count) {
  return 1.0f / __builtin_sqrtf(sum / (float)count + part->eps);
}

// Writes floats, which it spoils.
PA_INLINE void write_piece(const pa_scatter *part, const HeadRow &row, int64_t at, int count, float *x) {
  for (int i = 0; i < count; i++) x[i] *= row.factor;
  if (row.out) narrow(x, row.out + at * itemsize(part->dtype), part->dtype, count);
  if (row.whole) {
    for (int i = 0; i < count; i++) row.whole[at + i] = x[i] / part->scale;
  } else if (row.cache) {
    quantise(x, row.cache + at * itemsize(part->cache_dtype), part->cache_dtype, count, part->scale);
  }
}

static void pass_elements(const pa_scatter *part, const HeadRow &row, int64_t from, int64_t to) {
  float x[PIECE];
  for (int64_t at = from; at < to; at += PIECE) {
    int count = (int)(to - at < PIECE ? to - at : PIECE);
    read_piece(part, row, at, count, x);
    write_piece(part, row, at, count, x);
  }
}

// Element a and its partner b become a cos - b sin and b cos + a sin.
static void turn_halves(const pa_scatter *part, const HeadRow &row, const float *cos, const float *sin) {
  float a[PIECE], b[PIECE], turned[PIECE];
  for (int64_t pair = 0; pair < part->num_pairs; pair += PIECE) {
    int count = (int)(part->num_pairs - pair < PIECE ? part->num_pairs - pair : PIECE);
    int64_t first = part->first_turned + pair, second = first + part->num_pairs;
    read_piece(part, row, first, count, a);
    read_piece(part, row, second, count, b);
    for (int i = 0; i < count; i++) {
      turned[i] = a[i] * cos[pair + i] - b[i] * sin[pair + i];
      b[i] = b[i] * cos[pair + i] + a[i] * sin[pair + i];
    }
    write_piece(part, row, first, count, turned);
    write_piece(part, row, second, count, b);
  }
}

static void turn_neighbours(const pa_scatter *part, const HeadRow &row, const float *cos, const float *sin) {
  float x[PIECE];
  for (int64_t pair = 0; pair < part->num_pairs; pair += PIECE / 2) {
    int count = (int)(part->num_pairs - pair < PIECE / 2 ? part->num_pairs - pair : PIECE / 2);
    int64_t first = part->first_turned + 2 * pair;
    read_piece(part, row, first, 2 * count, x);
    for (int i = 0; i < count; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[pair + i] - b * sin[pair + i];
      x[2 * i + 1] = b * cos[pair + i] + a * sin[pair + i];
    }
    write_piece(part, row, first, 2 * count, x);
  }
}

static void store_head(const pa_scatter *part, const HeadRow &row, const float *turns) {
  if (part->dtype == part->cache_dtype && !row.out && !row.bias && !row.norm && !part->num_pairs &&
      !part->factors) {
    __builtin_memcpy(row.cache, row.source, part->head_size * itemsize(part->dtype));
    return;
  }
  pass_elements(part, row, 0, part->first_turned);
  if (part->num_pairs) {
    const float *sines = turns + part->num_pairs;
    if (part->neighbours) turn_neighbours(part, row, turns, sines);
    else turn_halves(part, row, turns, sines);
  }
  pass_elements(part, row, part->first_turned + 2 * part->num_pairs, part->head_size);
}

struct Ends {  // of some elements, NaN where one is
  float least, most;
};
PA_INLINE Ends ends_of(const float *x, int count) {
  vf low = loadf(x), high = low;
  vi nan = low != low;
  for (int i = W; i < count; i += W) {
    const vf each = loadf(x + i);
    low = vmin(low, each);
    high = vmax(high, each);
    nan |= each != each;
  }
  if (any(nan)) return {NAN, NAN};
  Ends found = {low[0], high[0]};
  for (int i = 1; i < W; i++) {
    found.least = low[i] < found.least ? low[i] : found.least;
    found.most = high[i] > found.most ? high[i] : found.most;
  }
  return found;
}
PA_INLINE float within(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }
PA_INLINE float put_half(float x, char *to) {  // returns what is stored
  const uint16_t half = round_half(x);
  __builtin_memcpy(to, &half, 2);
  return half_bits(vu{} + half)[0];
}
// A number over a step, to the nearest code from `least` to `most`, ties to even; NaN, and over a step of 0: 0.
PA_INLINE vf nearest(vf x, float step, float least, float most) {
  if (step == 0) return vf{};
  const vf magic = splat(12582912.0f), y = x / splat(step);  // 1.5 * 2^23
  const vf whole = y < splat(-4e6f) || y > splat(4e6f) ? y : y + magic - magic;
  const vf code = whole < splat(least) ? splat(least) : whole > splat(most) ? splat(most) : whole;
  return code == code ? code : vf{};
}

// Codes of four bits, from `x` in groups: int4's about 0, or from a group's least number on.
static void write_codes(const pa_row_format &f, float *x, char *to) {
  constexpr float HALF_MAX = 65504.0f;
  const int each = f.scale == PA_STEPS ? 4 : 2;
  for (int g = 0; g < f.size / f.group; g++, x += f.group) {
    char *scale = to + f.size / 2 + g * each;
    float step, least = 0;
    if (f.scale == PA_STEPS) {
      for (int i = 0; i < f.group; i++) x[i] = within(x[i], HALF_MAX / 2);
      const Ends ends = ends_of(x, f.group);
      least = put_half(ends.least, scale + 2);
      step = put_half((ends.most - least) / 15.0f, scale);
    } else {
      const Ends ends = ends_of(x, f.group);
      step = put_half(within((-ends.least > ends.most ? ends.least : ends.most) / -8.0f, HALF_MAX / 8), scale);
    }
    int32_t code[64];
    for (int i = 0; i < f.group; i += W) {
      vf c;
      if (f.scale == PA_STEPS) {
        c = nearest(loadf(x + i) - splat(least), step, 0, 15);
      } else {
        c = nearest(loadf(x + i), step, -8, 7) + splat(step == step ? 8.0f : 0.0f);
      }
      write(code + i, __builtin_convertvector(c, vi));
    }
    char *bytes = to + g * f.group / 2;
    for (int i = 0; i < f.group / 2; i++) bytes[i] = (char)(code[2 * i] | code[2 * i + 1] << 4);
  }
}

// A byte an element, then the row's scale.
static void write_bytes(const pa_row_format &f, float *x, char *to) {
  const bool integers = f.form == PA_ROWS_INT8;
  const float most = integers ? 127.0f : 448.0f, largest = 3.4028234663852886e38f;
  float top = 0;
  bool nan = false;
  for (int i = 0; i < f.size; i++) {
    const float each = x[i] < 0 ? -x[i] : x[i];
    nan |= each != each;
    top = each > top ? each : top;
  }
  const float scale = nan ? NAN : within(top, largest) / most;
  __builtin_memcpy(to + f.size, &scale, 4);
  for (int i = 0; i < f.size; i++) x[i] = scale == 0 ? 0.0f : within(x[i] / scale, most);
  if (integers) {
    for (int i = 0; i < f.size; i++) {
      const float y = (x[i] + 12582912.0f) - 12582912.0f;
      to[i] = (char)(y == y ? (int)y : 0);
    }
  } else {
    for (int i = 0; i < f.size; i++) to[i] = (char)round_float8(x[i], 3, 7, 448.0f, 0x7f);
  }
}

// A head's elements over the scale, which it spoils, as the bytes of its row.
static void write_row(const pa_row_format &f, float *whole, char *to, int32_t *registers) {
  if (f.form == PA_CODES) return write_codes(f, whole, to);
  if (f.form != PA_TRACED) return write_bytes(f, whole, to);
  const int32_t *bytes = (const int32_t *)trace_row(f, (const char *)whole, registers);
  for (int i = 0; i < f.bytes; i++) to[i] = (char)bytes[i];
}

static void store_tokens(const pa_scatter *part, int64_t first, int64_t last) {
  const pa_row_format *rows = part->cache ? part->rows : nullptr;
  float *whole = nullptr;
  if (rows) {  // there is little of it
    whole = (float *)malloc(sizeof(float) * (row_width(*rows) + row_registers(*rows)));
    if (!whole) abort();
  }
  const int from = itemsize(part->dtype), to = itemsize(part->cache_dtype);
  for (int64_t token = first; token < last; token++) {
    int64_t slot = part->cache ? part->slots[token] : -1;
    if (slot < 0 && !part->out) continue;
    const char *source = (const char *)part->source + token * part->source_token * from;
    char *cache = nullptr, *out = nullptr;
    if (slot >= 0) {
      cache = (char *)part->cache + (slot / part->block_size * part->cache_block +
                                     slot % part->block_size * part->cache_token) * to;
    }
    if (part->out) out = (char *)part->out + token * part->num_heads * part->head_size * from;
    const float *turns = part->turns ? part->turns + token * 2 * part->num_pairs : nullptr;
    auto row_of = [&](int64_t head) {
      return HeadRow{source + head * part->source_head * from,
                     cache ? cache + head * part->cache_head * to : nullptr,
                     out ? out + head * part->head_size * from : nullptr,
                     cache ? whole : nullptr,
                     part->bias ? part->bias + head * part->head_size : nullptr,
                     part->factors ? part->factors[token] : 1.0f, nullptr, 1.0f};
    };
    float of_token = 0;
    if (part->norm && part->whole) {
      for (int64_t head = 0; head < part->num_heads; head++) of_token += sum_of_squares(part, row_of(head));
      of_token = over_root(part, of_token, part->num_heads * part->head_size);
    }
    for (int64_t head = 0; head < part->num_heads; head++) {
      HeadRow row = row_of(head);
      if (part->norm) {
        row.over = part->whole ? of_token : over_root(part, sum_of_squares(part, row), part->head_size);
        row.norm = part->norm + (part->whole ? head * part->head_size : 0);
      }
      store_head(part, row, turns);
      if (row.whole) write_row(*rows, whole, row.cache, (int32_t *)(whole + row_width(*rows)));
    }
  }
  free(whole);
}
