// A driver without a device: enough of libcuda for kvrs to open devices, move bytes and launch one kernel, on the
// CPU. Environment variables make it fail:
//   FAKE_VERSION   what cuDriverGetVersion says (12080)
//   FAKE_INIT      what cuInit returns (0)
//   FAKE_DEVICES   how many devices there are (1)
//   FAKE_CAPABILITY their compute capability (90)
//   FAKE_MEMORY    bytes of their memory (1 MiB)
//   FAKE_POOLS     whether they have memory pools (1)
// Compiled with -DWITHOUT_POOLS, the library lacks cuMemAllocAsync, and with -DEMPTY it has no function at all.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };
typedef uint32_t Code;
typedef unsigned long long Address;
typedef struct { int device; } Context;
typedef struct { Context *context; uint64_t id; int capturing; } Stream;
typedef struct { int recorded; } Event;
typedef struct { Address to; uint32_t bytes; uint32_t value; } FillArgs;

static Context contexts[8];
static _Thread_local Context *stack[64];
static _Thread_local int depth;
static int initialised;
static size_t used;
static uint64_t next_id = 10;
// What the tests ask for: calls that were made, and what is alive.
static long orders, synchronisations, alive, broken;

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

#ifndef EMPTY
long fake_orders(void) { return orders; }
long fake_synchronisations(void) { return synchronisations; }
long fake_alive(void) { return alive; }
long fake_depth(void) { return depth; }
void *fake_stream(int device, int capturing) {
  Stream *stream = malloc(sizeof *stream);
  *stream = (Stream){&contexts[device], next_id++, capturing};
  return stream;
}

Code cuDriverGetVersion(int *version) { *version = (int)setting("FAKE_VERSION", 12080); return 0; }
Code cuInit(unsigned flags) {
  Code code = (Code)setting("FAKE_INIT", 0);
  for (int i = 0; i < 8; ++i) contexts[i].device = i;
  initialised = !code && !flags;
  return code;
}
static const struct { Code code; const char *name, *text; } codes[] = {
    {INVALID, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}};
static Code find(Code code, const char **text, int name) {
  for (size_t i = 0; i < sizeof codes / sizeof *codes; ++i)
    if (codes[i].code == code) { *text = name ? codes[i].name : codes[i].text; return 0; }
  *text = NULL;
  return INVALID;
}
Code cuGetErrorName(Code code, const char **text) { return find(code, text, 1); }
Code cuGetErrorString(Code code, const char **text) { return find(code, text, 0); }
Code cuDeviceGetCount(int *count) {
  *count = (int)setting("FAKE_DEVICES", 1);
  return initialised ? 0 : NOT_INITIALIZED;
}
Code cuDeviceGet(int *device, int index) {
  *device = index;
  return index >= 0 && index < setting("FAKE_DEVICES", 1) ? 0 : INVALID_DEVICE;
}
Code cuDeviceGetName(char *name, int room, int device) { snprintf(name, (size_t)room, "Fake %d", device); return 0; }
Code cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = (size_t)setting("FAKE_MEMORY", 1 << 20);
  return 0;
}
Code cuDeviceGetAttribute(int *value, unsigned which, int device) {
  (void)device;
  long capability = setting("FAKE_CAPABILITY", 90);
  switch (which) {
    case 16: *value = 4; return 0;
    case 75: *value = (int)(capability / 10); return 0;
    case 76: *value = (int)(capability % 10); return 0;
    case 115: *value = (int)setting("FAKE_POOLS", 1); return 0;
    default: return INVALID;
  }
}

Code cuDevicePrimaryCtxRetain(Context **context, int device) { *context = &contexts[device]; ++alive; return 0; }
Code cuDevicePrimaryCtxRelease_v2(int device) { (void)device; --alive; return 0; }
Code cuCtxPushCurrent_v2(Context *context) { stack[depth++] = context; return 0; }
Code cuCtxPopCurrent_v2(Context **context) { *context = stack[--depth]; return 0; }
static Code usable(void) { return broken ? (Code)broken : depth ? 0 : INVALID; }

