"""One thread at a time uses an engine, and any may close it, at any time. Nothing here waits on a clock: calls are held in the
middle by an event.
"""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.cuts import CutAtLine, cut_off_at_every_line, traced
from support.runs import GREEDY, SCORED, TOKENS, Open, feed, spell, turn

from pyllama_kvflash import KVFlash, Token
from pyllama_kvflash.engine.generation import step_together
from pyllama_kvflash.errors import Interrupted, InUseError, UsageError
from pyllama_kvflash.native import Context, Model, Notes, Sampler, Sampling, interrupt, noted
from pyllama_kvflash.native.lib import ffi, lib, owned
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.policy import QkCos

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {**SCORED, "n_parallel": 2, "pool": 1536}
SECONDS = 60  # for what comes at once, or never
NONE = np.empty(0, np.int32)


class Held(NamedTuple):
    """A call that is in the middle, in a thread of its own. go: lets it go on."""

    result: Future[Any]
    go: threading.Event


@contextmanager
def held(target: Any, name: str, call: Callable[[], object]) -> Iterator[Held]:
    """Make a call in a thread, and hold it where it comes to a method of `target`; it goes on at the end of the block."""
    inside, go, method, patch = threading.Event(), threading.Event(), getattr(target, name), pytest.MonkeyPatch()

    def waits(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go.wait(SECONDS)
        return method(*args, **kwargs)

    patch.setattr(target, name, waits)
    with ThreadPoolExecutor(1) as thread:
        try:
            result = thread.submit(call)
            assert inside.wait(SECONDS)
            yield Held(result, go)
        finally:
            patch.undo()
            go.set()


@pytest.fixture
def wordless(monkeypatch: pytest.MonkeyPatch) -> None:
    spell(monkeypatch)


def uses(kv: KVFlash, tmp_path: Path) -> dict[str, Callable[[], object]]:
    """All calls of an engine that has 900 tokens, and those of a generation on its second sequence."""
    other = kv.sequences[1]
    run = other.generation(TOKENS[:70], max_tokens=9, sampling=GREEDY)
    while run.reading:
        turn(run)
    reading = kv.generation(TOKENS[900:1000], sampling=GREEDY)
    kv.save(tmp_path / "text.kvsnap")
    prefill = kv.prefill(TOKENS[900:1100])
    next(prefill)
    return {
        "generate": lambda: next(iter(kv.generate(TOKENS[:5]))),
        "generate of another sequence": lambda: next(iter(other.generate(TOKENS[:5]))),
        "generation": lambda: kv.generation(TOKENS[:5]),
        "read": lambda: next(reading.read()),
        "step": run.step,
        "draft": run.draft,
        "recover": run.recover,
        "step_together": lambda: step_together([run]),
        "prefill": lambda: next(iter(kv.prefill(TOKENS[:5]))),
        "the next batch of a prefill": lambda: next(prefill),
        "decode": lambda: kv.decode(TOKENS[:5]),
        "decode of another sequence": lambda: other.decode(TOKENS[:5]),
        "decode_each": lambda: kv.decode_each({0: 1, 1: 1}),
        "clear": kv.clear,
        "rollback": lambda: kv.rollback(5),
        "expect": lambda: kv.expect(64),
        "logits": kv.logits,
        "stats": kv.stats,
        "queries": kv.queries,
        "reselect": kv.reselect,
        "use": lambda: kv.use(QkCos()),
        "residency": kv.residency,
        "pin": lambda: kv.pin(0, 64),
        "unpin": lambda: kv.unpin(0, 64),
        "page_in": lambda: kv.page_in(1),
        "page_out": lambda: kv.page_out(1),
        "check_integrity": kv.check_integrity,
        "identity": lambda: kv.identity,
        "checkpoints": lambda: kv.checkpoints,
        "save": lambda: kv.save(tmp_path / "other.kvsnap"),
        "capture": kv.capture,
        "restore": lambda: kv.restore(tmp_path / "text.kvsnap"),
    }


#
# in use
#


def test_a_call_while_another_thread_is_in_one(opened: Open, tmp_path: Path, wordless: None) -> None:
    """Every call of every sequence says so at once. The first one goes on as if nothing had been, and all is well."""
    kv, control = opened(), opened()
    calls = {}
    for engine in (control, kv):
        feed(engine, 900, 64)
        calls = uses(engine, tmp_path)
    with held(kv.ctx, "decode", lambda: kv.decode(TOKENS[kv.n_tokens : kv.n_tokens + 8])) as first:
        for name, call in calls.items():
            with pytest.raises(
                InUseError, match=r"^the engine is in use by another thread: wait until that call has returned$"
            ):
                call()
            assert kv.n_tokens == 964, name
        assert len(kv.detokenize(kv.tokens[:3])) == 0, "a model's words, and what is known, can be read"
        first.go.set()
        first.result.result(SECONDS)
    control.decode(TOKENS[964:972])
    assert np.array_equal(kv.logits(), control.logits())
    kv.check_integrity()
    assert not (tmp_path / "other.kvsnap").exists()


def test_threads_one_after_the_other(opened: Open) -> None:
    """A generate() that two threads go on with by turns says what one says."""
    kv = opened("needle", n_parallel=1)
    prompt = "The secret code for the"
    want = [e.id for e in kv.generate(prompt, max_tokens=20, sampling=GREEDY) if isinstance(e, Token)]
    kv.clear()
    events, got = kv.generate(prompt, max_tokens=20, sampling=GREEDY), []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        threads = itertools.cycle([one, two])
        while (event := next(threads).submit(next, events, None).result(SECONDS)) is not None:
            got += [event.id] if isinstance(event, Token) else []
    assert got == want


def test_a_call_from_within_a_call(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a callback, or a signal handler: it would change what the first one is in the middle of."""
    kv, control = opened(), opened()
    decode, said = kv.ctx.decode, []

    def calls(*args: Any) -> None:
        for call in (kv.clear, kv.stats, lambda: kv.rollback(0), lambda: kv.decode(TOKENS[:2])):
            with pytest.raises(InUseError, match=r"^the engine is in use by another call of this thread"):
                call()
            said.append(True)
        decode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(kv.ctx, "decode", calls)
        kv.decode(TOKENS[:8])
    control.decode(TOKENS[:8])
    assert len(said) == 4
    assert np.array_equal(kv.logits(), control.logits())


def test_a_call_that_was_cut_off_anywhere_leaves_it_free(opened: Open) -> None:
    """For this thread and for others, with two engines in one stack, too."""
    kv = opened()

    def free(_: KVFlash) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(kv.stats).result(SECONDS)
        kv.stats()
        kv.guard.run(kv.decoder.clear)

    _, places = cut_off_at_every_line(lambda: kv, lambda kv: kv.decode(TOKENS[:2]), free, files=("guard.py",))
    assert len(places) > 8
    _, places = cut_off_at_every_line(lambda: kv, lambda kv: kv.stats(), free, files=("guard.py", "notes.py"))
    assert len(places) > 8


def test_no_note_stays_of_a_call_that_was_cut_off_anywhere() -> None:
    """One of what Python waits for at its end, too."""
    for at in itertools.count(1):
        notes, line = Notes(), itertools.count(1)
        cut = CutAtLine(lambda *_, at=at, line=line: next(line) == at, ("notes.py",))
        with suppress(KeyboardInterrupt), traced(cut):
            noted(notes, "use", list)
        assert notes == {}
        if cut.where is None:
            break
    assert at > 8


#
# closing
#


def test_closing_while_a_call_is_under_way(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that call, which ends as ever; the next one says that the engine is closed."""
    kv = opened()
    order, free = list[str](), kv.guard._free

    def frees() -> None:
        order.append("freed")
        free()

    monkeypatch.setattr(kv.guard, "_free", frees)

    decode = kv.ctx.decode
    monkeypatch.setattr(kv.ctx, "decode", lambda *args: (decode(*args), order.append("decoded"))[0])  # type: ignore[func-returns-value]
    with held(kv.ctx, "decode", lambda: kv.decode(TOKENS[:8])) as first, ThreadPoolExecutor(2) as closers:
        closing = [closers.submit(kv.close) for _ in range(2)]
        while not kv.guard._closing:
            pass
        with pytest.raises(UsageError, match=r"is closed: open it again$"):
            kv.stats()
        assert not order
        assert kv.ctx.handle, "it is not freed under the call"
        first.go.set()
        first.result.result(SECONDS)
        for closed in closing:
            closed.result(SECONDS)
    assert order == ["decoded", "freed"]
    with pytest.raises(UsageError, match="is closed"):
        _ = kv.ctx.handle


@pytest.mark.parametrize("how", ["directly", "by a signal"])
def test_closing_from_within_a_call(opened: Open, monkeypatch: pytest.MonkeyPatch, how: str, wordless: None) -> None:
    """It returns at once, the call ends as ever, and then the engine is closed. A generate() keeps its token."""
    kv = opened()
    before = signal.signal(signal.SIGUSR1, lambda *_: kv.close())
    decode, n = kv.ctx.decode, 0

    def closes(*args: Any) -> None:
        nonlocal n
        n += 1
        if n == 4:
            signal.raise_signal(signal.SIGUSR1) if how == "by a signal" else kv.close()
            assert kv.ctx.handle
            assert not kv.guard.closed
        decode(*args)

    got: list[int] = []

    def listen() -> None:
        for event in kv.generate(TOKENS[:20], sampling=GREEDY):
            got.extend([event.id] if isinstance(event, Token) else [])

    try:
        with monkeypatch.context() as patch:
            patch.setattr(kv.ctx, "decode", closes)
            with pytest.raises(UsageError, match=r"^the engine of .* is closed: open it again$"):
                listen()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == TOKENS[20:24].tolist(), "that of the call, too"
    assert n == 4
    assert kv.guard.closed


def test_all_says_so_when_it_is_closed(opened: Open, tmp_path: Path, wordless: None) -> None:
    """What was held, too: generations, generators, contexts, samplers. Summaries and captures keep what they need."""
    kv = opened()
    feed(kv, 900, 64)
    calls = uses(kv, tmp_path)
    capture, summaries, sampler = kv.capture(), kv.summaries, Sampler(Sampling(n_probs=2), kv.model)
    kv.save(tmp_path / "before.kvsnap")
    assert summaries
    q = np.ones(summaries._shapes[0], np.float32)
    scores, ctx, other = summaries.score(0, q), kv.ctx, kv.sequences[1]
    kv.close()
    calls |= {
        "tokens": lambda: kv.tokens,
        "n_tokens": lambda: other.n_tokens,
        "summaries": lambda: kv.summaries,
        "pager": lambda: kv.pager,
        "host_bytes": lambda: kv.host_bytes,
        "resident_bytes": lambda: kv.resident_bytes,
        "sample": lambda: sampler.sample(ctx),
        "probs": lambda: sampler.probs(ctx, 1),
        "raw decode": lambda: ctx.decode(TOKENS[:2], 0),
        "raw logits": ctx.logits,
        "vocabulary": lambda: kv.model.vocab,
        "detokenize": lambda: kv.detokenize([1]) or kv.model.handle,
        "a new sampler": lambda: Sampler(Sampling(grammar='root ::= "a"'), kv.model),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=r"is closed: open it again$"):
            print(name, call())
    assert np.array_equal(summaries.score(0, q), scores)
    capture.write(tmp_path / "after.kvsnap")
    assert (tmp_path / "after.kvsnap").read_bytes() == (tmp_path / "before.kvsnap").read_bytes()
    kv.close()


def test_closing_while_a_capture_is_written(opened: Open, tmp_path: Path) -> None:
    """The file is whole."""
    kv = opened()
    feed(kv, 900, 64)
    kv.save(tmp_path / "want.kvsnap")
    capture, half, go = kv.capture(), threading.Event(), threading.Event()

    def on_record(i: int, _: int) -> None:
        if i == 7:
            half.set()
            assert go.wait(SECONDS)

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(capture.write, tmp_path / "got.kvsnap", on_record)
        assert half.wait(SECONDS)
        kv.close()
        del kv
        go.set()
        writing.result(SECONDS)
    assert (tmp_path / "got.kvsnap").read_bytes() == (tmp_path / "want.kvsnap").read_bytes()


def test_closing_one_engine_leaves_another_alone(opened: Open) -> None:
    """Even in the middle of a batch: nothing global is told to stop."""
    kv, other, control = opened(), opened(), opened()
    with held(kv.ctx, "decode", lambda: kv.decode(TOKENS[:8])) as first:
        feed(other, 64, 64)
        other.close()
        first.go.set()
        first.result.result(SECONDS)
    control.decode(TOKENS[:8])
    assert np.array_equal(kv.logits(), control.logits())


def test_ctrl_c_is_for_every_engine_and_each_can_go_on(opened: Open) -> None:
    """As interruptible() has it: the process is told to stop, whichever thread computes. No token is lost or half decoded."""
    kv, control = opened(), opened()
    for engine in (kv, control):
        feed(engine, 128, 64)
    with held(kv.ctx, "decode", lambda: kv.decode(TOKENS[128:192])) as other:
        interrupt(True)
        try:
            other.go.set()
            with pytest.raises(Interrupted):
                other.result.result(SECONDS)
        finally:
            interrupt(False)
    assert kv.n_tokens == 128
    for engine in (kv, control):
        feed(engine, 192, 64)
    assert np.array_equal(kv.logits(), control.logits())


def test_closing_that_was_cut_off_anywhere(opened: Open) -> None:
    """Closed again, it is closed."""
    engines: list[KVFlash] = []

    def check(_: KVFlash) -> None:
        engines[-1].close()
        assert engines[-1].guard.closed
        with pytest.raises(UsageError):
            _ = engines[-1].ctx.handle

    def fresh(_: KVFlash | None = None) -> KVFlash:
        engines.append(opened(n_parallel=1))
        return engines[-1]

    _, places = cut_off_at_every_line(fresh, lambda _: engines[-1].close(), check, prepare=fresh, files=("guard.py",))
    assert len(places) > 8


#
# what is freed, and when
#


def test_a_native_object_is_freed_after_its_calls_and_before_its_parts() -> None:
    """Closing lets go of it; a call that another thread has under way keeps it."""
    freed: list[str] = []
    part = owned(ffi.new("int *", 1), lambda _: freed.append("part"))
    whole = owned(ffi.new("int *", 2), lambda _: freed.append("whole"), part)
    inside, go = threading.Event(), threading.Event()

    def call(pointer: Any) -> int:
        inside.set()
        assert go.wait(SECONDS)
        return int(pointer[0])

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(call, whole)
        assert inside.wait(SECONDS)
        del part, whole
        assert freed == []
        go.set()
        assert result.result(SECONDS) == 2
        del result
    assert freed == ["whole", "part"]


def test_a_model_that_is_closed_before_its_context(tiny_path: Callable[[str], Path]) -> None:
    """In any order, and while threads use its words."""
    model = Model.load(tiny_path("qwen3"))
    ctx, control = Context(model, n_ctx=256), Context(model, n_ctx=256)
    control.decode(TOKENS[:8], 0)
    want = control.logits()
    vocab = model.vocab
    model.close()
    ctx.decode(TOKENS[:8], 0)
    assert np.array_equal(ctx.logits(), want)
    ctx.close()
    control.close()
    assert lib.llama_vocab_n_tokens(vocab) == 512


def test_words_of_a_model_that_is_being_closed() -> None:
    """Each text is whole, or says that the model is closed."""
    model = Model.load(BUNDLED_MODEL)
    want = model.tokenize("The old mill by the river. " * 200)
    ready = threading.Barrier(4)

    def use() -> int:
        ready.wait(SECONDS)
        for n in range(100_000):
            try:
                assert np.array_equal(model.tokenize("The old mill by the river. " * 200), want)
            except UsageError:
                return n
        return -1

    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(use) for _ in range(3)]
        ready.wait(SECONDS)
        model.close()
        assert all(end.result(SECONDS) >= 0 for end in ends)


def test_an_engine_that_nobody_has_is_closed(tiny_path: Callable[[str], Path]) -> None:
    """Not before the last generation that goes on with it."""
    kv = KVFlash.from_file(tiny_path("qwen3"), **SMALL)
    ctx, run = kv.ctx, kv.generation(TOKENS[:70], max_tokens=3, sampling=GREEDY)
    del kv
    gc.collect()
    next(run.read())
    assert ctx.handle
    del run
    gc.collect()
    with pytest.raises(UsageError, match="is closed"):
        _ = ctx.handle


#
# the end of the process
#


def ends(code: str, *args: str | Path, **env: str) -> str:
    """What a process prints, which must end by itself, and say nothing on stderr but what its threads raise."""
    res = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *map(str, args)], env=os.environ | env,
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert res.returncode == 0, res.stderr
    assert "ignored" not in res.stderr, res.stderr
    return res.stdout


