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
    const int64_t rows[5] = {first, second ? second : first, first, second, kTileRows};
    for (int t = 0; t < 5; t++) {
      c.column_bytes[t] = rows[t] == 0 ? 0 : 64;
      c.rows[t] = static_cast<uint8_t>(rows[t]);
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
    const Avx512::W codes = Avx512::decode<Format>(w, Avx512::lookup(table_of(Format)));
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
  class Decoder {
   public:
    Decoder(const uint8_t* block, const Layout* layout)
        : codes_(block),
          scales_(block + layout->scale_offset),
          minima_(block + layout->min_offset),
          shift_(layout->group > kActGroup ? __builtin_ctzll(static_cast<uint64_t>(layout->group / kActGroup))
                                           : 0) {}

    void begin(int64_t c, uint16_t* to) {
      at_ = codes_ + c * chunk_bytes<Format>();
      to_ = to;
      const int64_t group = c >> shift_;
      if constexpr (Format == kFp8) {
        scale_ = V::set1(float_at(scales_ + group * 4) * 256.0f);
      } else if constexpr (Format == kNvfp4) {
        scale_ = V::template scale<Format>(scales_ + 2 * group * kBlockRows);
        second_ = V::template scale<Format>(scales_ + (2 * group + 1) * kBlockRows);
      } else {
        constexpr int64_t kBytes = kBlockRows * Codes<Format>::kScaleBytes;
        scale_ = V::template scale<Format>(scales_ + group * kBytes);
        if (Format != kMxfp4) scale_ = V::mul(scale_, V::set1(kCentre));
      }
      if constexpr (Format == kInt8 || Format == kInt4) {
        const float zero = Codes<Format>::kZero;
        shift15_ = V::mul(scale_, V::set1(-0x1p15f - zero));
        shift11_ = V::mul(scale_, V::set1(-0x1p11f - zero));
        shift7_ = V::mul(scale_, V::set1(-0x1p7f - zero));
      }
      if constexpr (Format == kInt4a) {
        const uint16_t* minima = reinterpret_cast<const uint16_t*>(minima_) + group * kBlockRows;
        const __m512 minimum = V::mul(V::half(minima), V::set1(kCentre));
        shift15_ = V::fma(scale_, V::set1(-0x1p15f), minimum);
        shift11_ = V::fma(scale_, V::set1(-0x1p11f), minimum);
        shift7_ = V::fma(scale_, V::set1(-0x1p7f), minimum);
      }
    }

    void step(int i) {
      uint16_t* to = to_ + 128 * i;
      if constexpr (Format == kInt8) {
        for (int half = 0; half < 2; half++, to += 64) {
          const __m512i x = _mm512_loadu_si512(at_ + 128 * i + 64 * half);
          store_pair(to, value<15, 0xff00>(_mm512_slli_epi32(x, 8), scale_, shift15_),
                     value<15, 0xff00>(x, scale_, shift15_));
          store_pair(to + 32, value<15, 0xff00>(_mm512_srli_epi32(x, 8), scale_, shift15_),
                     value<15, 0xff00>(_mm512_srli_epi32(x, 16), scale_, shift15_));
        }
      } else if constexpr (Format == kFp8) {
        for (int half = 0; half < 2; half++, to += 64) {
          __m512 w[4];
          V::e4m3(at_ + 128 * i + 64 * half, w);
          store_rounded(to, V::mul(w[0], scale_), V::mul(w[1], scale_));
          store_rounded(to + 32, V::mul(w[2], scale_), V::mul(w[3], scale_));
        }
      } else if constexpr (Codes<Format>::kTable) {
        const __m512i x = _mm512_loadu_si512(at_ + 64 * i);
        const __m512 scale = Format == kNvfp4 && i >= 2 ? second_ : scale_;
        // Nibbles of the first byte of a lane are k and k + 4.
        store_pair(to, number<0>(x, scale), number<8>(x, scale));
        store_pair(to + 32, number<16>(x, scale), number<24>(x, scale));
        store_pair(to + 64, number<4>(x, scale), number<12>(x, scale));
        store_pair(to + 96, number<20>(x, scale), number<28>(x, scale));
      } else {
        const __m512i x = _mm512_loadu_si512(at_ + 64 * i);
        const __m512i up = _mm512_slli_epi32(x, 12), down = _mm512_srli_epi32(x, 12);
        store_pair(to, value<11, 0xf000>(up, scale_, shift11_), value<15, 0xf00>(x, scale_, shift15_));
        store_pair(to + 32, value<7, 0xf0000>(x, scale_, shift7_), value<11, 0xf000>(down, scale_, shift11_));
        store_pair(to + 64, value<7, 0xf0000>(up, scale_, shift7_), value<11, 0xf000>(x, scale_, shift11_));
        store_pair(to + 96, value<15, 0xf00>(down, scale_, shift15_),
                   value<7, 0xf0000>(down, scale_, shift7_));
      }
    }

   private:
    // Of the code at bit Shift of a lane: twice the number of E2M1 times the scale. vpermps looks at 4 bits.
    template <int Shift>
    static __m512 number(__m512i x, __m512 scale) {
      const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
      const __m512i code = Shift == 0 ? x : _mm512_srli_epi32(x, Shift);
      return V::mul(_mm512_permutexvar_ps(code, numbers), scale);
    }
    static void store_rounded(uint16_t* to, __m512 first, __m512 second) {
      _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }

    const uint8_t *codes_, *scales_, *minima_, *at_ = nullptr;
    const int shift_;
    uint16_t* to_ = nullptr;
    __m512 scale_, second_, shift15_, shift11_, shift7_;
  };
};

const IsaTable kUnit = HETERO_AMX_UNIT("amx", Tiles);

}  // namespace

const IsaTable* amx_unit() { return &kUnit; }

}  // namespace hetero
