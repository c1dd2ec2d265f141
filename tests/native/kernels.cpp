// The kernels by which layers choose on a GPU, on the CPU: see cuda/ggml-cuda/common.cuh. tests/support/kernels.py builds
// it.

#include "coarse/attend.cu"
#include "coarse/encode.cu"
#include "guests/fresh.cu"

static ggml_backend_cuda_context context;

// a custom node of the CPU's: all its threads come here
template <void (*LAUNCH)(ggml_tensor *, void *)> static void on_cpu(ggml_tensor * dst, int ith, int, void *) {
    if (ith == 0) { LAUNCH(dst, &context); }
}

template <void (*LAUNCH)(ggml_tensor *, void *)> static void (*of_cpu())(ggml_tensor *, void *) {
    return (void (*)(ggml_tensor *, void *)) on_cpu<LAUNCH>;
}

extern "C" const kvf_gpu * kvflash_host_kernels() {
    static kvf_gpu res = *kvflash_gpu();
    res.attend         = of_cpu<kvf_attend_node>();
    res.mix            = of_cpu<kvf_mix_node>();
    res.choose_late    = of_cpu<kvf_late_node>();
    res.occupy         = of_cpu<kvf_occupy_node>();
    return &res;
}
