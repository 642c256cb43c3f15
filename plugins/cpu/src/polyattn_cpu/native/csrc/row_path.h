// Decode over rows of bytes: codes and bytes are multiplied in registers, a trace's numbers for a head and
// a tile at a time. Included after dot_path.h.
#include "row_keys.h"

// What a tile's weights make of its values; and all tiles of an item.
template <int ROWS>
struct RowDecode : RowKeys<ROWS> {
  typedef RowKeys<ROWS> Base;
  using Base::Base, Base::run, Base::layer, Base::heads, Base::is, Base::o, Base::s, Base::v_size, Base::used, Base::source,
      Base::value_base, Base::value, Base::in_keys, Base::value_pairs, Base::value_ints, Base::value_tiles, Base::key_tiles,
      Base::weights, Base::by, Base::floats, Base::units, Base::unpacked, Base::walk, Base::scales_of, Base::look_at,
      Base::scale_rows, Base::ask, Base::RUN, Base::PASS, Base::TILES, Base::SCORED;
  typedef typename Base::Far Far;
#if defined(__AMX_BF16__)
  using Base::value_room, Base::value_bytes, Base::key_bytes, Base::by_tile_scale;
  void add_bytes(const char *const *v, int count) {
    for (int h = 0; h < heads; h++) {
      const int64_t offset = value_base + h * source.value_head;
      char *const by = value_room + (int64_t)v_size / 16 * TILE_BYTES;
      tiles_of_bytes(v, offset, v_size, value_room, ask(count * is.parts, 16 * (v_size / 16)));
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        tile_of_byte_weights<ROWS>(scales_of(value, v, offset), count, s + lane, is.lanes, by, units);
        add_byte_tiles<ROWS>(by, units, value_room, v_size, o + (int64_t)lane * is.ldo, is.ldo);
      }
    }
  }
  void add_tiles(int h, const Codes &of, int count) {
    const PairTable table((const float *)value.table);
    const int groups = of.groups;
    char *const by = value_room + 2L * groups * TILE_BYTES;
    for (int t = 0; t < count; t += 32) {
      Codes some = of;
      some.rows += t;
      tiles_of_values(some, table, value_room, ask(pa_min(32, count - t) * is.parts, 32));
      for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += ROWS) {
        by_tile_scale(value, [&](auto scale) {
          tiles_of_weights<scale(), ROWS>(some, count - t, s + (int64_t)t * is.lanes + lane, is.lanes, by);
        });
        add_tile_values(by, value_room, groups, ROWS, o + (int64_t)lane * is.ldo, is.ldo);
      }
    }
  }
#endif
#if defined(PA_INT_DOTS)
  using Base::value_table, Base::by_scale, Base::keys_listed;
  static constexpr int SOME = ROWS < 4 ? ROWS : 4;  // rows whose weights are integers at once
  template <class Add>
  void add_some_rows(int h, Add add) {
    for (int lane = h * is.parts * ROWS; lane < (h + 1) * is.parts * ROWS; lane += SOME) {
      add(s + lane, o + (int64_t)lane * is.ldo);
    }
  }
  template <int SCALE, bool LOOKS>
  void add_int_words(int h, const Codes &of, int count) {
    add_some_rows(h, [&](const float *p, float *to) {
      for (int word = 0; word < of.words; word += W) {
        const WordUnits by = code_int_weights<SCALE, SOME>(value, of, count, word, value_table, p, is.lanes, floats, weights);
        auto add = [&](auto j) {
          add_int_codes<SOME, LOOKS, j()>(of, value_table, count, by, weights, to, is.ldo, word,
                                          ask(count * SOME / ROWS * INT_CODES * W / v_size, (count + 1) / 2));
        };
        add(std::integral_constant<int, 0>());
        if constexpr (INT_CODES < 4) add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 4>());
        if constexpr (INT_CODES < 4) add(std::integral_constant<int, 6>());
      }
    });
  }
  void add_int_values(int h, const char *const *v, int64_t offset, const Codes &of, int count) {
    if (value.form == PA_CODES) {
      return by_scale(value, [&](auto scale) {
        value_table.looks ? add_int_words<scale(), true>(h, of, count) : add_int_words<scale(), false>(h, of, count);
      });
    }
    const RowScales scales = scales_of(value, v, offset);
    add_some_rows(h, [&](const float *p, float *to) {
      const IntWeights<1, false> by(
          p, is.lanes, count, floats,
          [&](int t) __attribute__((always_inline)) { return GroupScales{splat(scales[t]), vf{}}; },
          [&](int t, const RowLanes<1> &two) __attribute__((always_inline)) {
            __builtin_memcpy(weights + 2 * t, &two, 16);
          });
      vi *const sums = (vi *)floats;  // which weights don't need any more
      const int run = keys_listed(v_size);
      for (int t = 0; t < count; t += run) {
        const int some = pa_min(run, count - t);
        add_int_bytes<SOME>(v + t, offset, some, weights + 2 * t, v_size, t == 0, sums, ask(some * SOME / ROWS, some * v_size / 64));
      }
      add_int_sums<SOME>(sums, by.unit.of[0], to, is.ldo, v_size);
    });
  }