IN_THREADS = """
import sys, threading
import numpy as np
from pyllama_kvflash import KVFlash, Sampling
from pyllama_kvflash.native import Context, Model

TOKENS = np.arange(5, 517, dtype=np.int32)
kv = KVFlash.from_file(sys.argv[1], n_ctx=8192, pool=1024, n_threads=1)
raw = Context(kv.model, n_ctx=2048, n_threads=1)
n_begun, begun = 0, threading.Semaphore(0)

def generate():
    while True:
        for event in kv.generate("The sea is wide. " * 400, max_tokens=500, sampling=Sampling(temperature=0)):
            begun.release()

def decode():
    while True:
        raw.clear()
        begun.release()
        raw.decode(TOKENS, 0)

def load():
    while True:
        Model.load(sys.argv[1], progress=lambda _: begun.release()).close()

for work in (generate, decode, load):
    threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    begun.acquire()
threading.excepthook = lambda _: None
print("ends")
"""


def test_python_ends_while_threads_compute_and_load() -> None:
    assert ends(IN_THREADS, BUNDLED_MODEL) == "ends\n"


FREES = """
import threading, time
from pyllama_kvflash.native.lib import ffi, owned

begun = threading.Event()

def free(_):
    begun.set()
    time.sleep(0.5)
    print("freed")

def let_go():
    owned(ffi.new("int *"), free)
    owned(ffi.new("int *"), free)

threading.Thread(target=let_go, daemon=True).start()
begun.wait()
print("ends")
"""


