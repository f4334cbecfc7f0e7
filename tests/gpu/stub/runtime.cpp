// A CUDA runtime on a CPU, under the name by which torch asks for CUDA's own (libcudart.so.13). See README.md, beside
// this file, for what it imitates and what not. Each function's signature is checked against NVIDIA's header.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Time = int64_t;  // nanoseconds of CLOCK_MONOTONIC, which all processes of the host share
constexpr Time kNever = INT64_MAX;
constexpr Time kSecond = 1'000'000'000;

// ---- Settings: CUDA_STUB="devices=2 kernel_ns=2000", or stub_set(). ----

struct Setting {
  const char* name;
  std::atomic<int64_t> value;
};
Setting settings[] = {
    {"devices", {1}},
    {"memory_mib", {8192}},   // of each device
    {"kernel_ns", {2000}},    // how long a kernel runs
    {"copy_ns", {3000}},      // a copy: so long, and a nanosecond more for 50 bytes
    {"queue", {1024}},        // work that a stream takes before a launch waits
    {"open_us", {0}},         // how long opening memory of another process lasts
    {"fill_mib", {64}},       // so much of new memory is filled with 0xFF
};
enum { kDevices, kMemoryMiB, kKernelNs, kCopyNs, kQueue, kOpenUs, kFillMiB };

int64_t setting(int index) { return settings[index].value; }

bool set_setting(const std::string& name, int64_t value) {
  for (auto& each : settings) {
    if (name == each.name) {
      each.value = value;
      return true;
    }
  }
  return false;
}

void read_settings() {
  const char* text = getenv("CUDA_STUB");
  std::string rest = text ? text : "";
  for (size_t start = 0; start < rest.size();) {
    size_t end = std::min(rest.find(' ', start), rest.size());
    std::string item = rest.substr(start, end - start);
    size_t equals = item.find('=');
    if (!item.empty() && (equals == std::string::npos ||
                          !set_setting(item.substr(0, equals), atoll(item.c_str() + equals + 1)))) {
      fprintf(stderr, "CUDA_STUB: %s is no setting of the stub, which are:", item.c_str());
      for (auto& each : settings) fprintf(stderr, " %s", each.name);
      fprintf(stderr, "\n");
      abort();
    }
    start = end + 1;
  }
}
struct ReadSettings {
  ReadSettings() { read_settings(); }
} read_settings_at_load;

// ---- Time ----

Time now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

void sleep_for(Time duration) {
  timespec t{duration / kSecond, duration % kSecond};
  nanosleep(&t, nullptr);
}

bool holds_the_lock() {
  static auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto is_up = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  return check && is_up && is_up() && check();
}

// ---- Counts of calls, and errors to inject into them ----

struct Function {
  const char* name;
  bool asks_driver;  // others only look at what the calling thread or the runtime knows
  std::atomic<int64_t> calls{0}, locked{0}, waits{0}, locked_waits{0};
  std::atomic<int64_t> fail_after{0}, fail_times{0};
  std::atomic<int> fail_with{0};
  Function(const char* name, bool asks_driver);
};

struct Functions {
  std::mutex mutex;
  std::vector<Function*> all;
  struct Order {
    int64_t after, times;
    int error;
  };
  std::map<std::string, Order> orders;  // for functions that nobody has called yet
};
Functions& functions() {
  static auto* the = new Functions;  // never destroyed: threads may call until the process is gone
  return *the;
}
Function::Function(const char* name, bool asks_driver) : name(name), asks_driver(asks_driver) {
  auto& the = functions();
  std::lock_guard<std::mutex> guard(the.mutex);
  the.all.push_back(this);
  if (auto order = the.orders.find(name); order != the.orders.end()) {
    fail_after = order->second.after;
    fail_times = order->second.times;
    fail_with = order->second.error;
  }
}

thread_local Function* current_function = nullptr;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// An error that was ordered for this call; cudaSuccess without one.
cudaError_t begin(Function* function) {
  current_function = function;
  function->calls++;
  if (holds_the_lock()) function->locked++;
  if (function->fail_times > 0 && --function->fail_after < 0 && function->fail_times-- > 0) {
    return static_cast<cudaError_t>(function->fail_with.load());
  }
  return cudaSuccess;
}

