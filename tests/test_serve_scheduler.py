"""The scheduler: several answers at once, each as if it were the only one."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.changes import ENGINE, SERVE
from support.rounding import Chosen
from support.serving import N_CODE, Asked, alone, check_all, parse_metrics, scheduling, tokens_of, until

from pyllama_kvflash.engine import decoder
from pyllama_kvflash.errors import Interrupted, NativeError, PoolError, SnapshotError, UnsupportedError, UsageError
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt
from pyllama_kvflash.serve import prefixes
from pyllama_kvflash.serve.job import Failed, Finished, NotReady, Phase, Reading, Text
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

CHUNK = 64

chosen = serving.chosen
environment = serving.environment


def test_a_long_prompt_does_not_stop_an_answer() -> None:
    """One token of the answer for each batch of the prompt, and a short prompt that comes later is answered before."""
    order: list[str] = []
    with scheduling(n_parallel=3, prefill="pool") as scheduler:
        first = Asked(scheduler, tokens_of(20), 60, lambda u: order.append("answer") if isinstance(u, Text) else None)
        until(lambda: "answer" in order)
        long = Asked(
            scheduler, tokens_of(1500, 1), 2, lambda u: order.append("read") if isinstance(u, Reading) else None
        )
        until(lambda: "read" in order)
        short = Asked(
            scheduler, tokens_of(40, 2), 1, lambda u: order.append("short") if isinstance(u, Finished) else None
        )
        assert first.done.n_answer == 60
        assert long.done.n_answer == short.done.n_answer + 1 == 2
    reads = [i for i, what in enumerate(order) if what == "read"]
    assert len(reads) == 12, "batches of 128"
    assert order.index("short") < reads[-2]
    between = [order[a:b].count("answer") for a, b in itertools.pairwise(reads)]
    assert sum(between) >= 8
    assert max(between) <= 3


def test_which_sequence_is_taken(chosen: Chosen) -> None:
    with scheduling(n_parallel=3) as scheduler:
        a, b = tokens_of(300, 1), tokens_of(300, 2)
        assert Asked(scheduler, a).done.n_cached == 0
        assert Asked(scheduler, b).done.n_cached == 0
        assert [s.n_tokens > 0 for s in scheduler.kv.sequences] == [True, True, False], (
            "BOS alone is no reason to take one"
        )
        assert Asked(scheduler, a).done.n_cached == 299, "one token is left, for its logits"
        assert Asked(scheduler, [*b[:200], *tokens_of(50, 3)]).done.n_cached == 200
        assert Asked(scheduler, tokens_of(100, 4)).done.n_cached == 0
        assert Asked(scheduler, a[:100]).done.n_cached == 99
        (want,) = alone([tokens_of(200, 5)], 12)
        n_held = chosen.n_held
        assert Asked(scheduler, tokens_of(200, 5)).text == want
        assert chosen.n_held == n_held + 12


def test_a_state_that_cannot_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent model reads all of a prompt again, unless it goes on from where it was."""

    def cannot(*_: Any) -> None:
        raise UnsupportedError("this state cannot go back")

    with scheduling() as scheduler:
        monkeypatch.setattr(type(scheduler.kv.sequence), "rollback", cannot)
        prompt = tokens_of(200, 1)
        first = Asked(scheduler, prompt, 4)
        kept = scheduler.kv.sequences[0].tokens.tolist()
        assert first.done.n_cached == 0
        again = Asked(scheduler, prompt, 4)
        assert again.text == first.text
        assert again.done.n_cached == 0
        assert Asked(scheduler, [*kept, 5, 6], 4).done.n_cached == len(kept)


