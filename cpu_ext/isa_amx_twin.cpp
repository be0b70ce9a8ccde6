#include "tables.h"

namespace hetero {

const IsaTable* amx_twin_unit() { return nullptr; }

}  // namespace hetero
