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
  static void configure_pair(int64_t first, int64_t second) {
    alignas(64) Config c = {};
    c.palette = 1;
    for (int t = 0; t < 8; t++) {
      const int64_t rows = t > 5 ? 16 : t == 0 || t == 1 || t == 4 ? first : second;
      c.column_bytes[t] = rows == 0 ? 0 : 64;
      c.rows[t] = static_cast<uint8_t>(rows);
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
  // Codes become floats without a conversion: where a code's bits land in the mantissa of a power of two, the
  // float is that power plus the code, and one fma takes the power and the zero point off and scales. Of int4
  // the nibbles at bits 8, 12 and 16 do so for 2^15, 2^11 and 2^7; shifts by 12 bring the others there.
  template <int Exponent, uint32_t Mask>
  static __m512 value(__m512i codes, __m512 scale, __m512 shift) {
    const __m512i bits = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(Mask),
                                                   _mm512_set1_epi32((127 + Exponent) << 23), 0xea);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(bits), scale, shift);
  }
  // The upper halves of both, truncated: a row of the tile, low half first.
  static void store_pair(uint16_t* to, __m512 low, __m512 high) {
    const __m512i lanes = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    _mm512_store_si512(to, _mm512_mask_shuffle_epi8(_mm512_castps_si512(high), 0x3333333333333333ull,
                                                    _mm512_castps_si512(low), lanes));
  }
  template <int Format>
  static void decode(const uint8_t* block, const Layout* layout, int64_t c, uint16_t* to) {
    const int64_t at = c * 32 / layout->group * kBlockRows;
    const __m512 scale = _mm512_mul_ps(
        V::half(reinterpret_cast<const uint16_t*>(block + layout->scale_offset) + at), V::set1(kCentre));
    const uint8_t* codes = block + c * Codes<Format>::kGroupBytes;
    auto shift = [&](float power) {  // what takes off the power and the zero point
      const float zero = Format == kInt8 ? 128 : Format == kInt4 ? 8 : 0;
      if (Format != kInt4a) return V::mul(scale, V::set1(-power - zero));
      const __m512 minimum = V::half(reinterpret_cast<const uint16_t*>(block + layout->min_offset) + at);
      return V::fma(scale, V::set1(-power), V::mul(minimum, V::set1(kCentre)));
    };
    const __m512 shift15 = shift(0x1p15f);
    if (Format == kInt8) {
      for (int i = 0; i < 8; i++, to += 64) {
        const __m512i x = _mm512_loadu_si512(codes + 64 * i);
        store_pair(to, value<15, 0xff00>(_mm512_slli_epi32(x, 8), scale, shift15),
                   value<15, 0xff00>(x, scale, shift15));
        store_pair(to + 32, value<15, 0xff00>(_mm512_srli_epi32(x, 8), scale, shift15),
                   value<15, 0xff00>(_mm512_srli_epi32(x, 16), scale, shift15));
      }
      return;
    }
    const __m512 shift7 = shift(0x1p7f), shift11 = shift(0x1p11f);
    for (int i = 0; i < 4; i++, to += 128) {
      const __m512i x = _mm512_loadu_si512(codes + 64 * i);
      const __m512i up = _mm512_slli_epi32(x, 12), down = _mm512_srli_epi32(x, 12);
      store_pair(to, value<11, 0xf000>(up, scale, shift11), value<15, 0xf00>(x, scale, shift15));
      store_pair(to + 32, value<7, 0xf0000>(x, scale, shift7), value<11, 0xf000>(down, scale, shift11));
      store_pair(to + 64, value<7, 0xf0000>(up, scale, shift7), value<11, 0xf000>(x, scale, shift11));
      store_pair(to + 96, value<15, 0xf00>(down, scale, shift15), value<7, 0xf0000>(down, scale, shift7));
    }
  }
};

const IsaTable kUnit = HETERO_AMX_UNIT("amx", Tiles);

}  // namespace

const IsaTable* amx_unit() { return &kUnit; }

}  // namespace hetero
