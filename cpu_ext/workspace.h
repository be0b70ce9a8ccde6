// What a step of the operator keeps from one to the next: tokens by expert, and work in pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "arena.h"

namespace hetero {

constexpr int64_t kTileFloats = 128 * 1024;  // results of one item before activation or sum: half of L2
constexpr int64_t kPiecesPerThread = 8;      // items per thread, so that late threads can be helped

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// ids of `pairs` = tokens * slots expert numbers; any outside [0, experts) is skipped.
struct Routing {
  const void* ids;
  bool wide;  // int64, else int32
  int64_t tokens, slots;
  int64_t experts = 0;  // 0: as many as have weights here
};

// Positions whose groups are split, `units` units an expert of which each makes unit_floats results a row
// (0: however many);
// items of at most max_rows rows, for so many threads and parts.
struct Split {
  int64_t begin, end, units, unit_floats, max_rows;
  int threads, parts;
};

// The units of an expert that lie in a part: (first, the one behind the last).
using UnitRange = std::function<std::pair<int64_t, int64_t>(int64_t expert, int part)>;

// What a step needs beside the weights. Shared by all operators, guarded by Context::lock; it grows to the
// largest step seen and is reused, so a step allocates nothing after the first of its size.
struct Workspace {
  struct Group {  // one expert's pairs: order[first .. first + rows)
    int32_t expert;
    int64_t first, rows;
  };
  struct Item {  // output units [unit, unit + units), all of one part, of rows [row, row + rows) of a group
    int32_t group, part;
    int64_t row, rows, unit, units;
  };
  std::vector<int64_t> counts;    // per expert, then its first position
  std::vector<int32_t> order;     // position -> pair (token * slots + slot), sorted by expert, then pair
  std::vector<int32_t> position;  // pair -> position, -1 where the pair is skipped
  std::vector<Group> groups;
  std::vector<int32_t> by_size;
  std::vector<Item> up_items, down_items;
  std::vector<int64_t> up_ends, down_ends;  // items of parts 0 .. p end here
  Arena memory;

  // Counting sort of `pairs` pairs from first_pair on by expert; pairs of an expert stay in ascending order.
  // Fills order, position, groups and by_size (the largest groups first, or in order); returns the pairs
  // kept.
  int64_t group(const Routing& routing, int64_t first_pair, int64_t pairs, int64_t experts,
                bool largest_first);
  // The expert of a position.
  int64_t expert_at(int64_t position) const;
  // The end of the wave that begins at position `begin`: whole experts while they fit, else a part of one.
  int64_t wave_limit(int64_t begin, int64_t most) const;
  // Splits the groups within positions [begin, end) into items of about equal cost, those of each part
  // together.
  void split(const Split& by, const UnitRange& range, std::vector<Item>* items,
             std::vector<int64_t>* ends) const;
};

}  // namespace hetero
