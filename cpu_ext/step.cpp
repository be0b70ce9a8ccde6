// One step of the operator: grouping by expert, the phases, and the work of a chunk.
#include <algorithm>
#include <cstring>
#include <utility>

#include "moe.h"

namespace hetero {
namespace {

constexpr int64_t kGatherBytes = 1 << 20;  // activations of one item
constexpr int64_t kUpFloats = 48 * 1024;   // results of gate and up before activation

}  // namespace

// Everything that the phases of one pass share. It lives on the caller's stack for the duration of the step.
struct Step {
  using Mode = Experts::Mode;

  Step(const Experts& experts, Context& context, Mode step_mode)
      : op(experts),
        store(experts.weights_),
        up(store.up_packed()),
        down(store.down_packed()),
        up_side{up, store.up_stored(), store.up_layout().block_bytes, experts.up_plan_,
                takes_codes(up.format)},
        down_side{down, store.down_stored(), store.down_layout().block_bytes, experts.down_plan_,
                  takes_codes(down.format)},
        ctx(context),
        ws(context.workspace),
        mode(step_mode),
        by_position(experts.config_.ordered && step_mode != Mode::kDown && step_mode != Mode::kSum) {}

  // The projections into the experts (gate and up), or out of them: their weights, kernels, and the form of
  // the rows that they read.
  struct Side {
    const Layout& layout;
    const GgmlStore& stored;    // how the blocks lie in the arenas where they are not packed, and
    const int64_t block_bytes;  // how far apart
    const Plan& plan;
    const bool quantised;
    RowForm form = {};
  };

  const Experts& op;
  const Weights& store;
  const Layout &up, &down;
  Side up_side, down_side;
  Context& ctx;
  Workspace& ws;
  const Mode mode;
  const bool by_position;  // each expert's inputs are in its own order, so that every pair has a row of xs
  bool exact = false;
  bool in_place = false;  // the input is the store's f32

  const uint8_t* x = nullptr;  // [x_rows, k_in] of `type`
  DType type = DType::kF32;
  int64_t tokens = 0, slots = 0, x_rows = 0, k_in = 0;
  int64_t pairs_kept = 0;
  const float* weights = nullptr;
  float* out = nullptr;

  RowStore xs;         // inputs by token (by pair for Mode::kDown; `by_position`)
  RowStore hs;         // hidden rows by position - h_begin
  float* y = nullptr;  // results of down by position - wave_begin, ldy columns each
  int64_t h_most = 0;  // hidden rows that are kept at a time
  int64_t h_begin = 0, h_end = 0;
  int64_t ldy = 0, wave_begin = 0, wave_end = 0;
  int64_t strip = 1;  // blocks of a strip of down
  int64_t x_chunk = 1, column_chunk = 0;
  int64_t max_rows = 1, tile_floats = 0;
  uint8_t* thread_memory = nullptr;
  size_t thread_bytes = 0;

  struct Buffers {
    int node;  // of the thread that they belong to
    void* scratch;
    RowStore gather;
    float* tile;
    float* row;
  };

  Side& in_side() { return mode == Mode::kDown ? down_side : up_side; }
  const Side& in_side() const { return mode == Mode::kDown ? down_side : up_side; }
  const Layout& in_layout() const { return in_side().layout; }

  // Inputs of both projections pass through the buffer where they are laid out as tiles.
  RowForm gather_form() const {
    const RowForm form = in_side().form;
    return {form.codes, form.floats, form.halves || down_side.form.halves};
  }
  int64_t gather_k() const {
    return gather_form().halves ? std::max(up.k_pad, down.k_pad) : in_layout().k_pad;
  }

  int64_t row_floats() const {
    return std::max(std::max(up.k_pad, down.k_pad), std::max(up.n_pad, down.n_pad)) + kUnit;
  }

