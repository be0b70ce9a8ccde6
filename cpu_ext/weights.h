// The packed weights of one MoE block: where each block of each expert lies, on one memory node or several.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "arena.h"
#include "ggml.h"
#include "kernels.h"
#include "pack.h"
#include "pool.h"
#include "rows.h"

namespace hetero {

struct ExpertsConfig {
  int64_t experts, hidden, intermediate;
  int32_t format, group;            // of gate and up
  int32_t down_format, down_group;  // of down
  bool has_bias;
  Act act;
  GgmlStore stored = {}, down_stored = {};  // whether gate and up, down, stay in the blocks of their file
  bool ordered = false;                     // whether each expert takes its inputs in an order of its own
};

enum class Spread : int32_t {
  kWhole = 0,      // every expert in one arena
  kSplit = 1,      // every expert cut over all nodes
  kReplicate = 2,  // a copy on every node
};

// Memory nodes by the number that seats of the pool use, 0 and up: nodes[i] is the kernel's number of node i,
// or -1 to leave its arena to the kernel.
struct Placement {
  Spread spread = Spread::kWhole;
  std::vector<int> nodes = {-1};
  int only = -1;  // the node whose threads do the work; -1: all
};

constexpr int64_t kUnit = 32;  // outputs of gate and up that go together: a group of down's quantised inputs

// Split: gate and up are cut along the intermediate dimension in units, down along the hidden dimension in
// blocks of 16 outputs, so that no sum is cut: a block's products are the same wherever it lies. Shares of
// the nodes differ by at most one unit and one block; which nodes get the odd units rotates with the expert.
//
// A part is what one arena holds of an expert: [gate block][up block] of its units, its down blocks, and in
// part 0 the biases and the order of its inputs. Without a split part 0 is the whole expert in the layout of
// kernels.h, and experts begin at pages, so that files which hold them alike can be read into the arena
// without a copy.
class Weights {
 public:
  enum Part : int32_t {
    kGate = 0,
    kUp = 1,
    kDown = 2,
    kGateBias = 3,
    kUpBias = 4,
    kDownBias = 5,
    kOrder = 6,
    kParts = 7
  };

  // Throws std::invalid_argument for a format and shape that do not exist, std::bad_alloc when the system
  // refuses the memory. `memory`: what whole experts without a node of their own shall lie in, where it is
  // not nullptr; std::invalid_argument where it is not of their size, or they are placed otherwise.
  Weights(const ExpertsConfig& config, const Placement& placement, const Arena* memory = nullptr);
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  static int64_t expert_bytes(const ExpertsConfig& config);

  // Of the blocks that lie in the arenas.
  const Layout& up_layout() const { return up_; }
  const Layout& down_layout() const { return down_; }
  // Of the blocks that kernels read: other ones where the arenas hold those of a file.
  const Layout& up_packed() const { return up_packed_; }
  const Layout& down_packed() const { return down_packed_; }
  const GgmlStore& up_stored() const { return stored(kUp); }
  const GgmlStore& down_stored() const { return stored(kDown); }
  int mats() const { return mats_; }  // matrices before down: 2, or 1 without a gate
  int only() const { return only_; }

  // Parts that an expert is cut into, and the arena in which a thread of `node` finds part `part`.
  int parts() const { return parts_; }
  int arena_of(int part, int node) const { return copies_ == 1 ? part : node < copies_ ? node : 0; }
  // Units of gate and up, blocks of down, that part `part` begins with; of part parts(): their number.
  int64_t unit_begin(int64_t expert, int part) const {
    return unit_begin_[static_cast<size_t>((expert % parts_) * (parts_ + 1) + part)];
  }
  int64_t down_begin(int part) const { return down_begin_[static_cast<size_t>(part)]; }