def test_an_interrupt_while_a_sequence_goes_back_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the request, which is not read anew; the next one is."""

    def stopped(*_: Any) -> None:
        raise Interrupted("stopped")

    with scheduling() as scheduler:
        prompt = tokens_of(200, 1)
        first = Asked(scheduler, prompt, 4)
        assert first.done.n_cached == 0
        with monkeypatch.context() as patch:
            patch.setattr(type(scheduler.kv.sequence), "rollback", stopped)
            assert Asked(scheduler, prompt, 4).failed
        assert Asked(scheduler, prompt, 4).text == first.text


@pytest.fixture(scope="module")
def questions() -> list[list[int]]:
    """Prompts with answers that are no matter of rounding."""
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        document = make_prompt(400, lambda s: len(model.tokenize(s, add_special=False)), n_needles=3, seed=5)
        return [model.tokenize(document.text + needle.question).tolist() for needle in document.needles]


def test_an_engine_error_while_a_prompt_is_read(questions: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends this request; the others say what they would have said."""
    want = alone(questions, N_CODE)
    with scheduling(n_parallel=3) as scheduler:
        victim = scheduler.kv.sequences[1]
        decode = type(victim.ctx).decode

        def fails(self: Any, *args: Any) -> Any:
            if self.seq == 1 and victim.n_tokens > 300:
                raise NativeError("no luck")
            return decode(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(victim.ctx), "decode", fails)
            asked = [Asked(scheduler, prompt, N_CODE) for prompt in questions]
            assert asked[1].failed == Failed(500, "no luck")
            assert [asked[0].text, asked[2].text] == [want[0], want[2]]
            assert victim.n_tokens == 0
        assert [a.text for a in [Asked(scheduler, prompt, N_CODE) for prompt in questions]] == want


