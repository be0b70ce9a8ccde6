// The Python face of the extension. Tensors arrive as addresses: hetero/cpu*.py check shapes, types and
// contiguity, keep the tensors alive during the call, and are the only callers of this file's functions.
#include "bindings.h"

#include <emmintrin.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bulk.h"
#include "context.h"
#include "dispatch.h"
#include "fields.h"
#include "ggml.h"
#include "probes.h"
#include "tune.h"

namespace nb = nanobind;

namespace hetero {
namespace {

// One thread a seat: (node, CPUs that it may run on; none: anywhere).
void set_seats(const std::vector<std::pair<int, std::vector<int>>>& given) {
  if (given.empty()) throw std::invalid_argument("threads must be at least 1");
  std::vector<Seat> seats;
  for (const auto& [node, cpus] : given) {
    if (node < 0) throw std::invalid_argument("nodes are numbered from 0");
    seats.push_back({node, cpus});
  }
  nb::gil_scoped_release release;
  seat(std::move(seats));
}

// At interpreter exit no thread of ours may outlive the module; a later step runs on its caller alone.
void shut_down() {
  nb::gil_scoped_release release;
  seat(std::vector<Seat>(1));
}

constexpr int64_t kPiece = 1 << 18;

// Adds up the bytes of one piece of `size`, so that nothing but the reads takes time. Two streams, fetched
// ahead like the kernels' weights: one core alone reads a fifth more than by a plain loop, and a yardstick
// must not be slower than what it measures.
uint64_t read_piece(const uint8_t* data, int64_t size) {
  constexpr int64_t kNear = 1024, kFar = 3072;
  const int64_t half = size / 128 * 64;
  __m128i a = _mm_setzero_si128(), b = a;
  for (int64_t at = 0; at < half; at += 64) {
    for (const uint8_t* p : {data + at, data + half + at}) {
      _mm_prefetch(reinterpret_cast<const char*>(p + kNear), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(p + kFar), _MM_HINT_T1);
    }
    const __m128i* p = reinterpret_cast<const __m128i*>(data + at);
    const __m128i* q = reinterpret_cast<const __m128i*>(data + half + at);
    for (int i = 0; i < 4; ++i) {
      a = _mm_add_epi64(a, _mm_load_si128(p + i));
      b = _mm_add_epi64(b, _mm_load_si128(q + i));
    }
  }
  for (int64_t at = 2 * half; at + 16 <= size; at += 16) {
    a = _mm_add_epi64(a, _mm_load_si128(reinterpret_cast<const __m128i*>(data + at)));
  }
  alignas(16) uint64_t sums[2];
  _mm_store_si128(reinterpret_cast<__m128i*>(sums), _mm_add_epi64(a, b));
  return sums[0] + sums[1];
}

// Reads the packed bytes of some experts with every thread of the pool, each node's by its own threads first:
// the yardstick of the operator's bandwidth. Returns how many bytes that are.
int64_t read_experts(Experts& experts, int64_t first, int64_t count) {
  nb::gil_scoped_release release;
  const Held own;
  struct Piece {
    int64_t expert, offset, bytes;
    int part;
  };
  struct Job {
    const Weights& weights;
    const Pool& pool;
    std::vector<Piece> pieces;
    std::atomic<uint64_t> sum{0};
  } job{experts.weights(), *own->pool, {}};
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (int part = 0; part < job.weights.parts(); ++part) {
    for (int64_t e = first; e < first + count; ++e) {
      const int64_t bytes = job.weights.part_bytes(e, part);
      for (int64_t at = 0; at < bytes; at += kPiece)
        job.pieces.push_back({e, at, std::min(kPiece, bytes - at), part});
      total += bytes;
    }
    ends.push_back(static_cast<int64_t>(job.pieces.size()));
  }
  Phase phase = {static_cast<int64_t>(job.pieces.size()),
                 [](void* ctx, int64_t chunk, int thread) {
                   Job& j = *static_cast<Job*>(ctx);
                   const Piece& p = j.pieces[static_cast<size_t>(chunk)];
                   const int arena = j.weights.arena_of(p.part, j.pool.node_of(thread));
                   j.sum += read_piece(j.weights.part_data(p.expert, arena) + p.offset, p.bytes);
                 },
                 &job};
  phase.only = job.weights.only();
  if (ends.size() > 1) {
    phase.node_ends = ends.data();
    phase.nodes = static_cast<int>(ends.size());
  }
  own->pool->run(&phase, 1);
  return total;
}

using Bands = std::vector<std::tuple<int64_t, std::string, int32_t>>;

// Throws std::invalid_argument for bands that are no plan, what choose_isa throws for their names.
std::vector<Band> make_bands(const Bands& given, int32_t format, bool exact) {
  std::vector<Band> bands;
  for (const auto& [rows, name, row_class] : given) {
    if (row_class < 0 || row_class >= kRowClasses || (exact && row_class == kBulk))
      throw std::invalid_argument("no such class of rows here");
    if (rows < 1 || (row_class == kGemv && rows > kGemvRows))
      throw std::invalid_argument("gemv kernels take 1 to 4 rows");
    if (!bands.empty() && rows <= bands.back().rows)
      throw std::invalid_argument("bands must be in ascending order of rows");
    const IsaChoice isa = choose_isa(name);
    bands.push_back({rows, &isa.table->gemm[format][row_class], &isa.counters->calls[format][row_class]});
  }
  if (given.empty() || std::get<2>(given.back()) == kGemv)
    throw std::invalid_argument("the last band must take any number of rows");
  bands.back().rows = INT64_MAX;
  return bands;
}

// The ggml type in whose blocks matrices stay, -1 for none, and its tables.
using Stored = std::tuple<int32_t, GgmlTable<uint64_t>, GgmlTable<float>>;

template <class T>
const T* address(uintptr_t value) {
  return reinterpret_cast<const T*>(value);
}

}  // namespace
}  // namespace hetero

