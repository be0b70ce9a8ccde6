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
  static void own(const void* p) { __asm__ volatile("prefetchw (%0)" ::"r"(p)); }
  static void configure_full() {
    alignas(64) Config c = {};
    c.palette = 1;
    for (int t = 0; t < 8; t++) {
      c.column_bytes[t] = 64;
      c.rows[t] = kTileRows;
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
    using C = Codes<Format>;
    static constexpr bool kPlanes = C::kBits != 4 && C::kBits != 8;
    static constexpr bool kExact = Format == kMxfp4 || Format == kNvfp4;  // bf16 holds the products

   public:
    Decoder(const uint8_t* block, const Layout* layout)
        : codes_(block),
          scales_(block + layout->scale_offset),
          beside_(block + layout->min_offset),
          shift_(layout->group > kActGroup ? __builtin_ctzll(static_cast<uint64_t>(layout->group / kActGroup))
                                           : 0) {
      if constexpr (C::kTable) {
        const Table& table = table_of(layout->format);
        const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(table.codes));
        numbers_ = V::to_float(V::subi(_mm512_cvtepu8_epi32(codes), V::set1i(C::kZero)));
        if (Format == kMxfp4 || Format == kNvfp4)  // its zero has a sign
          numbers_ = _mm512_mask_mov_ps(numbers_, 1 << 8, V::set1(-0.0f));
        centre_ = V::set1(kExact ? 1.0f : C::kSuper ? kCentre * table.factor : kCentre);
      } else {
        centre_ = V::set1(kCentre);
      }
    }

    void begin(int64_t c, uint16_t* to) {
      at_ = codes_ + c * chunk_bytes<Format>();
      to_ = to;
      if constexpr (kPlanes) unpacked_ = V::planes<Format>(at_);
      const int64_t group = c >> shift_;
      if constexpr (Format == kFp8) {
        scale_[0] = scale_[1] = V::set1(float_at(scales_ + group * 4) * 256.0f);
        return;
      }
      if constexpr (Format == kFp8Row) {
        // Each row's twice, as e4m3 has two k of a row side by side: of the first half of the rows, then of
        // the second.
        const __m512 rows = V::mul(_mm512_loadu_ps(scales_), V::set1(256.0f));
        const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        scale_[0] = _mm512_permutexvar_ps(twice, rows);
        scale_[1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, V::set1i(8)), rows);
        return;
      }
      const uint16_t* super =
          reinterpret_cast<const uint16_t*>(beside_ + c / (kSuperGroup / kActGroup) * C::kSuperBytes);
      for (int part = 0; part < C::kParts; part++) {
        const uint8_t* at = scales_ + (group * C::kParts + part) * C::kPartBytes;
        __m512 scale = V::template scale<Format>(at);
        if (C::kSuper) scale = V::mul(scale, V::half(super));
        if (!kExact) scale = V::mul(scale, centre_);
        scale_[part] = scale;
        if constexpr (C::kMinimum) {
          __m512 minimum;
          if (C::kSuperMinima)
            minimum =
                V::mul(V::mul(V::bytes(at + kBlockRows), V::half(super + kBlockRows)), V::set1(-kCentre));
          else
            minimum = V::mul(V::half(reinterpret_cast<const uint16_t*>(beside_ + group * C::kBesideBytes)),
                             centre_);
          shift15_[part] = V::fma(scale, V::set1(-0x1p15f), minimum);
          shift11_[part] = V::fma(scale, V::set1(-0x1p11f), minimum);
          shift7_[part] = V::fma(scale, V::set1(-0x1p7f), minimum);
        } else if constexpr (!C::kTable) {
          const __m512 zero = C::kZeros ? V::bytes(beside_ + group * C::kBesideBytes) : V::set1(C::kZero);
          shift15_[part] = V::mul(scale, V::sub(V::set1(-0x1p15f), zero));
          shift11_[part] = V::mul(scale, V::sub(V::set1(-0x1p11f), zero));
          shift7_[part] = V::mul(scale, V::sub(V::set1(-0x1p7f), zero));
        }
      }
    }

    void step(int i) {
      uint16_t* to = to_ + 128 * i;
      const int part = C::kParts == 2 && i >= 2 ? 1 : 0;
      const __m512 scale = scale_[part];
      if constexpr (is_fp8(Format)) {
        for (int half = 0; half < 2; half++, to += 64) {
          __m512 w[4];
          V::e4m3(at_ + 128 * i + 64 * half, w);
          store_rounded(to, V::mul(w[0], scale_[0]), V::mul(w[1], scale_[1]));
          store_rounded(to + 32, V::mul(w[2], scale_[0]), V::mul(w[3], scale_[1]));
        }
      } else if constexpr (C::kTable && kPlanes) {
        for (int half = 0; half < 2; half++, to += 64) {
          const __m512i x = unpacked_.v[2 * i + half];
          store_pair(to, number<0>(x, scale), number<8>(x, scale));
          store_pair(to + 32, number<16>(x, scale), number<24>(x, scale));
        }
      } else if constexpr (C::kBytes || kPlanes) {
        const __m512 shift15 = shift15_[part];
        for (int half = 0; half < 2; half++, to += 64) {
          const __m512i x =
              kPlanes ? unpacked_.v[2 * i + half] : _mm512_loadu_si512(at_ + 128 * i + 64 * half);
          store_pair(to, value<15, 0xff00>(_mm512_slli_epi32(x, 8), scale, shift15),
                     value<15, 0xff00>(x, scale, shift15));
          store_pair(to + 32, value<15, 0xff00>(_mm512_srli_epi32(x, 8), scale, shift15),
                     value<15, 0xff00>(_mm512_srli_epi32(x, 16), scale, shift15));
        }
      } else if constexpr (C::kTable) {
        const __m512i x = _mm512_loadu_si512(at_ + 64 * i);
        // Nibbles of the first byte of a lane are k and k + 4.
        store_pair(to, number<0>(x, scale), number<8>(x, scale));
        store_pair(to + 32, number<16>(x, scale), number<24>(x, scale));
        store_pair(to + 64, number<4>(x, scale), number<12>(x, scale));
        store_pair(to + 96, number<20>(x, scale), number<28>(x, scale));
      } else {
        const __m512 shift15 = shift15_[part], shift11 = shift11_[part], shift7 = shift7_[part];
        const __m512i x = _mm512_loadu_si512(at_ + 64 * i);
        const __m512i up = _mm512_slli_epi32(x, 12), down = _mm512_srli_epi32(x, 12);
        store_pair(to, value<11, 0xf000>(up, scale, shift11), value<15, 0xf00>(x, scale, shift15));
        store_pair(to + 32, value<7, 0xf0000>(x, scale, shift7), value<11, 0xf000>(down, scale, shift11));
        store_pair(to + 64, value<7, 0xf0000>(up, scale, shift7), value<11, 0xf000>(x, scale, shift11));
        store_pair(to + 96, value<15, 0xf00>(down, scale, shift15), value<7, 0xf0000>(down, scale, shift7));
      }
    }

   private:
    // Of the code at bit Shift of a lane: its number in the table (E2M1: twice that) times the scale. vpermps
    // looks at 4 bits.
    template <int Shift>
    __m512 number(__m512i x, __m512 scale) const {
      const __m512i code = Shift == 0 ? x : _mm512_srli_epi32(x, Shift);
      return V::mul(_mm512_permutexvar_ps(code, numbers_), scale);
    }
    static void store_rounded(uint16_t* to, __m512 first, __m512 second) {
      _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }

    const uint8_t *codes_, *scales_, *beside_, *at_ = nullptr;
    const int shift_;
    uint16_t* to_ = nullptr;
    V::W unpacked_;
    __m512 numbers_, centre_, scale_[2], shift15_[2], shift11_[2], shift7_[2];
  };
};

const IsaTable kUnit = HETERO_AMX_UNIT("amx", Tiles);

}  // namespace

const IsaTable* amx_unit() { return &kUnit; }

}  // namespace hetero
