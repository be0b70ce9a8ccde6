// AVX2 with FMA and F16C: a block in two halves of 8 rows.
#include <immintrin.h>

#include "act.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kGemvBlocks = 2, kMaxSums = 4;
  static constexpr int kFloatRows = 2, kFloatUnits = 2;
  using F = __m256;
  using I = __m256i;
  struct W {
    __m256i v[8];
  };
  using Lookup = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
  static F where_greater(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I bits(F a) { return _mm256_castps_si256(a); }
  static F from_bits(I a) { return _mm256_castsi256_ps(a); }
  static I set1i(int32_t x) { return _mm256_set1_epi32(x); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I half_down(I a) { return _mm256_srai_epi32(a, 1); }
  static I shift_to_exponent(I a) { return _mm256_slli_epi32(a, 23); }

  static F half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I raw(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static F bf_even(const uint8_t* p) { return from_bits(_mm256_slli_epi32(raw(p), 16)); }
  static F bf_odd(const uint8_t* p) {
    return from_bits(_mm256_and_si256(raw(p), _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }

  static I half_bits(I words) {  // E4M3 bits in the high bytes of words -> fp16 bits
    return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
  static void e4m3(const uint8_t* p, F* w) {
    const I step = raw(p), first = _mm256_setr_epi32(0x01800080, 0x05800480, 0x09800880, 0x0d800c80,
                                                     0x01800080, 0x05800480, 0x09800880, 0x0d800c80);
    const I second = _mm256_add_epi8(first, _mm256_set1_epi16(0x0200));
    const I a = half_bits(_mm256_shuffle_epi8(step, first)), b = half_bits(_mm256_shuffle_epi8(step, second));
    w[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
    w[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    w[2] = _mm256_cvtph_ps(_mm256_castsi256_si128(b));
    w[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1));
  }
  static F pair(const float* p) {
    double both;
    memcpy(&both, p, 8);
    return _mm256_castpd_ps(_mm256_set1_pd(both));
  }
  static F fold(F first, F second) {
    // The shuffles work within 128-bit lanes: rows 0 1 4 5 2 3 6 7.
    const F sums = add(_mm256_shuffle_ps(first, second, 0x88), _mm256_shuffle_ps(first, second, 0xdd));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
  }
  static F bytes(const uint8_t* p) {
    return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  template <int Format>
  static F scale(const uint8_t* p) {
    constexpr Scale kScale = Codes<Format>::kOf.scale;
    if (kScale != Scale::kHalf) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      if (kScale == Scale::kUnsigned) return to_float(_mm256_cvtepu8_epi32(bytes));
      if (kScale == Scale::kSigned) return to_float(_mm256_cvtepi8_epi32(bytes));
      if (kScale == Scale::kE8m0) {
        const I power = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
        return mul(from_bits(_mm256_max_epi32(power, _mm256_set1_epi32(0x00400000))), set1(0.5f));
      }
      const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
      return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
    }
    return half(reinterpret_cast<const uint16_t*>(p));
  }
  static void half_sums(const int8_t* a, int32_t* sums) {
    const I shifted = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const I*>(a)),
                                       _mm256_set1_epi8(static_cast<char>(0x80)));
    const I eights = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
    const I both = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(both)) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(both, 1)) - 16 * 128;
  }

  // Codes of 8 bits become signed, less 128, in the code or its table; the others stay unsigned.
  static I flipped(I codes) { return _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))); }
  static Lookup lookup(const Table& table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.codes)));
  }
  template <int Format>
  static I number(I code, Lookup table) {
    if (!Codes<Format>::kTable) return code;
    return _mm256_shuffle_epi8(sums_fit<Format>(1) ? table : flipped(table), code);
  }
  // The bits of Mask of `bits`, beside those of `others`.
  template <uint8_t Mask>
  static I joined(I bits, I others) {
    return _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi8(static_cast<char>(Mask))), others);
  }
  // Codes of 2, 3, 5 and 6 bits, see kernels.h. `moved` brings a plane's bit From to bit To of a byte.
  template <int From, int To>
  static I moved(I x) {
    if constexpr (From > To) return _mm256_srli_epi16(x, From - To);
    if constexpr (From < To) return _mm256_slli_epi16(x, To - From);
    return x;
  }
  template <int To, int Step>
  static void add_pairs(const uint8_t* p, W& r) {  // a plane of 2 bits
    constexpr uint8_t kMask = 3 << To;
    const I x = raw(p + Step / 4 * 64);
    r.v[Step] = joined<kMask>(moved<0, To>(x), r.v[Step]);
    r.v[Step + 1] = joined<kMask>(moved<2, To>(x), r.v[Step + 1]);
    r.v[Step + 2] = joined<kMask>(moved<4, To>(x), r.v[Step + 2]);
    r.v[Step + 3] = joined<kMask>(moved<6, To>(x), r.v[Step + 3]);
  }
  template <int To>
  static void add_bits(const uint8_t* p, W& r) {  // a plane of 1 bit
    constexpr uint8_t kMask = 1 << To;
    const I x = raw(p);
    r.v[0] = joined<kMask>(moved<0, To>(x), r.v[0]);
    r.v[1] = joined<kMask>(moved<1, To>(x), r.v[1]);
    r.v[2] = joined<kMask>(moved<2, To>(x), r.v[2]);
    r.v[3] = joined<kMask>(moved<3, To>(x), r.v[3]);
    r.v[4] = joined<kMask>(moved<4, To>(x), r.v[4]);
    r.v[5] = joined<kMask>(moved<5, To>(x), r.v[5]);
    r.v[6] = joined<kMask>(moved<6, To>(x), r.v[6]);
    r.v[7] = joined<kMask>(moved<7, To>(x), r.v[7]);
  }
  template <int Format>
  static W planes(const uint8_t* p) {
    constexpr int kBits = Codes<Format>::kBits, kLow = kBits > 4 ? 4 : 2;
    W r;
    if constexpr (kLow == 4) {
      const I low = _mm256_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = raw(p + 64 * i);
        r.v[2 * i] = _mm256_and_si256(both, low);
        r.v[2 * i + 1] = _mm256_and_si256(moved<4, 0>(both), low);
      }
    } else {
      for (int i = 0; i < 8; i++) r.v[i] = _mm256_setzero_si256();
      add_pairs<0, 0>(p, r);
      add_pairs<0, 4>(p, r);
    }
    const uint8_t* high = p + 64 * kLow;
    if constexpr (kBits == 6) {
      add_pairs<4, 0>(high, r);
      add_pairs<4, 4>(high, r);
    }
    if constexpr (kBits % 2) add_bits<kLow>(high, r);
    return r;
  }
  template <int Format>
  static W decode(const uint8_t* p, Lookup table) {
    W r;
    if constexpr (!Codes<Format>::kBytes && Codes<Format>::kBits != 4) {
      r = planes<Format>(p);
      for (int i = 0; i < 8; i++) r.v[i] = number<Format>(r.v[i], table);
      return r;
    }
    if (Codes<Format>::kBytes) {
      for (int i = 0; i < 8; i++) r.v[i] = sums_fit<Format>(1) ? raw(p + 64 * i) : flipped(raw(p + 64 * i));
    } else {
      const I low = _mm256_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = raw(p + 64 * i);
        r.v[2 * i] = number<Format>(_mm256_and_si256(both, low), table);
        r.v[2 * i + 1] = number<Format>(_mm256_and_si256(_mm256_srli_epi16(both, 4), low), table);
      }
    }
    return r;
  }
  static I four(const int8_t* a) {
    int32_t bytes;
    memcpy(&bytes, a, 4);
    return _mm256_set1_epi32(bytes);
  }
  // vpmaddubsw saturates at 32767. int4: the sums of a whole group stay below 8 * 2 * 15 * 127 = 30480;
  // E2M1 reaches 24, so the sums of two halves of 4 * 2 * 24 * 127 = 24384 are widened apart, as those of
  // q5_k and q6_k. Codes of 8 bits: |w| times the activation with the sign of w stays below
  // 2 * 128 * 127 = 32512, so each step is widened.
  template <int Format, int First, int Count>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    const I ones = _mm256_set1_epi16(1);
    if constexpr (!sums_fit<Format>(1)) {
      I total = _mm256_setzero_si256();
      for (int i = First; i < First + Count; i++) {
        const I product =
            _mm256_maddubs_epi16(_mm256_abs_epi8(w.v[i]), _mm256_sign_epi8(four(a + 4 * i), w.v[i]));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(product, ones));
      }
      constexpr int32_t kRest = 128 - Codes<Format>::kZero;
      return kRest ? _mm256_add_epi32(total, _mm256_set1_epi32(kRest * sum)) : total;
    } else {
      I even = _mm256_maddubs_epi16(w.v[First], four(a + 4 * First));
      I odd = _mm256_maddubs_epi16(w.v[First + 1], four(a + 4 * First + 4));
      for (int i = First + 2; i < First + Count; i += 2) {
        even = _mm256_add_epi16(even, _mm256_maddubs_epi16(w.v[i], four(a + 4 * i)));
        odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(w.v[i + 1], four(a + 4 * i + 4)));
      }
      static_assert(sums_fit<Format>(Count / 2), "16-bit sums saturate");
      const I total = sums_fit<Format>(Count)
                          ? _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones)
                          : _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
      constexpr int32_t kZero = Codes<Format>::kZero;
      return kZero ? _mm256_add_epi32(total, _mm256_set1_epi32(-kZero * sum)) : total;
    }
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  static int32_t amax_bits(const float* p) {
    const I mask = _mm256_set1_epi32(0x7fffffff);
    I most = _mm256_setzero_si256();
    for (int i = 0; i < kActGroup; i += 8)
      most = _mm256_max_epi32(most, _mm256_and_si256(bits(load(p + i)), mask));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
  }
  static int32_t codes(const float* p, float inverse, int8_t* q) {
    const F scale = set1(inverse);
    I v[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
      v[i] = _mm256_cvtps_epi32(mul(load(p + 8 * i), scale));
      sum = _mm256_add_epi32(sum, v[i]);
    }
    // The packs work within 128-bit lanes: the permutation puts the dwords back in order.
    const I words = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const I ordered = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<I*>(q), ordered);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
  }
};

