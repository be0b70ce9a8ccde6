// The contract between the expert operator and the kernels of every instruction set.
// Plain C types and intrinsics only: translation units that are compiled for an instruction set include
// this header, so it must define no function and no object with external linkage.
#pragma once

#include <stdint.h>

namespace hetero {

// Weights are packed in blocks of 16 output rows. Inside a block, `step` bytes of 64 hold, for each of the
// 16 rows in turn, 4 consecutive bytes of the row's k axis (the order of vpdpbusd and of AMX B tiles):
//   f32   16 rows x 1 value            a step is 1 k
//   bf16  16 rows x 2 values           a step is 2 k
//   int8  16 rows x 4 codes            a step is 4 k; code = value + 128, so codes are unsigned
//   int4  16 rows x 4 bytes            a step is 8 k; byte j holds k0+j in the low nibble, k0+4+j in the high
//   fp8, fp8_row   16 rows x 4 codes   a step is 4 k; E4M3 (no infinities), 0x7f and 0xff never occur
//   mxfp4, nvfp4   as int4; codes are E2M1: bit 3 is the sign, bits 0-2 are 0 0.5 1 1.5 2 3 4 6
//   int8a, int8z    as int8, code as it is
//   int4z, q4_k, iq4_nl, iq4_xs, iq3_xxs, iq3_s   as int4; of the iq types a code is a place in a table of 16
//   q2_k            2 bits; q5_k 5 bits; q3_k 3 bits, value + 4; q6_k 6 bits, value + 32
//   iq2 and iq1 types   a place in a table of 8, bits 0, 1 and 3 of the code (codes.h); 3 bits
// Codes of 2, 3, 5 and 6 bits lie in planes, 32 k of them together: of each plane 64 bytes a step, the 4
// bytes of a row of 4 k as above, with the number s of a step of 4 k:
//   low 4 bits (5, 6)   4 steps: as int4
//   2 bits              2 steps: bits 2j and 2j+1 of step i are those of s = 4i+j (low of 2 and 3, high of 6)
//   1 bit               1 step: bit s is that of s (high of 3 and 5)
// The codes of the whole block come first (k_pad / k_per_step steps), then at scale_offset the scales:
//   int8, int4, int4a   fp16 [k_pad/group][16]; then, for int4a, fp16 minima [k_pad/group][16] at min_offset
//   fp8                 float32 [k_pad/128]: the scales of blocks of 128 x 128 of the matrix, of which every
//                       block of 16 rows holds those of its rows
//   fp8_row             float32 [16], one of each row
//   mxfp4               E8M0 [k_pad/32][16]: a byte e is 2^(e - 127); 255 never occurs
//   nvfp4               E4M3 [k_pad/16][16]; then one float32, the scale of the whole matrix, at min_offset
//   int8a, iq4_nl       as int4a, as int4
//   int4z, int8z        fp16 [k_pad/group][16]; then zeros uint8 [k_pad/group][16] at min_offset
//   q4_k q5_k q2_k      uint8 [k_pad/group][2][16], scales and minima; at min_offset fp16 [S][2][16], d and
//   dmin
//                       of each 256 k, S = ceil(k_pad/256)
//   q3_k q6_k, other iq types   int8 [k_pad/group][16]; at min_offset fp16 [S][1][16], d
// A value is (code - zero) * scale with zero 128 (int8) or 8 (int4), code * scale + minimum (int4a), the
// code's number times its scale (fp8, fp8_row, mxfp4), or its number times (scale * matrix scale) (nvfp4).
// int8a as int4a, iq4_nl as mxfp4; int4z, int8z (code - zero) * scale; q4_k q5_k q2_k (d * scale) * code -
// dmin * minimum; q3_k, q6_k and the other iq types (d * factor * scale) * number, the factor a power of two
// of the type. Codes beyond k or n decode to zero (int4a: scale and minimum zero beyond n; beyond k the
// activations are 0).
enum Format : int32_t {
  kF32 = 0,
  kBf16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kInt4a = 4,
  kFp8 = 5,
  kMxfp4 = 6,
  kNvfp4 = 7,
  kInt8a = 8,
  kInt4z = 9,
  kInt8z = 10,
  kIq4Nl = 11,
  kQ4K = 12,
  kQ5K = 13,
  kQ2K = 14,
  kQ3K = 15,
  kQ6K = 16,
  kIq4Xs = 17,
  kIq3Xxs = 18,
  kIq3S = 19,
  kIq2Xxs = 20,
  kIq2Xs = 21,
  kIq2S = 22,
  kIq1S = 23,
  kIq1M = 24,
  kFp8Row = 25,
  kFormats = 26
};

// Whether the kernels of a format take activations as int8 codes.
static inline bool takes_codes(int32_t format) {
  return format != kF32 && format != kBf16 && format != kFp8 && format != kFp8Row;
}

enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kIsas = 4 };

constexpr int kBlockRows = 16;  // output rows of a packed block
constexpr int kActGroup = 32;   // activations share one scale per 32 values
constexpr float kTinyAmax = 0x1p-100f;
constexpr int kGemvRows = 4;    // most rows of a GEMV kernel
constexpr int kExactRows = 16;  // up to this many rows of a step, every ISA gives the same bits

// A packed matrix of n rows (outputs) and k columns (inputs). k_pad: k rounded up to a multiple of
// max(group, 32). All offsets in bytes from the start of a block; block_bytes is a multiple of 64.
struct Layout {
  int32_t format;
  int32_t group;  // 32, 64 or 128; of most formats a fixed one, see kTraits of codes.h; 0 for f32 and bf16
  int64_t n, k, n_pad, k_pad;
  int64_t block_bytes;
  int64_t scale_offset, min_offset;
};

