"""What the tests of snapshots do to a sequence, in its own process and in another one, which is asked through a pipe."""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash import KVFlash, Reselect, Sampling, Token, View
from pyllama_kvflash.events import Event
from pyllama_kvflash.native import Context, Model
from pyllama_kvflash.policy import Scores
from pyllama_kvflash.snapshot.file import SnapshotFile

Arrays = dict[str, npt.NDArray[Any]]

N_VOCAB = 512  # of the tiny models; the needle model has more
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 70_000).astype(np.int32)
MORE = np.random.default_rng(6).integers(0, N_VOCAB, 4000).astype(np.int32)
GREEDY = Sampling(temperature=0)
SMALL: dict[str, Any] = {
    "n_ctx": 16384,
    "pool": 1024,
    "n_threads": 1,
    "share": 0,
    "tau": 16,
    "prefill": "pool",
    "coarse": "off",  # also where another process goes on
}  # 16 blocks
FRESH: dict[str, Any] = {"policy": "fresh", "coarse": "4"}
"""A policy that cannot do without codes."""


@dataclass(frozen=True)
class Case:
    """A model that reads a prompt of n tokens."""

    name: str
    cache: str
    policy: str
    n: int
    beside: bool = False
    """Whether it scores beside decode, as with a GPU."""

    def __str__(self) -> str:
        return "-".join(map(str, (self.name, self.cache, self.policy, self.n, *(["beside"] if self.beside else []))))

    @property
    def options(self) -> dict[str, Any]:
        """For KVFlash.from_file."""
        return {
            **SMALL,
            "n_ctx": max(SMALL["n_ctx"], self.n + 4096),
            **with_policy(self.policy),
            "type_k": self.cache,
            "type_v": self.cache,
            **({"again": 0} if self.beside else {}),  # else it would score within the token
        }


def with_policy(policy: Any) -> dict[str, Any]:
    """Options: a policy, and codes if it needs them."""
    return FRESH if policy == "fresh" else {"policy": policy}


def answer(kv: KVFlash, prompt: Any, n: int = 40, *, append: bool = True) -> list[int]:
    """A prompt, and n tokens of an answer."""
    return ids(kv.generate(prompt, max_tokens=n, sampling=GREEDY, append=append))


def ids(events: Iterable[Event]) -> list[int]:
    """The tokens of an answer."""
    return [event.id for event in events if isinstance(event, Token)]


def flat(event: Reselect) -> npt.NDArray[np.float64]:
    """A reselect as numbers, without its times."""
    scores = [np.nan if score is None else score for score in event.scores]
    return np.array([event.pos, *event.drops, -1, *event.page_ins, -1, *scores], np.float64)


def seen(kv: KVFlash) -> Arrays:
    """Where everything is now: nothing moves for it."""
    kv.pager.wait_stored()
    where, ledger, info = kv.residency(), kv.pager.ledger, kv.ctx.pool_info()
    summaries = kv.pager.summaries
    entries = [row.ravel() for chunk in range(len(summaries or ())) for row in summaries.entry(chunk)]
    room = kv.pager.guests
    blocks, units = room.native.tables() if room else (np.empty(0, np.int32), np.empty((0, 0), np.int32))
    codes = room.native.saved_codes(room.native.info().n) if room else []
    return {
        **{name: getattr(where, name) for name in ("resident", "block", "sealed", "stored", "protected", "score")},
        "touched": ledger.touched,
        "numbers": np.array(
            [kv.n_tokens, ledger.tick, info.n_kv, -1 if kv.sequence.pending is None else kv.sequence.pending]
        ),
        "tokens": kv.tokens,
        "summaries": np.concatenate(entries) if entries else np.empty(0, np.float32),
        "guests": blocks,
        "units": units,
        "codes": np.concatenate(codes) if codes else np.empty(0, np.uint8),
    }


