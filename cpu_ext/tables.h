// Which instruction sets this machine has, and the kernel table of each.
#pragma once

#include "kernels.h"

namespace hetero {

// What CPUID says and the operating system enables (XGETBV; for tiles also ARCH_REQ_XCOMP_PERM).
struct Features {
  bool avx2;    // AVX2, FMA and F16C, with ymm state enabled
  bool avx512;  // F, BW, VL and DQ, with zmm state enabled
  bool avx512_vnni;
  bool avx512_bf16;
  bool amx_tile, amx_int8, amx_bf16;  // by CPUID, with tile state enabled
  bool amx_denied;                    // the kernel refused this process the tile data (arch_prctl failed)
};

// Asks once a process for permission to use tile data; later calls return the same answer.
const Features& detect_features();

// Pure functions of the features, so that a test can pass made-up ones.
bool isa_supported(Isa isa, const Features& features);
Isa best_isa(const Features& features);
// The table that runs on a machine with these features, nullptr where it lacks them.
const IsaTable* select_table(Isa isa, const Features& features);
// The features that `isa` needs and `features` lacks, e.g. "amx_tile, amx_int8", for a message.
// Writes at most `size` bytes with the closing zero.
void missing_features(Isa isa, const Features& features, char* out, int size);

const IsaTable* scalar_table();
const IsaTable* avx2_table();
// Without VNNI and BF16 the kernels of the plain AVX-512 units stand in for them.
const IsaTable* avx512_table(bool vnni, bool bf16);
const IsaTable* amx_table();
// The AMX kernels over software tiles, for machines without them: same bits in the exact classes.
const IsaTable* amx_twin_table();

// What single units contribute to the tables above; entries they do not have are nullptr.
const IsaTable* avx512_plain_unit();
const IsaTable* avx512_vnni_unit();
const IsaTable* avx512_bf16_unit();
const IsaTable* amx_unit();
const IsaTable* amx_twin_unit();

}  // namespace hetero
