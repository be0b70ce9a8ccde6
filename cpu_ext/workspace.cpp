#include "workspace.h"

#include <algorithm>
#include <iterator>

namespace hetero {
namespace {

constexpr int64_t kUnitCost = 8;  // reading a unit's weights costs like computing 8 rows

int64_t id_of(const Routing& r, int64_t pair) {
  return r.wide ? static_cast<const int64_t*>(r.ids)[pair] : static_cast<const int32_t*>(r.ids)[pair];
}

}  // namespace

int64_t Workspace::group(const Routing& routing, int64_t first_pair, int64_t pairs, int64_t experts,
                         bool largest_first) {
  counts.assign(static_cast<size_t>(experts), 0);
  position.resize(static_cast<size_t>(pairs));
  order.resize(static_cast<size_t>(pairs));
  groups.clear();
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t e = id_of(routing, first_pair + p);
    if (e >= 0 && e < experts) ++counts[static_cast<size_t>(e)];
  }
  int64_t first = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t& count = counts[static_cast<size_t>(e)];
    const int64_t rows = count;
    if (rows > 0) groups.push_back({static_cast<int32_t>(e), first, rows});
    count = first;
    first += rows;
  }
  const int64_t kept = first;
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t e = id_of(routing, first_pair + p);
    if (e < 0 || e >= experts) {
      position[static_cast<size_t>(p)] = -1;
      continue;
    }
    const int64_t at = counts[static_cast<size_t>(e)]++;
    position[static_cast<size_t>(p)] = static_cast<int32_t>(at);
    order[static_cast<size_t>(at)] = static_cast<int32_t>(p);
  }
  by_size.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) by_size[i] = static_cast<int32_t>(i);
  if (largest_first) {
    // Large experts first: the short items at the end even out the threads.
    std::sort(by_size.begin(), by_size.end(), [&](int32_t a, int32_t b) {
      const int64_t ra = groups[static_cast<size_t>(a)].rows, rb = groups[static_cast<size_t>(b)].rows;
      return ra != rb ? ra > rb : a < b;
    });
  }
  return kept;
}

int64_t Workspace::expert_at(int64_t position) const {
  const auto after = std::upper_bound(groups.begin(), groups.end(), position,
                                      [](int64_t at, const Group& g) { return at < g.first; });
  return std::prev(after)->expert;
}

int64_t Workspace::wave_limit(int64_t begin, int64_t most) const {
  int64_t end = begin;
  for (const auto& g : groups) {
    if (g.first + g.rows <= begin) continue;
    if (g.first + g.rows - begin > most) return end > begin ? end : begin + most;
    end = g.first + g.rows;
  }
  return end;
}

void Workspace::split(const Split& by, const UnitRange& range, std::vector<Item>* items,
                      std::vector<int64_t>* ends) const {
  items->clear();
  ends->clear();
  int64_t cost = 0;
  for (const auto& g : groups) {
    const int64_t rows = std::min(by.end, g.first + g.rows) - std::max(by.begin, g.first);
    if (rows > 0) cost += by.units * (kUnitCost + rows);
  }
  const int64_t target = std::max<int64_t>(1, cost / (by.threads * kPiecesPerThread));
  for (int32_t part = 0; part < by.parts; ++part) {
    for (const int32_t index : by_size) {
      const auto& g = groups[static_cast<size_t>(index)];
      const int64_t from = std::max(by.begin, g.first) - g.first;
      const int64_t rows = std::min(by.end, g.first + g.rows) - g.first - from;
      const std::pair<int64_t, int64_t> limits = range(g.expert, part);
      const int64_t here = limits.second - limits.first;
      if (rows <= 0 || here <= 0) continue;
      const int64_t pieces = ceil_div(rows, by.max_rows);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t row = from + rows * piece / pieces;
        const int64_t m = from + rows * (piece + 1) / pieces - row;
        const int64_t most =
            by.unit_floats == 0 ? here : std::max<int64_t>(1, kTileFloats / (m * by.unit_floats));
        const int64_t want = std::clamp<int64_t>(target / (kUnitCost + m), 1, std::min(here, most));
        const int64_t n = ceil_div(here, want);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t u0 = here * i / n, u1 = here * (i + 1) / n;
          items->push_back({index, part, row, m, limits.first + u0, u1 - u0});
        }
      }
    }
    ends->push_back(static_cast<int64_t>(items->size()));
  }
}

}  // namespace hetero
