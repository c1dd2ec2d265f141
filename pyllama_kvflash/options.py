"""Options of a run. Those that llama.cpp also has keep its names."""

import os
import re
from dataclasses import dataclass, replace
from typing import Any, Self

from pyllama_kvflash.errors import UsageError, check_choice, check_range
from pyllama_kvflash.native import CACHE_TYPES, Rope
from pyllama_kvflash.policy import Scorer, n_queries
from pyllama_kvflash.policy.coarse import CHOICES
from pyllama_kvflash.policy.fresh import EXCHANGE
from pyllama_kvflash.policy.sizing import AUTO_CAP, SINKS, PoolShape, n_pinned, pinned_chunks
from pyllama_kvflash.registry import BUILT_IN, policy_names

CHUNKS = (16, 32, 64)
FLASH_ATTN = ("auto", "on", "off")
PREFILL = ("exact", "pool", "auto")
MODES = ("fast", "lossless")
MAX_TOKENS = 1 << 30  # positions are 32-bit numbers
MAX_THREADS = 512  # ggml's limit
MAX_SEQ = 256  # llama.cpp's limit
_SPLIT_LAYERS = {
    "row": "splits each matrix over the GPUs, and was not tried with a pool",
    "tensor": "splits the KV of each layer over the GPUs, and a pool needs a layer's KV on one GPU",
}
"""Split modes of llama.cpp that are refused, and why."""
_NOT_QUANTISED = ("f32", "f16", "bf16")  # cache types of V that llama.cpp takes without flash attention
_CHOOSING = ("auto", "fresh")
"""Policies with which each layer may choose for itself. Loading replaces "auto" by a policy that the model supports."""
SPEC_KINDS = ("draft", "dflash", "eagle3", "mtp", "ngram")
MAX_DRAFT, USUAL_DRAFT = 64, 8
LOOKAHEAD = 64
"""Most tokens that lossless decoding drafts before a check."""
RECURRENT_LOOKAHEAD = 8
"""The same for models with a recurrent state: the exact pass keeps a copy of the state for each of these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Options of speculative decoding: how tokens are guessed, and when drafting pays. Names are llama.cpp's if possible."""

    kind: str
    """The source of guesses.

    "draft": a smaller model with the same tokens.
    "dflash": DFlash, DFlash2 or DSpark.
    "eagle3": EAGLE-3.
    "mtp": the model's own heads, or those in a file.
    "ngram": if the last tokens occurred earlier in the text, the tokens that followed them there.
    """
    model: str | None = None
    """File of the draft model. "draft", "dflash" and "eagle3" need one; "mtp" may have one; "ngram" takes none."""
    n_max: int = 0
    """Most tokens of a draft, 1 to 64; 0: as many as pay, 1 to 8, judged by the measured times and acceptance.

    A draft of n tokens is checked in one batch of n + 1.
    """
    p_min: float = 0.0
    """A guess that the draft model finds less likely than this (0 to 1) ends the draft."""
    window: int = 2048
    """How many of the last positions the draft model remembers."""
    gate: float = 1.0
    """Drafting continues while a drafted step is worth at least this many plain steps; 0: always draft."""

    def __post_init__(self) -> None:
        """Check every value. Raises UsageError."""
        check_choice(self.kind, SPEC_KINDS, "spec.kind")
        if self.model is None and self.kind in ("draft", "dflash", "eagle3"):
            msg = f"`spec.kind` is {self.kind!r}, which needs a drafter: give its file with `spec.model`"
            raise UsageError(msg)
        if self.model is not None and self.kind == "ngram":
            msg = "`spec.kind` is 'ngram', which takes no drafter: leave `spec.model` out, or give another kind"
            raise UsageError(msg)
        check_range(self.n_max, 0, MAX_DRAFT, "spec.n_max", "0 takes as many as pay, up to 8")
        check_range(self.p_min, 0, 1, "spec.p_min", "0 takes every token")
        check_range(self.window, 256, 1 << 20, "spec.window", "2,048 is usual")
        check_range(self.gate, 0, 100, "spec.gate", "1 is usual, 0 drafts always")

    @property
    def most(self) -> int:
        """The most tokens of a draft."""
        return self.n_max or USUAL_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run. KVFlash.from_file() takes them by name, and all have defaults.

    Sizes are in tokens unless a comment says otherwise. The device holds a pool of KV; chunks outside it are records in
    host memory, and the policy decides which chunks come back.
    """

    # the context and the pool
    n_ctx: int = 0  # positions of a sequence; 0: as many as the model was trained for
    pool: int | str = (
        "auto"  # tokens of KV on the device; "off": the full cache; "auto": off if the full cache fits and a pool gains little
    )
    auto_cap: int | None = None  # largest "auto" pool; if set, there is always a pool; None: 16,384 (CPU: 4,096)
    chunk: int = 64  # for measurements: tokens that move together: 16, 32 or 64
    tail: int = 4  # for measurements: chunks at the end that never leave the device
    pins: tuple[tuple[int, int], ...] = ()  # ranges of positions [start, end) that never leave the device
    n_parallel: int = 1  # sequences of n_ctx positions each, which share the pool; if several, policy must be a name

    # prompts that the pool cannot hold, and answers
    prefill: str = "exact"  # "exact": tokens see all tokens before them; "pool": they see only the pool; "auto": exact if memory allows
    opening: int = -1  # first tokens of an answer to decode losslessly; -1: 32, or 0 with fresh and codes of 4 bits
    mode: str = "fast"  # "fast": an answer's tokens see the pool; "lossless": they are drafted with the pool, and checked against the whole text
    meter: float = 0.0  # largest share of the time spent comparing tokens with the full cache; 0: none are compared
    min_agreement: float = 0.0  # if a smaller share of compared tokens is equal, decoding becomes lossless; 0: never
    panes: int = 0  # layers whose KV an exact pass keeps on each device; 0: 2, or more if an automatic pool leaves room or there are RPC servers

    # positions outside the pool
    coarse: str = "auto"  # bits of codes, by which tokens see the rest of the text: "4", "2" or "4,2" (keys, values); "off": none; "auto": by memory
    codes_in_panes: bool | None = (
        None  # for measurements: whether codes are in the panes' GPU memory, and on the host during exact passes; None: if there is no room for both
    )

    # which chunks are resident
    policy: str | Scorer = (
        "auto"  # a name (see registry.policy_names()), or a Scorer; "auto": fresh where there are codes, else qk
    )
    tau: int = 0  # for measurements: fewest tokens between two scorings; 0: 2, or 64 with spec
    swaps: int = 0  # for measurements: most chunks that a scoring brings back (0: 4); with fresh, guests that a layer exchanges (0: 32)
    share: float = 0.03  # for measurements: largest share of the decode time that scoring may take; 0: no limit
    again: float = (
        0.03  # for measurements: a token that missed more than this share of its attention is decoded again; 0: never
    )
    replay: int = (
        64  # for measurements: tokens at the end of a prompt that run again after the pool was chosen for them; 0: none
    )
    scorer_model: str | None = None  # small model of "drafter" and "crosstok"; None: one is found (scorers.reader)

    # speculative decoding
    spec: Spec | None = None  # None: no speculative decoding

    # contexts longer than the trained one
    rope: Rope | None = None  # scaling of RoPE; None: the model's own

    # computation
    n_batch: int = 0  # most prompt tokens of a decode call; 0: what the pool allows, up to 2,048
    n_ubatch: int = 512  # most tokens of one compute graph
    n_threads: int | None = None  # None: all cores
    type_k: str = "f16"  # cache type of K
    type_v: str = "f16"  # cache type of V
    flash_attn: str = "auto"  # "auto", "on" or "off"

    # devices
    n_gpu_layers: int = -1  # layers on the GPUs; -1: all
    tensor_split: tuple[float, ...] = ()  # each GPU's share of the layers; (): by free memory
    split_mode: str = "layer"  # "layer": each GPU has some layers; "none": one GPU has all
    main_gpu: int = 0  # with split_mode "none": the GPU, from 0; -1: the CPU
    n_cpu_moe: int | str = (
        0  # first layers whose experts (or feed-forward weights) stay on the host; "auto": as few as possible
    )
    kv_offload: bool = True  # False: the full cache is in RAM, and the CPU computes attention (llama.cpp's --no-kv-offload); needs pool "off"
    rpc: tuple[str, ...] = ()  # RPC servers (host:port) whose devices are used, too

    # host memory and disk
    host_limit: int | None = None  # most bytes of chunk records in host memory; None: no limit
    disk: str | None = None  # a folder for the records beyond host_limit; None: no records are on disk
    snapshots: bool = False  # whether to keep what save() needs: checkpoints, and a pool even if it covers the context
    checkpoint_limit: int = 1 << 30  # most bytes of checkpoints (see rollback()) of all sequences; 0: none

    def __post_init__(self) -> None:
        """Check every value. Raises UsageError."""
        self._check_sizes()
        self._check_devices()
        self._check_policy()
        self._check_cache()

    def _check_sizes(self) -> None:
        check_range(self.n_ctx, 0, MAX_TOKENS, "n_ctx", "0 takes the model's own context")
        check_range(self.n_batch, 0, MAX_TOKENS, "n_batch", "0 takes as many as the pool allows")
        check_range(self.n_ubatch, 1, MAX_TOKENS, "n_ubatch", "512 is usual")
        most = min(MAX_SEQ, self.n_ubatch, self.n_batch or MAX_SEQ)
        check_range(self.n_parallel, 1, most, "n_parallel", "a token of each must fit a batch (`n_batch`, `n_ubatch`)")
        check_range(self.tail, 1, MAX_TOKENS, "tail", "the chunk being written always stays")

    def _check_devices(self) -> None:
        check_range(self.n_gpu_layers, -1, MAX_TOKENS, "n_gpu_layers", "-1 offloads all")
        if self.n_threads is not None:
            check_range(self.n_threads, 1, MAX_THREADS, "n_threads", "leave it out for all cores")
        if not all(0 <= x <= MAX_TOKENS for x in self.tensor_split) or (
            self.tensor_split and not any(self.tensor_split)
        ):
            msg = f"`tensor_split` is {self.tensor_split}: give a share for each GPU, such as 3,1"
            raise UsageError(msg)
        if why := _SPLIT_LAYERS.get(self.split_mode):
            msg = f"`split_mode` is {self.split_mode!r}, which {why}: give layer, or none to use one GPU"
            raise UsageError(msg)
        check_choice(self.split_mode, ("layer", "none"), "split_mode")
        check_range(self.main_gpu, -1, MAX_TOKENS, "main_gpu", "0 is the first GPU, -1 the CPU")
        if self.main_gpu and self.split_mode != "none":
            msg = f"`main_gpu` is {self.main_gpu}, and `split_mode` {self.split_mode} uses all GPUs: give `split_mode` none, too"
            raise UsageError(msg)
        if self.tensor_split and self.split_mode == "none":
            msg = "`split_mode` none has all layers on one GPU, so `tensor_split` has no effect: leave one of them out"
            raise UsageError(msg)
        if isinstance(self.n_cpu_moe, str):
            check_choice(self.n_cpu_moe, ("auto",), "n_cpu_moe")
        else:
            check_range(self.n_cpu_moe, 0, MAX_TOKENS, "n_cpu_moe", '"auto" chooses, 0 is none')
        for server in self.rpc:
            host, _, port = server.rpartition(":")
            if not re.fullmatch(r"[^\s:/]+", host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                msg = f"`rpc` has {server!r}: give servers as host:port, several with commas"
                raise UsageError(msg)
        if self.host_limit is not None:
            usual = "64GiB, say, or 1K with `disk` for all on disk; leave it out for no limit"
            check_range(self.host_limit, 1, 1 << 60, "host_limit", usual)
        check_range(self.checkpoint_limit, 0, 1 << 60, "checkpoint_limit", "1 GiB is usual, 0 keeps none")
        if self.auto_cap is not None:
            check_range(self.auto_cap, 1, MAX_TOKENS, "auto_cap", f"leave it out for {AUTO_CAP:,}")

    def _check_policy(self) -> None:
        check_choice(self.chunk, CHUNKS, "chunk")
        if isinstance(self.policy, str):
            if self.policy not in BUILT_IN:  # it takes long to find those that other packages register
                check_choice(self.policy, policy_names(), "policy")
        elif isinstance(self.policy, type) or not isinstance(self.policy, Scorer):
            msg = f"`policy` is a {type(self.policy).__name__}: give a name, or a Scorer with name, summary, query and score()"
            raise UsageError(msg)
        if self.n_parallel > 1 and not isinstance(self.policy, str):
            msg = f"`policy` is one scorer, for `n_parallel` = {self.n_parallel} sequences: give the name of a registered one"
            raise UsageError(msg)
        check_range(self.tau, 0, MAX_TOKENS, "tau", "0 takes 2, or 64 with spec")
        check_range(self.swaps, 0, MAX_TOKENS, "swaps", "0 takes 4, or 32 with policy fresh")
        check_range(self.share, 0, 1, "share", "0.03 is usual, 0 sets no limit")
        check_range(self.again, 0, 1, "again", "0.03 is usual, 0 decodes no token again")
        check_range(self.replay, 0, MAX_TOKENS, "replay", "0 runs nothing again")
        self._check_coarse()

    def _check_coarse(self) -> None:
        check_choice(self.coarse, CHOICES, "coarse")
        if self.policy == "fresh" and self.coarse == "off" and self.pool != "off":
            msg = "`policy` is fresh, whose layers choose by codes, and `coarse` is off: give policy qk, or leave `coarse` out"
            raise UsageError(msg)
        if self.codes_in_panes and self.reads_in_answers:
            msg = "`codes_in_panes` is True, and answers need exact passes, too (`mode`, `opening`, `meter`, `min_agreement`): leave it out"
            raise UsageError(msg)

    def _check_cache(self) -> None:
        check_choice(self.type_k, tuple(CACHE_TYPES), "type_k")
        check_choice(self.type_v, tuple(CACHE_TYPES), "type_v")
        check_choice(self.flash_attn, FLASH_ATTN, "flash_attn")
        if self.flash_attn == "off" and self.type_v not in _NOT_QUANTISED:
            msg = f"`type_v` is {self.type_v}, which needs flash attention, and `flash_attn` is off: leave one of the two out"
            raise UsageError(msg)
        if isinstance(self.pool, str):
            check_choice(self.pool, ("auto", "off"), "pool")
        else:
            check_range(self.pool, 1, MAX_TOKENS, "pool", '"auto" chooses, "off" is the full cache')
        if not self.kv_offload and self.pool != "off":
            msg = f"`kv_offload` is False, which is for the full cache, and `pool` is {self.pool!r}: give `pool` off, or leave it out"
            raise UsageError(msg)
        for start, end in self.pins:
            check_span(start, end, MAX_TOKENS)
        check_choice(self.prefill, PREFILL, "prefill")
        check_range(self.opening, -1, MAX_TOKENS, "opening", "-1 takes 32, or 0 with fresh and codes of 4 bits")
        check_range(self.meter, 0, 1, "meter", "0.05 is usual, 0 compares nothing")
        check_range(self.min_agreement, 0, 1, "min_agreement", "0.9, say; 0 sets no bound")
        check_choice(self.mode, MODES, "mode")
        wanted = {
            "`mode` 'lossless'": self.lossless,
            "`meter`": self.meter,
            "`min_agreement`": self.min_agreement,
        }
        wants = next((name for name, value in wanted.items() if value), None)
        if wants is not None and self.prefill != "exact":
            msg = f"{wants} needs exact passes, and `prefill` is {self.prefill!r}: leave one of the two out"
            raise UsageError(msg)
        check_range(self.panes, 0, MAX_TOKENS, "panes", "0 decides, 1 takes the least memory")

    @property
    def where(self) -> dict[str, Any]:
        """The devices of a model, and the scaling of its RoPE, as arguments of Model.load()."""
        names = ("n_gpu_layers", "tensor_split", "split_mode", "main_gpu", "rope")
        return {name: getattr(self, name) for name in names}

    @property
    def on_cpu(self) -> bool:
        """Whether all layers are on the CPU, even on a machine with GPUs."""
        return self.n_gpu_layers == 0 or self.main_gpu < 0

    @property
    def lossless(self) -> bool:
        """Whether all of an answer is decoded losslessly."""
        return self.mode == "lossless"

    @property
    def reads_in_answers(self) -> bool:
        """Whether the options ask for exact passes while an answer is decoded."""
        return self.lossless or self.opening > 0 or self.meter_share > 0

    def n_asking(self, query: str) -> int:
        """Return for how many of a prompt's last tokens a scorer needs the queries. query: see Scorer."""
        return n_queries(query) or max(1, self.replay)

    def n_lookahead(self, *, recurrent: bool) -> int:
        """Return the most tokens that lossless decoding drafts at once; 0: none. recurrent: whether the model has a recurrent state."""
        n = RECURRENT_LOOKAHEAD if recurrent else LOOKAHEAD
        wanted = self.lossless or self.min_agreement or (self.n_opening and not recurrent)
        return min(n, self.n_ubatch - 1) if wanted else 0

    @property
    def n_opening(self) -> int:
        """How many of an answer's first tokens are decoded losslessly: `opening` or, if that is -1, 32 or 0.

        The default is 0 for "fresh" with codes of 4 bits, which reaches the full cache's RULER scores without an opening
        (docs/results/coarse.md), and for codes in the panes' memory, which each exact pass would have to move.
        """
        usual = 0 if self.codes_in_panes or (self.policy == "fresh" and self.coarse == "4") else 32
        return self.opening if self.opening >= 0 else usual

    @property
    def n_swaps(self) -> int:
        """Most chunks that one scoring brings back while decoding; with fresh, most guests that a layer exchanges per batch."""
        return self.swaps or (EXCHANGE if self.policy in _CHOOSING else 4)

    @property
    def meter_share(self) -> float:
        """Largest share of the time spent comparing tokens with the full cache: `meter`, or 0.05 if only min_agreement is set."""
        return self.meter or (0.05 if self.min_agreement else 0.0)

    def drafter_batch(self, n_batch: int) -> int:
        """Return the most tokens that a drafter reads at once, exact passes included. n_batch: the pool's batch size."""
        return n_batch if self.prefill == "pool" else max(n_batch, min(self.n_ubatch, self.n_ctx))

    @property
    def interval(self) -> int:
        """Tokens from one scoring to the next: `tau`. The default is 2, or 64 with spec, since a draft ends where the pool may change."""
        return self.tau or (64 if self.spec else 2)

    @property
    def shape(self) -> PoolShape:
        """The chunks that every pool must have room for."""
        pinned = n_pinned(pinned_chunks(self.pins, self.chunk), SINKS)
        return PoolShape(self.chunk, SINKS, self.tail, self.n_parallel * pinned, self.n_parallel)

    @property
    def n_draft(self) -> int:
        """The most tokens of a draft; 0 without speculative decoding."""
        return self.spec.most if self.spec else 0

    def resolved(self, n_ctx_train: int) -> Self:
        """Return a copy with the model's context and this machine's threads filled in. Raises UsageError for a pin beyond the context.

        n_batch becomes at most the context; 0 stays 0: the pool then decides.
        """
        n_ctx = self.n_ctx or n_ctx_train
        for start, end in self.pins:
            check_span(start, end, n_ctx)
        return replace(
            self,
            n_ctx=n_ctx,
            n_batch=min(self.n_batch, n_ctx),
            n_threads=self.n_threads or cores(),
        )


def check_span(start: int, end: int, n_ctx: int) -> None:
    """Raise UsageError unless [start, end) is a range of positions in a context."""
    if not 0 <= start < end <= n_ctx:
        msg = f"pin {start}:{end} is not a range of positions: give 0 <= start < end <= {n_ctx}"
        raise UsageError(msg)


def cores() -> int:
    """Return how many cores this process may use; all cores if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
