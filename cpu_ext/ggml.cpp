// Decoders of ggml's block types. Each is one struct: the block's layout in numbers, and how its bytes become
// codes, scales and extras. Floats are made from these by one function for all types, in float32 and in the
// order of operations of the types' definition; all products are exact, so that only the sum with a minimum
// rounds.
#include "ggml.h"

#include <string.h>

#include <array>

#include "bits.h"

// The loops over a block are compiled for two instruction sets and chosen by the loader. They hold integer
// operations and single products and sums, and contraction is off: results do not depend on the choice.
#define HETERO_CLONES __attribute__((target_clones("default", "avx2")))
#define HETERO_INLINE inline __attribute__((always_inline))

namespace hetero {
namespace {

constexpr uint64_t kEachByte = 0x0101010101010101u;

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  const uint32_t subnormal = float_to_bits(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  const uint32_t normal = (rest << 13) + ((rest < 0x7c00u ? 112u : 224u) << 23);
  // A mask rather than a choice: the compiler would not do a multiplication that may not be wanted.
  const uint32_t mask = rest < 0x400u ? ~0u : 0u;
  return bits_to_float(sign | (subnormal & mask) | (normal & ~mask));
}

template <class T>
inline T load(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}
inline float load_half(const uint8_t* from) { return half_to_float(load<uint16_t>(from)); }
inline bool half_is_finite(const uint8_t* from) { return (load<uint16_t>(from) & 0x7c00u) != 0x7c00u; }

// How scales, extras and codes make a value.
enum Kind {
  kHalf,      // fp16 scale: (code - zero) * scale
  kHalfMin,   // fp16 scale and minimum: code * scale + minimum
  kE8m0,      // numbers[code] * 2^(scale - 128)
  kE4m3,      // numbers[code] * (scale / 2)
  kSigned,    // of an fp16 d and signed scales: (d * scale) * (code - zero), or numbers[code] for the latter
  kUnsigned,  // likewise, with unsigned scales: (d * scale) * numbers[code]
  kSuperMin,  // of fp16 d and dmin: (d * scale) * code - dmin * minimum
};

template <int Number, int Values, int Bytes, int Group, Kind K, int Zero = 0, int GridRows = 0,
          int GridValues = 0>
struct Type {
  static constexpr int kNumber = Number, kValues = Values, kBytes = Bytes, kGroup = Group, kZero = Zero;
  static constexpr Kind kKind = K;
  static constexpr int kGroups = Values / Group;
  static constexpr int kScaleBytes = K == kHalf || K == kHalfMin || K == kSuperMin ? 2 : 1;
  static constexpr int kExtraBytes = K == kHalfMin || K == kSigned || K == kUnsigned ? 2
                                     : K == kSuperMin                                ? 4
                                                                                     : 0;
  static constexpr int kGridRows = GridRows, kGridValues = GridValues;
};

// Low nibbles of `count` bytes, then the high ones.
HETERO_INLINE void nibbles(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) {
    codes[i] = from[i] & 15;
    codes[count + i] = from[i] >> 4;
  }
}
// Pairs of bits: the lowest of 32 bytes, then the next ones, for each 32 bytes.
HETERO_INLINE void bit_pairs(const uint8_t* from, uint8_t* codes) {
  for (int half = 0; half < 2; half++)
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 32; i++) codes[128 * half + 32 * j + i] = from[32 * half + i] >> 2 * j & 3;
}

struct Q4_0 : Type<2, 32, 18, 32, kHalf, 8> {
  static constexpr const char* kName = "Q4_0";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    memcpy(scales, b, 2);
    nibbles(b + 2, 16, codes);
  }
};
struct Q4_1 : Type<3, 32, 20, 32, kHalfMin> {
  static constexpr const char* kName = "Q4_1";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(scales, b, 2);
    memcpy(extra, b + 2, 2);
    nibbles(b + 4, 16, codes);
  }
};

// Bytes of which byte i holds `flag`, a power of two, where bit i of eight is set.
HETERO_INLINE uint64_t spread_bits(uint32_t eight, int flag) {
  const uint64_t bits = eight * kEachByte & 0x8040201008040201u;
  return ((bits + 0x7f * kEachByte) >> 7 & kEachByte) * static_cast<uint64_t>(flag);
}

