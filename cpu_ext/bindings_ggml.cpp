// Decoding of ggml's block types for hetero/quant/ggml.py, on the pool's threads and without the GIL. Arrays
// are C-contiguous; sizes are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace hetero {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kPieceBytes = 1 << 16;  // of the source, that a thread takes at a time

// Runs task(first block, blocks) over all blocks of a matrix on the pool.
void in_pieces(const GgmlSource& source, int64_t blocks, const std::function<void(int64_t, int64_t)>& task) {
  struct Job {
    const std::function<void(int64_t, int64_t)>& task;
    int64_t blocks, piece;
  } job{task, blocks, std::max<int64_t>(1, kPieceBytes / source.type->bytes)};
  const Phase phase = {(blocks + job.piece - 1) / job.piece,
                       [](void* ctx, int64_t chunk, int) {
                         const Job& j = *static_cast<Job*>(ctx);
                         const int64_t first = chunk * j.piece;
                         j.task(first, std::min(j.piece, j.blocks - first));
                       },
                       &job};
  nb::gil_scoped_release release;
  const Held own;
  own->pool->run(&phase, 1);
}

// Codes, scales and extras of a matrix; false where a scale or minimum is NaN or infinite.
bool codes(int32_t type, GgmlBytes data, int64_t n, int64_t k, const GgmlTable<uint64_t>& grid,
           const GgmlTable<float>& numbers, Bytes codes, Bytes scales, Bytes extra) {
  const GgmlSource source = ggml_source(type, data, n, k, grid, numbers);
  const GgmlType& t = *source.type;
  if (t.group == 0) throw std::invalid_argument(std::string(t.name) + " has no codes");
  const int64_t blocks = n * (k / t.values);
  const int64_t of_scales = t.values / t.group * t.scale_bytes, of_extra = t.extra_bytes;
  if (static_cast<int64_t>(codes.size()) != n * k ||
      static_cast<int64_t>(scales.size()) != blocks * of_scales ||
      static_cast<int64_t>(extra.size()) != blocks * of_extra)
    throw std::invalid_argument("codes, scales or extras of another size than the matrix has");
  std::atomic<bool> finite{true};
  in_pieces(source, blocks, [&](int64_t first, int64_t count) {
    if (!ggml_codes(t, source.tables, source.data + first * t.bytes, count, codes.data() + first * t.values,
                    scales.data() + first * of_scales, extra.data() + first * of_extra))
      finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

void floats(int32_t type, GgmlBytes data, int64_t n, int64_t k, const GgmlTable<uint64_t>& grid,
            const GgmlTable<float>& numbers, Floats out) {
  const GgmlSource source = ggml_source(type, data, n, k, grid, numbers);
  const GgmlType& t = *source.type;
  if (static_cast<int64_t>(out.size()) != n * k)
    throw std::invalid_argument("the output is of another size than the matrix");
  in_pieces(source, n * (k / t.values), [&](int64_t first, int64_t count) {
    ggml_floats(t, source.tables, source.data + first * t.bytes, count, out.data() + first * t.values);
  });
}

using Described = std::tuple<std::string, int, int, int, int, int, int, int, int, bool>;

// (name, number in the file, and the other fields of GgmlType in their order) of each type.
std::vector<Described> types() {
  std::vector<Described> all;
  int64_t count = 0;
  const GgmlType* type = ggml_types(&count);
  for (const GgmlType* t = type; t != type + count; t++)
    all.emplace_back(t->name, t->number, t->values, t->bytes, t->group, t->scale_bytes, t->extra_bytes,
                     t->grid_rows, t->grid_values, t->numbers);
  return all;
}

void check_tables(const GgmlType& type, const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers) {
  const size_t rows = grid ? grid->size() : 0, entries = numbers ? numbers->size() : 0;
  if (rows != static_cast<size_t>(type.grid_rows) || entries != (type.numbers ? 16u : 0u))
    throw std::invalid_argument(std::string("tables of another size than ") + type.name + " has");
}

}  // namespace

GgmlStore ggml_store(int32_t type, const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers) {
  GgmlStore store;
  if (type == -1) return store;
  store.type = ggml_type(type);
  if (store.type == nullptr || store.type->group == 0)
    throw std::invalid_argument("no such ggml type of blocks: " + std::to_string(type));
  check_tables(*store.type, grid, numbers);
  if (grid) store.grid.assign(grid->data(), grid->data() + grid->size());
  if (numbers) store.numbers.assign(numbers->data(), numbers->data() + numbers->size());
  return store;
}

GgmlSource ggml_source(int32_t type, const GgmlBytes& data, int64_t n, int64_t k,
                       const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers) {
  const GgmlType* t = ggml_type(type);
  if (t == nullptr) throw std::invalid_argument("no such ggml type: " + std::to_string(type));
  if (n < 1 || k < 1 || k % t->values != 0)
    throw std::invalid_argument("rows of " + std::to_string(k) + " values are not blocks of " +
                                std::to_string(t->values));
  // Divided rather than multiplied, so that no product of absurd sizes can wrap around.
  const uint64_t row = static_cast<uint64_t>(ggml_row_bytes(*t, k));
  if (data.size() % row != 0 || data.size() / row != static_cast<uint64_t>(n))
    throw std::invalid_argument(std::to_string(data.size()) + " bytes are not " + std::to_string(n) +
                                " rows of " + std::to_string(row));
  check_tables(*t, grid, numbers);
  return {t, {grid ? grid->data() : nullptr, numbers ? numbers->data() : nullptr}, data.data()};
}

}  // namespace hetero

void bind_ggml(nb::module_& parent) {
  using namespace hetero;
  nb::module_ m = parent.def_submodule("ggml");
  m.def("types", &types);
  m.def("codes", &codes, nb::arg("type"), nb::arg("data"), nb::arg("n"), nb::arg("k"), nb::arg("grid").none(),
        nb::arg("numbers").none(), nb::arg("codes"), nb::arg("scales"), nb::arg("extra"));
  m.def("floats", &floats, nb::arg("type"), nb::arg("data"), nb::arg("n"), nb::arg("k"),
        nb::arg("grid").none(), nb::arg("numbers").none(), nb::arg("out"));
}
