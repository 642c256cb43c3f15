// A step's new rows into the paged cache: divide by the scale, saturate, round to nearest even.
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

static void store_tokens(const pa_scatter *part, int64_t first, int64_t last) {
  const int from = itemsize(part->dtype), to = itemsize(part->cache_dtype);
  constexpr int PIECE = 256;
  float piece[PIECE];
  for (int64_t token = first; token < last; token++) {
    int64_t slot = part->slots[token];
    if (slot < 0) continue;
    const char *source = (const char *)part->source + token * part->source_token * from;
    char *cache = (char *)part->cache + (slot / part->block_size * part->cache_block +
                                         slot % part->block_size * part->cache_token) * to;
    for (int64_t head = 0; head < part->num_heads; head++) {
      const char *row = source + head * part->source_head * from;
      char *goal = cache + head * part->cache_head * to;
      if (part->dtype == part->cache_dtype) {
        __builtin_memcpy(goal, row, part->head_size * to);
        continue;
      }
      for (int64_t d = 0; d < part->head_size; d += PIECE) {
        int count = (int)(part->head_size - d < PIECE ? part->head_size - d : PIECE);
        widen_any(row + d * from, part->dtype, piece, count);
        quantise(piece, goal + d * to, part->cache_dtype, count, part->scale);
      }
    }
  }
}