#endif
#if defined(PA_PAIR_DOTS)
  using Base::by_scale, Base::by_used, Base::pairs, Base::more;
#endif

  template <class T>
  void add_elements(int h, const char *const *v, int64_t offset, int count) {
    constexpr int C = Base::C;
    const int most = value_vectors<C, false>(v_size / W);
    for (int c = 0, step; c < v_size; c += step) {
      const int vectors = c + most * W <= v_size ? most : 1;
      step = vectors * W;
      for (int part = 0; part < is.parts; part++) {
        const int lane = (h * is.parts + part) * ROWS;
        float *to = o + (int64_t)lane * is.ldo + c;
        const int64_t at = offset + c * (int64_t)sizeof(T);
        for (int t = 0; t < count; t += RUN) {
          const float *p = s + (int64_t)t * is.lanes + lane;
          const int some = pa_min(RUN, count - t), last = pa_min(W, v_size - c);
          switch (vectors) {
#define PA_WIDE(V) \
  if constexpr (V <= C) add_values<T, ROWS, V, 1>(v + t, at, some, p, is.lanes, to, is.ldo, last, NoAsks{}); \
  break;
            case 8: PA_WIDE(8)
            case 6: PA_WIDE(6)
            case 4: PA_WIDE(4)
            case 2: PA_WIDE(2)
            default: PA_WIDE(1)
#undef PA_WIDE
          }
          walk.ahead(some * step / v_size);
        }
      }
    }
  }
  template <bool LEAST>
  void add_head(int h, const Codes &of, int count) {
    const Table table((const float *)value.table);
    for (int part = 0; part < is.parts; part++) {
      const int lane = (h * is.parts + part) * ROWS;
      for (int word = 0; word < of.words; word += W) {
        for (int j = 0; j < WORD_CODES; j += PASS) {
          for (int t = 0; t < count; t += RUN) {
            const int some = pa_min(RUN, count - t);
            add_codes<ROWS, PASS, LEAST>(of, table, t, some, s + lane, is.lanes, o + (int64_t)lane * is.ldo,
                                         is.ldo, word, j);
            walk.ahead(some * PASS / WORD_CODES);
          }
        }
      }
    }
  }
