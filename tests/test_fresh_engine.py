"""Policy fresh in an engine: what Python decides about guests, whatever comes between two tokens."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import kernels, needles
from support.changes import ENGINE, crossed
from support.cuts import cut_off_at_every_line
from support.kernels import host_kernels
from support.oracles import N_GPU
from support.runs import GREEDY, TOKENS, Open, feed, logits_of, read, text_of

from pyllama_kvflash import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.options import Spec

pytestmark = [pytest.mark.native, pytest.mark.sampled(ENGINE)]

SMALL: dict[str, Any] = {"n_ctx": 8192, "n_batch": 64, "n_threads": 1, "pool": 768, "policy": "fresh"}  # 12 blocks
TINY: dict[str, Any] = {**SMALL, "chunk": 16, "pool": 256, "n_ubatch": 64}  # 16 blocks
SINKS_AND_TAIL = 5  # chunks


def tables(kv: KVFlash) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The unit in each slot of each layer."""
    assert kv.pager.guests is not None
    return kv.pager.guests.native.tables()[1]


def check(kv: KVFlash) -> None:
    """Ledger, store and pool agree, and no guest is twice there, or not in the text."""
    kv.check_integrity()
    for row in tables(kv):
        here = row[row >= 0]
        assert len(set(here.tolist())) == len(here), "a guest is twice there"
        assert (here < kv.n_tokens // 16).all(), "a guest is not in the text"


#
# what fits, and what does not
#


@pytest.mark.parametrize("how", ["exact", "pool"])
def test_what_fits_is_the_full_cache(opened: Open, how: str) -> None:
    kv, full = opened(prefill=how), opened(pool="off", policy="lru")
    for one in (kv, full):
        read(one, 600)
    off = np.abs(logits_of(kv, 700, 1) - logits_of(full, 700, 1)).max()
    assert off == 0 or (N_GPU > 1 and off < 0.02)  # each device sums over a width of its own
    assert kv.pager.ledger.n_guests == 0


@pytest.mark.parametrize(("how", "name"), crossed(["exact", "pool"], ["qwen3", "qwen35", "gemma4"]))
def test_guests_have_what_common_chunks_leave(opened: Open, name: str, how: str) -> None:
    kv = opened(name, prefill=how)
    read(kv, 2000)
    feed(kv, 2200)
    check(kv)
    ledger = kv.pager.ledger
    assert ledger.n_resident <= SINKS_AND_TAIL + 1
    assert ledger.n_free == 0
    units = tables(kv)
    assert (units >= 0).all()
    assert units.shape[1] == 4 * ledger.n_guests
    assert kv.pager.guests.native.info().n == ledger.n_sealed * 64


def test_codes_stay_as_the_text_grows(opened: Open) -> None:
    kv = opened()
    room = kv.pager.guests
    assert room is not None
    read(kv, 1024)
    feed(kv, 1025)
    first = room.native.saved_codes(1024)
    feed(kv, 1400)
    for now, before in zip(room.native.saved_codes(1024), first, strict=True):
        assert np.array_equal(now, before)
    check(kv)


#
# what comes between two tokens
#


def test_rollback_pins_and_moves_by_hand(opened: Open) -> None:
    kv = opened()
    read(kv, 2000)
    feed(kv, 2010)
    kv.rollback(1500)
    check(kv)
    feed(kv, 1600)
    check(kv)
    kv.pin(200, 300)
    feed(kv, 1610)
    kv.page_in(10)
    feed(kv, 1620)
    check(kv)
    assert not np.isin(tables(kv) // 4, [3, 4, 10]).any(), "a chunk is common and a guest"
    kv.page_out(10)
    feed(kv, 1700)
    check(kv)
    assert not np.isin(tables(kv) // 4, [3, 4]).any()
    kv.rollback(100)
    feed(kv, 200)
    check(kv)
    kv.clear()
    check(kv)
    read(kv, 2000)
    feed(kv, 2100)
    check(kv)


def test_sequences_share_a_pool(opened: Open) -> None:
    """Each has guests of its own, and gives them up where another needs its share."""
    kv = opened(n_parallel=3, pool=2048, n_ctx=4096)
    a, b, c = kv.sequences
    read(a, 2000)
    feed(a, 2010)
    assert a.pager.ledger.n_held <= 32
    read(b, 1500)
    feed(b, 1510)
    read(c, 1200)
    for _ in range(70):
        kv.decode_each({s.seq: int(TOKENS[s.n_tokens]) for s in (a, b, c)})
    for s in (a, b, c):
        check(s)
        assert s.pager.ledger.n_guests > 0
    b.clear()
    feed(a, 2100)
    feed(c, 1300)
    for s in (a, b, c):
        check(s)


def test_drafts_are_checked(opened: Open) -> None:
    kv = opened("needle", spec=Spec(kind="ngram", gate=0), pool=512, n_ctx=4096)
    text = "The secret code is 12345. The secret code is 12345. " * 60
    events = list(kv.generate(text, max_tokens=40, sampling=GREEDY))
    assert text_of(events)
    check(kv)


OPERATIONS = {
    "decode": (
        lambda kv: feed(kv, (kv.n_tokens // 16 + 1) * 16, 16),
        lambda kv: kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + 16]),
    ),
    "rollback": (lambda kv: feed(kv, max(kv.n_tokens, 480) // 16 * 16 + 16, 16), lambda kv: kv.rollback(461)),
    "clear": (lambda kv: feed(kv, 330, 16), lambda kv: kv.clear()),
}


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cut_off_at_every_line(opened: Open, operation: str) -> None:
    prepare, act = OPERATIONS[operation]

    def begun() -> KVFlash:
        kv = opened(**{**TINY, "n_ctx": 16384, "prefill": "pool"})
        feed(kv, 400, 16)
        return kv

    def checked(kv: KVFlash) -> None:
        check(kv)
        feed(kv, kv.n_tokens + 16, 16)
        check(kv)

    step = {"decode": 2, "rollback": 1, "clear": 7}[operation]  # each time a text is to be read anew
    _, places = cut_off_at_every_line(begun, act, checked, prepare=prepare, step=step)
    assert any("guests.py" in place for place in places) or operation != "decode"


#
# answers
#


library = kernels.library


NEEDLES = needles.document(2400, seed=3)


@pytest.mark.nightly(ENGINE)
@pytest.mark.parametrize("how", ["cpu", pytest.param("kernels", marks=pytest.mark.nightly(ENGINE))])
def test_needles_are_found(opened: Open, request: pytest.FixtureRequest, how: str) -> None:
    with host_kernels(request.getfixturevalue("library")) if how == "kernels" else nullcontext():
        assert needles.n_found(opened, NEEDLES, policy="fresh") == len(NEEDLES.needles)


#
# options
#


def test_options_that_are_refused(opened: Open) -> None:
    with pytest.raises(UsageError, match="`swaps` is "):
        opened(swaps=-1)
