// The C interface: which instruction set runs, what a step's work items are, a call.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"
#include "pool.h"
#include "processor.h"

extern "C" {
#define PA_DECLARE(name) extern const KernelTable pa_kernels_##name;
PA_BUILT(PA_DECLARE)
}

namespace {

#define PA_POINTER(name) &pa_kernels_##name,
const KernelTable *const TABLES[] = {PA_BUILT(PA_POINTER)};  // best first

#define PA_NAME(name) #name,
const char *const LEFT_OUT[] = {PA_LEFT_OUT(PA_NAME) nullptr};  // what the compiler failed at

thread_local char error_text[256] = "";

template <class... Args>
void *fail(const char *format, Args... args) {
  std::snprintf(error_text, sizeof error_text, format, args...);
  return nullptr;
}

struct Items {  // grows; the plan takes its memory
  Item *all = nullptr;
  int32_t count = 0, room = 0;
  bool add(const Item &item) {
    if (count == room) {
      room = room ? 2 * room : 64;
      Item *larger = (Item *)std::realloc((void *)all, sizeof(Item) * room);
      if (!larger) return false;
      all = larger;
    }
    all[count++] = item;
    return true;
  }
};

// Some tokens of a sequence, and all that they see.
Item item_of(const pa_plan *plan, int32_t seq, int32_t token0, int32_t tokens) {
  int32_t len = plan->lens[seq];
  int32_t queries = plan->query_starts[seq + 1] - plan->query_starts[seq];
  int64_t first = (int64_t)len - queries + token0;
  KeyRanges seen = pa_key_ranges(&plan->layer, first, first + tokens - 1, len);
  Item item = {};
  item.seq = seq;
  item.token0 = token0;
  item.tokens = tokens;
  item.part = -1;
  item.kept = seen.kept;
  item.near = seen.near;
  item.to = item.near.hi - item.near.lo + item.kept.hi - item.kept.lo;
  return item;
}

// Adds an item once per piece of its keys; `split` bounds a piece, 0 doesn't.
bool add_pieces(pa_plan *plan, Items &items, Item item, int32_t split) {
  int32_t total = item.to, pieces = split ? pa_pieces(total, split) : 1;
  const int64_t rows = rows_per_head(plan->layer, item);
  for (int32_t i = 0; i < (pieces > 1 ? pieces : 1); i++) {
    if (pieces > 1) {
      item.from = i * split;
      item.to = i == pieces - 1 ? total : item.from + split;
      item.piece_keys = split;
      item.part = plan->num_parts++;
      item.group = plan->num_groups;
    }
    item.cost = (item.to - item.from + 16) * item.heads * (rows + 8);
    if (!items.add(item)) return false;
  }
  if (pieces > 1) {
    int64_t floats = rows * item.heads * (plan->layer.v_head_size + 2);
    plan->part_floats = floats > plan->part_floats ? floats : plan->part_floats;
    void *larger = std::realloc(plan->groups, sizeof(Group) * (plan->num_groups + 1));
    if (!larger) return false;
    plan->groups = (Group *)larger;
    plan->groups[plan->num_groups++] = {plan->num_parts - pieces, pieces};
  }
  return true;
}

// Neighbouring pieces of a sequence become one item, which keeps their partial results to itself, as long as the
// threads have enough items: which pieces go together changes no bit.
void join_pieces(pa_plan *plan, Items &items) {
  int64_t left = 0;
  for (int32_t i = 0; i < items.count; i++) left += items.all[i].cost;
  int32_t count = 0;
  plan->num_parts = plan->num_groups = 0;
  for (int32_t i = 0, pieces; i < items.count; i += pieces) {
    Item item = items.all[i];
    pieces = item.part < 0 ? 1 : plan->groups[item.group].parts;
    if (pieces == 1) {
      items.all[count++] = item;
      continue;
    }
    int64_t cost = 0;
    for (int32_t j = 0; j < pieces; j++) cost += items.all[i + j].cost;
    const int32_t rows = rows_per_head(plan->layer, item);
    const int64_t bytes = (pieces * plan->part_floats * 4 + 63) / 64 * 64;
    const int64_t room = rows > 16 ? 4 * KEPT_BYTES : KEPT_BYTES;  // latents of 128 heads keep 256 KiB of each piece
    if (left - cost >= plan->num_threads * cost && bytes <= room && plan->kernels->joins(&plan->layer, rows)) {
      left -= cost;
      plan->kept_bytes = bytes > plan->kept_bytes ? bytes : plan->kept_bytes;
      item.to = items.all[i + pieces - 1].to;
      item.part = -1;
      item.joined = pieces;
      item.cost = cost;
      items.all[count++] = item;
      continue;
    }
    plan->groups[plan->num_groups] = {plan->num_parts, pieces};
    for (int32_t j = 0; j < pieces; j++) {
      item = items.all[i + j];
      item.part = plan->num_parts++;
      item.group = plan->num_groups;
      items.all[count++] = item;
    }
    plan->num_groups++;
  }
  items.count = count;
}

int dearer_first(const void *a, const void *b) {
  int64_t x = ((const Item *)a)->cost, y = ((const Item *)b)->cost;
  return x < y ? 1 : x > y ? -1 : 0;
}

// Few rows per head: an item has all KV heads, unless there are fewer items than threads; which
// heads go together changes no bit. Many rows: one KV head, a block of rows; and where the rows
// are one block only, the keys in pieces too.
bool plan_sequence(pa_plan *plan, Items &items, int32_t seq, int32_t head_parts) {
  const pa_layer &layer = plan->layer;
  int32_t ratio = layer.num_heads / layer.num_kv_heads;
  int32_t queries = plan->query_starts[seq + 1] - plan->query_starts[seq];
  if (queries == 0) return true;
  if (queries * ratio <= plan->kernels->dot_rows(&layer)) {
    Item item = item_of(plan, seq, 0, queries);
    int32_t heads = layer.num_kv_heads, each = (heads + head_parts - 1) / head_parts;
    for (int32_t h = 0; h < heads; h += each) {
      item.head0 = h;
      item.heads = pa_min(each, heads - h);
      int32_t split = queries * ratio <= 8 ? SPLIT_KEYS : 2 * SPLIT_KEYS;
      if (!add_pieces(plan, items, item, split)) return false;
    }
    return true;
  }
  int32_t most = pa_max(1, plan->kernels->matrix_rows / ratio);
  int32_t blocks = (queries + most - 1) / most;
  for (int32_t block = 0; block < blocks; block++) {
    int32_t token = (int64_t)queries * block / blocks, end = (int64_t)queries * (block + 1) / blocks;
    Item item = item_of(plan, seq, token, end - token);
    item.heads = 1;
    for (item.head0 = 0; item.head0 < layer.num_kv_heads; item.head0++) {
      const bool cut = blocks == 1 && !layer.invariant;
      if (!add_pieces(plan, items, item, cut ? 2 * SPLIT_KEYS : 0)) return false;
    }
  }
  return true;
}

int32_t *copied(const int32_t *from, int64_t count) {
  int32_t *to = (int32_t *)std::malloc(sizeof(int32_t) * (count ? count : 1));
  if (to && count) std::memcpy(to, from, sizeof(int32_t) * count);
  return to;
}

bool fill(pa_plan *plan) {
  const pa_layer &layer = plan->layer;
  int64_t pieces = 0;  // of the decode path, with all heads together
  for (int32_t i = 0; i < plan->num_seqs; i++) pieces += (plan->lens[i] + SPLIT_KEYS - 1) / SPLIT_KEYS;
  int32_t head_parts = 1;
  while (pieces && head_parts < layer.num_kv_heads && pieces * head_parts < 2L * plan->num_threads) {
    head_parts *= 2;
  }
  Items items;
  bool fine = true;
  int32_t rows = 1, heads = (layer.num_kv_heads + head_parts - 1) / head_parts;
  for (int32_t i = 0; i < plan->num_seqs && fine; i++) {
    fine = plan_sequence(plan, items, i, head_parts);
  }
  if (fine) join_pieces(plan, items);
  for (int32_t i = 0; i < items.count; i++) rows = pa_max(rows, rows_per_head(layer, items.all[i]));
  plan->items = items.all;
  plan->num_items = items.count;
  if (items.count > 1) std::qsort((void *)items.all, items.count, sizeof(Item), dearer_first);
  plan->scratch_bytes = plan->kernels->scratch_bytes(&layer, heads, rows);
  return fine;
}

void run_one(void *context, Turn *turn) {
  Run *run = (Run *)context;
  if (__atomic_load_n(&run->bad, __ATOMIC_RELAXED) != PA_OTHER_LENGTHS) run->plan->kernels->run_item(run, turn);
}

void write_row(void *context, int32_t index, char *room) {
  Run *run = (Run *)context;
  const int32_t seq = run->plan->items[index].seq;
  if (pa_write_row(run->chosen, seq, room) == run->plan->lens[seq]) return;
  __atomic_store_n(&run->bad, PA_OTHER_LENGTHS, __ATOMIC_RELAXED);
}

struct StoreRun {
  enum { TOKENS = 64 };
  const KernelTable *kernels;
  const pa_scatter *part;
};

void store_piece(void *context, Turn *turn) {
  const StoreRun *run = (const StoreRun *)context;
  int64_t first = (int64_t)turn->index * StoreRun::TOKENS, last = first + StoreRun::TOKENS;
  run->kernels->store(run->part, first, last < run->part->num_tokens ? last : run->part->num_tokens);
}

struct ScanRun {
  const KernelTable *kernels;
  const pa_scan *scan;
};

void scan_one(void *context, Turn *turn) {
  const ScanRun *run = (const ScanRun *)context;
  run->kernels->scan(run->scan, turn->index, turn->scratch);
}

// Asking the processor costs microseconds under a hypervisor, which traps cpuid: once for each.
const KernelTable *table(const char *isa) {
  enum : char { UNKNOWN, HERE, MISSING };
  static std::atomic<char> known[sizeof TABLES / sizeof *TABLES];
  std::atomic<char> *state = known;
  for (const KernelTable *each : TABLES) {
    std::atomic<char> &found = *state++;
    if (std::strcmp(each->name, isa)) continue;
    if (found == UNKNOWN) found = has(isa) ? HERE : MISSING;
    return found == HERE ? each : nullptr;
  }
  return nullptr;
}

// The table that attends: of avx512_bf16 only where its products are the faster ones, or where
// POLYATTN_CPU_PAIRS=1 wants them nonetheless, as the tests do.
const KernelTable *attending(const char *isa) {
  const KernelTable *found = table(isa);
  if (!found || !pairs_are_slow() || std::strcmp(isa, "avx512_bf16")) return found;
  const char *wanted = std::getenv("POLYATTN_CPU_PAIRS");
  return wanted && *wanted == '1' ? found : table("avx512");
}

}  // namespace