using P = Avx2;
template <int Format>
constexpr GemmFn gemv = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn gemm = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn fp8_gemv = fp8_kernel<P, Format, 4, 1>;
template <int Format>
constexpr GemmFn fp8_gemm = fp8_kernel<P, Format, 4, 1>;

const IsaTable kTable = {
    "avx2",
    {{{float_kernel<P, kF32>, "f32.avx2.gemv"},
      {float_kernel<P, kF32>, "f32.avx2.gemm"},
      {float_kernel<P, kF32>, "f32.avx2.gemm"}},
     {{float_kernel<P, kBf16>, "bf16.avx2.gemv"},
      {float_kernel<P, kBf16>, "bf16.avx2.gemm"},
      {float_kernel<P, kBf16>, "bf16.avx2.gemm"}},
     {{quant_kernel<P, kInt8, 4>, "int8.avx2.gemv"},
      {quant_kernel<P, kInt8, 4>, "int8.avx2.gemm"},
      {quant_kernel<P, kInt8, 4>, "int8.avx2.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.avx2.gemv"},
      {quant_kernel<P, kInt4, 4>, "int4.avx2.gemm"},
      {quant_kernel<P, kInt4, 4>, "int4.avx2.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemv"},
      {quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemm"},
      {quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemm"}},
     HETERO_FP8_ROW("fp8", "avx2", kFp8),
     {{quant_kernel<P, kMxfp4, 4>, "mxfp4.avx2.gemv"},
      {quant_kernel<P, kMxfp4, 4>, "mxfp4.avx2.gemm"},
      {quant_kernel<P, kMxfp4, 4>, "mxfp4.avx2.gemm"}},
     {{quant_kernel<P, kNvfp4, 4>, "nvfp4.avx2.gemv"},
      {quant_kernel<P, kNvfp4, 4>, "nvfp4.avx2.gemm"},
      {quant_kernel<P, kNvfp4, 4>, "nvfp4.avx2.gemm"}},
     HETERO_KEPT_FORMATS("avx2"),
     HETERO_FP8_ROW("fp8_row", "avx2", kFp8Row)},
    act_kernel<P>,
    quantize_kernel<P>,
    axpy_kernel<P>,
    round_kernel,
};

}  // namespace

const IsaTable* avx2_table() { return &kTable; }

}  // namespace hetero
