"""What a run yields. Frozen dataclasses; `as_dict` gives the form that `--jsonl` writes."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of one generation, and the memory it stood in at its end."""

    n_prompt: int  # tokens of the prompt
    n_generated: int  # tokens produced
    prefill_s: float
    decode_s: float
    n_ctx: int  # logical positions
    n_pool: int | None  # cells of the pool, None: full cache
    kv_device_bytes: int  # full-attention KV on the device: the pool, or the whole context
    kv_full_bytes: int  # what the full cache of n_ctx positions (rounded up to 256) takes
    other_device_bytes: int  # sliding-window KV and recurrent state
    host_bytes: int  # records of sealed chunks in host memory
    chunks: int  # chunks of the sequence
    resident: int  # of them, in the pool
    stored: int  # chunks written to the host store
    pages_out: int  # chunks dropped from the pool
    pages_in: int  # chunks brought back
    reselects: int  # times that all chunks were scored
    reselect_s: float  # spent on that, beside decode or not
    summary_bytes: int  # host memory of the summaries of keys that the scorer works on
    seed: int | None  # of the sampler, None: greedy
    disk_bytes: int = 0  # records on disk, beyond those in host memory
    drafted: int = 0  # tokens guessed
    accepted: int = 0  # of them, right
    draft_steps: int = 0  # batches that checked a draft
    plain_steps: int = 0  # steps without one, 0 without speculative decoding
    gated_steps: int = 0  # of these, because drafting did not pay

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_committed(self) -> float:
        """Tokens that a drafted step brought, the one that is always right among them."""
        return 1 + self.accepted / self.draft_steps if self.draft_steps else 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, 0 if there were none."""
        return self.n_prompt / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second; the first comes out of the prefill and is not counted."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s and self.n_generated > 1 else 0.0


@dataclass(slots=True)
class DraftStats:
    """What speculative decoding did for one answer: the last counts of Stats."""

    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    plain_steps: int = 0
    gated_steps: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """A batch of the prompt is in: `done` of `total` tokens."""

    done: int
    total: int
    seconds: float
    resident_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Paged:
    """Chunks moved before position `pos` was decoded."""

    pos: int
    drops: tuple[int, ...]
    page_ins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reselect:
    """All chunks were scored, and the pool was changed to the best of them, with `pos` positions written.

    reason: "prefill" (between two batches), "question" (at the end of the prompt, before its last tokens are run again)
    or "decode". scores: of each chunk, higher is hotter, None: it does not compete (sinks, tail, pins, not full). missed: the share of
    the last token's attention that the chunks have that came in, 0: the scorer does not say.
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
class Warn:
    """Something that the user should know, and that does not end the run."""

    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """A token was produced. text: what can be shown by now, "" while a UTF-8 sequence or a stop string is incomplete."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end. reason: "eos", "stop" (a stop string), "length" (max_tokens), "context" (it is full) or "interrupted"."""

    reason: str
    text: str  # text held back until now, to be shown
    stats: Stats


Event = Prefill | Paged | Reselect | Warn | Token | Done


def as_dict(event: Event) -> dict[str, Any]:
    """An event as plain JSON values, with its lower-case class name under "event"."""
    res: dict[str, Any] = {"event": type(event).__name__.lower(), **asdict(event)}
    if isinstance(event, Done):
        res["stats"] = stats_dict(event.stats)
    return res


def stats_dict(stats: Stats) -> dict[str, Any]:
    """Stats as plain JSON values, with the rates."""
    names = ("prefill_rate", "decode_rate", "acceptance", "mean_committed")
    return {**asdict(stats), **{name: getattr(stats, name) for name in names}}