const KernelTable *pa_kernels_for(const char *isa) { return attending(isa); }

int pa_abi(void) { return PA_ABI; }
const char *pa_error(void) { return error_text; }

// Best first.
const char *pa_isas(void) {
  static char names[128];
  if (names[0]) return names;
  char text[128] = "";
  const KernelTable *later = nullptr;
  auto list = [&text](const char *name, const char *between = ",") {
    if (text[0]) std::strcat(text, between);
    std::strcat(text, name);
  };
  for (const KernelTable *each : TABLES) {
    if (!has(each->name)) continue;
    if (pairs_are_slow() && !std::strcmp(each->name, "avx512_bf16")) {
      later = each;
      continue;
    }
    list(each->name);
    if (later && !std::strcmp(each->name, "avx512")) list(later->name);
  }
  const char *between = ";";
  for (int i = 0; LEFT_OUT[i]; i++) {
    if (!has(LEFT_OUT[i])) continue;
    list(LEFT_OUT[i], between);
    between = ",";
  }
  std::strcpy(names, text);
  return names;
}

pa_plan *pa_plan_new(const char *isa, const pa_layer *layer, const pa_batch *batch) {
  const KernelTable *kernels = attending(isa);
  if (!kernels) return (pa_plan *)fail("isa=%s has no kernels that this processor runs", isa);
  if (layer->num_kv_heads <= 0 || layer->num_heads % layer->num_kv_heads || layer->head_size <= 0 ||
      layer->v_head_size <= 0 || layer->dtype < 0 || layer->dtype > PA_F16 ||
      layer->cache_dtype < 0 || layer->cache_dtype >= PA_DTYPES) {
    return (pa_plan *)fail("num_heads=%d, num_kv_heads=%d, dtype=%d and cache_dtype=%d are no layer",
                           layer->num_heads, layer->num_kv_heads, layer->dtype, layer->cache_dtype);
  }
  pa_plan *plan = (pa_plan *)std::calloc(1, sizeof(pa_plan));
  if (!plan) return (pa_plan *)fail("there is no memory for a plan");
  plan->layer = *layer;
  plan->kernels = kernels;
  plan->num_seqs = batch->num_seqs;
  plan->block_size = batch->block_size;
  plan->num_threads = batch->num_threads > 0 ? batch->num_threads : 1;
  // A line that AMD's processors are asked for into the first cache takes one of few buffers until it
  // comes: a Zen 4 reads 10 GB/s so, and 22 into the second.
  plan->far = is_amd();
  plan->query_starts = copied(batch->query_starts, batch->num_seqs + 1);
  plan->lens = copied(batch->lens, batch->num_seqs);
  plan->key_starts = batch->key_starts ? copied(batch->key_starts, batch->num_seqs) : nullptr;
  if (!plan->query_starts || !plan->lens || (batch->key_starts && !plan->key_starts) || !fill(plan)) {
    pa_plan_free(plan);
    return (pa_plan *)fail("there is no memory for a plan of %d sequences", batch->num_seqs);
  }
  return plan;
}

