#include "tables.h"

namespace hetero {

const IsaTable* avx2_table() { return nullptr; }

}  // namespace hetero