#define COUNT_CALL(asks_driver)                                                                     \
  static auto* the_function = new Function(__func__, asks_driver);                                  \
  if (cudaError_t ordered = begin(the_function); ordered != cudaSuccess) return fail(ordered)
#define LOCAL_CALL COUNT_CALL(false)
#define CALL                                                                                        \
  COUNT_CALL(true);                                                                                 \
  devices[current_device].has_context = true;                                                       \
  if (cudaError_t sticky = sticky_error(current_device); sticky != cudaSuccess) return fail(sticky)

// ---- Devices and streams ----

struct Device {
  std::atomic<Time> breaks_at{kNever};
  std::atomic<int> error{cudaErrorAssert};
  std::atomic<int64_t> used{0};
  std::atomic<bool> has_context{false};
};
constexpr int kMostDevices = 16;
Device devices[kMostDevices];
std::atomic<int64_t> kernels_until_failure{0};  // 0: none fails

cudaError_t sticky_error(int device) {
  auto& the = devices[device];
  return now() >= the.breaks_at ? static_cast<cudaError_t>(the.error.load()) : cudaSuccess;
}

// Blocks until the device has got to a time; false if it breaks before.
bool wait_until(int device, Time when) {
  bool has_waited = false;
  for (;;) {
    Time left = when - now();
    if (sticky_error(device) != cudaSuccess) return false;
    if (left <= 0) return true;
    if (!has_waited && current_function) {
      has_waited = true;
      current_function->waits++;
      if (holds_the_lock()) current_function->locked_waits++;
    }
    sleep_for(std::min<Time>(left, kSecond / 1000));  // in pieces, since it may break meanwhile
  }
}

struct Stream {
  int device = 0, priority = 0;
  std::mutex mutex;
  Time busy_until = 0;
  std::deque<Time> queue;  // the ends of work that has not ended

  Time end() {
    std::lock_guard<std::mutex> guard(mutex);
    return busy_until;
  }
  void wait_for(Time when) {
    std::lock_guard<std::mutex> guard(mutex);
    busy_until = std::max(busy_until, when);
  }
  // Puts work behind what the stream has; the time of its end. Waits while the queue is full.
  Time issue(Time duration) {
    for (;;) {
      Time oldest;
      {
        std::lock_guard<std::mutex> guard(mutex);
        Time started = now();
        while (!queue.empty() && queue.front() <= started) queue.pop_front();
        if (static_cast<int64_t>(queue.size()) < setting(kQueue)) {
          busy_until = std::max(busy_until, started) + duration;
          queue.push_back(busy_until);
          return busy_until;
        }
        oldest = queue.front();
      }
      if (!wait_until(device, oldest)) return oldest;
    }
  }
};

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  Stream* of_null[kMostDevices];
  Streams() {
    for (int device = 0; device < kMostDevices; device++) {
      of_null[device] = new Stream;
      of_null[device]->device = device;
      all.insert(of_null[device]);
    }
  }
};
Streams& streams() {
  static auto* the = new Streams;
  return *the;
}

Stream* stream_of(cudaStream_t handle) {
  bool is_null = reinterpret_cast<uintptr_t>(handle) <= 2;  // none, cudaStreamLegacy, cudaStreamPerThread
  return is_null ? streams().of_null[current_device] : reinterpret_cast<Stream*>(handle);
}

// What some calls do on the side: they wait for all that was issued to the device.
void wait_for_device(int device) {
  Time when = 0;
  {
    std::lock_guard<std::mutex> guard(streams().mutex);
    for (Stream* each : streams().all)
      if (each->device == device) when = std::max(when, each->end());
  }
  wait_until(device, when);
}

void break_at(int device, Time when, int error) {
  devices[device].error = error;
  devices[device].breaks_at = when;
}

cudaError_t run_kernel(Stream* stream, Time duration) {
  if (cudaError_t sticky = sticky_error(stream->device); sticky != cudaSuccess) return sticky;
  Time end = stream->issue(duration);
  if (kernels_until_failure > 0 && --kernels_until_failure == 0) break_at(stream->device, end, cudaErrorAssert);
  return cudaSuccess;
}

// ---- Memory ----

struct Handle {  // what travels in a cudaIpcMemHandle_t or a cudaIpcEventHandle_t
  uint32_t magic;
  int process, descriptor, device;
  uint64_t inode, size;
};
constexpr uint32_t kMemoryMagic = 0x5e5e0001, kEventMagic = 0x5e5e0002;
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t) && sizeof(Handle) <= sizeof(cudaIpcEventHandle_t));