// Nibbles with a fifth bit each, from 32 bits.
HETERO_INLINE void five_bits(const uint8_t* high, const uint8_t* low, int add, uint8_t* codes) {
  for (int i = 0; i < 4; i++) {
    const uint64_t four = load<uint64_t>(low + i % 2 * 8) >> i / 2 * 4 & 15 * kEachByte;
    const uint64_t eight = (four | spread_bits(high[i], 16)) + static_cast<uint64_t>(add) * kEachByte;
    memcpy(codes + 8 * i, &eight, 8);
  }
}
struct Q5_0 : Type<6, 32, 22, 32, kHalf, 128> {
  static constexpr const char* kName = "Q5_0";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    memcpy(scales, b, 2);
    five_bits(b + 2, b + 6, 128 - 16, codes);
  }
};
struct Q5_1 : Type<7, 32, 24, 32, kHalfMin> {
  static constexpr const char* kName = "Q5_1";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(scales, b, 2);
    memcpy(extra, b + 2, 2);
    five_bits(b + 4, b + 8, 0, codes);
  }
};
struct Q8_0 : Type<8, 32, 34, 32, kHalf, 128> {
  static constexpr const char* kName = "Q8_0";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    memcpy(scales, b, 2);
    for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 0x80;
  }
};

struct Q2_K : Type<10, 256, 84, 16, kSuperMin> {
  static constexpr const char* kName = "Q2_K";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    for (int g = 0; g < 16; g++) {
      scales[2 * g] = b[g] & 15;
      scales[2 * g + 1] = b[g] >> 4;
    }
    bit_pairs(b + 16, codes);
    memcpy(extra, b + 80, 4);
  }
};
struct Q3_K : Type<11, 256, 110, 16, kSigned, 8> {
  static constexpr const char* kName = "Q3_K";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    // The mask's bit says that 4 is not to be subtracted.
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
          const int low = b[32 + 32 * half + i] >> 2 * j & 3, mask = b[i] >> (4 * half + j) & 1;
          codes[128 * half + 32 * j + i] = static_cast<uint8_t>(low + 4 + mask * 4);
        }
    const uint8_t *low = b + 96, *high = low + 8;
    for (int g = 0; g < 16; g++) {
      const int scale = (low[g % 8] >> g / 8 * 4 & 15) | (high[g % 4] >> g / 4 * 2 & 3) << 4;
      scales[g] = static_cast<uint8_t>(scale - 32);
    }
    memcpy(extra, b + 108, 2);
  }
};

// The eight scales and minima of 6 bits in the 12 bytes of Q4_K and Q5_K.
HETERO_INLINE void six_bits(const uint8_t* from, uint8_t* scales) {
  for (int i = 0; i < 4; i++) {
    scales[2 * i] = from[i] & 63;
    scales[2 * i + 1] = from[4 + i] & 63;
    scales[8 + 2 * i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 6) << 4);
    scales[8 + 2 * i + 1] = static_cast<uint8_t>(from[8 + i] >> 4 | (from[4 + i] >> 6) << 4);
  }
}
struct Q4_K : Type<12, 256, 144, 32, kSuperMin> {
  static constexpr const char* kName = "Q4_K";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 4);
    six_bits(b + 4, scales);
    for (int i = 0; i < 4; i++) nibbles(b + 16 + 32 * i, 32, codes + 64 * i);
  }
};
struct Q5_K : Type<13, 256, 176, 32, kSuperMin> {
  static constexpr const char* kName = "Q5_K";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 4);
    six_bits(b + 4, scales);
    for (int i = 0; i < 4; i++) nibbles(b + 48 + 32 * i, 32, codes + 64 * i);
    for (int j = 0; j < 8; j++)
      for (int i = 0; i < 32; i++)
        codes[32 * j + i] = static_cast<uint8_t>(codes[32 * j + i] | (b[16 + i] >> j & 1) << 4);
  }
};
struct Q6_K : Type<14, 256, 210, 16, kSigned, 128> {
  static constexpr const char* kName = "Q6_K";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    const uint8_t* high = b + 128;
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
          const int low = b[64 * half + 32 * (j & 1) + i] >> (j >> 1) * 4 & 15;
          const int code = low | (high[32 * half + i] >> 2 * j & 3) << 4;
          codes[128 * half + 32 * j + i] = static_cast<uint8_t>(code + 128 - 32);
        }
    memcpy(scales, b + 192, 16);
    memcpy(extra, b + 208, 2);
  }
};

