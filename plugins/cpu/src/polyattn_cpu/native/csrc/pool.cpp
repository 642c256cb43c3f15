#include "pool.h"
#include "polyattn_cpu.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace {

enum { MOST_RANGES = 64 };

struct Job {
  void (*body)(void *, Turn *);
  void *context;
  int32_t count;
  int64_t scratch_bytes;  // of an item, with what `taking` has
  const Taking *taking;
  int32_t ranges = 1;
  int32_t next[MOST_RANGES];  // in each range the first item that no thread has taken; taken atomically
  int processor = -1;  // the caller's, as it began
  int64_t ended = 0;   // when the first thread found no item
};

struct Pool {
  std::mutex region;  // held while a region runs
  std::mutex lock;    // guards all below
  std::condition_variable work, idle;
  Job *job = nullptr;
  int32_t wanted = 0;  // workers that may still join
  int32_t active = 0;  // workers that joined and aren't done
  int32_t workers = 0;
  int32_t pause = 0, without_team = 0;  // of the team, and what is left of it, in regions
};

// Never destroyed: its threads sleep until the process ends. A child of fork() has none of them and
// starts with a pool of its own.
Pool *pool = nullptr;
std::once_flag once;
std::mutex buffers_lock;
Buffer *buffers = nullptr;

// The OpenMP runtime of torch's operators. Its threads spin for milliseconds after each operator: they
// work at once, while a thread of the pool would share a core with one of them.
void (*team)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
int (*size_of_team)() = nullptr, (*number_in_team)() = nullptr;

void start_over() {
  pool = new Pool;
  new (&buffers_lock) std::mutex;
  team = nullptr;  // a child of fork() has none of its threads, and would wait for them
}

Pool *the_pool() {
  std::call_once(once, [] {
    start_over();
#if !defined(_WIN32)
    *(void **)&size_of_team = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    *(void **)&number_in_team = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    if (size_of_team && number_in_team) *(void **)&team = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    pthread_atfork(nullptr, nullptr, start_over);
#endif
  });
  return pool;
}

struct Scratch {  // a thread's own
  char *memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(memory); }
  char *at_least(int64_t wanted) {
    if (bytes < wanted) {
      std::free(memory);
      bytes = (wanted + 4095) / 4096 * 4096;
      memory = (char *)std::aligned_alloc(4096, bytes);
      if (!memory) bytes = 0;
    }
    return memory;
  }
};
thread_local Scratch scratch;

bool poisoned = false;

int32_t first_of(const Job &job, int32_t range) { return (int32_t)((int64_t)job.count * range / job.ranges); }

// Does the items of the range `own`, then helps with the other ranges. Each thread comes to all of them, so the items
// get done however many threads there are and whatever their numbers.
void take_items(Job &job, int32_t own) {
  char *memory = scratch.at_least(job.scratch_bytes);
  if (!memory) return;
  const int64_t own_bytes = job.scratch_bytes - (job.taking ? job.taking->bytes : 0);
  for (int32_t i = 0; i < job.ranges; i++) {
    const int32_t range = (own + i) % job.ranges;
    Turn turn = {0, first_of(job, range + 1), -1, &job.next[range], false, false, {memory, own_bytes},
                 job.taking, job.context, memory + own_bytes};
    while ((turn.index = pa_following(&turn)) < turn.count) {
      turn.following = -1;
      turn.asked = turn.asked_after;
      turn.asked_after = false;
      if (poisoned) std::memset(memory, 0xFF, own_bytes);
      job.body(job.context, &turn);
    }
  }
}

int this_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// A thread that is woken where the caller runs takes its place there, while another processor, on which
// only a runtime's thread spins, would serve both: it goes on elsewhere, if it may.
void leave_processor(int busy) {
#if defined(__linux__)
  cpu_set_t allowed, others;
  if (busy < 0 || busy >= CPU_SETSIZE || sched_getcpu() != busy ||
      sched_getaffinity(0, sizeof allowed, &allowed)) {
    return;
  }
  others = allowed;
  CPU_CLR(busy, &others);
  if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others)) {
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
#else
  (void)busy;
#endif
}