struct Block {
  int descriptor;
  size_t size;
  int device;
  int openings = 0;  // of another process's memory
  uint64_t inode = 0;
};
struct Blocks {
  std::mutex mutex;
  std::map<char*, Block> on_device;
  std::map<char*, size_t> pinned;
};
Blocks& blocks() {
  static auto* the = new Blocks;
  return *the;
}

template <typename Map, typename Size>
typename Map::iterator around(Map& map, const void* pointer, Size size_of) {
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto next = map.upper_bound(address);
  if (next == map.begin()) return map.end();
  --next;
  return address < next->first + size_of(next->second) ? next : map.end();
}
size_t size_of_block(const Block& block) { return block.size; }
size_t size_of_pinned(size_t size) { return size; }

enum class Place { kDevice, kPinned, kPageable };
Place place_of(const void* pointer) {
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  if (around(the.on_device, pointer, size_of_block) != the.on_device.end()) return Place::kDevice;
  if (around(the.pinned, pointer, size_of_pinned) != the.pinned.end()) return Place::kPinned;
  return Place::kPageable;
}

char* map_descriptor(int descriptor, size_t size) {
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

uint64_t inode_of(int descriptor) {
  struct stat status;
  return fstat(descriptor, &status) ? 0 : status.st_ino;
}

// The descriptor of another process, or -1: it has ended, or closed it.
int open_theirs(const Handle& handle) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.descriptor);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor >= 0 && inode_of(descriptor) != handle.inode) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

// ---- Events ----

struct Point {  // of an event between processes: in memory that both map
  std::atomic<Time> when{0};
};
struct Event {
  unsigned flags = 0;
  int device = 0, descriptor = -1;
  bool is_recorded = false, is_opened = false;
  Point own;
  Point* point = &own;
};
std::atomic<int64_t> live_events{0}, live_opened_events{0};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// ---- Kernels ----

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
};
Kernels& kernels() {
  static auto* the = new Kernels;
  return *the;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// The only kernel that is known here is torch.cuda._sleep's. All others are computed by kernels.cpp, or refused.
cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  const char* name = "unknown";
  {
    std::lock_guard<std::mutex> guard(kernels().mutex);
    if (auto found = kernels().names.find(function); found != kernels().names.end()) name = found->second;
  }
  if (strstr(name, "spin_kernel")) {
    auto cycles = *static_cast<int64_t*>(arguments[0]);
    return run_kernel(stream_of(handle), cycles * 2 / 3);  // a clock of 1.5 GHz
  }
  fprintf(stderr, "CUDA stub: the kernel %s is not computed here\n", name);
  return cudaErrorNotSupported;
}

}  // namespace

// ---- Control, for tests: by ctypes, see control.py. ----