struct IQ4_NL : Type<20, 32, 18, 32, kHalf> {
  static constexpr const char* kName = "IQ4_NL";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    memcpy(scales, b, 2);
    nibbles(b + 2, 16, codes);
  }
};
struct IQ4_XS : Type<23, 256, 136, 32, kSigned> {
  static constexpr const char* kName = "IQ4_XS";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    const int high = load<uint16_t>(b + 2);
    for (int g = 0; g < 8; g++) {
      const int scale = (b[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
      scales[g] = static_cast<uint8_t>(scale - 32);
      nibbles(b + 8 + 16 * g, 16, codes + 32 * g);
    }
  }
};

// E2M1 has two zeros; here both are the positive one.
HETERO_INLINE void e2m1(const uint8_t* from, int count, uint8_t* codes) {
  auto one_zero = [](int code) { return static_cast<uint8_t>(code == 8 ? 0 : code); };
  for (int i = 0; i < count; i++) {
    codes[i] = one_zero(from[i] & 15);
    codes[count + i] = one_zero(from[i] >> 4);
  }
}
struct MXFP4 : Type<39, 32, 17, 32, kE8m0> {
  static constexpr const char* kName = "MXFP4";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    scales[0] = b[0];
    e2m1(b + 1, 16, codes);
  }
};
struct NVFP4 : Type<kNvfp4Number, 64, 36, 16, kE4m3> {
  static constexpr const char* kName = "NVFP4";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    for (int g = 0; g < 4; g++) {
      // Scales have no sign; 0x7f stands for zero. What is left, 0xff, is 480, which E4M3 has not.
      scales[g] = b[g] == 0x7f ? 0 : b[g] == 0xff ? 0xff : b[g] & 0x7f;
      e2m1(b + 4 + 8 * g, 8, codes + 16 * g);
    }
  }
};

// Numbers -1, 0 and 1 with one scale, as int4 with groups of 128.
struct TQ1_0 : Type<34, 256, 54, 128, kHalf, 8> {
  static constexpr const char* kName = "TQ1_0";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    // Digits to the base of 3, as fractions of 256: what a product with a power of 3 carries is left out.
    auto digits = [&](const uint8_t* from, int bytes, int count) {
      for (int j = 0, power = 1; j < count; j++, power *= 3)
        for (int i = 0; i < bytes; i++) {
          const int fraction = from[i] * power & 255;
          *codes++ = static_cast<uint8_t>((fraction * 3 >> 8) + 7);
        }
    };
    digits(b, 32, 5);
    digits(b + 32, 16, 5);
    digits(b + 48, 4, 4);
    memcpy(scales, b + 52, 2);
    memcpy(scales + 2, b + 52, 2);
  }
};
struct TQ2_0 : Type<35, 256, 66, 128, kHalf, 8> {
  static constexpr const char* kName = "TQ2_0";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t*, uint8_t* codes, uint8_t* scales,
                                   uint8_t*) {
    bit_pairs(b, codes);
    for (int i = 0; i < 256; i++) codes[i] = static_cast<uint8_t>(codes[i] + 7);
    memcpy(scales, b + 64, 2);
    memcpy(scales + 2, b + 64, 2);
  }
};

// Bit 3 in each of eight codes of a grid that is negative, by eight signs; and by seven, whose eighth makes
// their number even.
struct Signs {
  uint64_t eight[256], seven[128];
};
constexpr Signs make_signs() {
  Signs all = {};
  for (int signs = 0; signs < 256; signs++) {
    int count = 0;
    for (int i = 0; i < 8; i++) {
      count += signs >> i & 1;
      all.eight[signs] |= static_cast<uint64_t>(signs >> i & 1) << (8 * i + 3);
    }
    if (count % 2 == 0) all.seven[signs & 127] = all.eight[signs];
  }
  return all;
}
constexpr Signs kSigns = make_signs();

