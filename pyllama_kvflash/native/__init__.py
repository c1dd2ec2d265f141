"""The native library behind a Python interface: handles, buffers, and statuses turned into exceptions.

Only this package imports the compiled module. The package moves bytes and runs graphs, and decides nothing.
"""

from pyllama_kvflash.native.chat import TEMPLATE_SECONDS, CallDelta, ChatEngine, Delta, Rendered, Reply
from pyllama_kvflash.native.context import (
    ALL,
    LAST,
    NONE,
    Context,
    Record,
    split_queries,
)
from pyllama_kvflash.native.device import Device, add_rpc, devices, gpus, pretending
from pyllama_kvflash.native.exact import ExactContext
from pyllama_kvflash.native.geometry import KVBytes, Layer, PaneInfo, PaneParams, PoolInfo, PoolParams
from pyllama_kvflash.native.grammar import Follower, Grammar, check_grammar, either
from pyllama_kvflash.native.guests import choice_bytes, codes_bytes
from pyllama_kvflash.native.lib import CACHE_TYPES, init, interrupt, interruptible, row_bytes, show_log
from pyllama_kvflash.native.model import Model, Tokens
from pyllama_kvflash.native.notes import Notes, Taken, noted
from pyllama_kvflash.native.order import order_of, order_of_letters
from pyllama_kvflash.native.partial import StateBytes
from pyllama_kvflash.native.quantize import quantize
from pyllama_kvflash.native.rope import SCALINGS, Rope
from pyllama_kvflash.native.sampler import (
    MAX_BIASES,
    MAX_BREAKERS,
    MAX_PROBS,
    RANGES,
    Sampler,
    Sampling,
    check_ends,
    top_probability,
)
from pyllama_kvflash.native.speculator import Speculator
from pyllama_kvflash.native.summary import Keys, Summaries
from pyllama_kvflash.native.unloadable import why_unloadable

__all__ = [
    "ALL",
    "CACHE_TYPES",
    "LAST",
    "MAX_BIASES",
    "MAX_BREAKERS",
    "MAX_PROBS",
    "NONE",
    "RANGES",
    "SCALINGS",
    "TEMPLATE_SECONDS",
    "CallDelta",
    "ChatEngine",
    "Context",
    "Delta",
    "Device",
    "ExactContext",
    "Follower",
    "Grammar",
    "KVBytes",
    "Keys",
    "Layer",
    "Model",
    "Notes",
    "PaneInfo",
    "PaneParams",
    "PoolInfo",
    "PoolParams",
    "Record",
    "Rendered",
    "Reply",
    "Rope",
    "Sampler",
    "Sampling",
    "Speculator",
    "StateBytes",
    "Summaries",
    "Taken",
    "Tokens",
    "add_rpc",
    "check_ends",
    "check_grammar",
    "choice_bytes",
    "codes_bytes",
    "devices",
    "either",
    "gpus",
    "init",
    "interrupt",
    "interruptible",
    "noted",
    "order_of",
    "order_of_letters",
    "pretending",
    "quantize",
    "row_bytes",
    "show_log",
    "split_queries",
    "top_probability",
    "why_unloadable",
]