extern "C" {

int stub_set(const char* name, long value) { return set_setting(name, value) ? 0 : -1; }

// The `after`-th kernel from now breaks its device when it ends.
void stub_fail_kernel(long after) { kernels_until_failure = after; }

void stub_break(int device, long after_us, int error) { break_at(device, now() + after_us * 1000, error); }

void stub_heal() {
  kernels_until_failure = 0;
  for (auto& device : devices) device.breaks_at = kNever;
}

// The next `times` calls of a function, after so many others, return an error, which does not stick.
void stub_fail_call(const char* name, int error, long after, long times) {
  auto& the = functions();
  std::lock_guard<std::mutex> guard(the.mutex);
  the.orders[name] = {after, times, error};
  for (Function* each : the.all) {
    if (!strcmp(each->name, name)) {
      each->fail_after = after;
      each->fail_with = error;
      each->fail_times = times;
    }
  }
}

void stub_reset_counts() {
  auto& the = functions();
  std::lock_guard<std::mutex> guard(the.mutex);
  for (Function* each : the.all) each->calls = each->locked = each->waits = each->locked_waits = 0;
}

// A line for each function that was called: name, whether it asks the driver, calls, those under the interpreter's
// lock, those that waited for the device, and those that did both. The length of the text, whatever fits.
long stub_report(char* text, long size) {
  std::string lines;
  auto& the = functions();
  std::lock_guard<std::mutex> guard(the.mutex);
  for (Function* each : the.all) {
    if (each->calls == 0) continue;
    lines += std::string(each->name) + " " + std::to_string(each->asks_driver);
    for (auto* count : {&each->calls, &each->locked, &each->waits, &each->locked_waits})
      lines += " " + std::to_string(count->load());
    lines += "\n";
  }
  if (size > 0) {
    strncpy(text, lines.c_str(), size - 1);
    text[size - 1] = 0;
  }
  return static_cast<long>(lines.size());
}

long stub_live(const char* what) {
  std::string name = what;
  if (name == "events") return live_events;
  if (name == "opened_events") return live_opened_events;
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  if (name == "pinned") return static_cast<long>(the.pinned.size());
  if (name == "blocks" || name == "opened_blocks") {
    return std::count_if(the.on_device.begin(), the.on_device.end(),
                         [&](auto& each) { return (each.second.openings > 0) == (name == "opened_blocks"); });
  }
  if (name == "streams") return static_cast<long>(streams().all.size()) - kMostDevices;
  return -1;
}

// Whether anything has used a device, which on a GPU takes some hundred MB of its memory.
int stub_has_context(int device) { return devices[device].has_context; }

// For kernels.cpp: a kernel that it has computed, on the stream where CUDA would run it.
cudaError_t stub_run_kernel(cudaStream_t stream) {
  static auto* function = new Function("kernel", true);
  if (cudaError_t ordered = begin(function); ordered != cudaSuccess) return fail(ordered);
  return fail(run_kernel(stream_of(stream), setting(kKernelNs)));
}

// For kernels.cpp: a kernel whose assertion fails.
cudaError_t stub_run_failing_kernel(cudaStream_t stream) {
  static auto* function = new Function("kernel", true);
  if (cudaError_t ordered = begin(function); ordered != cudaSuccess) return fail(ordered);
  Stream* where = stream_of(stream);
  if (cudaError_t sticky = sticky_error(where->device); sticky != cudaSuccess) return fail(sticky);
  break_at(where->device, where->issue(setting(kKernelNs)), cudaErrorAssert);
  return cudaSuccess;
}

// For what the stub does not have (refused.cpp lists its functions).
cudaError_t stub_refuse(const char* name) {
  fprintf(stderr, "CUDA stub: %s is not imitated\n", name);
  return fail(cudaErrorNotSupported);
}

// ---- Devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  LOCAL_CALL;
  *count = static_cast<int>(std::min<int64_t>(setting(kDevices), kMostDevices));
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  LOCAL_CALL;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  LOCAL_CALL;
  if (device < 0 || device >= setting(kDevices)) return fail(cudaErrorInvalidDevice);
  current_device = device;
  devices[device].has_context = true;
  return fail(sticky_error(device));
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  LOCAL_CALL;
  *properties = {};
  strcpy(properties->name, "CUDA stub on a CPU");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->totalGlobalMem = setting(kMemoryMiB) << 20;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  for (int axis = 0; axis < 3; axis++) {
    properties->maxThreadsDim[axis] = 1024;
    properties->maxGridSize[axis] = 65535;
  }
  properties->maxGridSize[0] = INT32_MAX;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->unifiedAddressing = properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  LOCAL_CALL;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  LOCAL_CALL;
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  LOCAL_CALL;
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  LOCAL_CALL;
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  CALL;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  CALL;
  wait_for_device(current_device);
  return fail(sticky_error(current_device));
}