  // Blocks of `part` in arena `arena`: from gate block `block` on, in gate-up pairs; from down block `block`.
  const uint8_t* up_block(int64_t expert, int part, int arena, int64_t block) const {
    return base(expert, arena) + (block - 2 * unit_begin(expert, part)) * mats_ * up_.block_bytes;
  }
  const uint8_t* down_block(int64_t expert, int part, int arena, int64_t block) const {
    return base(expert, arena) + up_bytes(expert, part) + (block - down_begin(part)) * down_.block_bytes;
  }
  const float* bias(int64_t expert, Part part) const;
  // hidden numbers of inputs: column j of gate and up belongs to input order[j]. nullptr: they are in order.
  const int32_t* order(int64_t expert) const;
  // Bytes of a part, and where they begin in an arena.
  int64_t part_bytes(int64_t expert, int part) const;
  const uint8_t* part_data(int64_t expert, int arena) const { return base(expert, arena); }

  // Packs one matrix (row_stride and col_stride in elements) or bias of an expert, on the pool's threads.
  // Throws std::invalid_argument when the part cannot be packed.
  void put(Pool& pool, int64_t expert, Part part, const void* data, DType type, int64_t row_stride,
           int64_t col_stride);
  // Gives an expert the order of its inputs, hidden numbers of which each is one of [0, hidden) once.
  void put_order(int64_t expert, const int32_t* order);
  // Packs a matrix that is quantised already, without changing a value.
  void put_codes(Pool& pool, int64_t expert, Part part, const Quantised& q);
  // The same from blocks of a ggml type whose values the part's format keeps.
  void put_ggml(Pool& pool, int64_t expert, Part part, const GgmlSource& source);
  // Gives expert `to` the packed bytes of expert `from`.
  void copy(int64_t from, int64_t to);
  // Gives every expert from `sources` on a mixture of the packed bytes of those before it, on the pool's
  // threads: random weights at the speed of memory.
  void replicate(Pool& pool, int64_t sources);

  // Bytes of a whole expert in the layout of kernels.h, whatever the placement; padding is not copied.
  int64_t whole_bytes() const;
  void load_whole(int64_t expert, const uint8_t* from);
  void save_whole(int64_t expert, uint8_t* to) const;

  // Bytes of the experts in all arenas.
  int64_t nbytes() const;
  // Address of expert 0 and distance to the next, where experts are whole.
  const uint8_t* data() const { return arenas_[0].data(); }
  int64_t stride() const { return stride_; }
  const std::vector<Arena>& arenas() const { return arenas_; }

 private:
  const GgmlStore& stored(Part part) const { return part == kDown ? config_.down_stored : config_.stored; }
  uint8_t* base(int64_t expert, int arena) const {
    return arenas_[static_cast<size_t>(arena)].data() +
           (parts_ == 1 ? expert * stride_ : offsets_[static_cast<size_t>(expert * parts_ + arena)]);
  }
  // Runs task(block) for each block of a matrix on the threads of the block's node, then copies it to the
  // other nodes that have one.
  void pack_blocks(Pool& pool, int64_t expert, Part part, const std::function<void(int64_t, uint8_t*)>& task);
  int64_t up_blocks(int64_t expert, int part) const;
  int64_t up_bytes(int64_t expert, int part) const {
    return up_blocks(expert, part) * mats_ * up_.block_bytes;
  }
  int64_t bias_offset(int64_t expert) const;
  int part_of(int64_t expert, bool down, int64_t block) const;
  // Runs piece(offset in a whole expert, where it lies here, bytes) over an expert, in arena `copy` of those
  // that hold the same.
  template <class Piece>
  void each_piece(int64_t expert, int copy, Piece piece) const;
  uint8_t* block_at(int64_t expert, Part part, int64_t block, int copy) const;

  ExpertsConfig config_;
  Layout up_packed_, down_packed_, up_, down_;
  int mats_, parts_, copies_, only_;
  std::vector<int64_t> unit_begin_;  // [rotation][part]
  std::vector<int64_t> down_begin_;
  std::vector<int64_t> offsets_;  // [expert][part], where there are several parts
  int64_t stride_ = 0;
  std::vector<Arena> arenas_;
};

}  // namespace hetero
