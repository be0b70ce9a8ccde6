#include "tables.h"

namespace hetero {

const IsaTable* amx_unit() { return nullptr; }

}  // namespace hetero
