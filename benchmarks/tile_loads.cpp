// How long a tile product takes beside the loads that feed it, with one thread and with many: products alone,
// two by two tiles (all eight registers in use), two by one, one by two; with operands of zeros, then of
// random numbers, which slow the clock.
//
//   g++ -O2 -std=c++17 -mamx-tile -mamx-bf16 -pthread benchmarks/tile_loads.cpp -o /tmp/tiles &&
//   /tmp/tiles 1 15
//
// Needs Linux and a CPU with AMX. Prints nanoseconds a product, the mean over the threads of each one's best
// of three runs; the threads run the same loop at the same time, each pinned to a CPU of its own.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

#define PRODUCT(c, a, b) "tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c "\n"
#define LOAD(t, offset) "tileloadd " #offset "(%0,%1,1), %%tmm" #t "\n"
#define LOOP(name, body)                                                                  \
  void name(const char* memory, int n) {                                                  \
    for (int i = 0; i < n; i++) __asm__ volatile(body::"r"(memory), "r"(64L) : "memory"); \
  }

LOOP(products, PRODUCT(0, 4, 6) PRODUCT(1, 4, 7) PRODUCT(2, 5, 6) PRODUCT(3, 5, 7))
LOOP(two_by_two, LOAD(4, 0) LOAD(6, 2048) PRODUCT(0, 4, 6) LOAD(7, 3072) PRODUCT(1, 4, 7) LOAD(5, 1024)
                     PRODUCT(2, 5, 6) PRODUCT(3, 5, 7))
LOOP(two_by_one, LOAD(2, 0) LOAD(3, 1024) LOAD(4, 2048) PRODUCT(0, 2, 4) PRODUCT(1, 3, 4))
LOOP(one_by_two, LOAD(2, 0) LOAD(4, 2048) PRODUCT(0, 2, 4) LOAD(4, 3072) PRODUCT(1, 2, 4))

struct Case {
  const char* name;
  int products;
  void (*run)(const char*, int);
};
const Case kCases[] = {{"products alone", 4, products},
                       {"2 x 2, eight registers", 4, two_by_two},
                       {"2 x 1, five registers", 2, two_by_one},
                       {"1 x 2, four registers", 2, one_by_two}};
constexpr int kRuns = 3, kTimes = 60000;

void configure() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.column_bytes[t] = 64;
    config.rows[t] = 16;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

void measure(int threads, bool random) {
  constexpr int kSteps = sizeof kCases / sizeof *kCases * kRuns;
  std::atomic<int> step{-1}, done{0};
  std::vector<std::vector<double>> best(kSteps / kRuns, std::vector<double>(threads, 1e9));
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; t++)
    workers.emplace_back([&, t] {
      cpu_set_t cpu;
      CPU_ZERO(&cpu);
      CPU_SET(t, &cpu);
      sched_setaffinity(0, sizeof cpu, &cpu);
      char* memory = static_cast<char*>(aligned_alloc(4096, 8192));
      memset(memory, 0, 8192);
      std::mt19937 numbers(1);
      for (int i = 0; random && i < 4096; i++) {  // bf16 from 2^-7 to 2 either way
        const uint16_t value = static_cast<uint16_t>(0x3c00 | (numbers() & 0x83ff));
        memcpy(memory + 2 * i, &value, 2);
      }
      configure();
      two_by_two(memory, 1);  // operands of the products alone
      for (int s = 0; s < kSteps; s++) {
        while (step.load() < s) continue;
        const Case& c = kCases[s / kRuns];
        const auto begin = std::chrono::steady_clock::now();
        c.run(memory, kTimes);
        const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
        double& mine = best[s / kRuns][t];
        if (took.count() / kTimes / c.products < mine) mine = took.count() / kTimes / c.products;
        done++;
      }
      free(memory);
    });
  for (int s = 0; s < kSteps; s++) {
    done = 0;
    step = s;
    while (done < threads) usleep(10);
  }
  for (auto& worker : workers) worker.join();
  printf("%d threads, %s\n", threads, random ? "random numbers" : "zeros");
  for (int c = 0; c < kSteps / kRuns; c++) {
    double sum = 0;
    for (const double ns : best[c]) sum += ns;
    printf("  %-24s %.1f ns a product\n", kCases[c].name, sum / threads);
  }
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    fprintf(stderr, "this CPU or its system offers no AMX tiles\n");
    return 3;
  }
  for (int i = 1; i < argc; i++)
    for (const bool random : {false, true}) measure(atoi(argv[i]), random);
  return argc > 1 ? 0 : 2;
}
