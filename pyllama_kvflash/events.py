"""Events that a run yields, as frozen dataclasses. `as_dict` gives the form that `--jsonl` writes."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of one generation, and the memory in use at its end. Times are in seconds.

    pages_out and pages_in are counted from the last clear() of the sequence.
    """

    n_prompt: int  # tokens of the prompt that were read
    n_generated: int  # tokens produced
    prefill_s: float
    decode_s: float
    n_ctx: int  # logical positions
    n_pool: int | None  # cells of the pool; None: full cache
    kv_device_bytes: int  # full-attention KV on the device: the pool, or the whole context
    kv_full_bytes: int  # the same for a full cache of n_ctx positions, rounded up to a multiple of 256
    pane_bytes: int  # device memory of the panes, which hold the KV of a few layers in an exact pass; 0: no panes
    compute_bytes: int  # buffers of the computation, on devices and host
    other_device_bytes: int  # sliding-window KV and recurrent state
    host_bytes: int  # host memory taken for records of sealed chunks
    chunks: int  # chunks of the sequence
    resident: int  # chunks of the sequence that are in the pool
    stored: int  # chunks written to the host store
    pages_out: int  # chunks dropped from the pool
    pages_in: int  # chunks brought back
    reselects: int  # times that all chunks were scored
    reselect_s: float  # time spent scoring and moving chunks, including time that overlaps decoding
    summary_bytes: int  # host memory of the key summaries that the scorer reads
    seed: int | None  # the sampler's seed; None: greedy
    disk_bytes: int = 0  # records on disk, beyond those in host memory
    drafted: int = 0  # tokens guessed
    accepted: int = 0  # guesses that were right
    draft_steps: int = 0  # batches that checked a draft
    plain_steps: int = 0  # steps without a draft; 0 without speculative decoding
    gated_steps: int = 0  # plain steps taken because drafting did not pay
    checked: int = 0  # tokens that were compared with the full cache
    agreed: int = 0  # compared tokens for which the pool and the full cache have the same likeliest token
    kld_sum: float = (
        0.0  # Kullback-Leibler divergence of the pool from the full cache, summed over compared tokens, in nats
    )
    check_s: float = 0.0  # time spent comparing tokens
    coarse_bytes: int = 0  # codes of all sequences and, on a GPU, the buffers for attending to them
    coarse_tokens: int = 0  # positions that have codes
    guest_blocks: int = 0  # blocks of the pool that hold guests, which each layer chooses for itself
    guests_fetched: int = 0  # guests fetched from records so far, by all sequences of the pool
    gpu_bytes: int = 0  # GPU memory planned for a full context, including the driver's; 0: there is no GPU
    checkpoint_bytes: int = 0  # host memory of the sequence's checkpoints (recurrent states, sliding windows)
    peak_bytes: int = 0  # peak RAM of the process, including mapped files

    @property
    def agreement(self) -> float | None:
        """Share of the compared tokens for which the pool and the full cache have the same likeliest token; None if no tokens were compared."""
        return self.agreed / self.checked if self.checked else None

    @property
    def kld(self) -> float | None:
        """Mean Kullback-Leibler divergence of the pool from the full cache, in nats; None if no tokens were compared."""
        return self.kld_sum / self.checked if self.checked else None

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right, 0 to 1; 0 without guesses."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_committed(self) -> float:
        """Tokens per drafted step, including the token that the model itself adds; 0 without drafted steps."""
        return 1 + self.accepted / self.draft_steps if self.draft_steps else 0.0

    @property
    def device_kv_bytes(self) -> int:
        """Device bytes of all full-attention KV: the pool, the codes and the panes, or the full cache."""
        return self.kv_device_bytes + self.coarse_bytes + self.pane_bytes

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 if none were read."""
        return self.n_prompt / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second; 0 if there are fewer than two. The first token comes from the prefill and is not counted."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s and self.n_generated > 1 else 0.0


@dataclass(slots=True)
class DraftStats:
    """Counts of speculative decoding for one answer. Stats explains the fields."""

    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    plain_steps: int = 0
    gated_steps: int = 0


@dataclass(slots=True)
class MeterStats:
    """Counts of comparisons with the full cache for one answer. Stats explains the fields."""

    checked: int = 0
    agreed: int = 0
    kld_sum: float = 0.0
    check_s: float = 0.0


def sum_stats(parts: Iterable[DraftStats]) -> DraftStats:
    """Return the sum of several DraftStats, field by field."""
    return DraftStats(*(sum(values) for values in zip(*map(astuple, parts), strict=True)))


@dataclass(frozen=True, slots=True)
class Prefill:
    """A batch of the prompt was decoded. So far, `done` of `total` tokens were decoded, in `seconds`.

    resident_bytes: device bytes of full-attention KV and of codes. host_bytes: host bytes taken for records.
    exact: whether the batch attended to the whole text before it. The batch's full chunks then stay out of the pool until the prompt ends.
    """

    done: int
    total: int
    seconds: float
    resident_bytes: int
    host_bytes: int
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Paged:
    """Chunks moved before position `pos` was decoded: `drops` left the pool, `page_ins` came back."""

    pos: int
    drops: tuple[int, ...]
    page_ins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reselect:
    """After `pos` positions were written, all chunks were scored, and the best were made resident.

    reason: "question" (at a prompt's end, before its tail runs again) or "decode".
    scores: one for each chunk, higher is hotter; None: the chunk does not compete (a sink, in the tail, pinned or not full).
    drops, page_ins: chunks that left the pool, and chunks that came back.
    score_s, apply_s: seconds to score, and to move the chunks.
    missed: share of the last token's attention that belongs to the chunks that came back; 0 if the scorer reports no shares.
    """

    pos: int
    reason: str
    scores: tuple[float | None, ...]
    drops: tuple[int, ...]
    page_ins: tuple[int, ...]
    score_s: float
    apply_s: float
    missed: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """In `seconds`, the last `n` tokens before position `pos` were compared with the full cache.

    agreed: tokens for which the pool and the full cache have the same likeliest token.
    kld: mean Kullback-Leibler divergence of the pool's next-token probabilities from the full cache's, in nats.
    """

    pos: int
    n: int
    agreed: int
    kld: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that the user should know; the run continues."""

    text: str


@dataclass(frozen=True, slots=True)
class Probs:
    """How likely a token was. logprob: natural logarithm of its probability. top: (token, logprob), the most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token was produced.

    text: the text that can now be shown; "" while a UTF-8 sequence or a possible stop string is incomplete.
    probs: how likely the token was, if Sampling.n_probs asks for that.
    """

    id: int
    text: str
    probs: Probs | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a run.

    reason: "eos", "stop" (a stop string), "length" (max_tokens), "context" (the context is full) or "interrupted".
    text: the text that was held back until now. If the answer can continue, an incomplete character at its end is left out.
    """

    reason: str
    text: str
    stats: Stats


Event = Prefill | Paged | Reselect | Checked | Warn | Token | Done


def as_dict(event: Event) -> dict[str, Any]:
    """Return an event as plain JSON values, with its class name in lower case under "event"."""
    res: dict[str, Any] = {"event": type(event).__name__.lower(), **asdict(event)}
    if isinstance(event, Token) and event.probs is None:
        del res["probs"]
    if isinstance(event, Done):
        res["stats"] = stats_dict(event.stats)
    return res


def stats_dict(stats: Stats) -> dict[str, Any]:
    """Return Stats as plain JSON values, including the rates."""
    names = ("prefill_rate", "decode_rate", "acceptance", "mean_committed", "agreement", "kld")
    return {**asdict(stats), **{name: getattr(stats, name) for name in names}}
