// Choice of an instruction set by its name.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "moe.h"

namespace hetero {

// Names that this machine can run, simplest first; "amx_twin", the AMX kernels over software tiles, last and
// only when asked for.
std::vector<std::string> isa_names(bool with_twin);
std::string best_isa_name();

// Throws std::invalid_argument for a name that does not exist, std::runtime_error saying what the machine
// lacks for one that it cannot run.
IsaChoice choose_isa(const std::string& name);

// Calls by kernel name since the last reset, zero counts left out.
std::map<std::string, uint64_t> kernel_counts();
void reset_kernel_counts();

}  // namespace hetero