  size_t buffer_bytes() const {
    return static_cast<size_t>(kScratchBytes) +
           RowStore::bytes(gather_form(), tile_rows(max_rows), gather_k()) +
           align64(static_cast<size_t>(tile_floats) * 4) + align64(static_cast<size_t>(row_floats()) * 4);
  }

  Buffers buffers(int thread) const {
    uint8_t* cursor = thread_memory + thread_bytes * static_cast<size_t>(thread);
    Buffers b;
    b.node = ctx.pool->node_of(thread);
    b.scratch = cursor;
    cursor += kScratchBytes;
    b.gather = RowStore::carve(&cursor, gather_form(), tile_rows(max_rows), gather_k());
    b.gather.k_pad = in_layout().k_pad;
    b.tile = reinterpret_cast<float*>(cursor);
    cursor += align64(static_cast<size_t>(tile_floats) * 4);
    b.row = reinterpret_cast<float*>(cursor);
    return b;
  }

  const Band& band(const Side& side, int64_t rows) const {
    const std::vector<Band>& bands = exact ? side.plan.exact : side.plan.large;
    size_t at = 0;
    while (rows > bands[at].rows) ++at;
    return bands[at];
  }

  // Whether the kernel of so many rows reads bf16, and whether as tiles.
  bool halves(const Side& side, int64_t rows) const { return band(side, rows).kernel->input != kInFormat; }
  bool tiled(const Side& side, int64_t rows) const { return band(side, rows).kernel->input == kInTiles; }

  RowForm form_of_groups(const Side& side) const {
    bool some = false, all = true;
    for (const auto& g : ws.groups) {
      const bool these = halves(side, g.rows);
      some = some || these;
      all = all && these;
    }
    if (ws.groups.empty()) all = false;
    return {side.quantised && !all, !side.quantised && !all, some};
  }

  // Products of the rows of a group of `group_rows` with `blocks` blocks at w. `first`: the one call of the
  // group that is counted.
  void multiply(const Side& side, int64_t group_rows, bool first, const uint8_t* w, int64_t blocks,
                const Rows& rows, float* to, int64_t ld, void* scratch) const {
    const Band& b = band(side, group_rows);
    if (first) b.calls->fetch_add(1, std::memory_order_relaxed);
    if (side.stored.type == nullptr) return b.kernel->fn(w, blocks, &side.layout, &rows, to, ld, scratch);
    for (int64_t i = 0; i < blocks; ++i) {
      const uint8_t* packed = pack_stored_block(side.layout, side.stored, w + i * side.block_bytes);
      b.kernel->fn(packed, 1, &side.layout, &rows, to + i * kBlockRows, ld, scratch);
    }
  }

  // -- input

  void input_row(int64_t row, float* tmp) {
    const int64_t from = by_position ? ws.order[static_cast<size_t>(row)] / slots : row;
    const uint8_t* src = x + static_cast<size_t>(from * k_in) * element_bytes(type);
    const int64_t k_pad = xs.k_pad;
    const RowForm form = in_side().form;
    const float* values = reinterpret_cast<const float*>(src);
    if (by_position) {
      widen_in_order(src, type, store.order(ws.expert_at(row)), k_in, tmp);
      values = tmp;
    } else if (type != DType::kF32) {
      widen(src, type, k_in, 1, tmp);
      values = tmp;
    }
    if (form.codes) {
      const int64_t groups = k_pad / kActGroup;
      op.isa_.table->quantize(values, k_in, k_pad, xs.q + row * k_pad, xs.scale + row * groups,
                              xs.sum + row * groups);
    }
    if (form.floats && !in_place) {
      std::memcpy(xs.f32 + row * k_pad, values, static_cast<size_t>(k_in) * 4);
      std::fill(xs.f32 + row * k_pad + k_in, xs.f32 + (row + 1) * k_pad, 0.0f);
    }
    if (form.halves) op.isa_.table->round(values, k_in, k_pad, xs.bf16 + row * k_pad);
  }

