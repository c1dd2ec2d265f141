"""How a model is run. Names are llama.cpp's where it has one."""

import os
import re
from dataclasses import dataclass, replace
from typing import Self

from pyllama_kvflash.drafting import Spec
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import CACHE_TYPES
from pyllama_kvflash.policy import AGGREGATES, Scorer, n_queries
from pyllama_kvflash.policy.sizing import AUTO_CAP
from pyllama_kvflash.registry import policy_names

CHUNKS = (16, 32, 64)
SUMMARY = re.compile(r"(?:centroid|runs):(?:1|2|4|8|16)|mean|minmax|exact")
FLASH_ATTN = ("auto", "on", "off")
MAX_TOKENS = 1 << 30  # positions are 32-bit numbers
MAX_THREADS = 512  # ggml's limit
MAX_SEQ = 256  # llama.cpp's


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a KVFlash. Sizes are tokens.

    n_ctx: logical context, 0: the model's. pool: tokens of KV kept on the device, "auto", or "off" for the full cache.
    chunk: tokens that are paged together (16, 32, 64). policy: which chunks stay and come back, a name ("qk", "qk-cos",
    "qk-zmax", "lru", "drafter", "crosstok", or one that a package registered) or a Scorer. tau: tokens from one scoring to
    the next, at least, 0: see `interval`; swaps: chunks that come back after one, at most, while decoding; share: of the decode time that scoring may take, 0: no limit. again: the share of a
    token's attention above which chunks that come in after it have it decoded again, 0: never. replay: tokens at the end of a prompt
    that are run again after the pool was chosen for them, 0: none. prefill_reselect: choose between the batches of a
    prompt, too. qk_summary (None: its own), qk_query, qk_rerank: of policies "qk" and "qk-zmax", see policy.Qk;
    qk_aggregate: of "qk-zmax", see policy.QkZmax. draft_model: of policy
    "drafter" and "crosstok", None: looked for, see drafter.find_drafter; draft_pool: its own pool. n_parallel: sequences
    of up to n_ctx tokens each, which share the pool; policy is a name then. n_batch: prompt tokens per decode call, 0: as many as the pool allows, at most 2048; n_ubatch: per graph. n_threads: None: all cores.
    spec: speculative decoding, None: off, see drafting.Spec.
    snapshots: keep a pool even where it covers the context, and checkpoints of what no chunk holds: for save().
    n_gpu_layers: -1: all. tensor_split: shares of the layers for each GPU, (): by their free memory. n_cpu_moe: layers,
    from the first, whose experts stay in host memory, "auto": as few as leave room for the pool. rpc: servers
    (host:port) whose devices are used, too. host_limit: bytes of host memory for the records of chunks, None: what there
    is; disk: a folder for those beyond that, None: none. auto_cap: tokens that pool "auto" takes at most. type_k, type_v: cache types. flash_attn: "auto", "on", "off". sinks, tail: chunks at the
    beginning and at the end that always stay. pins: position ranges [start, end) that always stay.
    """

    n_ctx: int = 0
    pool: int | str = "auto"
    chunk: int = 64
    policy: str | Scorer = "qk"
    tau: int = 0
    swaps: int = 4
    share: float = 0.03
    again: float = 0.03
    replay: int = 64
    prefill_reselect: bool = True
    qk_summary: str | None = None
    qk_aggregate: str = "zmax"
    qk_query: str = "last:4"
    qk_rerank: int = 8
    draft_model: str | None = None
    draft_pool: int = 2048
    spec: Spec | None = None
    snapshots: bool = False
    n_parallel: int = 1
    n_batch: int = 0
    n_ubatch: int = 512
    n_threads: int | None = None
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] = ()
    n_cpu_moe: int | str = 0
    rpc: tuple[str, ...] = ()
    host_limit: int | None = None
    disk: str | None = None
    auto_cap: int = AUTO_CAP
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    sinks: int = 1
    tail: int = 4
    pins: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check every value. Raises UsageError."""
        self._check_sizes()
        self._check_devices()
        self._check_policy()
        self._check_cache()

    def _check_sizes(self) -> None:
        _within(self.n_ctx, 0, MAX_TOKENS, "n_ctx (-c/--ctx-size)", "0 takes the model's own context")
        _within(self.n_batch, 0, MAX_TOKENS, "n_batch (-b/--batch-size)", "0 takes as many as the pool allows")
        _within(self.n_ubatch, 1, MAX_TOKENS, "n_ubatch (-ub/--ubatch-size)", "512 is usual")
        most = min(MAX_SEQ, self.n_ubatch, self.n_batch or MAX_SEQ)
        _within(self.n_parallel, 1, most, "n_parallel", "a token of each must fit a batch (n_batch, n_ubatch)")
        if self.spec is not None and self.n_parallel > 1:
            msg = f"spec drafts for one sequence, and n_parallel is {self.n_parallel}: leave one of the two out"
            raise UsageError(msg)
        _within(self.sinks, 0, MAX_TOKENS, "sinks", "1 is usual")
        _within(self.tail, 1, MAX_TOKENS, "tail", "the chunk being written always stays")

    def _check_devices(self) -> None:
        _within(self.n_gpu_layers, -1, MAX_TOKENS, "n_gpu_layers (-ngl/--n-gpu-layers)", "-1 offloads all")
        if self.n_threads is not None:
            _within(self.n_threads, 1, MAX_THREADS, "n_threads (-t/--threads)", "leave it out for all cores")
        if not all(0 <= x <= MAX_TOKENS for x in self.tensor_split) or (
            self.tensor_split and not any(self.tensor_split)
        ):
            msg = f"tensor_split (-ts/--tensor-split) is {self.tensor_split}: give a share for each GPU, such as 3,1"
            raise UsageError(msg)
        if isinstance(self.n_cpu_moe, str):
            _one_of(self.n_cpu_moe, ("auto",), "n_cpu_moe (-ncmoe/--n-cpu-moe)")
        else:
            _within(self.n_cpu_moe, 0, MAX_TOKENS, "n_cpu_moe (-ncmoe/--n-cpu-moe)", '"auto" chooses, 0 is none')
        for server in self.rpc:
            host, _, port = server.rpartition(":")
            if not re.fullmatch(r"[^\s:/]+", host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                msg = f"rpc (--rpc) has {server!r}: give servers as host:port, several with commas"
                raise UsageError(msg)
        if self.host_limit is not None:
            _within(self.host_limit, 1, 1 << 60, "host_limit (--kvflash-host)", "64GiB, say; leave it out for no limit")
        _within(self.auto_cap, 1, MAX_TOKENS, "auto_cap (--kvflash-auto-cap)", f"{AUTO_CAP} is usual")

    def _check_policy(self) -> None:
        _one_of(self.chunk, CHUNKS, "chunk (--kvflash-chunk)")
        if isinstance(self.policy, str):
            _one_of(self.policy, policy_names(), "policy (--kvflash-policy)")
        elif isinstance(self.policy, type) or not isinstance(self.policy, Scorer):
            msg = f"policy is a {type(self.policy).__name__}: give a name, or a Scorer with name, summary, query and score()"
            raise UsageError(msg)
        if self.n_parallel > 1 and not isinstance(self.policy, str):
            msg = (
                f"policy is one scorer, for n_parallel = {self.n_parallel} sequences: give the name of a registered one"
            )
            raise UsageError(msg)
        _within(self.tau, 0, MAX_TOKENS, "tau (--kvflash-tau)", "0 takes 2, or 64 with spec")
        _within(self.swaps, 1, MAX_TOKENS, "swaps (--kvflash-swaps)", "4 is usual")
        _within(self.share, 0, 1, "share (--kvflash-share)", "0.03 is usual, 0 sets no limit")
        _within(self.again, 0, 1, "again (--kvflash-again)", "0.03 is usual, 0 decodes no token again")
        _within(self.replay, 0, MAX_TOKENS, "replay (--kvflash-replay)", "0 runs nothing again")
        self._check_summary()
        _one_of(self.qk_aggregate, AGGREGATES, "qk_aggregate (--qk-aggregate)")
        try:
            n_queries(self.qk_query)
        except UsageError as err:
            msg = f"qk_query (--qk-query): {err}"
            raise UsageError(msg) from None
        _within(self.qk_rerank, 0, MAX_TOKENS, "qk_rerank (--qk-rerank)", "8 is usual, 0 looks at summaries alone")
        _within(self.draft_pool, 1, MAX_TOKENS, "draft_pool (--draft-pool)", "2048 is usual")

    def _check_summary(self) -> None:
        if self.qk_summary is not None and not SUMMARY.fullmatch(self.qk_summary):
            msg = (
                f"qk_summary (--qk-summary) is {self.qk_summary!r}: give runs:1, :2, :4, :8 or :16, centroid:1 to :16, mean,"
                " minmax or exact"
            )
            raise UsageError(msg)
        if self.policy == "qk" and self.qk_summary == "minmax":
            msg = "qk_summary (--qk-summary) is 'minmax', which has no mass: give centroid:4, or policy (--kvflash-policy) qk-zmax"
            raise UsageError(msg)

    def _check_cache(self) -> None:
        _one_of(self.type_k, tuple(CACHE_TYPES), "type_k (-ctk/--cache-type-k)")
        _one_of(self.type_v, tuple(CACHE_TYPES), "type_v (-ctv/--cache-type-v)")
        _one_of(self.flash_attn, FLASH_ATTN, "flash_attn (-fa/--flash-attn)")
        if isinstance(self.pool, str):
            _one_of(self.pool, ("auto", "off"), "pool (--kvflash)")
        else:
            _within(self.pool, 1, MAX_TOKENS, "pool (--kvflash)", '"auto" chooses, "off" is the full cache')
        for start, end in self.pins:
            check_span(start, end, MAX_TOKENS)

    @property
    def interval(self) -> int:
        """Tokens from one scoring to the next: tau, or 2; with spec 64, since a batch of guesses ends where the pool may change."""
        return self.tau or (64 if self.spec else 2)

    @property
    def n_draft(self) -> int:
        """Tokens that are guessed at most, 0 without speculative decoding."""
        return self.spec.n_max if self.spec else 0

    def resolved(self, n_ctx_train: int) -> Self:
        """With the model's context, this machine's threads, and no batch larger than the context (0 stays: the pool's)."""
        n_ctx = self.n_ctx or n_ctx_train
        for start, end in self.pins:
            check_span(start, end, n_ctx)
        return replace(
            self,
            n_ctx=n_ctx,
            n_batch=min(self.n_batch, n_ctx),
            n_threads=self.n_threads or _cores(),
        )


def check_span(start: int, end: int, n_ctx: int) -> None:
    """Raise UsageError unless [start, end) is a range of positions in a context."""
    if not 0 <= start < end <= n_ctx:
        msg = f"pin {start}:{end} is no range of positions: give 0 <= start < end <= {n_ctx}"
        raise UsageError(msg)


def _within(value: float, low: float, high: float, name: str, hint: str) -> None:
    if not low <= value <= high:
        msg = f"{name} is {value}, and must be from {low} to {high}: {hint}"
        raise UsageError(msg)


def _one_of(value: object, allowed: tuple[object, ...], name: str) -> None:
    if value not in allowed:
        msg = f"{name} is {value!r}, and must be one of {', '.join(map(str, allowed))}"
        raise UsageError(msg)


def _cores() -> int:
    """Cores that this process may use; where the system does not say, all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