HETERO_INLINE void store_eight(uint64_t codes, uint64_t signs, uint8_t* to) {
  const uint64_t eight = codes | signs;
  memcpy(to, &eight, 8);
}
HETERO_INLINE uint8_t odd(uint32_t number) { return static_cast<uint8_t>(2 * number + 1); }

struct IQ2_XXS : Type<16, 256, 66, 32, kUnsigned, 0, 256, 8> {
  static constexpr const char* kName = "IQ2_XXS";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    for (int g = 0; g < 8; g++) {
      const uint8_t* rows = b + 2 + 8 * g;
      const uint32_t rest = load<uint32_t>(rows + 4);
      scales[g] = odd(rest >> 28);
      for (int i = 0; i < 4; i++)
        store_eight(grid[rows[i]], kSigns.seven[rest >> 7 * i & 127u], codes + 32 * g + 8 * i);
    }
  }
};
struct IQ2_XS : Type<17, 256, 74, 16, kUnsigned, 0, 512, 8> {
  static constexpr const char* kName = "IQ2_XS";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    for (int g = 0; g < 16; g++) {
      for (int i = 0; i < 2; i++) {
        const uint32_t q = load<uint16_t>(b + 2 + 4 * g + 2 * i);
        store_eight(grid[q & 511u], kSigns.seven[q >> 9], codes + 16 * g + 8 * i);
      }
      scales[g] = odd(b[66 + g / 2] >> g % 2 * 4 & 15u);
    }
  }
};
struct IQ2_S : Type<22, 256, 82, 16, kUnsigned, 0, 1024, 8> {
  static constexpr const char* kName = "IQ2_S";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    const uint8_t *rows = b + 2, *signs = b + 34, *high = b + 66;
    for (int g = 0; g < 8; g++) {
      for (int i = 0; i < 4; i++)
        store_eight(grid[rows[4 * g + i] | (high[g] >> 2 * i & 3) << 8], kSigns.eight[signs[4 * g + i]],
                    codes + 32 * g + 8 * i);
      scales[2 * g] = odd(b[74 + g] & 15u);
      scales[2 * g + 1] = odd(b[74 + g] >> 4);
    }
  }
};
struct IQ3_XXS : Type<18, 256, 98, 32, kUnsigned, 0, 256, 4> {
  static constexpr const char* kName = "IQ3_XXS";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    for (int g = 0; g < 8; g++) {
      const uint8_t* rows = b + 2 + 8 * g;
      const uint32_t rest = load<uint32_t>(b + 66 + 4 * g);
      scales[g] = odd(rest >> 28);
      for (int i = 0; i < 4; i++)
        store_eight(grid[rows[2 * i]] | grid[rows[2 * i + 1]] << 32, kSigns.seven[rest >> 7 * i & 127u],
                    codes + 32 * g + 8 * i);
    }
  }
};
struct IQ3_S : Type<21, 256, 110, 32, kUnsigned, 0, 512, 4> {
  static constexpr const char* kName = "IQ3_S";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    const uint8_t *rows = b + 2, *high = b + 66, *signs = b + 74;
    for (int g = 0; g < 8; g++) {
      for (int i = 0; i < 4; i++) {
        const int at = 8 * g + 2 * i, bits = high[g] >> 2 * i;
        store_eight(grid[rows[at] | (bits & 1) << 8] | grid[rows[at + 1] | (bits & 2) << 7] << 32,
                    kSigns.eight[signs[4 * g + i]], codes + 32 * g + 8 * i);
      }
      scales[g] = odd(b[106 + g / 2] >> g % 2 * 4 & 15u);
    }
  }
};
struct IQ1_S : Type<19, 256, 50, 32, kUnsigned, 0, 2048, 8> {
  static constexpr const char* kName = "IQ1_S";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    memcpy(extra, b, 2);
    for (int g = 0; g < 8; g++) {
      const uint32_t high = load<uint16_t>(b + 34 + 2 * g);
      scales[g] = odd(high >> 12 & 7u);
      for (int i = 0; i < 4; i++)
        store_eight(grid[static_cast<int>(b[2 + 4 * g + i] | (high >> 3 * i & 7u) << 8)],
                    high & 0x8000u ? 8 * kEachByte : 0, codes + 32 * g + 8 * i);
    }
  }
};
struct IQ1_M : Type<29, 256, 56, 16, kUnsigned, 0, 2048, 8> {
  static constexpr const char* kName = "IQ1_M";
  static HETERO_INLINE void decode(const uint8_t* b, const uint64_t* grid, uint8_t* codes, uint8_t* scales,
                                   uint8_t* extra) {
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
      const uint32_t four = load<uint16_t>(b + 48 + 2 * i);
      d |= (four >> 12) << 4 * i;
      for (int j = 0; j < 4; j++) scales[4 * i + j] = odd(four >> 3 * j & 7u);
    }
    const uint16_t half = static_cast<uint16_t>(d);
    memcpy(extra, &half, 2);
    for (int g = 0; g < 16; g++) {
      const int high = b[32 + g];
      store_eight(grid[b[2 * g] | (high & 7) << 8], high & 8 ? 8 * kEachByte : 0, codes + 16 * g);
      store_eight(grid[b[2 * g + 1] | (high >> 4 & 7) << 8], high & 128 ? 8 * kEachByte : 0,
                  codes + 16 * g + 8);
    }
  }
};

