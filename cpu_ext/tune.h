// How long kernels take on weights that come from memory: what the choice between them rests on.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hetero {

using KernelId = std::pair<std::string, int32_t>;  // instruction set, class of rows

// Processor seconds of one call of each kernel with each number of rows, [kernel][rows], on about a megabyte
// of random weights that no cache holds; the fastest of several rounds, since what other work adds is no
// property of a kernel. Kernels and rows take turns, for a few rounds, and then, without those that are far
// behind, until `limit` processor seconds are spent. A GEMV kernel is not run with more rows than it takes;
// its time is infinite there. Runs on the calling thread. Throws std::invalid_argument for a format, class or
// number of rows that does not exist, what choose_isa throws for an instruction set.
std::vector<std::vector<double>> kernel_seconds(int32_t format, int32_t group,
                                                const std::vector<KernelId>& kernels,
                                                const std::vector<int64_t>& rows, double limit);

}  // namespace hetero