void pa_plan_free(pa_plan *plan) {
  if (!plan) return;
  std::free(plan->query_starts);
  std::free(plan->lens);
  std::free(plan->key_starts);
  std::free((void *)plan->items);
  std::free(plan->groups);
  std::free(plan);
}

void pa_plan_list(const pa_plan *plan, int64_t *numbers, int32_t *items, int32_t *groups) {
  int32_t heads = 1, rows = 1;
  for (int32_t i = 0; i < plan->num_items; i++) {
    const Item &item = plan->items[i];
    heads = pa_max(heads, item.heads);
    rows = pa_max(rows, rows_per_head(plan->layer, item));
    if (!items) continue;
    const int32_t fields[PA_ITEM_FIELDS] = {
        item.seq,     item.token0,  item.tokens,  item.head0, item.heads, item.kept.lo, item.kept.hi,
        item.near.lo, item.near.hi, item.from,    item.to,    item.part,  item.part < 0 ? -1 : item.group};
    std::memcpy(items + (int64_t)i * PA_ITEM_FIELDS, fields, sizeof fields);
  }
  for (int32_t i = 0; groups && i < plan->num_groups; i++) {
    groups[2 * i] = plan->groups[i].first_part;
    groups[2 * i + 1] = plan->groups[i].parts;
  }
  const int64_t found[] = {plan->num_items,   plan->num_groups,    plan->num_parts,
                           plan->part_floats, plan->scratch_bytes,
                           plan->kernels->scratch_bytes(&plan->layer, heads, rows)};
  std::memcpy(numbers, found, sizeof found);
}

