// The tile kernels on tiles of plain memory, for tests on machines without AMX. A tile checks what the
// hardware checks: sizes that fit each other, and no use before configuration; a violation stops the process.
#include "amx_kernels.h"
#include "scalar_policy.h"
#include "tables.h"

namespace hetero {
namespace {

struct Vectors : Scalar {
  static I load_ints(const int32_t* p) {
    I r;
    memcpy(r.v, p, 64);
    return r;
  }
};

struct Tile {
  int rows, bytes;
  uint8_t data[16][64];
};
thread_local Tile tiles[8];

void require(bool holds) {
  if (!holds) __builtin_trap();
}

inline int32_t int_at(const Tile& t, int row, int column) {
  int32_t value;
  memcpy(&value, t.data[row] + 4 * column, 4);
  return value;
}

inline void check_dot(const Tile& c, const Tile& a, const Tile& b) {
  require(c.rows > 0 && c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows);
}

struct Twin {
  using V = Vectors;

  static void configure(int64_t rows, int64_t k_bytes) {
    require(rows > 0 && rows <= 16 && k_bytes > 0 && k_bytes <= 64);
    for (int t = 0; t < 8; t++) {
      tiles[t].bytes = t < 4 || t == 7 ? 64 : static_cast<int>(k_bytes);
      tiles[t].rows = static_cast<int>(t == 7 ? k_bytes / 4 : t == 2 || t == 3 || t == 6 ? rows : 16);
      memset(tiles[t].data, 0, sizeof tiles[t].data);
    }
  }
  static void configure_pair(int64_t first, int64_t second) {
    require(first > 0 && first <= 16 && second >= 0 && second <= first);
    const int64_t rows[8] = {first, second ? second : first, first, second, kTileRows};
    for (int t = 0; t < 8; t++) {
      tiles[t].rows = static_cast<int>(rows[t]);
      tiles[t].bytes = tiles[t].rows == 0 ? 0 : 64;
      memset(tiles[t].data, 0, sizeof tiles[t].data);
    }
  }
  static void own(const void*) {}
  static void configure_full() {
    for (int t = 0; t < 8; t++) {
      tiles[t].rows = 16;
      tiles[t].bytes = 64;
      memset(tiles[t].data, 0, sizeof tiles[t].data);
    }
  }
  static void release() {
    for (int t = 0; t < 8; t++) tiles[t].rows = tiles[t].bytes = 0;
  }
  template <int Index>
  static void zero() {
    require(tiles[Index].rows > 0);
    memset(tiles[Index].data, 0, sizeof tiles[Index].data);
  }
  template <int Index>
  static void load(const void* p, int64_t stride) {
    Tile& t = tiles[Index];
    require(t.rows > 0);
    for (int r = 0; r < t.rows; r++)
      memcpy(t.data[r], static_cast<const uint8_t*>(p) + r * stride, static_cast<size_t>(t.bytes));
  }
  template <int Index>
  static void store(void* p, int64_t stride) {
    const Tile& t = tiles[Index];
    require(t.rows > 0);
    for (int r = 0; r < t.rows; r++)
      memcpy(static_cast<uint8_t*>(p) + r * stride, t.data[r], static_cast<size_t>(t.bytes));
  }
  template <int Result, int A, int B, bool Signed>
  static void dot() {
    Tile& c = tiles[Result];
    const Tile &a = tiles[A], &b = tiles[B];
    check_dot(c, a, b);
    for (int m = 0; m < c.rows; m++)
      for (int n = 0; n < c.bytes / 4; n++) {
        int32_t total = int_at(c, m, n);
        for (int k = 0; k < b.rows; k++)
          for (int j = 0; j < 4; j++) {
            const uint8_t code = b.data[k][4 * n + j];
            const int32_t weight = Signed ? static_cast<int8_t>(code) : code;
            total += static_cast<int8_t>(a.data[m][4 * k + j]) * weight;
          }
        memcpy(c.data[m] + 4 * n, &total, 4);
      }
  }
  template <int Result, int A, int B>
  static void dot_ss() {
    dot<Result, A, B, true>();
  }
  template <int Result, int A, int B>
  static void dot_su() {
    dot<Result, A, B, false>();
  }
  template <int Result, int A, int B>
  static void dot_bf16() {
    Tile& c = tiles[Result];
    const Tile &a = tiles[A], &b = tiles[B];
    check_dot(c, a, b);
    for (int m = 0; m < c.rows; m++)
      for (int n = 0; n < c.bytes / 4; n++) {
        float total;
        memcpy(&total, c.data[m] + 4 * n, 4);
        for (int k = 0; k < b.rows; k++) {
          const uint32_t x = static_cast<uint32_t>(int_at(a, m, k)),
                         w = static_cast<uint32_t>(int_at(b, k, n));
          total = __builtin_fmaf(bits_to_float(x << 16), bits_to_float(w << 16), total);
          total = __builtin_fmaf(bits_to_float(x & 0xffff0000u), bits_to_float(w & 0xffff0000u), total);
        }
        memcpy(c.data[m] + 4 * n, &total, 4);
      }
  }
  template <int Format>
  static void unpack(const uint8_t* w, uint8_t* to) {
    constexpr int kZero = Codes<Format>::kZero;
    const Scalar::W codes = Scalar::decode<Format>(w, Scalar::lookup(table_of(Format)));
    for (int i = 0; i < 512; i++) to[i] = static_cast<uint8_t>(codes.v[i / 64][i % 64] - kZero);
  }
  // Rounded, where the hardware's centres and truncates.
  template <int Format>
  class Decoder {
   public:
    Decoder(const uint8_t* block, const Layout* layout) : block_(block), layout_(layout) {}

