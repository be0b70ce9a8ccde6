#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "ggml.h"
#include "pack.h"

namespace hetero {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kPiece = 256 * 1024;  // that a thread copies at a time
constexpr const char* kBlocksAlone = "experts that stay in the blocks of their file take these alone";

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

Layout checked_layout(int32_t format, int32_t group, int64_t n, int64_t k) {
  Layout layout;
  if (!make_layout(format, group, n, k, &layout))
    throw std::invalid_argument("no such format, group or shape");
  return layout;
}

Layout packed_up(const ExpertsConfig& c) {
  return checked_layout(c.format, c.group, c.intermediate, c.hidden);
}
Layout packed_down(const ExpertsConfig& c) {
  return checked_layout(c.down_format, c.down_group, c.hidden, c.intermediate);
}

// As it lies in the arenas.
Layout stored_layout(const Layout& packed, const GgmlStore& stored) {
  if (stored.type == nullptr) return packed;
  Layout layout;
  if (stored.type->group != packed.group || !stored.make_layout(packed, &layout))
    throw std::invalid_argument("rows are no whole blocks of the ggml type, or its format is another");
  return layout;
}
Layout layout_of_up(const ExpertsConfig& c) { return stored_layout(packed_up(c), c.stored); }
Layout layout_of_down(const ExpertsConfig& c) { return stored_layout(packed_down(c), c.down_stored); }

int64_t bias_bytes(const ExpertsConfig& c, int mats) {
  return c.has_bias ? (c.intermediate * mats + c.hidden) * static_cast<int64_t>(sizeof(float)) : 0;
}

// What stands behind the blocks of a whole expert: biases, then the order of the inputs.
int64_t tail_bytes(const ExpertsConfig& c, int mats) {
  return bias_bytes(c, mats) + (c.ordered ? c.hidden * static_cast<int64_t>(sizeof(int32_t)) : 0);
}

// Appends the limits of `parts` shares of `total`; the larger shares begin at part `first`, cyclically.
void add_shares(int64_t total, int parts, int first, std::vector<int64_t>* begins) {
  int64_t at = 0;
  for (int part = 0; part < parts; ++part) {
    begins->push_back(at);
    at += total / parts + ((part - first + parts) % parts < total % parts ? 1 : 0);
  }
  begins->push_back(at);
}

}  // namespace

Weights::Weights(const ExpertsConfig& config, const Placement& placement, const Arena* memory)
    : config_(config),
      up_packed_(packed_up(config)),
      down_packed_(packed_down(config)),
      up_(layout_of_up(config)),
      down_(layout_of_down(config)),
      mats_(config.act.has_gate ? 2 : 1),
      parts_(placement.spread == Spread::kSplit ? static_cast<int>(placement.nodes.size()) : 1),
      copies_(placement.spread == Spread::kReplicate ? static_cast<int>(placement.nodes.size()) : 1),
      only_(placement.only) {
  if (placement.nodes.empty()) throw std::invalid_argument("no memory node");
  const int64_t units = (config.intermediate + kUnit - 1) / kUnit;
  for (int rotation = 0; rotation < parts_; ++rotation) add_shares(units, parts_, rotation, &unit_begin_);
  add_shares(block_count(down_), parts_, 0, &down_begin_);
  stride_ = round_up(part_bytes(0, 0), kPage);
  std::vector<int64_t> sizes(static_cast<size_t>(parts_), parts_ == 1 ? config.experts * stride_ : 0);
  if (parts_ > 1) {
    for (int64_t e = 0; e < config.experts; ++e) {
      for (int part = 0; part < parts_; ++part) {
        offsets_.push_back(sizes[static_cast<size_t>(part)]);
        sizes[static_cast<size_t>(part)] += part_bytes(e, part);
      }
    }
  }
  if (memory != nullptr) {
    if (placement.spread != Spread::kWhole || placement.nodes[0] >= 0 ||
        memory->size() != static_cast<size_t>(sizes[0]))
      throw std::invalid_argument("this memory is not for these experts");
    arenas_.push_back(*memory);
    return;
  }
  for (size_t i = 0; i < static_cast<size_t>(std::max(parts_, copies_)); ++i) {
    const int64_t bytes = sizes[copies_ > 1 ? 0 : i];
    arenas_.emplace_back(static_cast<size_t>(bytes), placement.nodes[i]);
  }
}