static int attend(const pa_plan *plan, const pa_tensors &tensors, const pa_chosen *chosen) {
  Run run = {plan, tensors, nullptr, nullptr, 0, chosen};
  Buffer *buffer = nullptr;
  if (plan->num_parts) {
    int64_t counters = ((int64_t)plan->num_groups * 4 + 63) / 64 * 64;
    buffer = pa_take_buffer(counters + plan->num_parts * plan->part_floats * 4);
    if (!buffer) {
      fail("there is no memory for %d partial results; let other work end first", plan->num_parts);
      return 2;
    }
    std::memset(buffer->memory, 0, counters);
    run.done = (int32_t *)buffer->memory;
    run.parts = (float *)(buffer->memory + counters);
  }
  // What a thread can't repay in a few microseconds is done by the caller alone.
  int64_t cost = 0;
  for (int32_t i = 0; i < plan->num_items; i++) cost += plan->items[i].cost;
  int64_t useful = 1 + cost * (plan->layer.head_size + plan->layer.v_head_size) / 1000000;
  int32_t threads = useful < plan->num_threads ? (int32_t)useful : plan->num_threads;
  const Taking rows = {write_row, chosen ? pa_row_room(chosen) : 0};
  bool fine = pa_parallel(plan->num_items, threads, plan->scratch_bytes + plan->kept_bytes, run_one, &run, false,
                          chosen ? &rows : nullptr);
  if (buffer) pa_give_buffer(buffer);
  if (!fine) {
    fail("there is no memory for %lld bytes of scratch; let other work end first", (long long)plan->scratch_bytes);
    return 2;
  }
  if (run.bad == 1) fail("block_table points outside the cache");
  return run.bad;
}