    void begin(int64_t c, uint16_t* to) {
      for (int k = 0; k < 32; k++)
        for (int row = 0; row < 16; row++) {
          const uint32_t bits = float_to_bits(value(32 * c, k, row));
          tile_[k / 2 * 32 + row * 2 + k % 2] =
              static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
        }
      to_ = to;
    }
    void step(int i) { memcpy(to_ + 128 * i, tile_ + 128 * i, 256); }

   private:
    float value(int64_t k0, int k, int row) const {
      using C = Codes<Format>;
      const uint8_t* codes = block_ + k0 / 32 * chunk_bytes<Format>();
      const uint8_t* scales = block_ + layout_->scale_offset;
      const uint8_t* beside = block_ + layout_->min_offset;
      const int64_t group = (k0 + k) / layout_->group;
      if constexpr (is_fp8(Format)) {
        const float scale = float_at(scales + 4 * (Format == kFp8 ? group : row));
        return e4m3_to_float(codes[k / 4 * 64 + row * 4 + k % 4]) * (scale * 256.0f);
      } else {
        const Table& table = table_of(layout_->format);
        const Scalar::W w = Scalar::decode<Format>(codes, Scalar::lookup(table));
        float number = static_cast<float>(w.v[k / 4][4 * row + k % 4]) - C::kZero;
        const uint8_t* at = scales + group * C::kPartBytes;
        float scale = Scalar::scale<Format>(at).v[row], minimum = 0;
        auto half_at = [&](const uint8_t* halves) {
          uint16_t half;
          memcpy(&half, halves + 2 * row, 2);
          return half_to_float(half);
        };
        if (C::kMinima) minimum = half_at(beside + group * C::kBesideBytes);
        if (C::kZeros) number -= beside[group * C::kBesideBytes + row];
        if (C::kSuper) {
          const uint8_t* super = beside + (k0 + k) / kSuperGroup * C::kSuperBytes;
          scale *= half_at(super) * (C::kTable ? table.factor : 1.0f);
          if (C::kSuperMinima) minimum = -half_at(super + 2 * kBlockRows) * at[kBlockRows + row];
        }
        return __builtin_fmaf(number, scale, minimum);
      }
    }

    const uint8_t* block_;
    const Layout* layout_;
    uint16_t* to_ = nullptr;
    uint16_t tile_[512];
  };
};

const IsaTable kUnit = HETERO_AMX_UNIT("amx_twin", Twin);

}  // namespace

const IsaTable* amx_twin_unit() { return &kUnit; }

}  // namespace hetero
