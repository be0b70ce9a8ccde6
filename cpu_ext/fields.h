// Codes of 4 and 8 bits that checkpoints keep in words, as bytes of a matrix [n, k].
#pragma once

#include <cstdint>

namespace hetero {

// Bytes as their halves, the low one first: out [2 * count].
void split_bytes(const uint8_t* from, int64_t count, uint8_t* out);

// words [m, n], fields of `bits` (4 or 8) along the columns, lowest first: out [n, m * 32 / bits].
void turn_words_of(int bits, const uint32_t* words, int64_t m, int64_t n, uint8_t* out);

// words [k, n / 8] of 4-bit fields in the order of rows 0, 2, 4, 6, 1, 3, 5, 7: out [n, k].
void turn_shuffled(const uint32_t* words, int64_t k, int64_t n, uint8_t* out);

}  // namespace hetero
