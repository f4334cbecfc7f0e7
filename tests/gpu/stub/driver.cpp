// The few functions of CUDA's driver (libcuda.so.1) that torch asks for here; the rest is refused by name.
#include <cuda.h>

#include <cstdlib>

extern "C" {

int stub_has_context(int device);  // runtime.cpp

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = stub_has_context(device);
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the CUDA stub's driver";
  return CUDA_SUCCESS;
}

// Who asks for another function through the loader gets one that refuses: refused.cpp, which environment.py writes.
CUresult stub_refuse_driver(const char*) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // extern "C"
