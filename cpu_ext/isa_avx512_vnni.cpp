#include "tables.h"

namespace hetero {

const IsaTable* avx512_vnni_unit() { return nullptr; }

}  // namespace hetero