int pa_attend(const pa_plan *plan, const pa_tensors *tensors) { return attend(plan, *tensors, nullptr); }

int pa_attend_chosen(const pa_plan *plan, const pa_tensors *alike, const pa_chosen *chosen, const pa_call *call) {
  pa_tensors tensors = *alike;
  pa_chosen choice = *chosen;
  tensors.query = call->query;
  tensors.key = call->key;
  tensors.value = call->value;
  tensors.out = call->out;
  tensors.lse = call->lse;
  tensors.num_blocks = call->num_blocks;
  tensors.k_scale = call->k_scale;
  tensors.v_scale = call->v_scale;
  choice.ids = call->ids;
  if (plan->num_items == plan->num_seqs) return attend(plan, tensors, &choice);  // an item for each row
  if (pa_pages(&choice, plan->num_threads)) {
    fail("there is no memory; let other work end first");
    return 2;
  }
  if (std::memcmp(choice.counts, plan->lens, sizeof(int32_t) * plan->num_seqs)) return PA_OTHER_LENGTHS;
  return attend(plan, tensors, nullptr);
}

int64_t pa_store(const char *isa, const pa_scatter *parts, int32_t count, int32_t threads) {
  const KernelTable *kernels = table(isa);
  if (!kernels) return -1;
  for (int32_t i = 0; i < count; i++) {
    for (int64_t token = 0; parts[i].cache && token < parts[i].num_tokens; token++) {
      if (parts[i].slots[token] >= parts[i].num_slots) return 1 + token;
    }
  }
  for (int32_t i = 0; i < count; i++) {
    StoreRun run = {kernels, parts + i};
    int32_t pieces = (int32_t)((parts[i].num_tokens + StoreRun::TOKENS - 1) / StoreRun::TOKENS);
    pa_parallel(pieces, pa_min(threads, 1 + pieces / 4), 64, store_piece, &run);
  }
  return 0;
}

int64_t pa_scan_step(const char *isa, const pa_scan *scan, int32_t threads) {
  const KernelTable *kernels = table(isa);
  if (!kernels) return -2;
  for (int64_t i = 0; i < scan->num_seqs; i++) {
    if (scan->slots[i] >= scan->num_slots) return 1 + i;
  }
  ScanRun run = {kernels, scan};
  // A thread is worth waking for a hundred thousand elements of states, each time that one is touched.
  int64_t tokens = scan->num_seqs ? scan->starts[scan->num_seqs] : 0;
  int64_t groups = scan->num_seqs;
  if (scan->kind == PA_SHORT_CONV) groups = (tokens + pa_conv_tokens(scan) - 1) / pa_conv_tokens(scan);
  int64_t useful = 1 + tokens * scan->state_slot / 100000;
  int32_t some = useful < threads ? (int32_t)useful : threads;
  int32_t items = (int32_t)(groups * pa_scan_pieces(scan));
  return pa_parallel(items, some, kernels->scan_scratch(scan), scan_one, &run, true) ? 0 : -1;
}
