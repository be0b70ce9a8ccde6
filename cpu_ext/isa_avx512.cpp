#include "tables.h"

namespace hetero {

const IsaTable* avx512_plain_unit() { return nullptr; }

}  // namespace hetero
