// Which instruction sets this processor and this process may use.
#include <cpuid.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tables.h"

namespace hetero {
namespace {

constexpr unsigned long kArchReqXcompPerm = 0x1023;
constexpr unsigned long kXfeatureTileData = 18;

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

Features detect() {
  Features f = {};
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool osxsave = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx) return f;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tile = (state & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const unsigned leaf7_ebx = b, leaf7_ecx = c, leaf7_edx = d;
  f.avx2 = ymm && fma && f16c && (leaf7_ebx >> 5 & 1);
  f.avx512 = f.avx2 && zmm && (leaf7_ebx >> 16 & 1) && (leaf7_ebx >> 17 & 1) && (leaf7_ebx >> 30 & 1) &&
             (leaf7_ebx >> 31 & 1);
  f.avx512_vnni = f.avx512 && (leaf7_ecx >> 11 & 1);
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = f.avx512 && (a >> 5 & 1);
  f.amx_tile = tile && (leaf7_edx >> 24 & 1);
  f.amx_int8 = tile && (leaf7_edx >> 25 & 1);
  f.amx_bf16 = tile && (leaf7_edx >> 22 & 1);
  if (f.amx_tile) f.amx_denied = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) != 0;
  return f;
}

struct Need {
  const char* name;
  bool present;
};

// What `isa` needs, in the order in which it is reported; returns how many.
int needs(Isa isa, const Features& f, Need* out) {
  int n = 0;
  if (isa >= kAvx2) out[n++] = {"avx2 with fma and f16c", f.avx2};
  if (isa >= kAvx512) out[n++] = {"avx512f/bw/vl/dq", f.avx512};
  if (isa >= kAmx) {
    out[n++] = {"avx512_vnni", f.avx512_vnni};
    out[n++] = {"avx512_bf16", f.avx512_bf16};
    out[n++] = {"amx_tile", f.amx_tile};
    out[n++] = {"amx_int8", f.amx_int8};
    out[n++] = {"amx_bf16", f.amx_bf16};
    out[n++] = {"permission of the operating system to use tiles", !f.amx_denied};
  }
  return n;
}

}  // namespace

const Features& detect_features() {
  static const Features features = detect();
  return features;
}

bool isa_supported(Isa isa, const Features& features) {
  Need list[8];
  const int n = needs(isa, features, list);
  for (int i = 0; i < n; i++)
    if (!list[i].present) return false;
  return true;
}

Isa best_isa(const Features& features) {
  for (int isa = kAmx; isa > kScalar; isa--)
    if (isa_supported(static_cast<Isa>(isa), features)) return static_cast<Isa>(isa);
  return kScalar;
}

void missing_features(Isa isa, const Features& features, char* out, int size) {
  Need list[8];
  const int n = needs(isa, features, list);
  int used = 0;
  if (size > 0) out[0] = 0;
  for (int i = 0; i < n; i++)
    if (!list[i].present && used < size)
      used += snprintf(out + used, static_cast<size_t>(size - used), "%s%s", used ? ", " : "", list[i].name);
}

const IsaTable* select_table(Isa isa, const Features& features) {
  if (!isa_supported(isa, features)) return nullptr;
  switch (isa) {
    case kScalar:
      return scalar_table();
    case kAvx2:
      return avx2_table();
    case kAvx512:
      return avx512_table(features.avx512_vnni, features.avx512_bf16);
    case kAmx:
      return amx_table();
    default:
      return nullptr;
  }
}

}  // namespace hetero
