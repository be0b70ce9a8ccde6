// The loops are inline assembly, so this unit needs no flags of an instruction set and cannot leak code of
// one.
#include "probes.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "tables.h"

namespace hetero {
namespace {

// Operands are small and not zero: a multiplier fed with zeros draws less power than one at work.
struct alignas(64) Operand {
  uint32_t words[16];
  explicit constexpr Operand(uint32_t w) : words{w, w, w, w, w, w, w, w, w, w, w, w, w, w, w, w} {}
};
constexpr Operand kInt(0x11070b05u);
constexpr Operand kFloat(0x3a83126fu);  // 0.001
constexpr Operand kHalves(0x3a833a83u);

#define HETERO_REGISTERS                                                                                     \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14", "xmm15", "cc", "memory"
// Ten sums: two pipes of four or five cycles of latency are full.
#define HETERO_TEN(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9)
#define HETERO_LOOP(operand, before, body, after)                      \
  __asm__ volatile(before "\n1:\n\t" body "dec %0\n\tjnz 1b\n\t" after \
                   : "+r"(rounds)                                      \
                   : "r"(&(operand)), "r"(int64_t{0})                  \
                   : HETERO_REGISTERS)
constexpr int64_t kSums = 10;

#define HETERO_STEP(n) "movdqa %%xmm14, %%xmm12\n\tpmaddwd %%xmm15, %%xmm12\n\tpaddd %%xmm12, %%xmm" #n "\n\t"
void sse_int(int64_t rounds) {
  HETERO_LOOP(kInt, "movdqa (%1), %%xmm14\n\tmovdqa (%1), %%xmm15", HETERO_TEN(HETERO_STEP), "");
}
#undef HETERO_STEP

#define HETERO_STEP(n) "movaps %%xmm14, %%xmm12\n\tmulps %%xmm15, %%xmm12\n\taddps %%xmm12, %%xmm" #n "\n\t"
void sse_float(int64_t rounds) {
  HETERO_LOOP(kFloat, "movaps (%1), %%xmm14\n\tmovaps (%1), %%xmm15", HETERO_TEN(HETERO_STEP), "");
}
#undef HETERO_STEP

#define HETERO_YMM "vmovups (%1), %%ymm14\n\tvmovups (%1), %%ymm15"
#define HETERO_ZMM "vmovups (%1), %%zmm14\n\tvmovups (%1), %%zmm15"

#define HETERO_STEP(n) "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n\tvpaddw %%ymm12, %%ymm" #n ", %%ymm" #n "\n\t"
void avx2_int(int64_t rounds) { HETERO_LOOP(kInt, HETERO_YMM, HETERO_TEN(HETERO_STEP), "vzeroupper"); }
#undef HETERO_STEP

#define HETERO_STEP(n) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #n "\n\t"
void avx2_float(int64_t rounds) { HETERO_LOOP(kFloat, HETERO_YMM, HETERO_TEN(HETERO_STEP), "vzeroupper"); }
#undef HETERO_STEP

#define HETERO_STEP(n) "vpmaddubsw %%zmm14, %%zmm15, %%zmm12\n\tvpaddw %%zmm12, %%zmm" #n ", %%zmm" #n "\n\t"
void avx512_int(int64_t rounds) { HETERO_LOOP(kInt, HETERO_ZMM, HETERO_TEN(HETERO_STEP), "vzeroupper"); }
#undef HETERO_STEP

#define HETERO_STEP(n) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #n "\n\t"
void avx512_dot(int64_t rounds) { HETERO_LOOP(kInt, HETERO_ZMM, HETERO_TEN(HETERO_STEP), "vzeroupper"); }
#undef HETERO_STEP

#define HETERO_STEP(n) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" #n "\n\t"
void avx512_halves(int64_t rounds) {
  HETERO_LOOP(kHalves, HETERO_ZMM, HETERO_TEN(HETERO_STEP), "vzeroupper");
}
#undef HETERO_STEP

#define HETERO_STEP(n) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #n "\n\t"
void avx512_float(int64_t rounds) { HETERO_LOOP(kFloat, HETERO_ZMM, HETERO_TEN(HETERO_STEP), "vzeroupper"); }
#undef HETERO_STEP

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};

void configure_tiles() {
  alignas(64) TileConfig c = {};
  c.palette = 1;
  std::fill(c.column_bytes, c.column_bytes + 8, uint16_t{64});
  std::fill(c.rows, c.rows + 8, uint8_t{16});
  __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

// Four sums of 16 x 16 from two tiles of activations and two of weights; a stride of 0 fills every row alike.
#define HETERO_TILES                                                             \
  "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t" \
  "tileloadd (%1,%2,1), %%tmm4\n\ttileloadd (%1,%2,1), %%tmm5\n\t"               \
  "tileloadd (%1,%2,1), %%tmm6\n\ttileloadd (%1,%2,1), %%tmm7"
#define HETERO_FOUR(op)                                                                                 \
  op " %%tmm6, %%tmm4, %%tmm0\n\t" op " %%tmm7, %%tmm4, %%tmm1\n\t" op " %%tmm6, %%tmm5, %%tmm2\n\t" op \
     " %%tmm7, %%tmm5, %%tmm3\n\t"
void amx_int(int64_t rounds) {
  configure_tiles();
  HETERO_LOOP(kInt, HETERO_TILES, HETERO_FOUR("tdpbusd"), "tilerelease");
}
void amx_halves(int64_t rounds) {
  configure_tiles();
  HETERO_LOOP(kHalves, HETERO_TILES, HETERO_FOUR("tdpbf16ps"), "tilerelease");
}

constexpr int64_t kClockRounds = 500, kClockCycles = 3 * 32;
constexpr int kClockTries = 4;

// A chain of multiplications of three cycles each, on every x86-64 core of the last fifteen years. Additions
// would not do: newer cores fold chains of them.
void clock_chain(int64_t rounds) {
  int64_t value = 3;
  __asm__ volatile("1:\n\t.rept 32\n\timul %1, %1\n\t.endr\n\tdec %0\n\tjnz 1b"
                   : "+r"(rounds), "+r"(value)
                   :
                   : "cc");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Job {
  void (*run)(int64_t);
  int64_t rounds;
  std::atomic<double> fastest{1e30};  // seconds of the clock chain
};

void vector_chunk(void* ctx, int64_t, int) {
  const Job& job = *static_cast<Job*>(ctx);
  job.run(job.rounds);
}

void clock_chunk(void* ctx, int64_t, int) {
  Job& job = *static_cast<Job*>(ctx);
  if (job.run != nullptr) job.run(job.rounds);
  for (int i = 0; i < kClockTries; i++) {  // a thread may lose its core during one of them
    const auto start = std::chrono::steady_clock::now();
    clock_chain(kClockRounds);
    const double took = seconds_since(start);
    double seen = job.fastest.load();
    while (took < seen && !job.fastest.compare_exchange_weak(seen, took)) {
    }
  }
}

}  // namespace

std::vector<Probe> probes() {
  const Features& f = detect_features();
  std::vector<Probe> found = {{"pmaddwd xmm", "scalar", "int8", kSums * 16, sse_int},
                              {"mulps xmm", "scalar", "f32", kSums * 8, sse_float}};
  if (f.avx2) {
    found.push_back({"vpmaddubsw ymm", "avx2", "int8", kSums * 64, avx2_int});
    found.push_back({"vfmadd231ps ymm", "avx2", "f32", kSums * 16, avx2_float});
  }
  if (f.avx512) {
    found.push_back({"vpmaddubsw zmm", "avx512", "int8", kSums * 128, avx512_int});
    found.push_back({"vfmadd231ps zmm", "avx512", "f32", kSums * 32, avx512_float});
  }
  if (f.avx512_vnni) found.push_back({"vpdpbusd zmm", "avx512", "int8", kSums * 128, avx512_dot});
  if (f.avx512_bf16) found.push_back({"vdpbf16ps zmm", "avx512", "bf16", kSums * 64, avx512_halves});
  if (isa_supported(kAmx, f)) {
    found.push_back({"tdpbusd tmm", "amx", "int8", 4 * 2 * 16 * 16 * 64, amx_int});
    found.push_back({"tdpbf16ps tmm", "amx", "bf16", 4 * 2 * 16 * 16 * 32, amx_halves});
  }
  return found;
}

ProbeResult run_probe(Pool& pool, const std::string& instruction, int64_t rounds, int64_t chunks) {
  if (rounds < 1 || chunks < 1) throw std::invalid_argument("rounds and chunks must be at least 1");
  Job job;
  job.run = nullptr;
  job.rounds = rounds;
  for (const Probe& probe : probes())
    if (instruction == probe.instruction) job.run = probe.run;
  if (job.run == nullptr && !instruction.empty())
    throw std::invalid_argument("no such probe on this machine: " + instruction);
  ProbeResult result = {};
  if (job.run != nullptr) {
    const Phase work = {chunks, vector_chunk, &job};
    const auto start = std::chrono::steady_clock::now();
    pool.run(&work, 1);
    result.seconds = seconds_since(start);
  }
  const Phase clock = {pool.threads(), clock_chunk, &job};
  pool.run(&clock, 1);
  result.clock_hz = static_cast<double>(kClockRounds * kClockCycles) / job.fastest.load();
  return result;
}

}  // namespace hetero
