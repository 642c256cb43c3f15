// Stored elements as bfloat16, by AVX-512 and its byte tables. Included inside an anonymous namespace.

// Of 8 bits, which are looked up: whether elements leave in order, or of each 16 those whose number is below
// 8, then the others.
enum Order { IN_ORDER, AS_LOOKED_UP };

// 64 stored elements as bfloat16, those beyond `count` zero; reads no byte of them.
struct Halves {
  __m512i part[2];
};
template <Order = IN_ORDER>
PA_INLINE Halves halves(const bf16 *p, int count) {
  if (count >= 64) return {{_mm512_loadu_si512(p), _mm512_loadu_si512(p + 32)}};
  uint64_t valid = ((uint64_t)1 << count) - 1;
  return {{count >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)valid, p),
           _mm512_maskz_loadu_epi16((__mmask32)(valid >> 32), p + 32)}};
}

// The upper and lower byte, as bfloat16, of what 8 bits stand for, by magnitude.
struct ByteTables {
  uint8_t high[128], low[128];
};
constexpr uint32_t bf16_of(uint32_t integer, int exponent) {  // integer * 2^exponent
  int top = 0;
  while (integer >> (top + 1)) top++;
  return integer ? (uint32_t)(127 + top + exponent) << 7 | ((integer << (7 - top)) & 0x7fu) : 0;
}
constexpr uint32_t bf16_of_byte(e4m3, uint32_t m) {
  if (m == 0x7f) return 0x7fc0;
  return m < 8 ? bf16_of(m, -9) : bf16_of(8 + (m & 7), (int)(m >> 3) - 10);
}
constexpr uint32_t bf16_of_byte(e5m2, uint32_t m) {
  if (m >= 0x7c) return m == 0x7c ? 0x7f80 : 0x7fc0;
  return m < 4 ? bf16_of(m, -16) : bf16_of(4 + (m & 3), (int)(m >> 2) - 17);
}
// Of -128 the magnitude is 0 in 7 bits, as of 0, which is told apart.
constexpr uint32_t bf16_of_byte(int8_t, uint32_t m) { return bf16_of(m ? m : 128, 0); }
template <class T>
constexpr ByteTables byte_tables() {
  ByteTables t = {};
  for (uint32_t m = 0; m < 128; m++) {
    uint32_t bits = bf16_of_byte(T{}, m);
    t.high[m] = (uint8_t)(bits >> 8);
    t.low[m] = (uint8_t)bits;
  }
  return t;
}
template <class T>
constexpr bool INTEGER = false;
template <>
constexpr bool INTEGER<int8_t> = true;
template <class T>
alignas(64) constexpr ByteTables BYTE_TABLES = byte_tables<T>();

// Of each 128 bits the lower eight bytes' elements, then the upper eight's.
template <class T>
PA_INLINE Halves looked_up(__m512i x) {
  static_assert(sizeof(T) == 1);
  const ByteTables &tables = BYTE_TABLES<T>;
  const __m512i high_table[2] = {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)};
  const __m512i low_table[2] = {_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)};
  __m512i high, low;
  if constexpr (INTEGER<T>) {
    const __m512i magnitude = _mm512_abs_epi8(x);
    high = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(x, x), high_table[0], magnitude, high_table[1]);
    low = _mm512_permutex2var_epi8(low_table[0], magnitude, low_table[1]);
  } else {
    high = _mm512_permutex2var_epi8(high_table[0], x, high_table[1]);
    low = _mm512_permutex2var_epi8(low_table[0], x, low_table[1]);
  }
  high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8((char)0x80), 0xf8);  // high | x & 0x80
  return {{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
}
template <Order ORDER = IN_ORDER, class T>
PA_INLINE Halves halves(const T *p, int count) {
  __m512i x = count >= 64 ? _mm512_loadu_si512(p)
                          : _mm512_maskz_loadu_epi8(((uint64_t)1 << count) - 1, p);
  if (ORDER == IN_ORDER) x = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), x);
  return looked_up<T>(x);
}
