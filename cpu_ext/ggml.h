// Block types of ggml files (GGUF): their blocks as codes and scales of the packed formats, and as floats.
#pragma once

#include <stdint.h>

#include <vector>

#include "pack.h"

namespace hetero {

// A row is blocks one after the other. Codes, scales and extras of a block are what Quantised (pack.h) has
// for the block's values in the format that keeps the type exactly, so that those of consecutive blocks, and
// of consecutive rows, follow each other.
struct GgmlType {
  int32_t number;                    // in the file
  const char* name;                  // as files' tools write it
  int32_t values, bytes;             // of a block
  int32_t group;                     // values that share a scale; 0: plain floats, which have no codes
  int32_t scale_bytes, extra_bytes;  // of a group, of a block
  int32_t grid_rows, grid_values;    // of the grid that the type needs; 0: none
  bool numbers;                      // whether a code is an index of a table of numbers
};

// The type whose format wants a scale of the whole matrix, which the file has not.
constexpr int32_t kNvfp4Number = 40;

// Every type, and one by its number in the file (nullptr: none of these).
const GgmlType* ggml_types(int64_t* count);
const GgmlType* ggml_type(int32_t number);

// Tables that the decoders of some types take from their caller.
//   grid     [grid_rows]: the codes of grid_values values, the first in the lowest byte, all below 8; a set
//            bit 3 is added where a value is negative (IQ1: where its shift is)
//   numbers  [16]: what a code stands for, beside its scales
struct GgmlTables {
  const uint64_t* grid;
  const float* numbers;
};

// `blocks` consecutive blocks of a type that has codes. False where a scale or minimum is not a number that a
// format can hold: a NaN or an infinity; the rest is decoded all the same.
bool ggml_codes(const GgmlType& type, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                uint8_t* codes, uint8_t* scales, uint8_t* extra);
// The same as float32, of every type.
void ggml_floats(const GgmlType& type, const GgmlTables& tables, const uint8_t* from, int64_t blocks,
                 float* out);

// A matrix of layout.n rows of layout.k values, k a multiple of the type's block.
struct GgmlSource {
  const GgmlType* type;
  GgmlTables tables;
  const uint8_t* data;
};
inline int64_t ggml_row_bytes(const GgmlType& type, int64_t k) { return k / type.values * type.bytes; }

// Packs block `block` of a matrix without changing a value; false as ggml_codes.
bool pack_ggml_block(const Layout& layout, int64_t block, const GgmlSource& source, uint8_t* out);

// How a matrix is kept in the blocks of its file instead: 16 rows at a time, those that do not exist zero,
// and packed when a step uses them. Takes the file's bytes of memory, and the time of packing in every step.
struct GgmlStore {
  const GgmlType* type = nullptr;  // nullptr: packed
  std::vector<uint64_t> grid;
  std::vector<float> numbers;

  GgmlTables tables() const { return {grid.data(), numbers.data()}; }
  // The layout whose blocks are these 16 rows; false where rows of the matrix are no whole blocks of the
  // type.
  bool make_layout(const Layout& packed, Layout* layout) const;
};

// Takes block `block` of a matrix; false as ggml_codes.
bool store_ggml_block(const Layout& layout, int64_t block, const GgmlSource& source, uint8_t* out);
// Packs one such block, in memory of the calling thread that is overwritten by its next call.
const uint8_t* pack_stored_block(const Layout& packed, const GgmlStore& store, const uint8_t* from);

}  // namespace hetero
