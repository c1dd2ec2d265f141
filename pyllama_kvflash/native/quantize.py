"""llama.cpp's quantiser."""

import os
from pathlib import Path

from pyllama_kvflash.native.lib import compute, ffi, init, lib


def quantize(src: Path, dst: Path, ftype: str, n_threads: int) -> None:
    """Convert a GGUF of f32, f16 or bf16 to another type. Raises ModelError, and may then leave dst behind.

    ftype: a type that cffi_build.py declares, by llama-quantize's name in lower case.
    """
    init()
    params = ffi.new("llama_model_quantize_params *", lib.llama_model_quantize_default_params())
    params.nthread, params.ftype = n_threads, getattr(lib, f"LLAMA_FTYPE_MOSTLY_{ftype.upper()}")
    compute(lib.kvf_quantize, os.fsencode(src), os.fsencode(dst), params)
