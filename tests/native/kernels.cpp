// The kernels by which layers choose on a GPU, on the CPU: see cuda/ggml-cuda/common.cuh. tests/support/kernels.py builds
// it.

#include "kvflash-fresh.cu"
#include "kvflash-index.cu"

// a custom node of the CPU's: all its threads come here
static void choose_on_cpu(ggml_tensor * dst, int ith, int, void *) {
    if (ith == 0) { kvf_choose_node(dst, nullptr); }
}

extern "C" const kvf_gpu * kvflash_host_kernels() {
    static kvf_gpu res = *kvflash_gpu();
    res.choose         = (void (*)(ggml_tensor *, void *)) choose_on_cpu;
    return &res;
}
