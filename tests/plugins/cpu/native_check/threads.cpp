// Do threads of the pool, or with TEAM those of a runtime, touch each other's memory? A program for
// ThreadSanitizer, which prints what races: steps cut in parts, blocks of prompts, stores and a recurrence
// by four threads, from two callers at once. Each output must have the bits that one thread computes; prints how
// many steps there were, and returns 1 where one differs, or where memory that two gave back isn't used
// again by two.

#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "polyattn_cpu.h"
#include "pool.h"

#if defined(TEAM)
// An OpenMP runtime whose threads ThreadSanitizer can follow. The pool finds it by name.
extern "C" int omp_get_max_threads() { return 4; }
thread_local int number = 0;
extern "C" int omp_get_thread_num() { return number; }
extern "C" void GOMP_parallel(void (*body)(void *), void *data, unsigned, unsigned) {
  std::vector<std::thread> team;
  for (int i = 1; i < omp_get_max_threads(); i++) team.emplace_back([=] { number = i, body(data); });
  body(data);
  for (std::thread &one : team) one.join();
}
#endif

namespace {

enum { HEADS = 8, KV_HEADS = 2, SIZE = 32, BLOCK = 16, TIMES = 6 };

struct Step {
  std::vector<int32_t> starts = {0}, lens, table;
  std::vector<float> query, cache;
  int32_t width = 0, blocks = 0;

  explicit Step(const std::vector<std::pair<int, int>> &rows) {
    for (auto [queries, length] : rows) {
      starts.push_back(starts.back() + queries);
      lens.push_back(length);
      width = std::max(width, (length + BLOCK - 1) / BLOCK);
    }
    blocks = width * (int32_t)lens.size();
    for (int32_t i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    query.resize((size_t)starts.back() * HEADS * SIZE);
    cache.resize((size_t)blocks * BLOCK * KV_HEADS * SIZE);
    for (auto *some : {&query, &cache}) {
      for (float &x : *some) x = normal(random);
    }
  }

  std::vector<float> attend(const char *isa, int32_t threads) const {
    const pa_layer layer = {HEADS, KV_HEADS, SIZE, SIZE, PA_F32, PA_F32, 1, 0, 0, 0, 0, 0.2f, 0};
    const pa_batch batch = {(int32_t)lens.size(), BLOCK, threads, starts.data(), lens.data(), nullptr};
    std::vector<float> out(query.size());
    const int64_t token = KV_HEADS * SIZE;
    pa_tensors t = {query.data(), cache.data(), cache.data(), out.data(), nullptr, table.data(), nullptr,
                    nullptr, HEADS * SIZE, SIZE, token * BLOCK, token, SIZE, token * BLOCK, token, SIZE,
                    HEADS * SIZE, SIZE, 0, 0, width, blocks, 1, 1};
    pa_plan *plan = pa_plan_new(isa, &layer, &batch);
    if (!plan || pa_attend(plan, &t)) std::printf("%s\n", pa_error());
    pa_plan_free(plan);
    return out;
  }

  std::vector<float> store(const char *isa, int32_t threads) const {
    std::vector<float> to(cache.size());
    std::vector<int64_t> slots;
    for (int32_t i = 0; i < blocks * BLOCK; i++) slots.push_back(blocks * BLOCK - 1 - i);
    pa_scatter part = {};
    part.source = cache.data();
    part.cache = to.data();
    part.slots = slots.data();
    part.num_tokens = part.num_slots = (int64_t)slots.size();
    part.num_heads = KV_HEADS, part.head_size = SIZE, part.block_size = BLOCK;
    part.source_token = part.cache_token = KV_HEADS * SIZE;
    part.source_head = part.cache_head = SIZE;
    part.cache_block = KV_HEADS * SIZE * BLOCK;
    part.dtype = part.cache_dtype = PA_F32, part.scale = 1;
    if (pa_store(isa, &part, 1, threads)) std::puts("a slot is out of range");
    return to;
  }
};

// States and outputs of linear attention, of a token of each sequence.
std::vector<float> recur(const char *isa, int32_t threads) {
  const int seqs = 61, row = HEADS * SIZE, slot = row * SIZE;
  std::vector<float> in(seqs * row), decay(HEADS, -0.1f), states(seqs * slot + seqs * row);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (float &x : in) x = normal(random);
  for (float &x : states) x = normal(random);
  std::vector<int32_t> starts = {0}, before(seqs, 1);
  std::vector<int64_t> slots;
  for (int i = 0; i < seqs; i++) starts.push_back(i + 1), slots.push_back(seqs - 1 - i);
  pa_scan scan = {};
  scan.kind = PA_LINEAR, scan.dtype = scan.state_dtype = PA_F32;
  scan.num_seqs = scan.num_slots = seqs, scan.num_heads = scan.num_groups = HEADS;
  scan.rows = scan.columns = SIZE, scan.state_slot = slot, scan.scale = 0.2f;
  scan.starts = starts.data(), scan.slots = slots.data(), scan.before = before.data();
  for (int i = 0; i < 3; i++) scan.inputs[i] = {in.data(), row, SIZE, PA_F32};
  scan.params[0] = decay.data(), scan.states = states.data(), scan.out = states.data() + seqs * slot;
  if (pa_scan_step(isa, &scan, threads)) std::puts("a scan failed");
  return states;
}

// Whether memory that two callers have given back serves two callers again, and no third.
bool used_again() {
  Buffer *small = pa_take_buffer(1 << 12), *large = pa_take_buffer(1 << 20);
  pa_give_buffer(large), pa_give_buffer(small);
  const bool both = pa_take_buffer(1 << 12) == small && pa_take_buffer(1 << 20) == large;
  pa_give_buffer(small);
  Buffer *other = pa_take_buffer(1 << 20);
  return both && other != large;
}

}  // namespace

int main() {
  if (!used_again()) return std::puts("memory is lost, or has two owners"), 1;
  char isa[32] = "";
  std::sscanf(pa_isas(), "%31[^,;]", isa);
  const std::vector<Step> steps = {Step({{1, 4000}, {1, 600}, {1, 3}}), Step({{300, 300}, {2, 2500}})};
  int differ[2] = {0, 0};
  auto caller = [&](int which) {
    for (int time = 0; time < TIMES; time++) {
      const Step &step = steps[(which + time) % steps.size()];
      differ[which] += step.attend(isa, 4) != step.attend(isa, 1);
      differ[which] += step.store(isa, 4) != step.store(isa, 1);
      differ[which] += recur(isa, 4) != recur(isa, 1);
    }
  };
  std::thread other(caller, 1);
  caller(0);
  other.join();
  std::printf("%d steps, %d differ\n", 6 * TIMES, differ[0] + differ[1]);
  return differ[0] + differ[1] != 0;
}
