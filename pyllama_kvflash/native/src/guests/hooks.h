#pragma once

// Hooks in the CUDA backend (patch 0005), which HIP and MUSA compile, too: without kernels of ours there.

#include <string.h>

#include "ggml.h"

#ifdef KVFLASH_KERNELS
#include "guests/gpu.h"
#else
static bool kvflash_launches(const ggml_tensor *) { return false; }

static void kvflash_launch(ggml_tensor *, void *) {}
#endif

// pins memory that is in use already. cudaMallocHost would hold up the launches of other threads for as long as it takes to
// get the memory from the system
static bool kvflash_host_register(void * ptr, size_t size) {
    const cudaError_t err = cudaHostRegister(ptr, size, cudaHostRegisterPortable);
    if (err != cudaSuccess) { (void) cudaGetLastError(); }
    return err == cudaSuccess;
}

static void kvflash_host_unregister(void * ptr) {
    if (cudaHostUnregister(ptr) != cudaSuccess) { (void) cudaGetLastError(); }
}

// a function by its name, as ggml_backend_reg_get_proc_address() finds it; null: not one of these
static void * kvflash_function(const char * name) {
#ifdef KVFLASH_KERNELS
    if (strcmp(name, "kvflash_gpu") == 0) { return (void *) kvflash_gpu; }
#endif
    if (strcmp(name, "kvflash_host_register") == 0) { return (void *) kvflash_host_register; }
    return strcmp(name, "kvflash_host_unregister") == 0 ? (void *) kvflash_host_unregister : nullptr;
}