int64_t Weights::expert_bytes(const ExpertsConfig& c) {
  return hetero::expert_bytes(layout_of_up(c), layout_of_down(c), c.act.has_gate != 0, c.has_bias, c.ordered);
}

int64_t Weights::nbytes() const {
  if (parts_ == 1) return config_.experts * part_bytes(0, 0) * copies_;
  int64_t bytes = 0;
  for (int64_t e = 0; e < config_.experts; ++e) {
    for (int part = 0; part < parts_; ++part) bytes += part_bytes(e, part);
  }
  return bytes;
}

// The last unit may hold one block only.
int64_t Weights::up_blocks(int64_t expert, int part) const {
  return std::min(2 * unit_begin(expert, part + 1), block_count(up_)) -
         std::min(2 * unit_begin(expert, part), block_count(up_));
}

int64_t Weights::bias_offset(int64_t expert) const {
  return up_bytes(expert, 0) + (down_begin(1) - down_begin(0)) * down_.block_bytes;
}

int64_t Weights::part_bytes(int64_t expert, int part) const {
  const int64_t blocks =
      up_bytes(expert, part) + (down_begin(part + 1) - down_begin(part)) * down_.block_bytes;
  return round_up(blocks + (part == 0 ? tail_bytes(config_, mats_) : 0), 64);
}

int Weights::part_of(int64_t expert, bool down, int64_t block) const {
  int part = 0;
  while (part + 1 < parts_ && block >= (down ? down_begin(part + 1) : 2 * unit_begin(expert, part + 1)))
    ++part;
  return part;
}

const float* Weights::bias(int64_t expert, Part part) const {
  if (!config_.has_bias) return nullptr;
  const float* all = reinterpret_cast<const float*>(base(expert, 0) + bias_offset(expert));
  if (part == kGateBias) return all;
  if (part == kUpBias) return all + (mats_ - 1) * config_.intermediate;
  return all + mats_ * config_.intermediate;
}

uint8_t* Weights::block_at(int64_t expert, Part part, int64_t block, int copy) const {
  const int owner = part_of(expert, part == kDown, block);
  const int arena = arena_of(owner, copy);
  if (part == kDown) return const_cast<uint8_t*>(down_block(expert, owner, arena, block));
  const uint8_t* pair = up_block(expert, owner, arena, block);
  return const_cast<uint8_t*>(pair) + (part == kUp ? (mats_ - 1) * up_.block_bytes : 0);
}

const int32_t* Weights::order(int64_t expert) const {
  if (!config_.ordered) return nullptr;
  return reinterpret_cast<const int32_t*>(base(expert, 0) + bias_offset(expert) + bias_bytes(config_, mats_));
}

void Weights::put_order(int64_t expert, const int32_t* order) {
  if (!config_.ordered) throw std::invalid_argument("these experts take their inputs in order");
  std::vector<bool> seen(static_cast<size_t>(config_.hidden));
  for (int64_t i = 0; i < config_.hidden; ++i) {
    if (order[i] < 0 || order[i] >= config_.hidden || seen[static_cast<size_t>(order[i])])
      throw std::invalid_argument("no order: each input must be named once");
    seen[static_cast<size_t>(order[i])] = true;
  }
  std::memcpy(const_cast<int32_t*>(this->order(expert)), order, static_cast<size_t>(config_.hidden) * 4);
}