#if defined(PA_PAIR_DOTS)
  void add_byte_quads(const char *const *v, int count) {
    constexpr int C = ROWS > 4 ? 1 : ROWS > 2 ? 2 : 4;
    const int per_head = is.parts * ROWS;
    for (int lane = 0; lane < used; lane += W) {
      const int first = lane / per_head, some = pa_min(heads - first, pa_max(1, W / per_head));
      int32_t of_lane[W];
      for (int i = 0; i < W; i++) of_lane[i] = pa_min((lane + i) / per_head - first, some - 1);
      float *to = by;
      for (int t = 0; t < count; t++, to += W) {
        for (int h = 0; h < some; h++) to[h] = scales_of(value, v, value_base + (first + h) * source.value_head)[t];
      }
      quad_weights(s + lane, is.lanes, count, by, _mm512_loadu_si512(of_lane), pairs + lane, is.lanes, units + lane, more + lane);
    }
    for (int lane = 0; lane < used; lane += ROWS) {
      const int64_t offset = value_base + lane / per_head * source.value_head;
      for (int c = 0, step; c < v_size; c += step) {
        const int vectors = c + C * W <= v_size ? C : 1;
        step = vectors * W;
        const Far asks = ask(count * pa_min(step, v_size - c) / v_size, (count + 3) / 4 * (vectors + 1));
        float *to = o + (int64_t)lane * is.ldo + c;
        if (vectors == C) {
          add_value_quads<ROWS, C>(v, offset + c, count, pairs + lane, is.lanes, units + lane, more + lane, to, is.ldo,
                                   v_size - c, asks);
        } else {
          add_value_quads<ROWS, 1>(v, offset + c, count, pairs + lane, is.lanes, units + lane, more + lane, to, is.ldo,
                                   v_size - c, asks);
        }
      }
    }
  }
  template <int SCALE, bool TWICE>
  void add_word_pairs(const Codes &of, int count, int word, int lane) {
    constexpr int C = ROWS > 4 ? 2 : 4;
    const PairTable table((const float *)value.table);
    float *to = o + (int64_t)lane * is.ldo;
    code_weights<SCALE, ROWS, TWICE>(of, count, word, s + lane, is.lanes, weights, to, is.ldo);
    const int visits = (count + (TWICE ? 3 : 1)) / (TWICE ? 4 : 2);
    uint32_t *const words = (uint32_t *)floats;
    pair_words<CODE_GROUPS<SCALE>, TWICE>(of, count, word, words, ask(count / 4, visits));
    for (int j = 0; j < WORD_CODES; j += C) {
      by_used([&](auto n) {
        add_code_pairs<CODE_GROUPS<SCALE>, ROWS, n(), C>(table, words, visits, weights, to + word * WORD_CODES, is.ldo, j,
                                                         ask(count * C / WORD_CODES * 3 / 4, visits));
      });
    }
  }
  template <int SCALE>
  void add_head_pairs(int h, const Codes &of, int count) {
    for (int part = 0; part < is.parts; part++) {
      const int lane = (h * is.parts + part) * ROWS;
      for (int word = 0; word < of.words; word += W) {
        in_halves(of.words - word) ? add_word_pairs<SCALE, true>(of, count, word, lane)
                                   : add_word_pairs<SCALE, false>(of, count, word, lane);
      }
    }
  }
  template <class T>
  void add_byte_pairs(const char *const *v, int count) {
    constexpr int C = Base::C;
    const int most = value_vectors<C, true>(v_size / W);
    for (int t = 0; t < count; t += RUN) {
      const int some = pa_min(RUN, count - t);
      for (int lane = 0; lane < used; lane += ROWS) {
        const int64_t offset = value_base + lane / (is.parts * ROWS) * source.value_head;
        weight_pairs<ROWS>(scales_of(value, v, offset).from(t), some, s + (int64_t)t * is.lanes + lane, is.lanes, weights);
        for (int c = 0, step; c < v_size; c += step) {
          const int vectors = c + most * W <= v_size ? most : 2;
          step = vectors * W;
          const Far asks = ask(some * pa_min(step, v_size - c) / v_size, some);
          float *to = o + (int64_t)lane * is.ldo + c;
          switch (vectors) {
#define PA_WIDE(V)                                                                                              \
  if constexpr (V <= C)                                                                                         \
    add_value_pairs<T, ROWS, V>(v + t, offset + c, some, weights, W, to, is.ldo, v_size - c, asks);             \
  break;
            case 8: PA_WIDE(8)
            case 6: PA_WIDE(6)
            case 4: PA_WIDE(4)
            default: PA_WIDE(2)
#undef PA_WIDE
          }
        }
      }
    }
  }
