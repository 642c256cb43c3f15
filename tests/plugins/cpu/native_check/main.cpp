// Do the native kernels agree with double precision where no Python is? A program for an emulator:
// attention, MLA, storing and recurrences through the plain C interface, by one instruction set; it
// prints each case that is wrong and returns 1 if there is one. `check ISA N` takes every Nth
// case, as emulated vectors are slow; `check` alone names the instruction sets.

#include <cstdlib>

#include "attention.h"
#include "scan.h"
#include "store.h"

int main(int count, char **arguments) {
  if (count < 3) return std::puts(pa_isas()) < 0;
  const struct {
    const char *name;
    void (*check)(Tally &);
  } parts[] = {{"attention", check_attention}, {"store", check_store}, {"scan", check_scan}};
  int wrong = 0;
  for (const auto &part : parts) {
    Tally tally = {arguments[1], std::atoi(arguments[2])};
    part.check(tally);
    std::printf("%s, %s: %d cases, %d wrong\n", tally.isa, part.name, tally.cases, tally.wrong);
    wrong += tally.wrong;
  }
  return wrong != 0;
}