template <class T>
constexpr bool has_numbers() {
  return T::kKind == kE8m0 || T::kKind == kE4m3 || T::kKind == kUnsigned ||
         (T::kZero == 0 && (T::kKind == kHalf || T::kKind == kSigned));
}

// Factor and subtrahend of each group, as floats.
template <class T>
HETERO_INLINE void factors(const uint8_t* scales, const uint8_t* extra, float* factor, float* minimum) {
  for (int g = 0; g < T::kGroups; g++) {
    if constexpr (T::kKind == kHalf) factor[g] = load_half(scales + 2 * g);
    if constexpr (T::kKind == kHalfMin) {
      factor[g] = load_half(scales + 2 * g);
      minimum[g] = -load_half(extra + 2 * g);
    }
    if constexpr (T::kKind == kE8m0)
      factor[g] = bits_to_float(scales[g] < 2 ? 0x00200000u << scales[g] : (scales[g] - 1u) << 23);
    if constexpr (T::kKind == kE4m3)
      factor[g] = half_to_float(static_cast<uint16_t>((scales[g] & 0x7f) << 7)) * 128.0f;
    if constexpr (T::kKind == kSigned)
      factor[g] = load_half(extra) * static_cast<float>(static_cast<int8_t>(scales[g]));
    if constexpr (T::kKind == kUnsigned) factor[g] = load_half(extra) * static_cast<float>(scales[g]);
    if constexpr (T::kKind == kSuperMin) {
      factor[g] = load_half(extra) * static_cast<float>(scales[2 * g]);
      minimum[g] = load_half(extra + 2) * static_cast<float>(scales[2 * g + 1]);
    }
  }
}

template <class T>
HETERO_INLINE bool is_finite(const uint8_t* scales, const uint8_t* extra) {
  bool finite = true;
  if constexpr (T::kKind == kHalf || T::kKind == kHalfMin)
    for (int g = 0; g < T::kGroups; g++) finite &= half_is_finite(scales + 2 * g);
  if constexpr (T::kKind == kE8m0 || T::kKind == kE4m3)
    for (int g = 0; g < T::kGroups; g++) finite &= scales[g] != 255;
  for (int i = 0; i < T::kExtraBytes; i += 2) finite &= half_is_finite(extra + i);
  return finite;
}

template <class T>
HETERO_INLINE bool codes_of(const GgmlTables& tables, const uint8_t* from, int64_t blocks, uint8_t* codes,
                            uint8_t* scales, uint8_t* extra) {
  bool finite = true;
  for (int64_t i = 0; i < blocks; i++) {
    T::decode(from, tables.grid, codes, scales, extra);
    finite &= is_finite<T>(scales, extra);
    from += T::kBytes;
    codes += T::kValues;
    scales += T::kGroups * T::kScaleBytes;
    extra += T::kExtraBytes;
  }
  return finite;
}

