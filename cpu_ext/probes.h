// What a core can do at most: loops that keep one instruction busy on registers alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pool.h"

namespace hetero {

struct Probe {
  const char* instruction;  // "vpdpbusd zmm": its name for the user, and the key of run_probe
  const char* isa;          // the instruction set it is a peak of
  const char* kind;         // "int8", "bf16" or "f32": the products it adds up
  int64_t ops;              // multiplications and additions of one round of the loop
  void (*run)(int64_t rounds);
};

// The probes that this machine can run.
std::vector<Probe> probes();

struct ProbeResult {
  double seconds;   // of `chunks` chunks of `rounds` rounds each, shared by all threads of the pool
  double clock_hz;  // the fastest core right after such a chunk
};
// An empty name measures the clock alone. Throws std::invalid_argument for a probe that is not there.
ProbeResult run_probe(Pool& pool, const std::string& instruction, int64_t rounds, int64_t chunks);

}  // namespace hetero
