// Who does the work? The threads of torch's OpenMP runtime, or a pool of sleeping threads.
//
// The runtime's threads are awake between a model's operators. Where other programs use its cores, its
// barrier waits for a thread that isn't scheduled. A region of the pool waits only for threads that took
// part, so the caller can finish alone.

#pragma once

#include <stdint.h>

// Memory of a thread's own, which takes from it piece by piece.
struct Room {
  char *at;
  int64_t left;
};

// What a thread does for an item as it takes it, before anybody reads what that makes. `bytes`: of the thread's own room.
struct Taking {
  void (*taken)(void *context, int32_t index, char *room);
  int64_t bytes;
};

// A thread's part in a region: which item it does, and, once it wants to know, which one after it.
struct Turn {
  int32_t index, count;     // of the item; where its range ends
  int32_t following;        // -1: not taken yet
  int32_t *next;            // the first item of the range that no thread has taken
  bool asked, asked_after;  // the first keys of this item, of the following one, were asked for before
  Room scratch;
  const Taking *taking;     // NULL: nothing to do
  void *context;
  char *room;
};

// Takes the item that this thread does next; none where it is not below `count`.
static inline int32_t pa_following(Turn *turn) {
  if (turn->following < 0) {
    turn->following = __atomic_fetch_add(turn->next, 1, __ATOMIC_RELAXED);
    if (turn->taking && turn->following < turn->count) turn->taking->taken(turn->context, turn->following, turn->room);
  }
  return turn->following;
}

// Calls body(context, turn) for each index below `count`, on up to `threads` threads, the caller's
// among them; each has `scratch_bytes` of memory of its own. They take indices in order. With `by_ranges` each
// begins with a range of its own and then helps with the others. A runtime's thread begins with the same range
// in each call, as its cache may hold what it wrote there.
// False where memory is short. Calls from several threads at once are fine: the later one runs alone.
bool pa_parallel(int32_t count, int32_t threads, int64_t scratch_bytes,
                 void (*body)(void *context, Turn *turn), void *context, bool by_ranges = false,
                 const Taking *taking = nullptr);

// Memory that is used again: at least `bytes`, at a cache line. NULL where memory is short.
struct Buffer {
  char *memory;
  int64_t bytes;
  Buffer *next;
};
Buffer *pa_take_buffer(int64_t bytes);
void pa_give_buffer(Buffer *buffer);