template <class T>
HETERO_INLINE void floats_of(const GgmlTables& tables, const uint8_t* from, int64_t blocks, float* out) {
  alignas(64) uint8_t codes[T::kValues];
  uint8_t scales[T::kGroups * T::kScaleBytes], extra[T::kExtraBytes + 1];
  float factor[T::kGroups], minimum[T::kGroups];
  for (int64_t i = 0; i < blocks; i++, from += T::kBytes) {
    T::decode(from, tables.grid, codes, scales, extra);
    factors<T>(scales, extra, factor, minimum);
    for (int g = 0; g < T::kGroups; g++, out += T::kGroup)
      for (int j = 0; j < T::kGroup; j++) {
        const int code = codes[g * T::kGroup + j];
        float number = 0;
        if constexpr (has_numbers<T>())
          number = tables.numbers[code];
        else
          number = static_cast<float>(code - T::kZero);
        out[j] = factor[g] * number;
        if constexpr (T::kKind == kHalfMin || T::kKind == kSuperMin) out[j] -= minimum[g];
      }
  }
}

// Types without blocks: their numbers, and a value of each.
constexpr int32_t kF32Number = 0, kF16Number = 1, kBf16Number = 30;

template <class T, class Convert>
HETERO_INLINE void widen_values(const uint8_t* from, int64_t count, float* out, Convert convert) {
  for (int64_t i = 0; i < count; i++) out[i] = convert(load<T>(from + i * static_cast<int64_t>(sizeof(T))));
}

template <class... T>
struct List {};
using BlockTypes = List<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, IQ3_XXS,
                        IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M, MXFP4, NVFP4, TQ1_0, TQ2_0>;

template <class... T>
constexpr auto describe(List<T...>) {
  return std::array<GgmlType, 3 + sizeof...(T)>{
      {{kF32Number, "F32", 1, 4, 0, 0, 0, 0, 0, false},
       {kF16Number, "F16", 1, 2, 0, 0, 0, 0, 0, false},
       {kBf16Number, "BF16", 1, 2, 0, 0, 0, 0, 0, false},
       {T::kNumber, T::kName, T::kValues, T::kBytes, T::kGroup, T::kScaleBytes, T::kExtraBytes, T::kGridRows,
        T::kGridValues, has_numbers<T>()}...}};
}
constexpr auto kTypes = describe(BlockTypes());

template <class... T>
HETERO_INLINE bool codes_of_any(List<T...>, int32_t number, const GgmlTables& tables, const uint8_t* from,
                                int64_t blocks, uint8_t* codes, uint8_t* scales, uint8_t* extra) {
  bool finite = false;
  ((number == T::kNumber && (finite = codes_of<T>(tables, from, blocks, codes, scales, extra), true)) || ...);
  return finite;
}

template <class... T>
HETERO_INLINE void floats_of_any(List<T...>, int32_t number, const GgmlTables& tables, const uint8_t* from,
                                 int64_t blocks, float* out) {
  ((number == T::kNumber && (floats_of<T>(tables, from, blocks, out), true)) || ...);
}

HETERO_CLONES bool to_codes(int32_t number, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                            uint8_t* codes, uint8_t* scales, uint8_t* extra) {
  return codes_of_any(BlockTypes(), number, tables, from, blocks, codes, scales, extra);
}

HETERO_CLONES void to_floats(int32_t number, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                             float* out) {
  switch (number) {
    case kF32Number:
      memcpy(out, from, static_cast<size_t>(blocks) * 4);
      return;
    case kF16Number:
      return widen_values<uint16_t>(from, blocks, out, [](uint16_t x) { return half_to_float(x); });
    case kBf16Number:
      return widen_values<uint16_t>(from, blocks, out,
                                    [](uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); });
    default:
      return floats_of_any(BlockTypes(), number, tables, from, blocks, out);
  }
}

}  // namespace

const GgmlType* ggml_types(int64_t* count) {
  *count = static_cast<int64_t>(kTypes.size());
  return kTypes.data();
}

const GgmlType* ggml_type(int32_t number) {
  for (const GgmlType& type : kTypes)
    if (type.number == number) return &type;
  return nullptr;
}

bool ggml_codes(const GgmlType& type, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                uint8_t* codes, uint8_t* scales, uint8_t* extra) {
  return to_codes(type.number, tables, from, blocks, codes, scales, extra);
}

void ggml_floats(const GgmlType& type, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                 float* out) {
  to_floats(type.number, tables, from, blocks, out);
}

}  // namespace hetero
