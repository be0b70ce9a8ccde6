// What the units of the Python face share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "context.h"
#include "ggml.h"

void bind_kernels(nanobind::module_& m);
void bind_ggml(nanobind::module_& m);
void bind_handoff(nanobind::module_& m);

namespace hetero {

using GgmlBytes =
    nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using GgmlTable =
    std::optional<nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>>;

// A matrix [n, k] of a block type, in memory that the caller keeps. Throws std::invalid_argument where the
// type is unknown, its tables are missing, or the bytes are not those of n rows.
GgmlSource ggml_source(int32_t type, const GgmlBytes& data, int64_t n, int64_t k,
                       const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers);

// How experts stay in blocks of a type, with its tables; of type -1: they do not. Throws as ggml_source.
GgmlStore ggml_store(int32_t type, const GgmlTable<uint64_t>& grid, const GgmlTable<float>& numbers);

}  // namespace hetero