@pytest.mark.sampled(SERVE, ENGINE)
@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_an_engine_error_in_a_step(questions: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Of all that answer, whenever it comes: it ends one request, and no token of the others is lost, or decoded twice."""
    want = alone(questions, N_CODE)
    with scheduling(n_parallel=3) as scheduler:
        kv = scheduler.kv
        victim, advance = kv.sequences[1], decoder.advance
        written = type(victim.pager).written

        def fails(parts: Any, *rest: Any) -> Any:
            late = any(part.sequence is victim.sequence for part in parts) and victim.n_tokens > len(questions[1])
            if late and when == "before":
                raise PoolError("no room")
            res = advance(parts, *rest)
            if late and when == "after":
                raise PoolError("no room")
            return res

        def fails_to_write(self: Any, n_tokens: int) -> Any:
            if self is victim.pager and n_tokens == 1:
                raise PoolError("no room")
            return written(self, n_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "advance", fails)
            if when == "within":
                patch.setattr(type(victim.pager), "written", fails_to_write)
            asked = [Asked(scheduler, prompt, N_CODE) for prompt in questions]
            assert asked[1].failed.status == 503
            assert [asked[0].text, asked[2].text] == [want[0], want[2]]
        assert [a.text for a in [Asked(scheduler, prompt, N_CODE) for prompt in questions]] == want
        until(lambda: scheduler.n_busy == 0)
        check_all(scheduler)


def test_a_bug_ends_one_and_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with scheduling() as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "advance", lambda *_: 1 / 0)
            failed = Asked(scheduler, tokens_of(10)).failed
        assert failed.status == 500
        assert "ZeroDivisionError" in caplog.text
        assert "Zero" not in failed.message
        assert Asked(scheduler, tokens_of(10)).done


def test_idle_sequences_give_their_memory() -> None:
    """What they keep is worth having only while there is room."""
    with scheduling() as scheduler:
        record = scheduler.kv.ctx.pool_info().record_bytes
    with scheduling(host_limit=40 * record) as scheduler:
        assert Asked(scheduler, tokens_of(1600, 1)).done
        assert Asked(scheduler, tokens_of(1600, 2)).done.n_cached <= 1
        failed = Asked(scheduler, tokens_of(3200, 3)).failed
        assert failed.status == 503
        assert "chunk records take" in failed.message
        assert Asked(scheduler, tokens_of(500, 2)).done


def test_the_end_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that cannot even be cleared: all hear of it, nobody waits for ever."""

    def broken(*_: Any) -> Any:
        raise NativeError("the device is gone")

    with scheduling() as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(type(scheduler.kv.ctx), "decode", broken)
            patch.setattr(type(scheduler.kv), "clear", broken)
            asked = [Asked(scheduler, tokens_of(10, i)) for i in range(4)]
            assert {a.failed.status for a in asked} == {500}
            assert scheduler.join(30)
        assert scheduler.phase == Phase.FAILED
        assert str(scheduler.error) == "the device is gone"
        with pytest.raises(NotReady):
            scheduler.admit()
        scheduler.kv.close()


@contextlib.contextmanager
def caching(folder: Path, **options: Any) -> Iterator[tuple[Scheduler, Callable[[str], float]]]:
    """A scheduler with one sequence and a cache on disk, and its counters by name."""
    how = {"cache": PrefixCache(folder, 1 << 30), "cache_min": 300, "n_parallel": 1, "snapshots": True, **options}
    with scheduling(**how) as scheduler:
        yield scheduler, scheduler.metrics.total


SAVES, RESTORED = "prefix_cache_saves", 'prefix_cache_hits{source="disk"}'


def test_prefixes_on_disk(chosen: Chosen, tmp_path: Path) -> None:
    a, b, c = (tokens_of(400, i) for i in range(3))
    with caching(tmp_path) as (scheduler, total):
        want = Asked(scheduler, a).text
        until(lambda: total(SAVES) == 1)
        assert Asked(scheduler, a).done.n_cached == 399
        assert Asked(scheduler, b).done.n_cached == 0, "BOS alone is read again"
        until(lambda: total(SAVES) == 2)
        assert total(RESTORED) == 0
        assert Asked(scheduler, [*a, *c[:50]]).done.n_cached == 400
        n_held = chosen.n_held
        assert Asked(scheduler, a).text == want
        assert chosen.n_held == n_held + 12
        assert Asked(scheduler, tokens_of(100, 9)).done.n_cached == 0
        until(lambda: scheduler.n_busy == 0)
        found = parse_metrics(scheduler.metrics.text())
        assert found["prefix_cache_saves_total"] == 2, "nothing else was new"
        assert found['prefix_cache_hits_total{source="disk"}'] == 1
        assert found['prefix_cache_tokens_total{source="disk"}'] == 400
        assert found['prefix_cache_hits_total{source="memory"}'] == 2
        assert found["prefix_cache_misses_total"] == 3


def test_a_file_with_little_more_than_memory_has_is_not_restored(tmp_path: Path) -> None:
    text = tokens_of(900, 1)
    with caching(tmp_path) as (scheduler, total):
        assert Asked(scheduler, text).done
        until(lambda: total(SAVES) == 1)
        assert Asked(scheduler, [*text[:700], *tokens_of(50, 2)]).done.n_cached == 700
        assert Asked(scheduler, text).done.n_cached == 700
        assert total(RESTORED) == 0
        assert Asked(scheduler, [*text[:400], *tokens_of(50, 2)]).done.n_cached == 400
        assert Asked(scheduler, text).done.n_cached > 899 - CHUNK
        assert total(RESTORED) == 1


def test_a_long_prompt_is_on_disk_in_parts_while_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that little is lost if the process is killed before its end."""
    monkeypatch.setattr(prefixes, "_READ_MUCH", 512)
    begin, written = PrefixCache.begin, []

    def noted(cache: PrefixCache, sequence: Any, *args: Any) -> Any:
        written.append(sequence.n_tokens)
        return begin(cache, sequence, *args)

    monkeypatch.setattr(PrefixCache, "begin", noted)
    with caching(tmp_path) as (scheduler, _):
        assert Asked(scheduler, tokens_of(1500, 1)).done
    assert written[0] >= 512
    assert 1024 <= written[1] < 1500
    assert len(written) == 3


@pytest.mark.sampled(SERVE, ENGINE)
@pytest.mark.parametrize("error", [SnapshotError("it is damaged"), OSError(28, "no space"), PoolError("no room")])
def test_a_cache_that_fails_is_no_reason_to_stop(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """While a file is read, while one is begun, and while one is written."""
    failed: Future[Path] = Future()
    failed.set_exception(error)
    begun = itertools.chain([failed], itertools.repeat(None))

    def begin(*_: Any) -> Any:
        if (future := next(begun)) is None:
            raise error
        return future

    def restore(_cache: PrefixCache, sequence: Any, *_: Any) -> int:
        sequence.clear()
        raise error

    a, b = tokens_of(400, 1), tokens_of(400, 2)
    with caching(tmp_path) as (scheduler, total):
        want = Asked(scheduler, a).text
        assert Asked(scheduler, b).done
        until(lambda: total(SAVES) == 2)
        monkeypatch.setattr(PrefixCache, "begin", begin)
        monkeypatch.setattr(PrefixCache, "restore", restore)
        again = Asked(scheduler, a)
        assert again.text == want
        assert again.done.n_cached == 0
        assert Asked(scheduler, tokens_of(400, 3)).done
    assert "the prefix cache could not be read" in caplog.text
    assert caplog.text.count("the prefix cache could not be written") >= 2


def test_a_cache_that_cannot_keep_what_the_model_has_is_told_once_and_not_asked(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It keeps chunks of a pool. The sequence keeps its text all the same."""
    text = tokens_of(400, 1)
    with caching(tmp_path, cache_min=100, pool="off") as (scheduler, _):
        assert [Asked(scheduler, text[:n]).done.n_cached for n in (200, 300, 400)] == [0, 200, 300]
    assert not list(tmp_path.iterdir())
    [warning] = [record.message for record in caplog.records]
    assert warning.startswith("--prefix-cache is not used: it stores the chunks of a pool")


@pytest.mark.sampled(SERVE, ENGINE)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_damage_that_is_found_in_an_answer(
    after: bool, chosen: Chosen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text so far is read again, and the answer goes on; the other one is not touched."""
    prompts = [tokens_of(200, 1), tokens_of(300, 2)]
    want = alone(prompts, 30, pool="off")
    with scheduling(pool="off", n_parallel=2) as scheduler:
        until(lambda: scheduler.kv is not None)
        advance, broken = decoder.advance, []

        def damaged(parts: Any, *rest: Any) -> Any:
            lengths = {part.sequence.seq: part.sequence.n_tokens for part in parts}
            if lengths.get(1, 0) == 310 and len(broken) < 2:  # with the other one, and again when tried alone
                broken.append(lengths)
                if after:
                    advance(parts, *rest)
                msg = "the record of chunk 3 was changed"
                raise SnapshotError(msg)
            return advance(parts, *rest)

        monkeypatch.setattr(decoder, "advance", damaged)
        asked = [Asked(scheduler, prompt, 30) for prompt in prompts]
        assert [a.text for a in asked] == want
        assert [a.done.n_answer for a in asked] == [30, 30]
        assert len(broken) == 2
        assert chosen.n_held == 2 * 30
    assert caplog.text.count("the record of chunk 3 was changed; the text is read again") == 1


def test_a_request_whose_sequence_is_taken() -> None:
    """As by a question that does more than look. Its client hears of it; another answer goes on in the same batches."""
    with scheduling() as scheduler:
        taken: list[Future[None]] = []

        def take(slots: Any) -> None:
            next(s for s in slots if s.job is first.job).seq.clear()

        def on(update: Any) -> None:
            if isinstance(update, Text) and not taken:
                taken.append(scheduler.query(take))

        first = Asked(scheduler, tokens_of(40), 3000, on)
        second = Asked(scheduler, tokens_of(50, 1), 40)
        assert first.failed.status == 500
        assert first.failed.message.startswith("another call has taken or changed this sequence")
        assert second.text == alone([tokens_of(50, 1)], 40)[0]
        assert Asked(scheduler, tokens_of(50, 1), 40).text == second.text
    assert taken[0].exception() is None


def test_an_engine_that_is_closed_under_the_scheduler() -> None:
    """By whoever else has it: all requests fail, and nothing crashes."""
    with scheduling() as scheduler:
        said = threading.Event()
        first = Asked(scheduler, tokens_of(40), 3000, lambda update: said.set() if isinstance(update, Text) else None)
        reading = Asked(scheduler, tokens_of(2000, 1), 10)
        waiting = Asked(scheduler, tokens_of(50, 2), 10)
        assert said.wait(60)
        assert scheduler.kv
        scheduler.kv.close()
        assert [asked.failed.status for asked in (first, reading, waiting)] == [500, 500, 500]
        assert scheduler.join(30)
        assert scheduler.phase == Phase.FAILED
        assert isinstance(scheduler.error, UsageError)
        with pytest.raises(NotReady):
            scheduler.admit()
