"""Convert DFlash drafters from safetensors to GGUF, without torch.

    find_source ─▶ resolve: Config, Weights ─▶ Drafter ─▶ tensors  ─▶ write
                   Target (tokenizer, sizes) ─┘

All errors, except wrong values of weights, are found before the first byte is written.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_kvflash.convert.config import Config
from pyllama_kvflash.convert.general import general_keys
from pyllama_kvflash.convert.gguf_file import TYPES, Contents, Progress, write_file
from pyllama_kvflash.convert.hparams import Drafter, Value, read_drafter
from pyllama_kvflash.convert.layout import Tensor, plan_tensors
from pyllama_kvflash.convert.source import Source, find_source
from pyllama_kvflash.convert.target import MASK, Target
from pyllama_kvflash.convert.weights import Weights
from pyllama_kvflash.errors import OutputError, UsageError, unwritten
from pyllama_kvflash.files import Replacement, check_outputs

__all__ = ["OUTTYPES", "Drafter", "Plan", "Source", "Target", "find_source", "resolve", "write"]

_LLAMA_TYPES = (
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
    *("iq4_nl", "iq4_xs"),
)  # types that llama.cpp's quantiser makes, from a file of another type
OUTTYPES = ("auto", *TYPES, *_LLAMA_TYPES)
"""Types of matrices. "auto": the stored type; f16 if that is f32."""

_STORED = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A drafter that can be written.

    target: None if the drafter is only inspected.
    stored: the type of the source's matrices, one of TYPES.
    """

    source: Source
    config: Config
    drafter: Drafter
    tensors: list[Tensor]
    target: Target | None
    stored: str

    @property
    def n_params(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def resolve(source: Source, target: Path | None) -> Plan:
    """Read a drafter's config.json, the headers of its weights, and the target's GGUF, and compare them.

    Raises UsageError, ModelError and UnsupportedError.
    """
    config = Config.of(source.folder)
    found = Target.of(target) if target else None
    weights = Weights.of(source.folder)
    drafter = read_drafter(config, weights, mrope=found is not None and found.mrope)
    tensors = plan_tensors(drafter, weights)
    if found:
        found.check(drafter, config)
    return Plan(source, config, drafter, tensors, found, _stored_type(weights))


def write(plan: Plan, output: Path, outtype: str = "auto", progress: Progress = lambda _: None) -> None:
    """Write a plan's drafter to a file, whole or not at all.

    outtype: one of OUTTYPES.
    progress: called with 0.0 to 1.0.

    Raises UsageError, ModelError for a weight that is not a number, UnsupportedError, and OutputError.
    """
    if plan.target is None:
        msg = "a drafter needs its target's tokenizer: give the target's GGUF as `target`"
        raise UsageError(msg)
    weights = {t.stored.path for t in plan.tensors if t.stored}
    check_outputs(
        [("the drafter", output)],
        [
            ("the target", plan.target.path),
            ("the config", plan.config.path),
            *(("the weights", path) for path in weights),
        ],
    )
    if outtype == "auto":
        outtype = "f16" if plan.stored == "f32" else plan.stored
    try:
        with Replacement(output) as new:
            if outtype in _LLAMA_TYPES:
                _quantized(plan, new, outtype, progress)
            else:
                write_file(new.path, _contents(plan, outtype), outtype, progress)
    except OSError as err:
        raise OutputError(unwritten(output, err)) from None


def _quantized(plan: Plan, new: Replacement, outtype: str, progress: Progress) -> None:
    """Write a drafter in one of _LLAMA_TYPES: first a temporary file in the stored type, from which llama.cpp makes the new file."""
    from pyllama_kvflash.native import quantize  # noqa: PLC0415 (all other types need no compiled part)

    stored = Replacement(new.target)  # only a temporary file, never renamed
    try:
        write_file(stored.path, _contents(plan, plan.stored), plan.stored, progress)
        quantize(stored.path, new.path, outtype, os.cpu_count() or 1)
    finally:
        stored.discard()


def _stored_type(weights: Weights) -> str:
    """Return the type of the first bf16 or f16 matrix, as upstream's `auto` does; f32 if there is none."""
    kinds = [t.dtype for t in weights.tensors.values() if len(t.shape) > 1]
    return _STORED[next((kind for kind in kinds if kind in ("BF16", "F16")), "F32")]


def _contents(plan: Plan, outtype: str) -> Contents:
    import gguf  # noqa: PLC0415 (half a second)

    kinds = gguf.GGUFValueType
    drafter, target = plan.drafter, plan.target
    keys: dict[str, tuple[Any, Any, Any]] = {"general.type": ("model", kinds.STRING, None)}
    keys |= general_keys(gguf, plan.source, plan.n_params)
    keys |= {f"dflash.{key}": _typed(kinds, value) for key, value in drafter.keys.items()}
    keys["general.file_type"] = (int(gguf.LlamaFileType[TYPES[outtype]]), kinds.UINT32, None)
    keys["general.quantization_version"] = (gguf.GGML_QUANT_VERSION, kinds.UINT32, None)
    for key, field in target.tokenizer.items() if target else ():
        if field.value != []:  # gguf does not write an empty array
            keys[key] = (field.value, kinds(field.kind), None if field.item_kind is None else kinds(field.item_kind))
    keys[MASK] = (drafter.mask_token, kinds.UINT32, None)
    return Contents(keys, plan.tensors)


def _typed(kinds: Any, value: Value) -> tuple[Any, Any, Any]:
    """Return a value with the GGUF type that upstream's converter gives it."""
    if isinstance(value, list):
        return value, kinds.ARRAY, kinds.BOOL if isinstance(value[0], bool) else kinds.INT32
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
    return value, kind, None
