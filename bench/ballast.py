"""Take a GPU's memory until so many GiB are free, and hold it until this is ended: a small card, on a large one.

python bench/ballast.py GIB
"""

import ctypes
import signal
import sys


def main() -> None:
    """Needs the CUDA runtime."""
    left = int(float(sys.argv[1]) * 2**30)
    cuda = ctypes.CDLL("libcudart.so")
    free, total, taken = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    status = cuda.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(free.value - left))
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    print(f"{free.value / 2**30:.1f} of {total.value / 2**30:.1f} GiB are free (status {status})", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
