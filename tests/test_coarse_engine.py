"""Codes in an engine: whatever comes between two tokens, every position counts once; what they take, and who has them.

With codes that are exact (32 bits), an engine with a pool has the full cache's logits, but for rounding, in whatever it does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import CLI, ENGINE
from support.commands import good
from support.cuts import cut_off_at_every_line
from support.oracles import ON_GPU
from support.rounding import relative_rms
from support.runs import TOKENS, Open, feed, logits_of, read

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import AllocationError, HostMemoryError, UsageError
from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.options import Options
from pyllama_kvflash.policy.coarse import FORMS, CoarseForm
from pyllama_kvflash.pool.guests import GuestRoom

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL: dict[str, Any] = {"n_ctx": 8192, "n_batch": 64, "n_threads": 1, "pool": 768, "coarse": "4"}
TINY: dict[str, Any] = {**SMALL, "chunk": 16, "pool": 256, "n_ubatch": 64, "n_ctx": 16384}
ROUNDING = 0.01  # relative RMS of a step; without a chunk of 64 it is ten times that, see the last test of this part
POLICIES = ("lru", "fresh", "qk")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are the rows themselves."""
    if ON_GPU:
        pytest.skip("exact codes are the CPU's")
    monkeypatch.setattr(CoarseForm, "of", classmethod(lambda cls, coarse: None if coarse == "off" else cls(32, 32)))


def far(kv: KVFlash, full: KVFlash, n: int) -> float:
    """From the full cache, over the tokens up to n."""
    return relative_rms(logits_of(kv, n, 1), logits_of(full, n, 1))


#
# every position once
#


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("how", ["exact", "pool"])
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_it_is_the_full_cache(opened: Open, policy: str, how: str) -> None:
    kv, full = opened(policy=policy, prefill=how), opened(pool="off", policy="lru")
    for one in (kv, full):
        read(one, 1500)
    assert far(kv, full, 1600) < ROUNDING
    for one in (kv, full):
        one.rollback(1100)
    assert far(kv, full, 1150) < ROUNDING
    kv.pin(200, 300)
    kv.page_in(10)
    kv.page_out(10)
    assert far(kv, full, 1200) < ROUNDING
    for one in (kv, full):
        one.clear()
        read(one, 900)
    assert far(kv, full, 1000) < ROUNDING


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("policy", ["lru", "fresh"])
def test_sequences_share_a_pool(opened: Open, policy: str) -> None:
    """The second one takes blocks of the first one, whose chunks have codes by its next token."""
    kv, full = opened(policy=policy, n_parallel=2, pool=1024), opened(pool="off", policy="lru")
    read(full, 1300)
    want = logits_of(full, 1340, 1)
    for one in kv.sequences:
        read(one, 1300)
    got = [logits_of(one, 1340, 1) for one in kv.sequences]
    assert max(relative_rms(its, want) for its in got) < ROUNDING


