// Who does the work? A pool of sleeping threads.
//
// A region waits only for threads that took part, so the caller can finish alone on a machine whose
// cores others use; a barrier would wait for a thread that isn't scheduled.

#pragma once

#include <stdint.h>

// Calls body(context, index, scratch) for each index below `count`, on up to `threads` threads, the
// caller's among them; each has `scratch_bytes` of memory of its own. Indices are taken in order.
// False where memory is short. Calls from several threads at once are fine: the later one runs alone.
bool pa_parallel(int32_t count, int32_t threads, int64_t scratch_bytes,
                 void (*body)(void *context, int32_t index, char *scratch), void *context);

// Memory that is used again: at least `bytes`, at a cache line. NULL where memory is short.
struct Buffer {
  char *memory;
  int64_t bytes;
  Buffer *next;
};
Buffer *pa_take_buffer(int64_t bytes);
void pa_give_buffer(Buffer *buffer);
