// The tile kernels on the hardware's tiles. Whoever calls them must hold the permission for tile data.
#include "amx_kernels.h"
#include "avx512_policy.h"
#include "tables.h"

namespace hetero {
namespace {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64, "the operand of ldtilecfg");

// By inline assembly: the intrinsics of gcc 12 take literal tile numbers only, and its loads do not tell the
// compiler that they read memory.
struct Tiles {
  using V = Avx512;

  static void configure(int64_t rows, int64_t k_bytes) {
    alignas(64) Config c = {};
    c.palette = 1;
    for (int t = 0; t < 8; t++) {
      c.column_bytes[t] = static_cast<uint16_t>(t < 4 || t == 7 ? 64 : k_bytes);
      c.rows[t] = static_cast<uint8_t>(t == 7 ? k_bytes / 4 : t == 2 || t == 3 || t == 6 ? rows : 16);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
  }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int Tile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Tile>
  static void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  static void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Result, int A, int B>
  static void dot_ss() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Result), "i"(A), "i"(B));
  }
  template <int Result, int A, int B>
  static void dot_su() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Result), "i"(A), "i"(B));
  }
  template <int Result, int A, int B>
  static void dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Result), "i"(A), "i"(B));
  }
  // The codes of 32 k; less the zero point where the format has one.
  template <int Format>
  static void unpack(const uint8_t* w, uint8_t* to) {
    const Avx512::W codes = Avx512::decode<Format>(w);
    for (int i = 0; i < 8; i++) {
      __m512i value = codes.v[i];
      if (Format == kInt8) value = _mm512_xor_si512(value, _mm512_set1_epi8(static_cast<char>(0x80)));
      if (Format != kInt8 && Codes<Format>::kZero)
        value = _mm512_sub_epi8(value, _mm512_set1_epi8(static_cast<char>(Codes<Format>::kZero)));
      _mm512_store_si512(to + 64 * i, value);
    }
  }
  static void round(const float* from, int64_t n, uint16_t* to) {
    for (int64_t i = 0; i < n; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  }
};

const IsaTable kUnit = HETERO_AMX_UNIT("amx", Tiles);

}  // namespace

const IsaTable* amx_unit() { return &kUnit; }

}  // namespace hetero
