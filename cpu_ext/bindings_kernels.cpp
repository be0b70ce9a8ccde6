// Single kernels, packing and detection for Python: what tests and benchmarks/kernels.py call, and the
// packing of whole matrices. Arrays are C-contiguous numpy arrays; sizes are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <time.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "pack.h"
#include "rows.h"
#include "tables.h"

namespace nb = nanobind;

namespace hetero {
namespace {

template <class T, int Dims>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T, int Dims>
using InOut = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

const char* const kFormatNames[kFormats] = {
    "f32",     "bf16",  "int8",    "int4",   "int4a", "fp8",   "mxfp4", "nvfp4",  "int8a",
    "int4z",   "int8z", "iq4_nl",  "q4_k",   "q5_k",  "q2_k",  "q3_k",  "q6_k",   "iq4_xs",
    "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "fp8_row"};
const char* const kClassNames[kRowClasses] = {"gemv", "gemm", "bulk"};
const char* const kIsaNames[kIsas] = {"scalar", "avx2", "avx512", "amx"};

std::unique_ptr<void, decltype(&std::free)> aligned_bytes(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (p == nullptr) throw std::bad_alloc();
  return {p, &std::free};
}

// A new numpy array, aligned to 64 bytes.
template <class T>
Out<T> make_array(std::vector<size_t> shape) {
  size_t count = 1;
  for (size_t size : shape) count *= size;
  void* p = aligned_bytes(count * sizeof(T)).release();
  nb::capsule owner(p, [](void* memory) noexcept { std::free(memory); });
  return Out<T>(p, shape.size(), shape.data(), owner);
}

Layout layout_of(int32_t format, int32_t group, int64_t n, int64_t k) {
  Layout layout;
  if (!make_layout(format, group, n, k, &layout))
    throw std::invalid_argument("no such format, group or size");
  return layout;
}

// Tables that run here by name; beside the instruction sets the partial AVX-512 tables and the AMX twin.
const IsaTable* table_of(const std::string& name) {
  const Features& f = detect_features();
  if (name == "amx_twin") return amx_twin_table();
  if (name == "avx512_plain" && f.avx512) return avx512_table(false, false);
  if (name == "avx512_vnni" && f.avx512_vnni) return avx512_table(true, false);
  for (int isa = 0; isa < kIsas; isa++)
    if (name == kIsaNames[isa]) {
      const IsaTable* table = select_table(static_cast<Isa>(isa), f);
      if (table != nullptr) return table;
    }
  throw std::invalid_argument("no such kernel table on this machine: " + name);
}

std::vector<std::string> table_names() {
  const Features& f = detect_features();
  std::vector<std::string> names;
  for (int isa = 0; isa < kIsas; isa++)
    if (isa_supported(static_cast<Isa>(isa), f)) names.push_back(kIsaNames[isa]);
  if (f.avx512) names.push_back("avx512_plain");
  if (f.avx512_vnni) names.push_back("avx512_vnni");
  names.push_back("amx_twin");
  return names;
}

struct Field {
  const char* name;
  bool Features::* member;
};
const Field kFields[] = {
    {"avx2", &Features::avx2},
    {"avx512", &Features::avx512},
    {"avx512_vnni", &Features::avx512_vnni},
    {"avx512_bf16", &Features::avx512_bf16},
    {"amx_tile", &Features::amx_tile},
    {"amx_int8", &Features::amx_int8},
    {"amx_bf16", &Features::amx_bf16},
    {"amx_denied", &Features::amx_denied},
};

std::map<std::string, bool> features() {
  std::map<std::string, bool> found;
  for (const Field& field : kFields) found[field.name] = detect_features().*field.member;
  return found;
}

// For made-up features: the best instruction set; what each lacks ("" where it is supported); the kernels of
// each supported one by "format.class".
nb::dict select_for(const std::map<std::string, bool>& made_up) {
  Features f = {};
  for (const auto& [name, value] : made_up) {
    bool known = false;
    for (const Field& field : kFields)
      if (name == field.name) {
        f.*field.member = value;
        known = true;
      }
    if (!known) throw std::invalid_argument("no such feature: " + name);
  }
  nb::dict missing, kernels, result;
  for (int i = 0; i < kIsas; i++) {
    char text[256];
    missing_features(static_cast<Isa>(i), f, text, sizeof text);
    missing[kIsaNames[i]] = text;
    const IsaTable* table = select_table(static_cast<Isa>(i), f);
    if (table == nullptr) continue;
    nb::dict names;
    for (int format = 0; format < kFormats; format++)
      for (int c = 0; c < kRowClasses; c++)
        names[(std::string(kFormatNames[format]) + "." + kClassNames[c]).c_str()] =
            table->gemm[format][c].name;
    kernels[kIsaNames[i]] = names;
  }
  result["best"] = kIsaNames[best_isa(f)];
  result["missing"] = missing;
  result["kernels"] = kernels;
  return result;
}

Out<uint8_t> pack_matrix(int32_t format, int32_t group, uintptr_t data, int32_t type, int64_t n, int64_t k,
                         int64_t row_stride, int64_t col_stride) {
  const Layout layout = layout_of(format, group, n, k);
  const Source source = {reinterpret_cast<const void*>(data), type, row_stride, col_stride};
  Out<uint8_t> out = make_array<uint8_t>({static_cast<size_t>(packed_bytes(layout))});
  PackStatus status = kPackOk;
  {
    nb::gil_scoped_release release;
    std::vector<float> shared(static_cast<size_t>(block_count(layout) * shared_per_block(layout)));
    for (int64_t b = 0; b < block_count(layout) && status == kPackOk; b++)
      status = measure_block(layout, b, source, shared.data());
    settle_shared(layout, shared.data());
    for (int64_t b = 0; b < block_count(layout) && status == kPackOk; b++)
      status = pack_block(layout, b, source, shared.data(), out.data() + b * layout.block_bytes);
  }
  if (status == kPackNotFinite) throw std::domain_error("a weight is not finite");
  if (status == kPackKeptOnly) throw std::invalid_argument("the format only keeps values that have it");
  if (status == kPackOverflow) throw std::overflow_error("a weight is too large for the format");
  return out;
}

// Scales and extras as bytes [rows, bytes of a row]; see Quantised for their shapes.
Out<uint8_t> pack_codes(int32_t format, int32_t group, In<uint8_t, 2> codes, In<uint8_t, 2> scales,
                        std::optional<In<uint8_t, 2>> extra) {
  const Layout layout =
      layout_of(format, group, static_cast<int64_t>(codes.shape(0)), static_cast<int64_t>(codes.shape(1)));
  if (layout.group == 0) throw std::invalid_argument("this format has no codes");
  const size_t rows = codes.shape(0), of_row = static_cast<size_t>(row_scale_bytes(layout));
  const size_t beside = format == kNvfp4 ? 4 : rows * static_cast<size_t>(row_extra_bytes(layout));
  if ((beside != 0) != extra.has_value())
    throw std::invalid_argument(beside != 0 ? "the format has something beside its scales"
                                            : "the format has nothing beside its scales");
  const size_t tiles = (rows + 127) / 128 * static_cast<size_t>((layout.k + group - 1) / group) * 4;
  if (scales.size() != (format == kFp8 ? tiles : rows * of_row) || (extra && extra->size() != beside))
    throw std::invalid_argument("scales or extras of another shape than the format has");
  const Quantised q = {codes.data(), scales.data(), extra ? extra->data() : nullptr};
  if (const char* wrong = wrong_codes(layout, q)) throw std::invalid_argument(wrong);
  Out<uint8_t> out = make_array<uint8_t>({static_cast<size_t>(packed_bytes(layout))});
  for (int64_t b = 0; b < block_count(layout); b++)
    pack_codes_block(layout, b, q, out.data() + b * layout.block_bytes);
  return out;
}

void check_packed(const Layout& layout, const In<uint8_t, 1>& packed) {
  if (static_cast<int64_t>(packed.size()) != packed_bytes(layout))
    throw std::invalid_argument("packed has the wrong number of bytes");
}

Out<float> unpack_matrix(int32_t format, int32_t group, int64_t n, int64_t k, In<uint8_t, 1> packed) {
  const Layout layout = layout_of(format, group, n, k);
  check_packed(layout, packed);
  Out<float> out = make_array<float>({static_cast<size_t>(n), static_cast<size_t>(k)});
  for (int64_t b = 0; b < block_count(layout); b++)
    unpack_block(layout, b, packed.data() + b * layout.block_bytes, out.data(), k);
  return out;
}

nb::tuple quantize_rows(const std::string& isa, In<float, 2> x, int64_t k_pad) {
  const size_t rows = x.shape(0), k = x.shape(1), padded = static_cast<size_t>(k_pad);
  if (padded % kActGroup != 0 || padded < k) throw std::invalid_argument("k_pad must be a multiple of 32");
  Out<int8_t> q = make_array<int8_t>({rows, padded});
  Out<float> scale = make_array<float>({rows, padded / kActGroup});
  Out<int32_t> sum = make_array<int32_t>({rows, padded / kActGroup});
  const QuantFn quantize = table_of(isa)->quantize;
  for (size_t m = 0; m < rows; m++)
    quantize(x.data() + m * k, static_cast<int64_t>(k), k_pad, q.data() + m * padded,
             scale.data() + m * (padded / kActGroup), sum.data() + m * (padded / kActGroup));
  return nb::make_tuple(q, scale, sum);
}

// Processor time of this thread: on a busy machine the wall clock counts the others too.
double processor_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Runs one kernel `repeats` times on x [rows, k] into y [rows, ld >= n_pad]; its name and the processor
// seconds of the fastest run, input preparation not counted.
std::tuple<std::string, double> run_kernel(const std::string& isa, int32_t row_class, int32_t format,
                                           int32_t group, int64_t n, int64_t k, In<uint8_t, 1> packed,
                                           In<float, 2> x, InOut<float, 2> y, int repeats) {
  const Layout layout = layout_of(format, group, n, k);
  check_packed(layout, packed);
  const IsaTable* table = table_of(isa);
  if (row_class < 0 || row_class >= kRowClasses) throw std::invalid_argument("no such class of rows");
  const Kernel& kernel = table->gemm[format][row_class];
  const int64_t rows = static_cast<int64_t>(x.shape(0)), ld = static_cast<int64_t>(y.shape(1));
  if (static_cast<int64_t>(x.shape(1)) != k || y.shape(0) != x.shape(0) || ld < layout.n_pad)
    throw std::invalid_argument("x must be [rows, k] and y [rows, n_pad or more]");
  if (row_class == kGemv && rows > kGemvRows) throw std::invalid_argument("gemv takes at most 4 rows");
  const size_t groups = static_cast<size_t>(layout.k_pad / kActGroup);
  const size_t elements = static_cast<size_t>(rows * layout.k_pad);
  auto scratch = aligned_bytes(kScratchBytes), q = aligned_bytes(elements), f32 = aligned_bytes(elements * 4),
       bf16 = aligned_bytes(elements * 2),
       tiles = aligned_bytes(static_cast<size_t>(tile_rows(rows) * layout.k_pad) * 2);
  auto scale = aligned_bytes(rows * groups * 4), sum = aligned_bytes(rows * groups * 4);
  Rows input = {};
  input.rows = rows;
  nb::gil_scoped_release release;
  for (int64_t m = 0; m < rows; m++) {
    const float* from = x.data() + m * k;
    float* values = static_cast<float*>(f32.get()) + m * layout.k_pad;
    for (int64_t i = 0; i < layout.k_pad; i++) values[i] = i < k ? from[i] : 0.0f;
    table->round(from, k, layout.k_pad, static_cast<uint16_t*>(bf16.get()) + m * layout.k_pad);
    table->quantize(from, k, layout.k_pad, static_cast<int8_t*>(q.get()) + m * layout.k_pad,
                    static_cast<float*>(scale.get()) + m * groups,
                    static_cast<int32_t*>(sum.get()) + m * groups);
  }
  if (kernel.input == kInBf16) {
    input.bf16 = static_cast<uint16_t*>(bf16.get());
  } else if (kernel.input == kInTiles) {
    input.tiles = static_cast<uint16_t*>(tiles.get());
    lay_tiles(rows, layout.k_pad, static_cast<uint16_t*>(tiles.get()),
              [&](int64_t m) { return static_cast<const uint16_t*>(bf16.get()) + m * layout.k_pad; });
  } else if (!takes_codes(format)) {
    input.f32 = static_cast<float*>(f32.get());
  } else {
    input.q = static_cast<int8_t*>(q.get());
    input.scale = static_cast<float*>(scale.get());
    input.sum = static_cast<int32_t*>(sum.get());
  }
  double best = 1e300;
  for (int i = 0; i < repeats; i++) {
    const double start = processor_seconds();
    kernel.fn(packed.data(), block_count(layout), &layout, &input, y.data(), ld, scratch.get());
    const double took = processor_seconds() - start;
    best = took < best ? took : best;
  }
  return {kernel.name, best};
}

Out<float> activate(const std::string& isa, In<float, 1> gate, In<float, 1> up, int32_t kind, bool has_gate,
                    float alpha, float gate_max, float up_limit, float act_max, float up_offset) {
  if (gate.size() != up.size()) throw std::invalid_argument("gate and up must be of one length");
  const Act act = {kind, has_gate, alpha, gate_max, up_limit, act_max, up_offset};
  Out<float> h = make_array<float>({up.size()});
  table_of(isa)->act(gate.data(), up.data(), h.data(), static_cast<int64_t>(up.size()), &act);
  return h;
}

void axpy(const std::string& isa, float weight, In<float, 1> y, InOut<float, 1> out) {
  if (y.size() != out.size()) throw std::invalid_argument("y and out must be of one length");
  table_of(isa)->axpy(weight, y.data(), out.data(), static_cast<int64_t>(y.size()));
}

// Processor seconds of a plain read of the bytes: what a kernel's stream is compared with.
double read_seconds(In<uint8_t, 1> bytes) {
  typedef uint64_t Wide __attribute__((vector_size(64), aligned(1)));
  nb::gil_scoped_release release;
  const double start = processor_seconds();
  Wide sum[4] = {};
  for (size_t at = 0; at + 256 <= bytes.size(); at += 256) {
    const uint8_t* p = bytes.data() + at;
    for (int j = 0; j < 4; j++) {
      __builtin_prefetch(p + 2048 + 64 * j);
      sum[j] ^= *reinterpret_cast<const Wide*>(p + 64 * j);
    }
  }
  __asm__ volatile("" ::"m"(sum));
  return processor_seconds() - start;
}

}  // namespace
}  // namespace hetero

void bind_kernels(nb::module_& parent) {
  using namespace hetero;
  nb::module_ m = parent.def_submodule("kernels");
  m.def("table_names", &table_names);
  m.def("features", &features);
  m.def("select", &select_for, nb::arg("features"));
  m.def("pack_matrix", &pack_matrix, nb::arg("format"), nb::arg("group"), nb::arg("data"), nb::arg("type"),
        nb::arg("n"), nb::arg("k"), nb::arg("row_stride"), nb::arg("col_stride"));
  m.def("pack_codes", &pack_codes, nb::arg("format"), nb::arg("group"), nb::arg("codes"), nb::arg("scales"),
        nb::arg("extra").none());
  m.def("unpack_matrix", &unpack_matrix, nb::arg("format"), nb::arg("group"), nb::arg("n"), nb::arg("k"),
        nb::arg("packed"));
  m.def("quantize_rows", &quantize_rows, nb::arg("isa"), nb::arg("x"), nb::arg("k_pad"));
  m.def("run_kernel", &run_kernel, nb::arg("isa"), nb::arg("row_class"), nb::arg("format"), nb::arg("group"),
        nb::arg("n"), nb::arg("k"), nb::arg("packed"), nb::arg("x"), nb::arg("y"), nb::arg("repeats") = 1);
  m.def("activate", &activate, nb::arg("isa"), nb::arg("gate"), nb::arg("up"), nb::arg("kind"),
        nb::arg("has_gate"), nb::arg("alpha"), nb::arg("gate_max"), nb::arg("up_limit"), nb::arg("act_max"),
        nb::arg("up_offset"));
  m.def("axpy", &axpy, nb::arg("isa"), nb::arg("weight"), nb::arg("y"), nb::arg("out"));
  m.def("read_seconds", &read_seconds, nb::arg("bytes"));
}