void Weights::put(Pool& pool, int64_t expert, Part part, const void* data, DType type, int64_t row_stride,
                  int64_t col_stride) {
  if (part >= kGateBias) {
    const int64_t n = part == kDownBias ? config_.hidden : config_.intermediate;
    widen(data, type, n, row_stride, const_cast<float*>(bias(expert, part)));
    return;
  }
  const Layout& layout = part == kDown ? down_ : up_;
  if (stored(part).type != nullptr) throw std::invalid_argument(kBlocksAlone);
  const Source source = {data, static_cast<int32_t>(type), row_stride, col_stride};
  std::atomic<int32_t> status{kPackOk};
  auto note = [&](PackStatus block) {
    if (block != kPackOk) status.store(block, std::memory_order_relaxed);
  };
  std::vector<float> shared(static_cast<size_t>(block_count(layout) * shared_per_block(layout)));
  if (!shared.empty()) {
    pack_blocks(pool, expert, part,
                [&](int64_t block, uint8_t*) { note(measure_block(layout, block, source, shared.data())); });
    settle_shared(layout, shared.data());
  }
  if (status == kPackOk) {
    pack_blocks(pool, expert, part, [&](int64_t block, uint8_t* to) {
      note(pack_block(layout, block, source, shared.data(), to));
    });
  }
  if (status == kPackNotFinite) throw std::invalid_argument("a weight is NaN or infinite");
  if (status == kPackKeptOnly)
    throw std::invalid_argument("the format only keeps the values of checkpoints that have it");
  if (status == kPackOverflow) throw std::invalid_argument("a weight is too large for the format");
}

void Weights::put_codes(Pool& pool, int64_t expert, Part part, const Quantised& q) {
  const Layout& layout = part == kDown ? down_ : up_;
  if (stored(part).type != nullptr) throw std::invalid_argument(kBlocksAlone);
  if (const char* wrong = wrong_codes(layout, q)) throw std::invalid_argument(wrong);
  pack_blocks(pool, expert, part,
              [&](int64_t block, uint8_t* to) { pack_codes_block(layout, block, q, to); });
}

void Weights::put_ggml(Pool& pool, int64_t expert, Part part, const GgmlSource& source) {
  const Layout& layout = part == kDown ? down_ : up_;
  if (source.type->group == 0 || source.type->group != layout.group)
    throw std::invalid_argument("the format has other groups than the ggml type");
  const GgmlType* kept = stored(part).type;
  if (kept != nullptr && kept != source.type) throw std::invalid_argument("blocks of another ggml type");
  const auto take = kept != nullptr ? store_ggml_block : pack_ggml_block;
  std::atomic<bool> finite{true};
  pack_blocks(pool, expert, part, [&](int64_t block, uint8_t* to) {
    if (!take(layout, block, source, to)) finite.store(false, std::memory_order_relaxed);
  });
  if (!finite) throw std::invalid_argument("a scale is NaN or infinite");
}

void Weights::pack_blocks(Pool& pool, int64_t expert, Part part,
                          const std::function<void(int64_t, uint8_t*)>& task) {
  struct Job {
    const Weights& weights;
    int64_t expert;
    Part part;
    const std::function<void(int64_t, uint8_t*)>& task;
  } job{*this, expert, part, task};
  auto pack = [](void* ctx, int64_t block, int) {
    Job& j = *static_cast<Job*>(ctx);
    uint8_t* to = j.weights.block_at(j.expert, j.part, block, 0);
    j.task(block, to);
    for (int copy = 1; copy < j.weights.copies_; ++copy) {
      std::memcpy(j.weights.block_at(j.expert, j.part, block, copy), to,
                  static_cast<size_t>((j.part == kDown ? j.weights.down_ : j.weights.up_).block_bytes));
    }
  };
  // Blocks are packed by their node's threads: where binding is denied, the first touch still places them.
  std::vector<int64_t> ends;
  const int64_t blocks = block_count(part == kDown ? down_ : up_);
  for (int p = 1; p <= parts_; ++p) {
    ends.push_back(std::min(blocks, part == kDown ? down_begin(p) : 2 * unit_begin(expert, p)));
  }
  Phase phase = {blocks, pack, &job};
  phase.only = only_;
  if (parts_ > 1) {
    phase.node_ends = ends.data();
    phase.nodes = parts_;
  }
  pool.run(&phase, 1);
}

