#include "tables.h"

namespace hetero {

const IsaTable* avx512_bf16_unit() { return nullptr; }

}  // namespace hetero
