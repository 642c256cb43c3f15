// Which lines does AMX's decode ask for, beside which products? Included by tile_path.h, for wide_path.h too.

// The next tile's rows, asked for 256 bytes at a time in place of `Ahead`: beside products, pairs of values and pairs of
// weights. More lines at once than the core has buffers for stop all that follows.
//
// A tile's first values are asked for once more, into the first cache, before its softmax.
struct RowAsks {
  static constexpr int NEAR = 16;
  const Ahead *of;
  const char *const *row, *const *end;  // the addresses of what is left of a head's keys, or values
  int64_t offset;
  int bytes, byte = 0, head = 0;        // of a row; the next one of it
  bool value = false;

  explicit RowAsks(Ahead &ahead)
      : of(&ahead), row(ahead.keys), end(ahead.keys + ahead.tokens), offset(ahead.key_offset),
        bytes(ahead.key_bytes) {
    ahead.at = ahead.end;
  }
  PA_ALWAYS void operator()() {
    if (row == end) return;
    const char *at = *row + offset + byte;
    byte += 256;
    if (byte > bytes) return rest(at);
    PA_UNROLLED
    for (int i = 0; i < 256; i += 64) prefetch_l2(at + i);
    if (byte == bytes) turn();
  }
  PA_NOINLINE void all() {
    while (row != end) (*this)();
  }

 private:
  PA_ALWAYS void turn() {
    byte = 0;
    if (++row == end) go_on();
  }
  // What a row has beyond whole 256 bytes.
  PA_ALWAYS void rest(const char *at) {
    for (int left = bytes - byte + 256; left > 0; left -= 64, at += 64) prefetch_l2(at);
    turn();
  }
  PA_NOINLINE void go_on() {
    if (++head == of->heads) {
      if (value || !of->value_bytes) return;
      value = true;
      head = 0;
    }
    row = value ? of->values : of->keys;
    end = row + of->tokens;
    offset = value ? of->value_offset + head * of->value_head : of->key_offset + head * of->key_head;
    bytes = value ? of->value_bytes : of->key_bytes;
  }
};