void work(Pool *of) {
  std::unique_lock<std::mutex> lock(of->lock);
  for (;;) {
    of->work.wait(lock, [of] { return of->job && of->wanted > 0; });
    Job *job = of->job;
    const int32_t number = of->wanted--;
    of->active++;
    lock.unlock();
    leave_processor(job->processor);
    take_items(*job, number);
    lock.lock();
    if (--of->active == 0) of->idle.notify_one();
  }
}

void grow(Pool *of, int32_t workers) {  // under its lock
  while (of->workers < workers) {
    try {
      std::thread(work, of).detach();
    } catch (const std::system_error &) {
      return;  // no more threads here: the others do the work
    }
    of->workers++;
  }
}

int64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void take_part(void *of) {
  Job &job = *(Job *)of;
  take_items(job, number_in_team());
  int64_t none = 0;
  __atomic_compare_exchange_n(&job.ended, &none, nanoseconds(), false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
}

// A team's region ends when each of its threads was there. Where another program has a core, that takes
// the scheduler's time: the next regions then are the pool's, which waits for no thread without an item,
// twice as many as after the last such region.
void by_team(Pool *of, Job &job) {
  int64_t begun = nanoseconds();
  team(take_part, &job, 0, 0);
  int64_t now = nanoseconds(), waited = now - job.ended;
  bool late = waited > 1000000 && waited > (now - begun) / 4;
  of->pause = late ? (of->pause < 32 ? 2 * of->pause + 1 : 63) : of->pause / 2;
  if (late) of->without_team = of->pause;
}

}  // namespace

void pa_poison(void) { poisoned = true; }

bool pa_parallel(int32_t count, int32_t threads, int64_t scratch_bytes,
                 void (*body)(void *, Turn *), void *context, bool by_ranges, const Taking *taking) {
  if (taking) scratch_bytes = (scratch_bytes + 63) / 64 * 64 + taking->bytes;
  Job job;
  job.body = body;
  job.context = context;
  job.count = count;
  job.scratch_bytes = scratch_bytes;
  job.taking = taking;
  if (!scratch.at_least(scratch_bytes)) return false;
  int32_t helpers = (threads < count ? threads : count) - 1;
  if (by_ranges && helpers > 0) job.ranges = helpers < MOST_RANGES ? helpers + 1 : MOST_RANGES;
  for (int32_t range = 0; range < job.ranges; range++) job.next[range] = first_of(job, range);
  if (helpers <= 0) {
    take_items(job, 0);
    return true;
  }
  job.processor = this_processor();
  Pool *of = the_pool();
  std::unique_lock<std::mutex> region(of->region, std::try_to_lock);
  if (!region.owns_lock()) {
    take_items(job, 0);
    return true;
  }
  if (of->without_team) {
    of->without_team--;
  } else if (team && size_of_team() == threads) {  // of another size it would end threads and start new ones
    by_team(of, job);
    return true;
  }
  {
    std::lock_guard<std::mutex> lock(of->lock);
    grow(of, helpers);
    of->job = &job;
    of->wanted = helpers;
  }
  for (int32_t i = 0; i < helpers; i++) of->work.notify_one();
  take_items(job, 0);
  std::unique_lock<std::mutex> lock(of->lock);
  of->job = nullptr;
  of->wanted = 0;
  of->idle.wait(lock, [of] { return of->active == 0; });
  return true;
}

Buffer *pa_take_buffer(int64_t bytes) {
  the_pool();
  {
    std::lock_guard<std::mutex> lock(buffers_lock);
    for (Buffer **at = &buffers; *at; at = &(*at)->next) {
      if ((*at)->bytes < bytes) continue;
      Buffer *found = *at;
      *at = found->next;
      return found;
    }
    if (buffers) {  // too small: a larger one takes its place
      Buffer *small = buffers;
      buffers = small->next;
      std::free(small->memory);
      delete small;
    }
  }
  int64_t rounded = (bytes + 4095) / 4096 * 4096;
  char *memory = (char *)std::aligned_alloc(4096, rounded);
  if (!memory) return nullptr;
  return new Buffer{memory, rounded, nullptr};
}

void pa_give_buffer(Buffer *buffer) {
  std::lock_guard<std::mutex> lock(buffers_lock);
  buffer->next = buffers;
  buffers = buffer;
}