  static void input_phase(void* self, int64_t chunk, int thread) {
    Step& s = *static_cast<Step*>(self);
    float* tmp = s.buffers(thread).row;
    const int64_t end = std::min(s.x_rows, (chunk + 1) * s.x_chunk);
    for (int64_t row = chunk * s.x_chunk; row < end; ++row) s.input_row(row, tmp);
  }

  // -- items

  void group_pairs(const Routing& r, int64_t first_pair) {
    pairs_kept =
        ws.group(r, first_pair, tokens * slots, r.experts > 0 ? r.experts : op.config_.experts, !exact);
  }

  // Splits the groups within positions [begin, end); `range` gives the units of an expert that lie in a part.
  void build_items(std::vector<Workspace::Item>* items, std::vector<int64_t>* ends, int64_t begin,
                   int64_t end, int64_t units, int64_t unit_floats, const UnitRange& range) {
    ws.split({begin, end, units, unit_floats, max_rows, ctx.pool->threads(), store.parts()}, range, items,
             ends);
  }

  // A phase of `chunks` chunks; `ends` as build_items gives them, null where chunks belong to no node.
  Phase phase(int64_t chunks, void (*fn)(void*, int64_t, int), const std::vector<int64_t>* ends = nullptr) {
    Phase p = {chunks, fn, this};
    p.only = store.only();
    if (ends != nullptr && store.parts() > 1) {
      p.node_ends = ends->data();
      p.nodes = store.parts();
    }
    return p;
  }

  int64_t source(const Workspace::Group& g, int64_t row) const {
    if (by_position) return g.first + row;
    const int64_t pair = ws.order[static_cast<size_t>(g.first + row)];
    return mode == Mode::kDown ? pair : pair / slots;
  }

  // Rows of a store as tiles; row(m) is the number of row m in the store.
  template <class Row>
  Rows lay(const RowStore& from, int64_t n, const RowStore& to, Row row) const {
    lay_tiles(n, from.k_pad, to.bf16, [&](int64_t m) { return from.bf16 + row(m) * from.k_pad; });
    Rows rows = {};
    rows.tiles = to.bf16;
    rows.rows = n;
    return rows;
  }

  // The input rows of an item, side by side: in place where they already are.
  Rows gather(const Workspace::Group& g, const Workspace::Item& item, const RowStore& to) const {
    if (tiled(in_side(), g.rows))
      return lay(xs, item.rows, to, [&](int64_t m) { return source(g, item.row + m); });
    const int64_t first = source(g, item.row);
    bool adjacent = true;
    for (int64_t m = 1; m < item.rows && adjacent; ++m) adjacent = source(g, item.row + m) == first + m;
    if (adjacent) return xs.at(first, item.rows);
    const bool as_halves = halves(in_side(), g.rows);
    const size_t k = static_cast<size_t>(xs.k_pad), n = k / kActGroup;
    for (int64_t m = 0; m < item.rows; ++m) {
      const size_t src = static_cast<size_t>(source(g, item.row + m)), dst = static_cast<size_t>(m);
      if (as_halves) {
        std::memcpy(to.bf16 + dst * k, xs.bf16 + src * k, k * 2);
      } else if (in_side().quantised) {
        std::memcpy(to.q + dst * k, xs.q + src * k, k);
        std::memcpy(to.scale + dst * n, xs.scale + src * n, n * 4);
        std::memcpy(to.sum + dst * n, xs.sum + src * n, n * 4);
      } else {
        std::memcpy(to.f32 + dst * k, xs.f32 + src * k, k * 4);
      }
    }
    return to.at(0, item.rows);
  }

  static void add_bias(const float* bias, int64_t n, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
  }

  // -- gate and up

  static void gate_up_phase(void* self, int64_t chunk, int thread) {
    Step& s = *static_cast<Step*>(self);
    s.gate_up_item(s.ws.up_items[static_cast<size_t>(chunk)], s.buffers(thread));
  }