@pytest.mark.nightly(ENGINE)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("policy", ["lru", "fresh"])
def test_cut_off_at_every_line(opened: Open, policy: str) -> None:
    full = opened(**{**TINY, "pool": "off", "policy": "lru", "prefill": "pool"})

    def begun() -> KVFlash:
        kv = opened(**{**TINY, "policy": policy, "prefill": "pool"})
        feed(kv, 400, 16)
        return kv

    def checked(kv: KVFlash) -> None:
        kv.check_integrity()
        full.clear()
        feed(full, kv.n_tokens, 16)
        assert far(kv, full, kv.n_tokens + 2) < ROUNDING

    act = {"lru": lambda kv: kv.rollback(461), "fresh": lambda kv: feed(kv, kv.n_tokens + 16, 16)}[policy]
    cut_off_at_every_line(
        begun, act, checked, prepare=lambda kv: feed(kv, max(kv.n_tokens, 480) // 16 * 16 + 16, 16), step=9
    )


@pytest.mark.usefixtures("exact")
def test_a_chunk_without_codes_is_missed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cover = GuestRoom.cover
    monkeypatch.setattr(GuestRoom, "cover", lambda self, n: cover(self, n - 16))
    kv, full = opened(policy="lru"), opened(pool="off", policy="lru")
    for one in (kv, full):
        read(one, 1500)
    assert far(kv, full, 1510) > ROUNDING


#
# warm starts
#


@pytest.mark.parametrize("policy", ["lru", "fresh"])
def test_a_warm_start_goes_on(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """With the same bits, and without codes made or units chosen anew."""
    kv, path = opened(policy=policy, snapshots=True), tmp_path / "a.kvsnap"
    read(kv, 1500)
    feed(kv, 1502)
    kv.save(path)
    want = logits_of(kv, 1530, 1)
    warm = opened(policy=policy, snapshots=True)
    with monkeypatch.context() as patch:
        patch.setattr("pyllama_kvflash.native.guests.Guests.put", lambda *_: pytest.fail("codes were made"))
        warm.restore(path)
        n = warm.stats().guests_fetched
        got = [logits_of(warm, 1503, 1)]
    if policy == "fresh":
        assert warm.stats().guests_fetched - n <= 32 * warm.ctx.pool_info().n_layer  # exchanged: the slots were full
    np.testing.assert_array_equal(np.concatenate([*got, logits_of(warm, 1530, 1)]), want)


GO_ON = """
import json, sys
import numpy as np
from pyllama_kvflash import KVFlash
from pyllama_kvflash.native.guests import Guests

Guests.put = None  # codes are not made here
with KVFlash.from_file(sys.argv[1], **json.loads(sys.argv[2])) as kv:
    kv.restore("a.kvsnap")
    logits = []
    for token in np.load("tokens.npy"):
        kv.decode([int(token)])
        logits.append(kv.logits())
    assert kv.stats().coarse_tokens == 1472
    np.save("logits.npy", np.array(logits))
"""


@pytest.mark.parametrize("policy", ["lru", "fresh"])
def test_another_process_goes_on(opened: Open, tmp_path: Path, policy: str) -> None:
    """With the same bits, by codes that are in the file: up to where the next chunk gets some."""
    kv = opened(policy=policy)
    read(kv, 1500)
    feed(kv, 1502)
    kv.save(tmp_path / "a.kvsnap")
    np.save(tmp_path / "tokens.npy", TOKENS[1502:1530])
    command = [sys.executable, "-c", GO_ON, str(kv.model.path), json.dumps({**SMALL, "policy": policy})]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), logits_of(kv, 1530, 1))


#
# answers
#

NEEDLES = needles.document(2400, seed=3)


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("coarse", FORMS)
def test_recency_with_codes_finds_every_needle(opened: Open, coarse: str) -> None:
    assert needles.n_found(opened, NEEDLES, policy="lru", coarse=coarse) == len(NEEDLES.needles)


#
# what they take, and who has them
#


def test_there_may_be_no_memory_for_them(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the text is lost: they are made with the next token."""
    kv = opened(policy="fresh")
    read(kv, 700)
    put = Guests.put

    def fails(*_: Any) -> None:
        msg = "out of memory"
        raise AllocationError(msg)

    monkeypatch.setattr(Guests, "put", fails)
    with pytest.raises(
        HostMemoryError, match=r"no memory for the codes of [\d,]+ tokens \(out of memory\): use fewer bits"
    ):
        read(kv, 1500)
    assert (kv.n_tokens, kv.stats().coarse_tokens) == (1500, 0)
    monkeypatch.setattr(Guests, "put", put)
    feed(kv, 1501)
    kv.check_integrity()
    assert kv.stats().coarse_tokens == 1472


@pytest.mark.parametrize("options", [{"coarse": "3"}, {"coarse": "off"}, {"coarse": "2,4"}])
def test_options_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="`coarse`"):
        Options(policy="fresh", **options)


@pytest.fixture
def long_file(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text(NEEDLES.text)
    return path


@pytest.mark.nightly(ENGINE, CLI)
def test_the_command_line(long_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLASH_COARSE", raising=False)
    pooled = ("-f", str(long_file), "--kvflash", "512", "-c", "4096", "-n", "4")
    said = good("run", *pooled).stderr
    assert "and 4 bits of keys and values for all else" in said
    said = good("run", *pooled, "--kvflash-coarse", "4,2", "--stats").stderr
    assert "and 4 bits of keys and 2 of values for all else" in said
    assert "codes" in said
    assert "all else" not in good("run", *pooled, "--kvflash-coarse", "off").stderr
    monkeypatch.setenv("KVFLASH_COARSE", "2")
    assert "and 2 bits of keys and values for all else" in good("run", *pooled).stderr
    found = json.loads(good("inspect", "--kvflash", "512", "-c", "4096", "--json").stdout)
    assert found["coarse"] == "2"
    assert found["coarse_bytes"] == next(m["coarse"] for m in found["memory"] if m["coarse"])