def test_python_ends_after_what_a_thread_frees() -> None:
    """A GPU's driver would be taken apart meanwhile. What comes after it is not freed."""
    assert ends(FREES) == "ends\nfreed\n"


HELD = """
import os, sys, threading
from pathlib import Path
import numpy as np
from pyllama_kvflash import KVFlash
from pyllama_kvflash.native import Context, Model

kv = KVFlash.from_file(sys.argv[1], n_ctx=8192, pool=1024, n_threads=1)
list(kv.prefill(np.arange(5, 2000, dtype=np.int32)))
pid = os.fork()
if pid == 0:
    kv.close()
    sys.exit(7)  # the engine is the parent's: this frees nothing, and waits for none of its threads
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
capture, summaries, model, ctx = kv.capture(), kv.summaries, kv.model, kv.ctx
going, run = kv.generate([5], append=True), kv.generation(np.arange(5, 9, dtype=np.int32))
next(going)
sys.all = [kv, capture, summaries, model, ctx, going, run]  # until the very end
circle = type("Circle", (), {})()
circle.model = Model.load(sys.argv[1])
circle.ctx, circle.self = Context(circle.model, n_ctx=512), circle
del circle
capture.begin(Path(sys.argv[2]))
"""


def test_python_ends_with_all_kinds_of_things_held(tmp_path: Path) -> None:
    """And a snapshot that is being written is written: whoever asked for it has nothing to wait for it with.

    On the CPU: a process that forks once CUDA has begun ends in CUDA's own exit handlers.
    """
    assert ends(HELD, BUNDLED_MODEL, tmp_path / "text.kvsnap", CUDA_VISIBLE_DEVICES="") == "7\n"
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=8192, pool=1024, n_threads=1) as kv:
        assert kv.restore(tmp_path / "text.kvsnap") == 1995
