#pragma once

// Hooks in the CUDA backend (patch 0005). HIP and MUSA compile them, too, but without our kernels.

#include <string.h>

#include "ggml.h"

#ifdef KVFLASH_KERNELS
#include "guests/gpu.h"
#else
static bool kvflash_launches(const ggml_tensor *) { return false; }

static void kvflash_launch(ggml_tensor *, void *) {}
#endif

// pin memory that is already allocated. cudaMallocHost() would block the launches of other threads until the system has
// provided the memory
static bool kvflash_host_register(void * ptr, size_t size) {
    const cudaError_t err = cudaHostRegister(ptr, size, cudaHostRegisterPortable);
    if (err != cudaSuccess) { (void) cudaGetLastError(); }
    return err == cudaSuccess;
}

static void kvflash_host_unregister(void * ptr) {
    if (cudaHostUnregister(ptr) != cudaSuccess) { (void) cudaGetLastError(); }
}

// look up a hook by name, for ggml_backend_reg_get_proc_address(); null: there is no such hook
static void * kvflash_function(const char * name) {
#ifdef KVFLASH_KERNELS
    if (strcmp(name, "kvflash_gpu") == 0) { return (void *) kvflash_gpu; }
#endif
    if (strcmp(name, "kvflash_host_register") == 0) { return (void *) kvflash_host_register; }
    return strcmp(name, "kvflash_host_unregister") == 0 ? (void *) kvflash_host_unregister : nullptr;
}