cudaError_t cudaDriverGetVersion(int* version) {
  LOCAL_CALL;
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  LOCAL_CALL;
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Errors: the last one is a thread's own; one that sticks is returned until the process ends. ----

cudaError_t cudaGetLastError() {
  LOCAL_CALL;
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  cudaError_t sticky = sticky_error(current_device);
  return sticky != cudaSuccess ? sticky : error;
}

cudaError_t cudaPeekAtLastError() {
  LOCAL_CALL;
  cudaError_t sticky = sticky_error(current_device);
  return sticky != cudaSuccess ? sticky : last_error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotSupported: return "operation not supported (by the CUDA stub)";
    default: return "an error of the CUDA stub";
  }
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

// ---- Streams ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  CALL;
  auto* stream = new Stream;
  stream->device = current_device;
  stream->priority = priority;
  std::lock_guard<std::mutex> guard(streams().mutex);
  streams().all.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CALL;
  std::lock_guard<std::mutex> guard(streams().mutex);
  streams().all.erase(stream_of(handle));  // and not deleted: its events may be asked for
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  LOCAL_CALL;
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALL;
  return stream_of(handle)->end() <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALL;
  Stream* stream = stream_of(handle);
  wait_until(stream->device, stream->end());
  return fail(sticky_error(stream->device));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  CALL;
  stream_of(handle)->wait_for(event_of(event)->point->when);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  LOCAL_CALL;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  LOCAL_CALL;
  *status = cudaStreamCaptureStatusNone;
  if (number) *number = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  LOCAL_CALL;
  return cudaSuccess;
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  CALL;
  auto* event = new Event;
  event->flags = flags;
  event->device = current_device;
  if (flags & cudaEventInterprocess) {
    if (!(flags & cudaEventDisableTiming)) return fail(cudaErrorInvalidValue);
    event->descriptor = memfd_create("cuda-stub-event", MFD_CLOEXEC);
    if (ftruncate(event->descriptor, sizeof(Point))) return fail(cudaErrorMemoryAllocation);
    event->point = new (map_descriptor(event->descriptor, sizeof(Point))) Point;
  }
  live_events++;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CALL;
  Event* event = event_of(handle);
  (event->is_opened ? live_opened_events : live_events)--;
  if (event->descriptor >= 0) {
    munmap(event->point, sizeof(Point));
    close(event->descriptor);
  }
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  CALL;
  Event* event = event_of(handle);
  event->is_recorded = true;
  event->point->when = std::max(now(), stream_of(stream)->end());
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CALL;
  return event_of(handle)->point->when <= now() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CALL;
  Event* event = event_of(handle);
  wait_until(event->device, event->point->when);
  return fail(sticky_error(event->device));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  CALL;
  Event *first = event_of(from), *last = event_of(to);
  bool has_times = first->is_recorded && last->is_recorded && !((first->flags | last->flags) & cudaEventDisableTiming);
  if (!has_times) return fail(cudaErrorInvalidResourceHandle);
  Time began = first->point->when, ended = last->point->when;
  if (std::max(began, ended) > now()) return fail(cudaErrorNotReady);
  *milliseconds = static_cast<float>((ended - began) / 1e6);
  return cudaSuccess;
}

// ---- Memory ----

