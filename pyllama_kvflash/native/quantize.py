"""llama.cpp's quantiser."""

import os
from pathlib import Path

from pyllama_kvflash.native.lib import check, ffi, init, lib

QUANTISED = {
    name: getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    for name in (
        *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
        *("iq4_nl", "iq4_xs"),
    )
}
"""The types that it writes, by the names of llama-quantize, in lower case."""


def quantize(src: Path, dst: Path, ftype: str, n_threads: int) -> None:
    """Write a GGUF of f32, f16 or bf16 in another type (of QUANTISED). Raises ModelError; dst may be left then."""
    init()
    params = ffi.new("llama_model_quantize_params *", lib.llama_model_quantize_default_params())
    params.nthread, params.ftype = n_threads, QUANTISED[ftype]
    check(lib.kvf_quantize(os.fsencode(src), os.fsencode(dst), params))