Code cuMemGetInfo_v2(size_t *left, size_t *total) {
  *total = (size_t)setting("FAKE_MEMORY", 1 << 20);
  *left = *total - used;
  return usable();
}
// The size lies before the memory, which starts out as garbage.
Code cuMemAlloc_v2(Address *address, size_t bytes) {
  if (usable()) return usable();
  if (used + bytes > (size_t)setting("FAKE_MEMORY", 1 << 20)) return OUT_OF_MEMORY;
  size_t *memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
  memory[0] = bytes;
  used += bytes;
  ++alive;
  memset((char *)memory + 256, 0xA5, bytes);
  *address = (Address)(uintptr_t)memory + 256;
  return 0;
}
Code cuMemFree_v2(Address address) {
  size_t *memory = (size_t *)(uintptr_t)(address - 256);
  used -= memory[0];
  --alive;
  free(memory);
  return 0;
}
#ifndef WITHOUT_POOLS
Code cuMemAllocAsync(Address *address, size_t bytes, Stream *stream) {
  return stream && setting("FAKE_POOLS", 1) ? cuMemAlloc_v2(address, bytes) : INVALID;
}
#endif
Code cuMemFreeAsync(Address address, Stream *stream) { return stream ? cuMemFree_v2(address) : INVALID; }
Code cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream *stream) {
  (void)stream;
  memset((void *)(uintptr_t)to, value, bytes);
  return usable();
}
Code cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Stream *stream) {
  (void)stream;
  memcpy((void *)(uintptr_t)to, from, bytes);
  return usable();
}
Code cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Stream *stream) {
  (void)stream;
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return usable();
}
Code cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream *stream) {
  (void)stream;
  memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
  return usable();
}
Code cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = malloc(bytes);
  ++alive;
  return usable();
}
Code cuMemFreeHost(void *memory) { free(memory); --alive; return 0; }

Code cuStreamCreate(Stream **stream, unsigned flags) {
  (void)flags;
  if (usable()) return usable();
  *stream = fake_stream(stack[depth - 1]->device, 0);
  ++alive;
  return 0;
}
Code cuStreamDestroy_v2(Stream *stream) { free(stream); --alive; return 0; }
Code cuStreamGetCtx(Stream *stream, Context **context) {
  *context = stream ? stream->context : stack[depth - 1];
  return 0;
}
Code cuStreamGetId(Stream *stream, uint64_t *id) { *id = stream ? stream->id : 1; return 0; }
Code cuStreamIsCapturing(Stream *stream, uint32_t *state) { *state = stream && stream->capturing; return 0; }
Code cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
  (void)stream, (void)flags;
  ++orders;
  return event->recorded ? 0 : INVALID;
}
Code cuStreamSynchronize(Stream *stream) { (void)stream; ++synchronisations; return usable(); }
Code cuEventCreate(Event **event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof **event);
  ++alive;
  return usable();
}
Code cuEventDestroy_v2(Event *event) { free(event); --alive; return 0; }
Code cuEventRecord(Event *event, Stream *stream) { (void)stream; event->recorded = 1; return usable(); }
Code cuEventSynchronize(Event *event) { (void)event; return usable(); }

// A module is a copy of its text; a function is its name in there.
Code cuModuleLoadDataEx(char **module, const char *image, unsigned n, void *options, void *values) {
  (void)options, (void)values;
  *module = strndup(image, 64);
  ++alive;
  return n ? INVALID : 0;
}
Code cuModuleUnload(char *module) { free(module); --alive; return 0; }
Code cuModuleGetFunction(char **function, char *module, const char *name) {
  *function = strstr(module, name);
  return *function ? 0 : NOT_FOUND;
}
Code cuLaunchKernel(char *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned y1, unsigned z1,
                    unsigned shared, Stream *stream, void **parameters, void **extra) {
  (void)stream, (void)extra;
  if (!x || !y || !z || !threads || y1 != 1 || z1 != 1 || shared) return INVALID;
  if (!strncmp(function, "fault", 5)) return (Code)(broken = ILLEGAL_ADDRESS);
  if (!strncmp(function, "worn", 4)) return (Code)(broken = 214);
  const FillArgs *args = parameters[0];
  memset((void *)(uintptr_t)args->to, (int)args->value, args->bytes);
  return usable();
}
#endif