#endif
  void add(const char *const *v, int count) {
#if defined(__AMX_BF16__)
    if (value_tiles) begin_code_tiles(ROWS);
    if (value_bytes) TileEngine::begin();
    if (value_bytes) return add_bytes(v, count);
#endif
#if defined(PA_PAIR_DOTS)
    if (value_pairs && value.form == PA_ROWS_INT8) return add_byte_quads(v, count);
    if (value_pairs && value.form == PA_ROWS_E4M3) return add_byte_pairs<e4m3>(v, count);
#endif
    for (int h = 0; h < heads; h++) {
      const int64_t offset = value_base + h * source.value_head;
      const Codes of = look_at(value, v, offset, count, v_size);
#if defined(__AMX_BF16__)
      if (value_tiles) {
        add_tiles(h, of, count);
        continue;
      }
#endif
#if defined(PA_INT_DOTS)
      if (value_ints) {
        add_int_values(h, v, offset, of, count);
        continue;
      }
#endif
#if defined(PA_PAIR_DOTS)
      if (value_pairs) {
        by_scale(value, [&](auto scale) { add_head_pairs<scale()>(h, of, count); });
        continue;
      }
#endif
      switch (value.form) {
        case PA_CODES: value.scale == PA_STEPS ? add_head<true>(h, of, count) : add_head<false>(h, of, count); break;
        case PA_ROWS_INT8:
          scale_rows(h, count);
          add_elements<int8_t>(h, v, offset, count);
          break;
        case PA_ROWS_E4M3:
          scale_rows(h, count);
          add_elements<e4m3>(h, v, offset, count);
          break;
        default: add_elements<float>(h, unpacked, 0, count);
      }
    }
  }

  void in_order(float *sums) {
#if defined(__AMX_BF16__)
    if (value_tiles) return tile_sums_in_order(sums, v_size);
    if (value_bytes) return;
#endif
#if defined(PA_PAIR_DOTS)
    if (value_pairs && value.form == PA_CODES) {
      return by_scale(value, [&](auto scale) { sums_in_order<CODE_GROUPS<scale()>>(sums, v_size); });
    }
    if (value_pairs && value.form == PA_ROWS_INT8) return;
    if (value_pairs) return pairs_together<e4m3>(sums, v_size, value_vectors<Base::C, true>(v_size / W));
#endif
    switch (value.form) {
      case PA_CODES: return by_code(sums, v_size, true);
      // What a factor takes from sums, row scales have had.
      case PA_ROWS_INT8: if (Apart<int8_t>::ANY) together<bf16>(sums, v_size / (2 * W) * (2 * W), v_size); return;
      case PA_ROWS_E4M3: if (Apart<e4m3>::ANY) together<bf16>(sums, v_size / (2 * W) * (2 * W), v_size); return;
      default: return;
    }
  }

  void all_rows() {
    this->take_rows();
    this->turn_rows();
    const Logits how = logits_of(run);
    while (walk.step([&](int count) { return 2 * count * heads * is.parts; })) {
      const int count = walk.tile.count;
      for (int t = count; t < (TILES ? ROW_TILE : pa_round_up(count, SCORED)); t++) {
        walk.keys[t] = walk.keys[count - 1];
        walk.values[t] = walk.values[count - 1];
      }
      this->scores(walk.keys, count);
      this->weigh(count, walk.tile.first_key, how);
      add(in_keys ? walk.keys : walk.values, count);
      walk.ahead.all();
    }
    if (!walk.fine) {
      __atomic_store_n(&run->bad, 1, __ATOMIC_RELAXED);
      return;
    }
#if defined(__AMX_BF16__)
    if (key_tiles || value_tiles || key_bytes || value_bytes) _tile_release();
#endif
    for (int lane = 0; lane < used; lane++) in_order(o + (int64_t)lane * is.ldo);
    this->leave_rows();
  }
};

static void row_item(Run *run, const Item &item, Turn *turn) {
  const DotLayout is(run->plan->layer, item.heads, rows_per_head(run->plan->layer, item), FEWER_ROWS<float>);
  if (is.rows <= 1) return RowDecode<1>(run, item, turn).all_rows();
  if (is.rows <= 2) return RowDecode<2>(run, item, turn).all_rows();
  if (is.rows <= 4) return RowDecode<4>(run, item, turn).all_rows();
  if constexpr (PART_ROWS >= 8) return RowDecode<8>(run, item, turn).all_rows();
}
