// Matrices in ggml's block types, 16 rows at a time: packed without changing a value, or kept as they are.
#include <emmintrin.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <new>

#include "ggml.h"

namespace hetero {
namespace {

// Memory of a thread, aligned to 64 bytes, as large as it was ever needed.
uint8_t* thread_memory(size_t bytes) {
  static thread_local std::unique_ptr<void, decltype(&free)> memory(nullptr, &free);
  static thread_local size_t size = 0;
  if (size < bytes) {
    size = 0;
    memory.reset(aligned_alloc(64, bytes));
    if (memory == nullptr) throw std::bad_alloc();
    size = bytes;
  }
  return static_cast<uint8_t*>(memory.get());
}

// Packs `rows` rows in memory of the thread; false as ggml_codes.
bool pack_rows(const Layout& layout, const GgmlType& type, const GgmlTables& tables, const uint8_t* from,
               int64_t rows, uint8_t** packed) {
  static const float kMatrixScale = 1.0f;  // the file has none; used where the format wants one
  const int64_t blocks = layout.k / type.values * rows;
  const int64_t scales = blocks * (type.values / type.group) * type.scale_bytes;
  const int64_t sizes[] = {layout.block_bytes, blocks * type.values, scales, blocks * type.extra_bytes};
  auto padded = [](int64_t bytes) { return static_cast<size_t>(bytes + 63) / 64 * 64; };
  size_t total = 0;
  for (int64_t size : sizes) total += padded(size);
  *packed = thread_memory(total);
  uint8_t* code = *packed + padded(sizes[0]);
  uint8_t *scale = code + padded(sizes[1]), *extra = scale + padded(sizes[2]);
  const bool finite = ggml_codes(type, tables, from, blocks, code, scale, extra);
  Layout part = layout;
  part.n = rows;
  part.n_pad = kBlockRows;
  Quantised q = {code, scale, extra};
  if (type.number == kNvfp4Number) q.extra = &kMatrixScale;
  pack_codes_block(part, 0, q, *packed);
  return finite;
}

int64_t rows_of(const Layout& layout, int64_t block) {
  const int64_t rows = layout.n - block * kBlockRows;
  return rows < kBlockRows ? rows : kBlockRows;
}

const uint8_t* bytes_of(const Layout& layout, int64_t block, const GgmlSource& source) {
  return source.data + block * kBlockRows * ggml_row_bytes(*source.type, layout.k);
}

}  // namespace

bool pack_ggml_block(const Layout& layout, int64_t block, const GgmlSource& source, uint8_t* out) {
  uint8_t* packed = nullptr;
  const bool finite = pack_rows(layout, *source.type, source.tables, bytes_of(layout, block, source),
                                rows_of(layout, block), &packed);
  // Blocks are written row by row in pieces of 4 bytes: done in the cache, and past it where they stay, so
  // that memory is not read for what is overwritten.
  for (int64_t i = 0; i < layout.block_bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(packed + i)));
  _mm_sfence();
  return finite;
}

bool GgmlStore::make_layout(const Layout& packed, Layout* layout) const {
  if (type == nullptr || packed.k % type->values != 0) return false;
  *layout = packed;
  layout->block_bytes = (kBlockRows * ggml_row_bytes(*type, packed.k) + 63) / 64 * 64;
  return true;
}

bool store_ggml_block(const Layout& layout, int64_t block, const GgmlSource& source, uint8_t* out) {
  const GgmlType& type = *source.type;
  const int64_t rows = rows_of(layout, block), bytes = rows * ggml_row_bytes(type, layout.k);
  const uint8_t* from = bytes_of(layout, block, source);
  memcpy(out, from, static_cast<size_t>(bytes));
  memset(out + bytes, 0, static_cast<size_t>(layout.block_bytes - bytes));
  // Decoded only to look at the scales.
  const int64_t blocks = bytes / type.bytes, scales = type.values / type.group * type.scale_bytes;
  uint8_t* work = thread_memory(static_cast<size_t>(type.values + scales + type.extra_bytes + 63) / 64 * 64);
  bool finite = true;
  for (int64_t i = 0; i < blocks; i++)
    finite &= ggml_codes(type, source.tables, from + i * type.bytes, 1, work, work + type.values,
                         work + type.values + scales);
  return finite;
}

const uint8_t* pack_stored_block(const Layout& packed, const GgmlStore& store, const uint8_t* from) {
  uint8_t* to = nullptr;
  pack_rows(packed, *store.type, store.tables(), from, kBlockRows, &to);
  return to;
}

}  // namespace hetero