// Rows of activations, contiguous: row m starts at m * k_pad.
//   q      int8 codes in [-127, 127], zero beyond k
//   scale  one float per 32 values, [rows][k_pad / 32]; NaN where the group holds a non-finite value
//   sum    sum of the codes of each group of 32, same shape
//   f32    the values themselves, zero beyond k
//   bf16   the values rounded to bf16 (to nearest, ties to even; a NaN stays one), zero beyond k
//   tiles  the same values in the order in which tile products read them: [ceil(rows / 16)][k_pad /
//   32][16][32];
//          rows that do not exist are undefined
// Only what the kernel needs is set. A kernel whose `input` is kInBf16 reads bf16 alone, one of kInTiles
// reads tiles alone; the others read f32 for f32, bf16, fp8 and fp8_row, and q, scale and sum for the other
// formats.
struct Rows {
  const int8_t* q;
  const float* scale;
  const int32_t* sum;
  const float* f32;
  const uint16_t* bf16;
  const uint16_t* tiles;
  int64_t rows;
};

// y[m * ldy + 16 * b + r] = dot of row m with output row r of block b, for `blocks` consecutive blocks
// starting at w. Every element of the rows x (16 * blocks) rectangle is written, none is read.
// Definition; the exact classes of every ISA give these bits:
//   quantised: acc = 0; for g = 0 .. k_pad/32-1 ascending, with s = scale_w(row, g) * scale_a(m, g) in f32:
//                acc = fma((float)(int32 dot of group g, zero point subtracted), s, acc)
//              int4a: acc = fma((float)(int32 dot of raw codes), s, acc), then
//                     acc = fma((float)sum_a(m, g), min_w(row, g) * scale_a(m, g), acc)
//              mxfp4: the int32 dot is of twice the codes' numbers; scale_w = 2^(e - 127) * 0.5
//              nvfp4: likewise by halves h = 0, 1 of 16 k, each with its own scale:
//                     scale_w = (E4M3 scale * 2^-8) * (matrix scale * 128), then s and acc as above
//              int8a as int4a; int4z, int8z: the int32 dot is that of the codes less the group's zero
//              integer scales: scale_w = scale * (d * factor); minima: min_w = minimum * -dmin, as for int4a
//              groups of 16: by halves, as nvfp4, a minimum after each half's dot with that half's sum_a
//   f32, bf16: even k and odd k are accumulated apart by fma in ascending order; y = even + odd
//   fp8, fp8_row:  acc = 0; for each 128 k ascending: even and odd k apart by fma in ascending order, from 0,
//   of
//              the codes' numbers * 2^-8 (an E4M3's bits, moved into an fp16); then
//              acc = fma(even + odd, scale_w * 256, acc)
// scratch: kScratchBytes per calling thread, 64-byte aligned, contents undefined.
typedef void (*GemmFn)(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y,
                       int64_t ldy, void* scratch);
constexpr int64_t kScratchBytes = 1 << 19;

// Activation of an expert. gate and up are the two projections (up alone where has_gate is 0: then
// h = act(up)).
//   g = min(gate, gate_max); u = clamp(up, -up_limit, up_limit)   (infinite where there is no limit)
//   h = min(act(g), act_max) * (u + up_offset)
enum ActKind : int32_t {
  kSilu = 0,      // g * sigmoid(alpha * g)
  kGelu = 1,      // 0.5 g (1 + erf(g / sqrt 2))
  kGeluTanh = 2,  // the tanh approximation
  kRelu = 3,
  kRelu2 = 4,  // relu(g)^2
  kIdentity = 5,
  kActKinds = 6
};
struct Act {
  int32_t kind;
  int32_t has_gate;
  float alpha, gate_max, up_limit, act_max, up_offset;
};
// n values; equal to the bit on every ISA.
typedef void (*ActFn)(const float* gate, const float* up, float* h, int64_t n, const Act* act);

// Quantises one row of k values to int8 in groups of 32 and zero-fills up to k_pad:
//   amax over the group; scale = amax / 127; q = rint(x * (127 / amax)) to even;
//   all zero where amax is below kTinyAmax, whose reciprocal would overflow;
//   a group with a NaN or infinity gets q = 0, sum = 0 and scale = NaN, so that it reaches the output.
typedef void (*QuantFn)(const float* x, int64_t k, int64_t k_pad, int8_t* q, float* scale, int32_t* sum);

// Rounds one row of k values to bf16 as Rows has it and zero-fills up to k_pad.
typedef void (*RoundFn)(const float* x, int64_t k, int64_t k_pad, uint16_t* out);

// out[i] = fma(weight, y[i], out[i])
typedef void (*AxpyFn)(float weight, const float* y, float* out, int64_t n);

// What one instruction set offers, by class of rows:
//   gemv  1 to 4 rows, exact
//   gemm  any number of rows, exact
//   bulk  any number of rows; need not be exact: bf16 products with float accumulation are allowed
enum RowClass : int32_t { kGemv = 0, kGemm = 1, kBulk = 2, kRowClasses = 3 };
enum RowInput : int32_t { kInFormat = 0, kInBf16 = 1, kInTiles = 2 };
struct Kernel {
  GemmFn fn;
  const char* name;  // e.g. "int4.avx512_vnni.gemv": format, instructions really used, class
  int32_t input = kInFormat;
};
struct IsaTable {
  const char* name;  // "scalar", "avx2", "avx512", "amx"
  Kernel gemm[kFormats][kRowClasses];
  ActFn act;
  QuantFn quantize;
  AxpyFn axpy;
  RoundFn round = nullptr;
};

}  // namespace hetero
