"""The native library behind a Python surface: handles, buffers, and statuses turned into exceptions.

Only this package imports the compiled module. It moves bytes and runs graphs; it decides nothing.
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
from pyllama_kvflash.native.device import Device, add_rpc, devices
from pyllama_kvflash.native.exact import ExactContext
from pyllama_kvflash.native.geometry import KVBytes, Layer, PaneInfo, PaneParams, PoolInfo, PoolParams
from pyllama_kvflash.native.json_grammar import json_grammar, pattern_grammar, whole_grammar
from pyllama_kvflash.native.lib import CACHE_TYPES, init, interruptible, row_bytes, show_log
from pyllama_kvflash.native.model import Model, Tokens
from pyllama_kvflash.native.quantize import quantize
from pyllama_kvflash.native.sampler import Grammar, Sampler, Sampling, check_grammar, either
from pyllama_kvflash.native.speculator import Speculator
from pyllama_kvflash.native.summary import Keys, Summaries

__all__ = [
    "ALL",
    "CACHE_TYPES",
    "LAST",
    "NONE",
    "TEMPLATE_SECONDS",
    "CallDelta",
    "ChatEngine",
    "Context",
    "Delta",
    "Device",
    "ExactContext",
    "Grammar",
    "KVBytes",
    "Keys",
    "Layer",
    "Model",
    "PaneInfo",
    "PaneParams",
    "PoolInfo",
    "PoolParams",
    "Record",
    "Rendered",
    "Reply",
    "Sampler",
    "Sampling",
    "Speculator",
    "Summaries",
    "Tokens",
    "add_rpc",
    "check_grammar",
    "devices",
    "either",
    "init",
    "interruptible",
    "json_grammar",
    "pattern_grammar",
    "quantize",
    "row_bytes",
    "show_log",
    "split_queries",
    "whole_grammar",
]