void Weights::copy(int64_t from, int64_t to) {
  auto copy_blocks = [&](Part part, const Layout& layout) {
    for (int64_t block = 0; block < block_count(layout); ++block) {
      for (int copy = 0; copy < copies_; ++copy) {
        std::memcpy(block_at(to, part, block, copy), block_at(from, part, block, copy),
                    static_cast<size_t>(layout.block_bytes));
      }
    }
  };
  if (mats_ == 2) copy_blocks(kGate, up_);
  copy_blocks(kUp, up_);
  copy_blocks(kDown, down_);
  if (config_.has_bias) {
    std::memcpy(const_cast<float*>(bias(to, mats_ == 2 ? kGateBias : kUpBias)),
                bias(from, mats_ == 2 ? kGateBias : kUpBias),
                static_cast<size_t>(bias_bytes(config_, mats_)));
  }
}

void Weights::replicate(Pool& pool, int64_t sources) {
  // Every place in an expert holds the same kind of field in all experts, and pieces begin at whole fields,
  // so that pieces of different experts make an expert. Where experts are cut over nodes their cuts differ,
  // and each is copied whole.
  struct Job {
    Weights& weights;
    int64_t sources, pieces, bytes;
  } job{*this, sources, 1, part_bytes(0, 0)};
  if (parts_ == 1) job.pieces = (job.bytes + kPiece - 1) / kPiece;
  auto piece = [](void* ctx, int64_t chunk, int) {
    const Job& j = *static_cast<Job*>(ctx);
    const int64_t to = j.sources + chunk / j.pieces, at = chunk % j.pieces * kPiece;
    const int64_t from =
        static_cast<int64_t>((static_cast<uint64_t>(chunk) * 0x9e3779b97f4a7c15ull) >> 33) % j.sources;
    if (j.weights.parts_ > 1) {
      j.weights.copy(from, to);
      return;
    }
    for (int copy = 0; copy < j.weights.copies_; ++copy) {
      std::memcpy(j.weights.base(to, copy) + at, j.weights.base(from, copy) + at,
                  static_cast<size_t>(std::min(kPiece, j.bytes - at)));
    }
  };
  const Phase phase = {(config_.experts - sources) * job.pieces, piece, &job};
  pool.run(&phase, 1);
}

template <class Piece>
void Weights::each_piece(int64_t expert, int copy, Piece piece) const {
  const int64_t pair = mats_ * up_.block_bytes, downs = block_count(up_) * pair;
  for (int part = 0; part < parts_; ++part) {
    uint8_t* here = base(expert, parts_ == 1 ? copy : part);
    const int64_t ups = up_bytes(expert, part);
    piece(std::min(2 * unit_begin(expert, part), block_count(up_)) * pair, here, ups);
    piece(downs + down_begin(part) * down_.block_bytes, here + ups,
          (down_begin(part + 1) - down_begin(part)) * down_.block_bytes);
  }
  piece(downs + block_count(down_) * down_.block_bytes, base(expert, copy) + bias_offset(expert),
        tail_bytes(config_, mats_));
}

int64_t Weights::whole_bytes() const {
  return round_up(block_count(up_) * mats_ * up_.block_bytes + block_count(down_) * down_.block_bytes +
                      tail_bytes(config_, mats_),
                  64);
}

void Weights::load_whole(int64_t expert, const uint8_t* from) {
  for (int copy = 0; copy < copies_; ++copy) {
    each_piece(expert, copy, [&](int64_t at, uint8_t* here, int64_t bytes) {
      std::memcpy(here, from + at, static_cast<size_t>(bytes));
    });
  }
}

void Weights::save_whole(int64_t expert, uint8_t* to) const {
  each_piece(expert, 0, [&](int64_t at, const uint8_t* here, int64_t bytes) {
    std::memcpy(to + at, here, static_cast<size_t>(bytes));
  });
}

}  // namespace hetero
