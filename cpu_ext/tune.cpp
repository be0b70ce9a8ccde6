#include "tune.h"

#include <emmintrin.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include "arena.h"
#include "codes.h"
#include "dispatch.h"
#include "pack.h"
#include "rows.h"

namespace hetero {
namespace {

constexpr int64_t kK = 2048;               // inputs of an output: as a hidden size
constexpr int64_t kWeightBytes = 1 << 20;  // of a call: enough that its beginning weighs little
constexpr int64_t kMostBlocks = 32;        // bounds the products of narrow formats
constexpr size_t kFewestRounds = 4;
constexpr double kHopeless = 2;  // so many times slower than another kernel: not worth more rounds

// Of this thread: on a busy machine the wall clock counts the others too.
double processor_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Whatever the size of the caches, the next read comes from memory.
void evict(const uint8_t* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_clflush(data + at);
  _mm_mfence();
}

// Any codes of a format that no weights are turned into, with scales that keep the products near one.
void pack_random_codes(const Layout& layout, std::mt19937& random, uint8_t* to) {
  const Traits& t = kTraits[layout.format];
  std::vector<uint8_t> codes(static_cast<size_t>(layout.n * layout.k));
  std::uniform_int_distribution<int> any(t.valid[0], t.valid[1]);
  for (uint8_t& code : codes) {
    code = static_cast<uint8_t>(any(random));
    if (is_fp8(layout.format) && (code & 0x7f) == 0x7f) code = 0;  // a NaN
  }
  constexpr uint16_t kOne = 0x3c00;  // as fp16
  constexpr float kOneFloat = 1.0f;
  constexpr uint8_t kInteger = 7;
  auto filled = [&](int64_t bytes, bool halves) {
    std::vector<uint8_t> all(static_cast<size_t>(bytes), kInteger);
    for (size_t i = 0; halves && i < all.size(); i += 2) std::memcpy(&all[i], &kOne, 2);
    return all;
  };
  auto scales = filled(layout.n * row_scale_bytes(layout), t.scale == Scale::kHalf);
  if (t.scale == Scale::kRows)
    for (size_t i = 0; i < scales.size(); i += 4) std::memcpy(&scales[i], &kOneFloat, 4);
  const auto extra = filled(layout.n * row_extra_bytes(layout), t.beside != Beside::kZeros);
  const Quantised q = {codes.data(), scales.data(), extra.data()};
  for (int64_t b = 0; b < block_count(layout); ++b)
    pack_codes_block(layout, b, q, to + b * layout.block_bytes);
}

void pack_random(const Layout& layout, std::mt19937& random, uint8_t* to) {
  if (layout.format > kNvfp4) return pack_random_codes(layout, random, to);
  std::vector<float> values(static_cast<size_t>(layout.n * layout.k));
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (float& v : values) v = uniform(random);
  const Source source = {values.data(), kSourceF32, layout.k, 1};
  std::vector<float> shared(static_cast<size_t>(block_count(layout) * shared_per_block(layout)));
  for (int64_t b = 0; b < block_count(layout); ++b) measure_block(layout, b, source, shared.data());
  settle_shared(layout, shared.data());
  for (int64_t b = 0; b < block_count(layout); ++b)
    pack_block(layout, b, source, shared.data(), to + b * layout.block_bytes);
}

}  // namespace

std::vector<std::vector<double>> kernel_seconds(int32_t format, int32_t group,
                                                const std::vector<KernelId>& kernels,
                                                const std::vector<int64_t>& rows, double limit) {
  Layout layout;
  if (!make_layout(format, group, kBlockRows, kK, &layout))
    throw std::invalid_argument("no such format or group");
  const int64_t blocks = std::clamp<int64_t>(kWeightBytes / layout.block_bytes, 1, kMostBlocks);
  make_layout(format, group, blocks * kBlockRows, kK, &layout);
  std::vector<GemmFn> calls;
  for (const auto& [name, row_class] : kernels) {
    if (row_class < 0 || row_class >= kRowClasses) throw std::invalid_argument("no such class of rows");
    calls.push_back(choose_isa(name).table->gemm[format][row_class].fn);
  }
  int64_t most = 1;
  for (const int64_t n : rows) {
    if (n < 1 || n > 4096) throw std::invalid_argument("rows must be from 1 to 4096");
    most = std::max(most, n);
  }

  const RowForm form = {true, true, true};
  const size_t weights_at = static_cast<size_t>(kScratchBytes) + RowStore::bytes(form, most, layout.k_pad);
  const size_t results_at = weights_at + align64(static_cast<size_t>(packed_bytes(layout)));
  const size_t tiles_at = results_at + align64(static_cast<size_t>(most * layout.n_pad) * 4);
  Arena memory(tiles_at + static_cast<size_t>(tile_rows(most) * layout.k_pad) * 2);
  uint8_t* cursor = memory.data() + kScratchBytes;
  const RowStore x = RowStore::carve(&cursor, form, most, layout.k_pad);
  uint8_t* weights = memory.data() + weights_at;
  float* y = reinterpret_cast<float*>(memory.data() + results_at);
  std::mt19937 random(1);
  pack_random(layout, random, weights);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const IsaTable* table = choose_isa("scalar").table;
  for (int64_t m = 0; m < most; ++m) {
    float* row = x.f32 + m * x.k_pad;
    for (int64_t i = 0; i < x.k_pad; ++i) row[i] = i < kK ? uniform(random) : 0.0f;
    table->quantize(row, kK, x.k_pad, x.q + m * x.k_pad, x.scale + m * (x.k_pad / kActGroup),
                    x.sum + m * (x.k_pad / kActGroup));
    table->round(row, kK, x.k_pad, x.bf16 + m * x.k_pad);
  }

  uint16_t* tiles = reinterpret_cast<uint16_t*>(memory.data() + tiles_at);
  lay_tiles(most, x.k_pad, tiles, [&](int64_t m) { return x.bf16 + m * x.k_pad; });

  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(kernels.size(), std::vector<double>(rows.size(), kNever));
  const double begin = processor_seconds();
  for (size_t round = 0; round < kFewestRounds || processor_seconds() - begin < limit; ++round) {
    for (size_t r = 0; r < rows.size(); ++r) {
      Rows input = x.at(0, rows[r]);
      input.tiles = tiles;
      double least = kNever;
      for (const auto& times : best) least = std::min(least, times[r]);
      for (size_t i = 0; i < kernels.size(); ++i) {
        if (kernels[i].second == kGemv && rows[r] > kGemvRows) continue;
        if (round >= kFewestRounds && best[i][r] > least * kHopeless) continue;
        evict(weights, packed_bytes(layout));
        const double start = processor_seconds();
        calls[i](weights, blocks, &layout, &input, y, layout.n_pad, memory.data());
        best[i][r] = std::min(best[i][r], processor_seconds() - start);
      }
    }
  }
  return best;
}

}  // namespace hetero