  void gate_up_item(const Workspace::Item& item, const Buffers& b) {
    const auto& g = ws.groups[static_cast<size_t>(item.group)];
    const Rows rows = gather(g, item, b.gather);
    // As many units at a time as leave their results in the second cache, beside the rows.
    const int64_t most = std::max<int64_t>(1, kUpFloats / (item.rows * kUnit * store.mats()));
    const int64_t steps = ceil_div(item.units, most);
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t first = item.unit + item.units * i / steps,
                    end = item.unit + item.units * (i + 1) / steps;
      gate_up_units(item, rows, first, end - first, b);
    }
  }

  void gate_up_units(const Workspace::Item& item, const Rows& rows, int64_t unit, int64_t units,
                     const Buffers& b) {
    const auto& g = ws.groups[static_cast<size_t>(item.group)];
    const int64_t inter = op.config_.intermediate, mats = store.mats();
    const int64_t block0 = unit * 2;
    const int64_t blocks = std::min(up.n_pad / kBlockRows, block0 + units * 2) - block0;
    const int64_t col0 = block0 * kBlockRows, cols = blocks * kBlockRows;
    const int64_t valid = std::min(inter - col0, cols);  // columns that exist
    const int64_t ld = cols * mats;
    const uint8_t* w = store.up_block(g.expert, item.part, store.arena_of(item.part, b.node), block0);
    multiply(up_side, g.rows, item.row == 0 && unit == 0, w, blocks * mats, rows, b.tile, ld, b.scratch);
    const float* gate_bias = store.bias(g.expert, Weights::kGateBias);
    const float* up_bias = store.bias(g.expert, Weights::kUpBias);
    for (int64_t m = 0; m < item.rows; ++m) {
      float* tile = b.tile + m * ld;
      if (op.config_.has_bias) {
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t n = std::min<int64_t>(kBlockRows, valid - i * kBlockRows);
          float* at = tile + i * kBlockRows * mats;
          if (mats == 2) add_bias(gate_bias + col0 + i * kBlockRows, n, at);
          add_bias(up_bias + col0 + i * kBlockRows, n, at + kBlockRows * (mats - 1));
        }
      }
      const int64_t position = g.first + item.row + m;
      if (mode == Mode::kGateUp) {
        store_gate_up(tile, blocks, col0, valid, ws.order[static_cast<size_t>(position)]);
      } else {
        activate(tile, blocks, col0, valid, position, b.row, halves(down_side, g.rows));
      }
    }
  }

  void store_gate_up(const float* tile, int64_t blocks, int64_t col0, int64_t valid, int64_t pair) {
    const int64_t inter = op.config_.intermediate, mats = store.mats();
    float* to = out + pair * inter * mats + col0;
    for (int64_t i = 0; i < blocks; ++i) {
      const size_t n = static_cast<size_t>(std::min<int64_t>(kBlockRows, valid - i * kBlockRows));
      for (int64_t mat = 0; mat < mats; ++mat) {
        std::memcpy(to + mat * inter + i * kBlockRows, tile + (i * mats + mat) * kBlockRows, n * 4);
      }
    }
  }

  // h of one row and a range of columns, straight into the store of down's inputs. A range starts at a
  // multiple of 32 columns, so it owns whole groups of the quantisation.
  void activate(const float* tile, int64_t blocks, int64_t col0, int64_t valid, int64_t position, float* row,
                bool as_halves) {
    const int64_t mats = store.mats(), k_pad = hs.k_pad;
    const bool last = col0 + blocks * kBlockRows >= up.n_pad;
    const int64_t end = last ? k_pad : col0 + blocks * kBlockRows;
    const bool quantised = down_side.quantised;
    const int64_t at = position - h_begin;
    float* h = quantised || as_halves ? row : hs.f32 + at * k_pad + col0;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t n = std::min<int64_t>(kBlockRows, valid - i * kBlockRows);
      const float* first = tile + i * kBlockRows * mats;
      op.isa_.table->act(first, first + kBlockRows * (mats - 1), h + i * kBlockRows, n, &op.config_.act);
    }
    if (as_halves) {
      op.isa_.table->round(h, valid, end - col0, hs.bf16 + at * k_pad + col0);
    } else if (quantised) {
      const int64_t groups = k_pad / kActGroup, g0 = at * groups + col0 / kActGroup;
      op.isa_.table->quantize(h, valid, end - col0, hs.q + at * k_pad + col0, hs.scale + g0, hs.sum + g0);
    } else {
      std::fill(h + valid, h + (end - col0), 0.0f);
    }
  }

  // -- down

  // Few tokens: a chunk computes one strip of columns for every expert, then the weighted sum of the strip,
  // so no result leaves the core and no barrier stands between product and sum.
  static void strip_phase(void* self, int64_t chunk, int thread) {
    Step& s = *static_cast<Step*>(self);
    s.strip_item(chunk, s.buffers(thread));
  }

  void strip_item(int64_t chunk, const Buffers& b) {
    const int64_t hidden = op.config_.hidden;
    int part = 0;
    while (chunk >= ws.down_ends[static_cast<size_t>(part)]) ++part;
    const int64_t before = part == 0 ? 0 : ws.down_ends[static_cast<size_t>(part - 1)];
    const int64_t block0 = store.down_begin(part) + (chunk - before) * strip;
    const int64_t blocks = std::min(store.down_begin(part + 1) - block0, strip);
    const int64_t col0 = block0 * kBlockRows, ld = blocks * kBlockRows;
    const int64_t valid = std::min(hidden - col0, ld);
    const int arena = store.arena_of(part, b.node);
    for (const auto& g : ws.groups) {
      const Rows rows = hs.at(g.first, g.rows);
      multiply(down_side, g.rows, chunk == 0, store.down_block(g.expert, part, arena, block0), blocks, rows,
               b.tile + g.first * ld, ld, b.scratch);
      if (op.config_.has_bias) {
        const float* bias = store.bias(g.expert, Weights::kDownBias) + col0;
        for (int64_t m = 0; m < g.rows; ++m) add_bias(bias, valid, b.tile + (g.first + m) * ld);
      }
    }
    for (int64_t t = 0; t < tokens; ++t) sum_slots(t, b.tile, ld, col0, valid, 0, pairs_kept);
  }

  // Adds the results at positions [begin, end) of one token to out, in slot order. Results stand by position,
  // those of Mode::kSum by pair.
  void sum_slots(int64_t token, const float* results, int64_t ld, int64_t col0, int64_t n, int64_t begin,
                 int64_t end) {
    float* to = out + token * op.config_.hidden + col0;
    if (begin == 0) std::fill(to, to + n, 0.0f);
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t pair = token * slots + slot;
      const int64_t at = ws.position[static_cast<size_t>(pair)];
      const int64_t row = mode == Mode::kSum ? pair : at - begin;
      if (at >= begin && at < end) op.isa_.table->axpy(weights[pair], results + row * ld, to, n);
    }
  }

  // Many tokens: items of one expert each; the results wait in y for the sum.
  static void down_phase(void* self, int64_t chunk, int thread) {
    Step& s = *static_cast<Step*>(self);
    s.down_item(s.ws.down_items[static_cast<size_t>(chunk)], s.buffers(thread));
  }

  void down_item(const Workspace::Item& item, const Buffers& b) {
    const auto& g = ws.groups[static_cast<size_t>(item.group)];
    const int64_t hidden = op.config_.hidden, col0 = item.unit * kBlockRows;
    const int64_t valid = std::min(hidden - col0, item.units * kBlockRows);
    const int64_t position = g.first + item.row;
    const bool whole = mode == Mode::kWhole;
    const Rows rows = mode == Mode::kDown ? gather(g, item, b.gather)
                      : tiled(down_side, g.rows)
                          ? lay(hs, item.rows, b.gather, [&](int64_t m) { return position - h_begin + m; })
                          : hs.at(position - h_begin, item.rows);
    float* to = whole ? y + (position - wave_begin) * ldy + col0 : b.tile;
    const int64_t ld = whole ? ldy : item.units * kBlockRows;
    const uint8_t* w = store.down_block(g.expert, item.part, store.arena_of(item.part, b.node), item.unit);
    multiply(down_side, g.rows, item.row == 0 && item.unit == 0, w, item.units, rows, to, ld, b.scratch);
    for (int64_t m = 0; m < item.rows; ++m) {
      if (op.config_.has_bias) add_bias(store.bias(g.expert, Weights::kDownBias) + col0, valid, to + m * ld);
      if (!whole) {
        const int64_t pair = ws.order[static_cast<size_t>(position + m)];
        std::memcpy(out + pair * hidden + col0, to + m * ld, static_cast<size_t>(valid) * 4);
      }
    }
  }

  static void sum_phase(void* self, int64_t chunk, int) {
    Step& s = *static_cast<Step*>(self);
    const int64_t pieces = ceil_div(s.op.config_.hidden, s.column_chunk);
    const int64_t col0 = chunk % pieces * s.column_chunk;
    const int64_t n = std::min(s.op.config_.hidden - col0, s.column_chunk);
    s.sum_slots(chunk / pieces, s.y + col0, s.ldy, col0, n, s.wave_begin, s.wave_end);
  }

  // -- the pass

  int64_t most_pairs() const { return std::max<int64_t>(1, ctx.tuning.wave_bytes / (down.n_pad * 4)); }

  // Positions are worked off in stretches, whose hidden rows are kept, and these in waves, whose results are
  // kept: moves to the next. False behind the last.
  bool next_stretch() {
    h_begin = h_end;
    h_end = exact ? pairs_kept : ws.wave_limit(h_begin, h_most);
    wave_end = h_begin;
    return h_begin < h_end;
  }
  bool next_wave() {
    wave_begin = wave_end;
    wave_end = exact ? pairs_kept : std::min(h_end, ws.wave_limit(wave_begin, most_pairs()));
    return wave_begin < wave_end;
  }

  // Chunks of the phase that sums one wave.
  int64_t sum_chunks() {
    const int64_t hidden = op.config_.hidden;
    column_chunk = tokens >= 4 * ctx.pool->threads() ? hidden : std::min<int64_t>(hidden, 512);
    return tokens * ceil_div(hidden, column_chunk);
  }

  // The sum alone, in the waves in which a whole step takes it.
  void sum(const Routing& routing, int64_t first_pair) {
    group_pairs(routing, first_pair);
    y = reinterpret_cast<float*>(const_cast<uint8_t*>(x));  // only read
    ldy = op.config_.hidden;
    const int64_t sums = sum_chunks();
    if (pairs_kept == 0) {
      const Phase none = phase(sums, sum_phase);  // zeros
      ctx.pool->run(&none, 1);
    }
    while (next_stretch()) {
      while (next_wave()) {
        const Phase one = phase(sums, sum_phase);
        ctx.pool->run(&one, 1);
      }
    }
  }

  void run(const Routing& routing, int64_t first_pair) {
    if (mode == Mode::kSum) return sum(routing, first_pair);
    group_pairs(routing, first_pair);
    if (mode == Mode::kWhole && ws.groups.empty()) {  // other tiers have them all: no thread need hear of it
      std::fill(out, out + tokens * op.config_.hidden, 0.0f);
      return;
    }
    const bool makes_hidden = mode == Mode::kWhole || mode == Mode::kPairs;
    in_side().form = form_of_groups(in_side());
    if (makes_hidden) down_side.form = form_of_groups(down_side);
    const RowForm form = in_side().form, h_form = down_side.form;
    const int64_t hidden = op.config_.hidden, pairs = tokens * slots;
    x_rows = by_position ? pairs_kept : mode == Mode::kDown ? pairs : tokens;
    k_in = in_layout().k;
    const int64_t k_pad = in_layout().k_pad, blocks = down.n_pad / kBlockRows;
    in_place = form.floats && type == DType::kF32 && k_in == k_pad && !by_position;
    const RowForm x_form = {form.codes, form.floats && !in_place, form.halves};
    const bool reads_input = x_form.codes || x_form.floats || x_form.halves;
    const bool strips = mode == Mode::kWhole && exact;
    const int threads = ctx.pool->threads();

    int64_t largest = 1;
    for (const auto& g : ws.groups) largest = std::max(largest, g.rows);
    const int64_t row_bytes = static_cast<int64_t>(RowStore::bytes(gather_form(), 1, gather_k()));
    max_rows =
        std::min(largest, std::clamp<int64_t>(kGatherBytes / std::max<int64_t>(1, row_bytes), 32, 256));
    tile_floats = kTileFloats;
    if (strips) {
      const int64_t most =
          std::max<int64_t>(1, kTileFloats / (kBlockRows * std::max<int64_t>(1, pairs_kept)));
      const int64_t want = ctx.tuning.strip_blocks > 0 ? ctx.tuning.strip_blocks : blocks / (threads * 5);
      strip = std::clamp<int64_t>(want, 1, std::min<int64_t>(16, most));
      tile_floats = std::max(tile_floats, pairs_kept * kBlockRows * strip);
    }
    ldy = down.n_pad;
    const int64_t y_rows = mode == Mode::kWhole && !exact ? std::min(pairs_kept, most_pairs()) : 0;
    const int64_t h_rows = !makes_hidden ? 0 : exact ? pairs_kept : std::min(pairs_kept, h_most);

    thread_bytes = buffer_bytes();
    ws.memory.reserve(RowStore::bytes(x_form, x_rows, k_pad) + RowStore::bytes(h_form, h_rows, down.k_pad) +
                      align64(static_cast<size_t>(y_rows * ldy) * 4) +
                      thread_bytes * static_cast<size_t>(threads));
    uint8_t* cursor = ws.memory.data();
    xs = RowStore::carve(&cursor, x_form, x_rows, k_pad);
    if (in_place) xs.f32 = const_cast<float*>(reinterpret_cast<const float*>(x));  // only read
    hs = RowStore::carve(&cursor, h_form, h_rows, down.k_pad);
    y = reinterpret_cast<float*>(cursor);
    cursor += align64(static_cast<size_t>(y_rows * ldy) * 4);
    thread_memory = cursor;

    Phase phases[4];
    int count = 0;
    if (reads_input && x_rows <= 2) {
      for (int64_t row = 0; row < x_rows; ++row) input_row(row, buffers(0).row);
    } else if (reads_input) {
      x_chunk = std::clamp<int64_t>(x_rows / (threads * kPiecesPerThread), 1, 16);
      phases[count++] = phase(ceil_div(x_rows, x_chunk), input_phase);
    }
    if (strips || mode == Mode::kGateUp) {
      phases[count++] = gate_up(0, pairs_kept);
      if (mode == Mode::kGateUp) clear_skipped(op.config_.intermediate * store.mats());
    }
    if (strips) {
      ws.down_ends.clear();
      int64_t chunks = 0;
      for (int part = 0; part < store.parts(); ++part) {
        chunks += ceil_div(store.down_begin(part + 1) - store.down_begin(part), strip);
        ws.down_ends.push_back(chunks);
      }
      phases[count++] = phase(chunks, strip_phase, &ws.down_ends);
    }
    if (mode == Mode::kDown) {
      clear_skipped(hidden);
      phases[count++] = down_of(0, pairs_kept);
    }
    if (strips || !makes_hidden) {
      ctx.pool->run(phases, count);
      return;
    }
    const int64_t sums = mode == Mode::kWhole ? sum_chunks() : 0;
    while (next_stretch()) {
      phases[count++] = gate_up(h_begin, h_end);
      if (mode == Mode::kPairs) {
        phases[count++] = down_of(h_begin, h_end);
        ctx.pool->run(phases, count);
        count = 0;
        continue;
      }
      while (next_wave()) {
        phases[count++] = down_of(wave_begin, wave_end);
        phases[count++] = phase(sums, sum_phase);
        ctx.pool->run(phases, count);
        count = 0;
      }
    }
  }

  // The phases of the pairs at positions [begin, end).
  Phase gate_up(int64_t begin, int64_t end) {
    build_items(&ws.up_items, &ws.up_ends, begin, end, ceil_div(up.n_pad, kUnit), 0,
                [&](int64_t expert, int part) {
                  return std::make_pair(store.unit_begin(expert, part), store.unit_begin(expert, part + 1));
                });
    return phase(static_cast<int64_t>(ws.up_items.size()), gate_up_phase, &ws.up_ends);
  }
  Phase down_of(int64_t begin, int64_t end) {
    build_items(&ws.down_items, &ws.down_ends, begin, end, down.n_pad / kBlockRows, kBlockRows,
                [&](int64_t, int part) {
                  return std::make_pair(store.down_begin(part), store.down_begin(part + 1));
                });
    return phase(static_cast<int64_t>(ws.down_items.size()), down_phase, &ws.down_ends);
  }

  void clear_skipped(int64_t width) {
    for (int64_t p = 0; p < tokens * slots; ++p) {
      if (ws.position[static_cast<size_t>(p)] < 0) std::fill(out + p * width, out + (p + 1) * width, 0.0f);
    }
  }
};