NB_MODULE(_cpu, m) {
  using namespace hetero;
  nb::set_leak_warnings(false);
  init_context();

  m.def("isa_names", &isa_names, nb::arg("with_twin"));
  m.def("best_isa", &best_isa_name);
  m.def("check_isa", [](const std::string& name) { choose_isa(name); });
  m.def("kernel_counts", &kernel_counts);
  m.def("reset_kernel_counts", &reset_kernel_counts);
  m.def("set_seats", &set_seats);
  m.def("threads", [] { return context().pool->threads(); });
  // Sets the sizes of Tuning and returns those before: wave_bytes, store_bytes, strip_blocks.
  m.def("set_tuning", [](int64_t wave_bytes, int64_t store_bytes, int64_t strip_blocks) {
    nb::gil_scoped_release release;
    const Held own;
    const Tuning before = own->tuning;
    own->tuning = {wave_bytes, store_bytes, strip_blocks};
    return std::vector<int64_t>{before.wave_bytes, before.store_bytes, before.strip_blocks};
  });
  // Seconds of each kernel by rows, weights from memory: see tune.h.
  m.def("kernel_seconds", [](int32_t format, int32_t group, const std::vector<KernelId>& kernels,
                             const std::vector<int64_t>& rows, double limit) {
    nb::gil_scoped_release release;
    return kernel_seconds(format, group, kernels, rows, limit);
  });
  // (instruction, instruction set, kind of products, operations of a round) of each probe of this machine.
  m.def("probes", [] {
    std::vector<std::tuple<std::string, std::string, std::string, int64_t>> found;
    for (const Probe& p : probes()) found.emplace_back(p.instruction, p.isa, p.kind, p.ops);
    return found;
  });
  m.def("run_probe", [](const std::string& instruction, int64_t rounds, int64_t chunks) {
    nb::gil_scoped_release release;
    const Held own;
    const ProbeResult result = run_probe(*own->pool, instruction, rounds, chunks);
    return std::make_pair(result.seconds, result.clock_hz);
  });
  m.def("shut_down", &shut_down);
  // Nanoseconds of each of `repeats` steps of `phases` phases with `chunks` chunks of about `work` ns, with a
  // pause of `pause` microseconds before each. For benchmarks.
  m.def("pool_time", [](int phases, int64_t chunks, int64_t work, int64_t pause, int64_t repeats) {
    auto now = [] {
      timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
    };
    auto spin = [](void* ctx, int64_t, int) {
      for (int64_t i = *static_cast<int64_t*>(ctx); i > 0; --i) __builtin_ia32_pause();
    };
    const int64_t probe = 10000;
    int64_t loops = probe;
    const int64_t start = now();
    spin(&loops, 0, 0);
    loops = work * probe / std::max<int64_t>(1, now() - start);
    std::vector<Phase> step(static_cast<size_t>(phases), Phase{chunks, spin, &loops});
    std::vector<int64_t> times;
    nb::gil_scoped_release release;
    const Held own;
    for (int64_t i = 0; i < repeats; ++i) {
      if (pause > 0) {
        const timespec t = {pause / 1000000, pause % 1000000 * 1000};
        nanosleep(&t, nullptr);
      }
      const int64_t begin = now();
      own->pool->run(step.data(), phases);
      times.push_back(now() - begin);
    }
    return times;
  });
  // Runs `chunks` chunks of `microseconds` of busy work; chunk `failing` throws (-1: none). For tests.
  m.def("pool_exercise", [](int64_t chunks, int64_t microseconds, int64_t failing) {
    struct Job {
      int64_t microseconds, failing;
      std::atomic<int64_t> done{0};
    } job;
    job.microseconds = microseconds;
    job.failing = failing;
    auto chunk_of_work = [](void* ctx, int64_t chunk, int) {
      Job& j = *static_cast<Job*>(ctx);
      if (chunk == j.failing) throw std::runtime_error("chunk " + std::to_string(chunk) + " failed");
      timespec start, t;
      clock_gettime(CLOCK_MONOTONIC, &start);
      do {
        clock_gettime(CLOCK_MONOTONIC, &t);
      } while ((t.tv_sec - start.tv_sec) * 1000000 + (t.tv_nsec - start.tv_nsec) / 1000 < j.microseconds);
      j.done.fetch_add(1, std::memory_order_relaxed);
    };
    const Phase phase = {chunks, chunk_of_work, &job};
    const Phase phases[2] = {phase, phase};
    nb::gil_scoped_release release;
    const Held own;
    own->pool->run(phases, 2);
    return job.done.load();
  });

  nb::class_<Arena>(m, "Arena")
      .def(nb::init<size_t>())
      .def_prop_ro("address", [](const Arena& a) { return reinterpret_cast<uintptr_t>(a.data()); })
      .def_prop_ro("nbytes", &Arena::size);

  // Blocks are (offset in the file, stride, bytes of an expert, checksums, memory).
  using Block = std::tuple<int64_t, int64_t, int64_t, std::vector<uint64_t>, const Arena*>;
  nb::class_<BulkRead>(m, "BulkRead")
      .def("__init__",
           [](BulkRead* self, int file, int direct, const std::vector<Block>& given, int threads) {
             std::vector<BulkBlock> blocks;
             for (const auto& [offset, stride, bytes, sums, memory] : given) {
               if (stride < 1 || bytes > stride || memory->size() / static_cast<size_t>(stride) < sums.size())
                 throw std::invalid_argument("a block does not fit into its memory");
               blocks.push_back({offset, stride, bytes, sums, *memory});
             }
             new (self) BulkRead(file, direct, std::move(blocks), threads);
           })
      // (kind of the fault, its value), None where the block is still being read after so many seconds
      .def("wait",
           [](BulkRead& r, int64_t block, double seconds) -> std::optional<std::pair<int, int64_t>> {
             nb::gil_scoped_release release;
             const std::optional<BulkFault> fault = r.wait(block, seconds);
             if (!fault) return std::nullopt;
             return std::make_pair(static_cast<int>(fault->kind), fault->value);
           })
      .def("stop",
           [](BulkRead& r) {
             nb::gil_scoped_release release;
             r.stop();
           })
      .def_prop_ro("read_bytes", &BulkRead::read_bytes)
      .def_prop_ro("taken_bytes", &BulkRead::taken_bytes);

  nb::class_<Experts>(m, "Experts")
      .def(
          "__init__",
          [](Experts* self, const std::string& isa, int32_t format, int32_t group, int32_t down_format,
             int32_t down_group, int64_t experts, int64_t hidden, int64_t intermediate, bool bias,
             int32_t kind, bool gate, float alpha, float gate_max, float up_limit, float act_max,
             float up_offset, int32_t spread, const std::vector<int>& nodes, int only, const Stored& stored,
             const Stored& down_stored, bool ordered, const Arena* memory) {
            const Act act = {kind, gate, alpha, gate_max, up_limit, act_max, up_offset};
            const auto store = [](const Stored& s) {
              return ggml_store(std::get<0>(s), std::get<1>(s), std::get<2>(s));
            };
            new (self) Experts({experts, hidden, intermediate, format, group, down_format, down_group, bias,
                                act, store(stored), store(down_stored), ordered},
                               {static_cast<Spread>(spread), nodes, only}, choose_isa(isa), memory);
          },
          nb::arg("isa"), nb::arg("format"), nb::arg("group"), nb::arg("down_format"), nb::arg("down_group"),
          nb::arg("experts"), nb::arg("hidden"), nb::arg("intermediate"), nb::arg("bias"), nb::arg("kind"),
          nb::arg("gate"), nb::arg("alpha"), nb::arg("gate_max"), nb::arg("up_limit"), nb::arg("act_max"),
          nb::arg("up_offset"), nb::arg("spread"), nb::arg("nodes"), nb::arg("only"), nb::arg("stored"),
          nb::arg("down_stored"), nb::arg("ordered"), nb::arg("memory").none())
      .def("set_isa",
           [](Experts& e, const std::string& isa) {
             const IsaChoice choice = choose_isa(isa);
             nb::gil_scoped_release release;
             const Held own;
             e.set_isa(choice);
           })
      // Bands (most rows, instruction set, class) of small steps and of large ones, see Plan; of gate and up,
      // and of down.
      .def("set_plan",
           [](Experts& e, const Bands& exact, const Bands& large, const Bands& down_exact,
              const Bands& down_large) {
             const int32_t format = e.config().format, down_format = e.config().down_format;
             Plan up = {make_bands(exact, format, true), make_bands(large, format, false)};
             Plan down = {make_bands(down_exact, down_format, true),
                          make_bands(down_large, down_format, false)};
             nb::gil_scoped_release release;
             const Held own;
             e.set_plan(std::move(up), std::move(down));
           })
      .def_prop_ro("nbytes", [](Experts& e) { return e.weights().nbytes(); })
      .def_prop_ro("stride", [](Experts& e) { return e.weights().stride(); })
      .def_prop_ro("address", [](Experts& e) { return reinterpret_cast<uintptr_t>(e.weights().data()); })
      // The memory of whole experts, which stays as long as what is returned.
      .def_prop_ro("memory", [](Experts& e) { return e.weights().arenas()[0]; })
      // For each part of an expert: its units of gate and up, its blocks of down.
      .def("shares",
           [](Experts& e, int64_t expert) {
             const Weights& w = e.weights();
             std::vector<std::pair<int64_t, int64_t>> all;
             for (int p = 0; p < w.parts(); ++p) {
               all.push_back({w.unit_begin(expert, p + 1) - w.unit_begin(expert, p),
                              w.down_begin(p + 1) - w.down_begin(p)});
             }
             return all;
           })
      // For each arena: the node asked for (-1: none), and node -> pages.
      .def("page_nodes",
           [](Experts& e, size_t most) {
             std::vector<std::pair<int, std::map<int, int64_t>>> all;
             for (const Arena& a : e.weights().arenas()) all.push_back({a.node(), a.page_nodes(most)});
             return all;
           })
      .def("bind_error",
           [](Experts& e) {
             int error = 0;
             for (const Arena& a : e.weights().arenas()) error = error != 0 ? error : a.bind_error();
             return error;
           })
      .def("read", &read_experts)
      .def("copy",
           [](Experts& e, int64_t from, int64_t to) {
             nb::gil_scoped_release release;
             e.weights().copy(from, to);
           })
      .def("replicate",
           [](Experts& e, int64_t sources) {
             nb::gil_scoped_release release;
             const Held own;
             e.weights().replicate(*own->pool, sources);
           })
      .def("put",
           [](Experts& e, int64_t expert, int32_t part, uintptr_t data, int32_t type, int64_t rows,
              int64_t cols) {
             nb::gil_scoped_release release;
             const Held own;
             e.weights().put(*own->pool, expert, static_cast<Weights::Part>(part), address<void>(data),
                             static_cast<DType>(type), rows, cols);
           })
      .def("put_order",
           [](Experts& e, int64_t expert, uintptr_t order) {
             nb::gil_scoped_release release;
             const Held own;
             e.weights().put_order(expert, address<int32_t>(order));
           })
      .def("put_codes",
           [](Experts& e, int64_t expert, int32_t part, uintptr_t codes, uintptr_t scales, uintptr_t extra) {
             nb::gil_scoped_release release;
             const Held own;
             const Quantised q = {address<uint8_t>(codes), address<void>(scales), address<void>(extra)};
             e.weights().put_codes(*own->pool, expert, static_cast<Weights::Part>(part), q);
           })
      .def(
          "put_ggml",
          [](Experts& e, int64_t expert, int32_t part, int32_t type, const GgmlBytes& data,
             const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers) {
            const Weights& w = e.weights();
            const Layout& layout = part == Weights::kDown ? w.down_layout() : w.up_layout();
            const GgmlSource source = ggml_source(type, data, layout.n, layout.k, grid, numbers);
            nb::gil_scoped_release release;
            const Held own;
            e.weights().put_ggml(*own->pool, expert, static_cast<Weights::Part>(part), source);
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("grid").none(), nb::arg("numbers").none())
      // A whole expert, in the layout of kernels.h, from and to memory of the caller.
      .def_prop_ro("whole_bytes", [](Experts& e) { return e.weights().whole_bytes(); })
      .def("load_whole",
           [](Experts& e, int64_t expert, uintptr_t from) {
             nb::gil_scoped_release release;
             e.weights().load_whole(expert, address<uint8_t>(from));
           })
      .def("save_whole",
           [](Experts& e, int64_t expert, uintptr_t to) {
             nb::gil_scoped_release release;
             e.weights().save_whole(expert, reinterpret_cast<uint8_t*>(to));
           })
      .def("pairs",
           [](const Experts& e, uintptr_t x, int32_t type, uintptr_t ids, bool wide, int64_t tokens,
              int64_t slots, uintptr_t out) {
             nb::gil_scoped_release release;
             e.pairs(context(), address<void>(x), static_cast<DType>(type),
                     {address<void>(ids), wide, tokens, slots}, reinterpret_cast<float*>(out));
           })
      .def("sum",
           [](const Experts& e, uintptr_t results, uintptr_t ids, bool wide, int64_t tokens, int64_t slots,
              int64_t experts, uintptr_t weights, uintptr_t out) {
             nb::gil_scoped_release release;
             e.sum(context(), address<float>(results), {address<void>(ids), wide, tokens, slots, experts},
                   address<float>(weights), reinterpret_cast<float*>(out));
           })
      .def("forward",
           [](const Experts& e, uintptr_t x, int32_t type, uintptr_t ids, bool wide, int64_t tokens,
              int64_t slots, uintptr_t weights, uintptr_t out) {
             nb::gil_scoped_release release;
             e.forward(context(), address<void>(x), static_cast<DType>(type),
                       {address<void>(ids), wide, tokens, slots}, address<float>(weights),
                       reinterpret_cast<float*>(out));
           })
      .def("gate_up",
           [](const Experts& e, uintptr_t x, int32_t type, uintptr_t ids, bool wide, int64_t tokens,
              int64_t slots, uintptr_t out) {
             nb::gil_scoped_release release;
             e.gate_up(context(), address<void>(x), static_cast<DType>(type),
                       {address<void>(ids), wide, tokens, slots}, reinterpret_cast<float*>(out));
           })
      .def("down", [](const Experts& e, uintptr_t h, int32_t type, uintptr_t ids, bool wide, int64_t tokens,
                      int64_t slots, uintptr_t out) {
        nb::gil_scoped_release release;
        e.down(context(), address<void>(h), static_cast<DType>(type),
               {address<void>(ids), wide, tokens, slots}, reinterpret_cast<float*>(out));
      });
  m.def("experts_bytes", [](int32_t format, int32_t group, int32_t down_format, int32_t down_group,
                            int64_t experts, int64_t hidden, int64_t intermediate, bool bias, bool gate,
                            int32_t stored, int32_t down_stored, bool ordered) {
    Act act = {};
    act.has_gate = gate;
    return experts * Weights::expert_bytes({experts,
                                            hidden,
                                            intermediate,
                                            format,
                                            group,
                                            down_format,
                                            down_group,
                                            bias,
                                            act,
                                            {ggml_type(stored), {}, {}},
                                            {ggml_type(down_stored), {}, {}},
                                            ordered});
  });
  // A checksum of 64 bits; it runs at the speed of memory.
  m.def("checksum", [](uintptr_t data, int64_t bytes) {
    nb::gil_scoped_release release;
    return checksum(address<uint8_t>(data), bytes);
  });
  nb::module_ fields = m.def_submodule("fields");
  fields.def("split_bytes", [](uintptr_t from, int64_t count, uintptr_t out) {
    nb::gil_scoped_release release;
    split_bytes(address<uint8_t>(from), count, reinterpret_cast<uint8_t*>(out));
  });
  fields.def("turn_words", [](int bits, uintptr_t words, int64_t m, int64_t n, uintptr_t out) {
    nb::gil_scoped_release release;
    turn_words_of(bits, address<uint32_t>(words), m, n, reinterpret_cast<uint8_t*>(out));
  });
  fields.def("turn_shuffled", [](uintptr_t words, int64_t k, int64_t n, uintptr_t out) {
    nb::gil_scoped_release release;
    turn_shuffled(address<uint32_t>(words), k, n, reinterpret_cast<uint8_t*>(out));
  });
  bind_kernels(m);
  bind_ggml(m);
  bind_handoff(m);
}