def go_on(kv: KVFlash) -> Arrays:
    """Where everything is, what follows two more prompts, and the scores that were given on the way."""
    res = seen(kv)
    for i, (prompt, n) in enumerate(((MORE[:70], 24), (MORE[70:80], 12))):
        events = list(kv.generate(prompt, max_tokens=n, sampling=GREEDY, append=True))
        scores = [flat(event) for event in events if isinstance(event, Reselect)]
        res[f"answer {i}"] = np.array(ids(events))
        res[f"logits {i}"] = kv.logits()
        res[f"scores {i}"] = np.concatenate(scores) if scores else np.empty(0)
    last = kv.reselect()
    res["reselect"] = flat(last) if last else np.empty(0)
    return res


def assert_same(got: Arrays, want: Arrays) -> None:
    """All of it, to the bit."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name, strict=True)


class Other:
    """Another process, which opens models and restores snapshots there."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.communicate()

    def goes_on(self, model: Path, case: Case, snapshots: list[Path], out: Path) -> list[Arrays]:
        """What go_on() gives there after each snapshot."""
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        asked = {"model": str(model), "case": asdict(case), "snapshots": list(map(str, snapshots)), "out": str(out)}
        print(json.dumps(asked), file=child.stdin, flush=True)
        assert json.loads(child.stdout.readline()) == "done"
        with np.load(out) as arrays:
            return [
                {name[2:]: arrays[name] for name in arrays.files if name.startswith(f"{i} ")}
                for i in range(len(snapshots))
            ]


def serve() -> None:
    """The other process."""
    Model.is_eog = lambda *_: False  # type: ignore[method-assign]
    Model.piece = lambda *_, **__: b""  # type: ignore[method-assign]
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            found: Arrays = {}
            Context.pinned = property(lambda _self, case=Case(**asked["case"]): case.beside)  # type: ignore[method-assign,misc]
            with KVFlash.from_file(asked["model"], **Case(**asked["case"]).options) as kv:
                for i, path in enumerate(asked["snapshots"]):
                    kv.restore(path)
                    found |= {f"{i} {name}": value for name, value in go_on(kv).items()}
                    kv.check_integrity()
            np.savez(asked["out"], **found)
            res = "done"
        except Exception:  # noqa: BLE001 (told to who asked)
            res = traceback.format_exc()
        print(json.dumps(res), flush=True)


#
# in this process
#

STATEFUL = ["qwen35", "gemma4"]


@pytest.fixture
def wordless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no vocabulary."""
    monkeypatch.setattr(Model, "is_eog", lambda *_: False)
    monkeypatch.setattr(Model, "piece", lambda *_, **__: b"")


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    """A name for a snapshot."""
    return tmp_path / "text.kvsnap"


def read(kv: KVFlash, end: int) -> KVFlash:
    """TOKENS from where the sequence is up to `end`, as a prompt."""
    for _ in kv.prefill(TOKENS[kv.n_tokens : end]):
        pass
    return kv


def whole(path: Path) -> SnapshotFile:
    """A file whose records were all checked."""
    res = SnapshotFile(path)
    for _ in res.verify():
        pass
    return res


@pytest.fixture(scope="module")
def saved(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 2,000 tokens of qwen3."""
    res = tmp_path_factory.mktemp("saved") / "text.kvsnap"
    with KVFlash.from_file(tiny_path("qwen3"), **SMALL) as kv:
        read(kv, 2000).save(res)
    return res


class Odd:
    """Wants what is furthest back, or what chance says, another one for each text. "shares": and says so much of the attention is its."""

    query = "last"

    def __init__(self, name: str) -> None:
        self.name = name
        self.shares = name == "shares"
        self.summary = "mean" if self.shares else None

    def score(self, view: View) -> Scores:
        n = len(view.candidates)
        return -np.arange(n) if self.name == "oldest" else np.random.default_rng(len(view.tokens)).random(n)


if __name__ == "__main__":
    serve()
