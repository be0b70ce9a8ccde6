// A libcuda for tests: streams run each operation at once, in host memory, so that device addresses are the
// host's plus SHIFT. Knows the kernels of the hand-off by name. -DOLD: without the second version of memory
// operations.
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define SHIFT (1ull << 50)  // beyond every address of a process
enum { FAILURE = 999 };
typedef unsigned long long u64;

static uint32_t* word(u64 device) { return (uint32_t*)(device - SHIFT); }

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index + 100;
  return 0;
}
// Device 1 has memory operations switched off.
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device == 100;
  return attribute == 92 ? 0 : FAILURE;
}
int cuPointerGetAttribute(void* data, int attribute, u64 pointer) {
  *(u64*)data = pointer + SHIFT;
  return attribute == 3 ? 0 : FAILURE;
}
int cuModuleLoadData(void** module, const char* text) {
  *module = (void*)text;
  return strstr(text, ".version") ? 0 : FAILURE;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)(uintptr_t)(strcmp(name, "hetero_send") == 0      ? 1
                                 : strcmp(name, "hetero_collect") == 0 ? 2
                                                                       : 0);
  return *function && module ? 0 : FAILURE;
}
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
  memcpy(word(to), from, bytes);
  return stream ? 0 : FAILURE;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  function(argument);
  return stream ? 0 : FAILURE;
}
// Graph n has n nodes, which are kernels and memory operations in turn.
int cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  *count = (size_t)graph;
  for (size_t i = 0; nodes && i < *count; ++i) nodes[i] = (void*)(i + 1);
  return graph ? 0 : FAILURE;
}
int cuGraphNodeGetType(void* node, int* type) {
  *type = (size_t)node % 2 ? 0 : 12;
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == FAILURE ? "a failure that the test asked for" : 0;
  return 0;
}

static int wait_value(u64 address, uint32_t value) {
  while (__atomic_load_n(word(address), __ATOMIC_ACQUIRE) != value) sched_yield();
  return 0;
}
static int write_value(u64 address, uint32_t value) {
  __atomic_store_n(word(address), value, __ATOMIC_RELEASE);
  return 0;
}

#ifdef OLD
#define cuStreamWaitValue32_v2 cuStreamWaitValue32
#define cuStreamWriteValue32_v2 cuStreamWriteValue32
#endif
int cuStreamWaitValue32_v2(void* stream, u64 address, uint32_t value, unsigned flags) {
  return stream && flags == 1 ? wait_value(address, value) : FAILURE;
}
int cuStreamWriteValue32_v2(void* stream, u64 address, uint32_t value, unsigned flags) {
  return stream && flags == 0 ? write_value(address, value) : FAILURE;
}

static u64 now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1000000000ull * (u64)t.tv_sec + (u64)t.tv_nsec;
}
static int collect(u64 done, u64 fault, uint32_t number, u64 limit) {
  const u64 start = now();
  while (__atomic_load_n(word(done), __ATOMIC_ACQUIRE) != 1) {
    if (now() - start > limit) return write_value(fault, number);
    sched_yield();
  }
  return write_value(done, 0);
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** at, void** extra) {
  if (!stream || extra || shared || gy * gz * by * bz != 1 || gx < 1 || gx > 512) return FAILURE;
  if (function == (void*)2) {
    if (gx * bx != 1 || *(uint32_t*)at[2] == 0 || *(u64*)at[3] < 1000000) return FAILURE;
    return collect(*(u64*)at[0], *(u64*)at[1], *(uint32_t*)at[2], *(u64*)at[3]);
  }
  const u64 flag = *(u64*)at[9];
  if (bx != 256 || (flag && gx != 1)) return FAILURE;
  for (int i = 0; i < 3; ++i) {
    const u64 to = *(u64*)at[3 * i], from = *(u64*)at[3 * i + 1];
    // One of the two is the channel's memory, which is SHIFTed; tensors of the test are not.
    const uint32_t words = *(uint32_t*)at[3 * i + 2];
    extern u64 channel_begin, channel_end;
    const u64 real_to = to >= channel_begin && to < channel_end ? to - SHIFT : to;
    const u64 real_from = from >= channel_begin && from < channel_end ? from - SHIFT : from;
    memcpy((void*)real_to, (void*)real_from, 4ull * words);
  }
  return flag ? write_value(flag, 1) : 0;
}
u64 channel_begin, channel_end;
