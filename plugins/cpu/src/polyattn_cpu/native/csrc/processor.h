// Which instruction sets has this processor, and which of them are worth having?

#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__x86_64__)
struct Leaf {  // what the processor says of itself
  unsigned a = 0, b = 0, c = 0, d = 0;
  explicit Leaf(unsigned number) { __get_cpuid_count(number, 0, &a, &b, &c, &d); }
};
#endif

bool has(const char *name) {
  if (!std::strcmp(name, "generic") || !std::strcmp(name, "neon")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              (Leaf(1).c >> 29 & 1);  // F16C, a name that Clang 16's builtin doesn't know
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avx512")) return avx512;
  bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
              __builtin_cpu_supports("avx512vnni");
  if (!std::strcmp(name, "avx512_bf16")) return bf16;
#if defined(__linux__)
  if (!std::strcmp(name, "amx")) {
    const unsigned more = Leaf(7).d;
    const bool tiles = (more >> 22 & 1) && (more >> 24 & 1) && (more >> 25 & 1);  // AMX-BF16, AMX-TILE, AMX-INT8
    // Tile registers are the kernel's to give: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    return bf16 && tiles && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  }
#endif
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long more = getauxval(AT_HWCAP2);
  if (!std::strcmp(name, "neon_bf16")) return more >> 14 & 1;  // HWCAP2_BF16
  // HWCAP_SVE, PR_SVE_GET_VL: compiled for vectors of 32 bytes, right for no others.
  bool sve256 = (getauxval(AT_HWCAP) >> 22 & 1) && (prctl(51) & 0xffff) == 32;
  if (!std::strcmp(name, "sve256")) return sve256;
  if (!std::strcmp(name, "sve256_bf16")) return sve256 && (more >> 12 & 1);  // HWCAP2_SVEBF16
#elif defined(__aarch64__) && defined(__APPLE__)
  int there = 0;
  size_t size = sizeof there;
  if (!std::strcmp(name, "neon_bf16")) {
    return !sysctlbyname("hw.optional.arm.FEAT_BF16", &there, &size, nullptr, 0) && there;
  }
#endif
  return false;
}

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// vdpbf16ps is half as fast as two float32 FMAs on Intel's processors, twice on AMD's.
bool pairs_are_slow() {
#if defined(__x86_64__)
  return !is_amd();
#else
  return false;
#endif
}

}  // namespace