// Runs in passes over the tokens, so that the workspace stays bounded whatever their number.
void Experts::run(Context& context, Mode mode, const void* x, DType type, const Routing& routing,
                  const float* weights, float* out) const {
  std::lock_guard<std::mutex> hold(context.lock);
  const int64_t slots = routing.slots, hidden = config_.hidden, inter = config_.intermediate;
  const int64_t in_width = mode == Mode::kDown ? slots * inter : mode == Mode::kSum ? slots * hidden : hidden;
  const int64_t out_width = mode == Mode::kGateUp                        ? slots * inter * weights_.mats()
                            : mode == Mode::kWhole || mode == Mode::kSum ? hidden
                                                                         : slots * hidden;
  auto most_bytes = [](const Layout& layout) {
    const bool quantised = takes_codes(layout.format);
    return static_cast<int64_t>(RowStore::bytes({quantised, !quantised, true}, 1, layout.k_pad));
  };
  const int64_t up_row = most_bytes(weights_.up_layout()), down_row = most_bytes(weights_.down_layout());
  const int64_t up_rows = mode == Mode::kDown ? 0 : config_.ordered ? slots : 1;
  // Inputs are kept for all tokens of a pass; of what makes hidden rows they leave a quarter to these. A step
  // without experts has none.
  const int64_t per_token = std::max<int64_t>(1, mode == Mode::kDown ? slots * down_row : up_rows * up_row);
  const int64_t bytes = context.tuning.store_bytes;
  const int64_t most = std::max<int64_t>(
      1, (mode == Mode::kGateUp || mode == Mode::kDown ? bytes : bytes / 4 * 3) / per_token);
  const int64_t passes = ceil_div(routing.tokens, most);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t begin = routing.tokens * pass / passes;
    Step step(*this, context, mode);
    step.exact = routing.tokens <= kExactRows;
    step.x = static_cast<const uint8_t*>(x) + static_cast<size_t>(begin * in_width) * element_bytes(type);
    step.type = type;
    step.tokens = routing.tokens * (pass + 1) / passes - begin;
    step.slots = slots;
    step.h_most = std::max<int64_t>(1, (bytes - step.tokens * per_token) / down_row);
    step.weights = weights == nullptr ? nullptr : weights + begin * slots;
    step.out = out + begin * out_width;
    step.run(routing, begin * slots);
  }
}

}  // namespace hetero