cudaError_t cudaMalloc(void** pointer, size_t size) {
  CALL;
  auto& device = devices[current_device];
  if (device.used + static_cast<int64_t>(size) > setting(kMemoryMiB) << 20) return fail(cudaErrorMemoryAllocation);
  int descriptor = memfd_create("cuda-stub", MFD_CLOEXEC);
  char* made = descriptor < 0 || ftruncate(descriptor, size) ? nullptr : map_descriptor(descriptor, size);
  if (!made) return fail(cudaErrorMemoryAllocation);
  memset(made, 0xFF, std::min<size_t>(size, setting(kFillMiB) << 20));  // NaN, -1: nobody may read it yet
  device.used += size;
  std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().on_device[made] = {descriptor, size, current_device};
  *pointer = made;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  CALL;
  if (!pointer) return cudaSuccess;
  wait_for_device(current_device);
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  auto found = the.on_device.find(static_cast<char*>(pointer));
  if (found == the.on_device.end() || found->second.openings) return fail(cudaErrorInvalidValue);
  munmap(pointer, found->second.size);
  close(found->second.descriptor);
  devices[found->second.device].used -= found->second.size;
  the.on_device.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CALL;
  *total = setting(kMemoryMiB) << 20;
  *free = *total - devices[current_device].used;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  CALL;
  wait_for_device(current_device);
  size_t whole = (size + 4095) / 4096 * 4096;
  *pointer = aligned_alloc(4096, whole);
  if (!*pointer) return fail(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().pinned[static_cast<char*>(*pointer)] = size;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  CALL;
  wait_for_device(current_device);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().pinned.erase(static_cast<char*>(pointer));
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  CALL;
  std::lock_guard<std::mutex> guard(blocks().mutex);
  if (!blocks().pinned.emplace(static_cast<char*>(pointer), size).second)
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  CALL;
  wait_for_device(current_device);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  if (!blocks().pinned.erase(static_cast<char*>(pointer))) return fail(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  LOCAL_CALL;
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  if (auto found = around(the.on_device, pointer, size_of_block); found != the.on_device.end()) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = found->second.device;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (around(the.pinned, pointer, size_of_pinned) != the.pinned.end()) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t handle) {
  CALL;
  Stream* stream = stream_of(handle);
  memcpy(to, from, size);
  Time end = stream->issue(setting(kCopyNs) + static_cast<Time>(size / 50));
  if (place_of(to) == Place::kPageable) wait_until(stream->device, end);  // as CUDA does where it cannot copy later
  return fail(sticky_error(stream->device));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  CALL;
  memcpy(to, from, size);
  Stream* stream = stream_of(nullptr);
  wait_until(stream->device, stream->issue(setting(kCopyNs) + static_cast<Time>(size / 50)));
  return fail(sticky_error(stream->device));
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t handle) {
  CALL;
  memset(pointer, value, size);
  stream_of(handle)->issue(setting(kKernelNs));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  CALL;
  memset(pointer, value, size);
  stream_of(nullptr)->issue(setting(kKernelNs));
  return cudaSuccess;
}

// ---- Memory and events of other processes ----

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* pointer) {
  CALL;
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  auto found = around(the.on_device, pointer, size_of_block);
  if (found == the.on_device.end() || found->second.openings) return fail(cudaErrorInvalidValue);
  const Block& block = found->second;
  Handle handle{kMemoryMagic, getpid(), block.descriptor, block.device, inode_of(block.descriptor), block.size};
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t in, unsigned) {
  CALL;
  sleep_for(setting(kOpenUs) * 1000);
  Handle handle;
  memcpy(&handle, &in, sizeof handle);
  if (handle.magic != kMemoryMagic) return fail(cudaErrorInvalidValue);
  if (handle.process == getpid()) return fail(cudaErrorInvalidResourceHandle);
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  for (auto& [address, block] : the.on_device) {
    if (block.openings && block.inode == handle.inode) {
      block.openings++;
      *pointer = address;
      return cudaSuccess;
    }
  }
  int descriptor = open_theirs(handle);
  char* mapped = descriptor < 0 ? nullptr : map_descriptor(descriptor, handle.size);
  if (!mapped) return fail(cudaErrorInvalidResourceHandle);
  the.on_device[mapped] = {descriptor, handle.size, current_device, 1, handle.inode};
  *pointer = mapped;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  CALL;
  wait_for_device(current_device);
  auto& the = blocks();
  std::lock_guard<std::mutex> guard(the.mutex);
  auto found = the.on_device.find(static_cast<char*>(pointer));
  if (found == the.on_device.end() || !found->second.openings) return fail(cudaErrorInvalidValue);
  if (--found->second.openings == 0) {
    munmap(pointer, found->second.size);
    close(found->second.descriptor);
    the.on_device.erase(found);
  }
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t in) {
  CALL;
  Event* event = event_of(in);
  if (event->descriptor < 0 || event->is_opened) return fail(cudaErrorInvalidResourceHandle);
  Handle handle{kEventMagic, getpid(), event->descriptor, event->device, inode_of(event->descriptor), sizeof(Point)};
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t in) {
  CALL;
  Handle handle;
  memcpy(&handle, &in, sizeof handle);
  if (handle.magic != kEventMagic) return fail(cudaErrorInvalidValue);
  int descriptor = open_theirs(handle);
  char* mapped = descriptor < 0 ? nullptr : map_descriptor(descriptor, sizeof(Point));
  if (!mapped) return fail(cudaErrorInvalidResourceHandle);
  auto* event = new Event;
  event->flags = cudaEventDisableTiming | cudaEventInterprocess;
  event->device = current_device;
  event->descriptor = descriptor;
  event->is_opened = true;
  event->point = reinterpret_cast<Point*>(mapped);
  live_opened_events++;
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

// ---- Kernels ----

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  CALL;
  return fail(launch(function, arguments, stream));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  CALL;
  return fail(launch(function, arguments, configuration->stream));
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  CALL;
  return fail(launch(kernel, arguments, stream));
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard<std::mutex> guard(kernels().mutex);
  kernels().names[function] = name;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  LOCAL_CALL;
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  LOCAL_CALL;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  LOCAL_CALL;
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  LOCAL_CALL;
  *count = 2;
  return cudaSuccess;
}

// ---- The driver, which driver.cpp stands for ----

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  LOCAL_CALL;
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
