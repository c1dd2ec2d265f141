"""The prefix cache, the disk tier, and the options of `kvflash run` that begin warm."""

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.changes import SNAPSHOT
from support.oracles import ON_GPU
from support.runs import GREEDY, Open

from pyllama_kvflash import KVFlash, Token, Warn
from pyllama_kvflash.cli import main
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt
from pyllama_kvflash.snapshot import layout
from pyllama_kvflash.snapshot.cache import PrefixCache
from pyllama_kvflash.snapshot.file import SnapshotFile

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 4096, "pool": 768, "n_threads": 1, "n_batch": 256, "share": 0, "snapshots": True}
SMALL |= {
    "prefill": "pool"
}  # a text that the pool holds is read in other batches than an exact pass, and rounds otherwise
N_CODE = 5  # tokens of a code and of the end of its line: what follows is less certain
RNG = np.random.default_rng(7)
TEXT = RNG.integers(0, 4000, 2000).astype(np.int32)
OTHER = RNG.integers(0, 4000, 2000).astype(np.int32)
LARGE = 1 << 40
ON_DISK = "qk" if ON_GPU else "fresh"  # the policy that has records on disk


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(KVFlash.from_file(BUNDLED_MODEL, **{**SMALL, **options}))


def read(kv: KVFlash, tokens: Any) -> KVFlash:
    """In place of what is there."""
    kv.clear()
    for _ in kv.prefill(tokens):
        pass
    return kv


def say(kv: KVFlash, tokens: Any, n: int = 12, *, append: bool = True) -> list[int]:
    events = list(kv.generate(tokens, max_tokens=n, sampling=GREEDY, append=append))
    return [e.id for e in events if isinstance(e, Token)]


#
# the cache
#


def test_the_longest_prefix_wins(opened: Open, tmp_path: Path) -> None:
    """Of three files, at a chunk's end, and as much as is the same."""
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    branch = np.concatenate([TEXT[:900], OTHER[:500]])
    for text in (OTHER, branch, TEXT[:1300]):
        assert cache.save(read(kv, text))
    assert len(cache.entries()) == 3
    for text, n in [
        (TEXT, 1300),  # all of the last one
        (np.concatenate([branch, TEXT[:9]]), 1400),
        (np.concatenate([TEXT[:1000], OTHER]), 960),
        (TEXT[:1300], 1280),  # the last token is to be decoded
        (OTHER[:70], 64),
        (TEXT[:64], 0),
        (TEXT[100:], 0),
    ]:
        assert cache.match(kv, text) == n
        assert cache.restore(kv, text) == kv.n_tokens == n
        assert kv.tokens.tolist() == text[:n].tolist()
        kv.check_integrity()
    assert (cache.stats.hits, cache.stats.misses) == (5, 2)
    assert cache.stats.n_tokens == 1300 + 1400 + 960 + 1280 + 64


def test_a_warm_turn_says_what_a_cold_one_says(opened: Open, tmp_path: Path) -> None:
    """Through a pool that is smaller than the text, saved before the question and put back by another process's model."""
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=512, pool="off") as kv:
        prompt = make_prompt(2500, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=2, seed=3)
        texts = [kv.tokenize(prompt.text + needle.question) for needle in prompt.needles]
    first = opened()
    cold = [first.detokenize(say(first, text, N_CODE, append=False)) for text in texts]
    assert all(needle.answer in said for needle, said in zip(prompt.needles, cold, strict=True))
    say(first, texts[0], append=False)
    PrefixCache(tmp_path, LARGE).save(first)
    second, cache = opened(), PrefixCache(tmp_path, LARGE)
    n = cache.restore(second, texts[1])
    assert n > 2400
    assert second.detokenize(say(second, texts[1][n:], N_CODE)) == cold[1]


def test_a_text_takes_the_place_of_what_it_begins_with(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    paths = [cache.save(read(kv, TEXT[:n])) for n in (500, 900, 1500)]
    assert [entry.path for entry in cache.entries()] == paths[-1:]
    assert cache.save(kv) == paths[-1]
    assert cache.stats.saves == 3, "what is there is not written again"


@pytest.mark.nightly(SNAPSHOT)
def test_a_turn_writes_what_is_new_in_it(opened: Open, tmp_path: Path) -> None:
    """Of a long text and twenty short turns, each in a process of its own, which begins with what the last one left. Codes are
    written whole: see test_snapshot_fresh.py.
    """
    size = opened().pager.records.record_bytes
    cache, text, n_written = PrefixCache(tmp_path, LARGE), RNG.integers(0, 4000, 2560).astype(np.int32), []
    before: set[tuple[int, int]] = set()
    for n in range(1280, 2560, 64):
        kv = opened(n_ctx=8192, policy="qk")
        assert cache.restore(kv, text[:n]) == (n - 64 if n > 1280 else 0)
        for _ in kv.prefill(text[kv.n_tokens : n]):
            pass
        path = cache.save(kv)
        assert path
        now = {entry.mark for entry in cache.entries()}
        n_written.append(sum(mark[1] for mark in now - before) // size)
        before = now
        file, new = SnapshotFile(path), opened(n_ctx=8192, policy="qk")
        assert len(file.contents.sources) <= 5
        assert new.restore(path) == n
        for chunk in range(n // 64):
            np.testing.assert_array_equal(new.pager.records.get(chunk), kv.pager.records.get(chunk))
        if n % 320 == 0:
            assert say(new, OTHER[:70]) == say(kv, OTHER[:70])
        kv.close()
        new.close()
    assert n_written[0] >= 20
    assert max(n_written[1:]) <= 16
    assert sum(n_written[1:]) <= 19 * 5, "each record again when twice as many come after it"
    held = sum(entry.size for entry in cache.entries())
    assert held < 1.3 * size * 39, "what is written again takes the place of what it was in"


def test_two_conversations_share_what_they_begin_with(opened: Open, tmp_path: Path) -> None:
    """Nothing is removed that one of them needs, until neither was used for long."""
    kv, cache = opened(policy="qk"), PrefixCache(tmp_path, LARGE)
    root = cache.save(read(kv, TEXT[:1280]))
    assert root
    leaves = []
    for i in range(2):
        text = np.concatenate([TEXT[:1280], np.roll(OTHER, i)[:256]])
        assert cache.restore(kv, text) == 1280
        for _ in kv.prefill(text[1280:]):
            pass
        leaves.append(cache.save(kv))
    assert None not in leaves
    assert {entry.path for entry in cache.entries()} == {root, *leaves}
    assert sum(entry.size for entry in cache.entries()) < 1.5 * root.stat().st_size
    for path, used in ((root, 1), (leaves[0], 2), (leaves[1], 3)):
        os.utime(path, (used, used))
    total = sum(entry.size for entry in cache.entries())
    assert cache.evict(total - 1) == [leaves[0]], "its root was used when the other one was"
    assert cache.restore(kv, np.concatenate([TEXT[:1280], np.roll(OTHER, 1)[:256], [5]])) == 1536
    kv.check_integrity()
    assert set(cache.evict(root.stat().st_size - 1)) == {root, leaves[1]}


@pytest.mark.nightly(SNAPSHOT)
def test_what_lies_in_a_removed_file_goes_with_it(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    root = cache.save(read(kv, TEXT[:1280]))
    leaf = cache.save(read(kv, TEXT[:1500]))
    apart = cache.save(read(kv, OTHER[:700]))
    assert root
    assert leaf
    assert set(cache.remove(root)) == {root, leaf}
    assert [entry.path for entry in cache.entries()] == [apart]
    assert cache.restore(kv, TEXT) == 0


@pytest.mark.nightly(SNAPSHOT)
def test_damage_of_a_shared_record_is_a_miss_for_all(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    root = cache.save(read(kv, TEXT[:1280]))
    assert cache.save(read(kv, TEXT[:1500]))
    assert root
    damage(root, resident=True)  # the first chunk, which is a sink
    assert cache.restore(kv, TEXT) == 0
    assert (cache.stats.damaged, cache.entries()) == (1, [])


@pytest.mark.nightly(SNAPSHOT)
def test_a_file_is_written_while_the_sequence_goes_on(opened: Open, tmp_path: Path) -> None:
    """It is of the moment when that was begun, whatever becomes of the sequence."""
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    waiting = [cache.begin(read(kv, text[:900])) for text in (TEXT, OTHER, TEXT[1000:])]
    read(kv, RNG.integers(0, 4000, 1500).astype(np.int32))
    for future, text in zip(waiting, (TEXT, OTHER, TEXT[1000:]), strict=True):
        assert future
        assert SnapshotFile(future.result()).contents.tokens.tolist() == text[:900].tolist()
        assert len(list(SnapshotFile(future.result()).verify())) == 15
        assert cache.restore(kv, text) == 900
    assert cache.begin(kv) is None, "it is there already"
    cache.close()


@pytest.mark.nightly(SNAPSHOT)
def test_what_was_used_longest_ago_goes_first(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    texts = [np.roll(TEXT, i)[:700] for i in range(4)]
    paths = [cache.save(read(kv, text)) for text in texts]
    size = cache.entries()[0].size
    for i, path in enumerate(paths):
        assert path
        os.utime(path, (i, i))
    assert cache.restore(kv, np.append(texts[0], 5)) == 700
    small = PrefixCache(tmp_path, int(2.5 * size))
    assert set(small.evict()) == {paths[1], paths[2]}
    assert {entry.path for entry in small.entries()} == {paths[0], paths[3]}
    assert small.save(read(kv, OTHER[:700]))
    assert len(small.entries()) == 2
    tiny = PrefixCache(tmp_path, size // 2)
    assert tiny.save(read(kv, OTHER[300:900])) is None, "larger than the cache"


def damage(path: Path, *, resident: bool) -> None:
    """A bit of the record of the first chunk that is in the pool, or that is not."""
    file = SnapshotFile(path)
    chunk = int(np.flatnonzero(file.contents.chunks["resident"] == resident)[0])
    pitch, lead = layout.record_place(file.contents.identity)
    with path.open("r+b") as out:
        out.seek(int(file.header["sections"][-1]["offset"]) + chunk * pitch + lead + 1000)
        byte = out.read(1)
        out.seek(-1, os.SEEK_CUR)
        out.write(bytes([byte[0] ^ 1]))


@pytest.mark.nightly(SNAPSHOT)
def test_damage_that_is_found_later_has_the_text_read_anew(opened: Open, tmp_path: Path) -> None:
    """Records are checked when they are used; a fresh pool uses all of them at once."""
    cold = say(opened(policy="qk"), np.concatenate([TEXT[:1500], OTHER[:70]]), append=False)
    kv, cache = opened(policy="qk"), PrefixCache(tmp_path, LARGE)
    path = cache.save(read(kv, TEXT[:1500]))
    assert path
    damage(path, resident=False)
    assert cache.restore(kv, np.append(TEXT[:1500], OTHER[:70])) == 1500
    events = list(kv.generate(OTHER[:70], max_tokens=12, sampling=GREEDY, append=True))
    warnings = [e.text for e in events if isinstance(e, Warn)]
    assert len(warnings) == 1
    assert re.search(r"the record of chunk \d+ was changed; the restored text is read again", warnings[0])
    assert [e.id for e in events if isinstance(e, Token)] == cold
    kv.check_integrity()
    assert (cache.stats.damaged, cache.entries()) == (1, [])


def test_nothing_else_in_the_folder_is_touched(opened: Open, tmp_path: Path) -> None:
    """No link is followed, and nobody else may read what is written."""
    kv, cache = opened(), PrefixCache(tmp_path / "cache", LARGE)
    path = cache.save(read(kv, TEXT[:700]))
    assert path
    secret = tmp_path / "secret.kvsnap"
    secret.write_bytes(path.read_bytes())
    (path.parent / f"{'a' * 32}.kvsnap").symlink_to(secret)
    (tmp_path / "cache" / ("b" * 32)).symlink_to(tmp_path)
    (path.parent / "notes.txt").write_text("mine")
    path.unlink()
    assert cache.restore(kv, TEXT) == 0
    assert cache.evict(0) == []
    assert secret.exists()
    assert (path.parent / "notes.txt").read_text() == "mine"
    path = cache.save(read(kv, TEXT[:700]))
    assert path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_a_killed_process_left_is_swept_away(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    path = cache.save(read(kv, TEXT[:700]))
    assert path
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = path.parent / f".x.kvsnap.{int(done.stdout)}.0123abcd.part"
    mine = path.parent / f".x.kvsnap.{os.getpid()}.0123abcd.part"
    for part in (dead, mine):
        part.write_bytes(b"half")
    cache.evict()
    assert not dead.exists()
    assert mine.exists(), "somebody may be writing it"


@pytest.mark.nightly(SNAPSHOT)
def test_two_may_save_and_evict_at_once(opened: Open, tmp_path: Path) -> None:
    """Each file that is there is whole, and the folder is no larger than it may be."""
    texts = [np.roll(TEXT, i)[:300] for i in range(8)]
    kvs = [opened(), opened()]
    size = kvs[0].pager.records.record_bytes * 6
    errors: list[Exception] = []

    def work(kv: KVFlash, order: list[int]) -> None:
        cache = PrefixCache(tmp_path, 3 * size)
        try:
            for i in order * 3:
                cache.restore(kv, texts[i])
                cache.save(read(kv, texts[i]))
        except Exception as err:  # noqa: BLE001 (told below)
            errors.append(err)

    threads = [threading.Thread(target=work, args=(kv, [*range(8)][:: 1 - 2 * i])) for i, kv in enumerate(kvs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = PrefixCache(tmp_path, 3 * size).entries()
    assert 1 <= len(found) <= 3
    for entry in found:
        assert list(SnapshotFile(entry.path).verify())


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_of_nothing_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(UsageError, match=rf"limited to {limit} bytes"):
        PrefixCache(tmp_path, limit)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be the prefix cache"):
        PrefixCache(tmp_path / "file" / "cache", 1)


#
# the disk tier
#


@pytest.mark.nightly(SNAPSHOT)
def test_records_on_disk_change_nothing(opened: Open, tmp_path: Path) -> None:
    """Bit for bit: the answers, and the records; a few in memory, the rest in files without names."""
    kv = opened(policy=ON_DISK)
    want = say(kv, TEXT, 40, append=False)
    limit = 5 * kv.pager.records.record_bytes
    spilled = opened(host_limit=limit, disk=str(tmp_path), policy=ON_DISK)
    assert say(spilled, TEXT, 40, append=False) == want
    for one in (kv, spilled):
        one.pager.wait_stored()
    for chunk in range(kv.pager.ledger.n_sealed):
        assert np.array_equal(kv.pager.records.get(chunk), spilled.pager.records.get(chunk))
    s = spilled.stats()
    assert s.host_bytes <= limit
    assert s.disk_bytes >= (kv.pager.ledger.n_sealed - 5) * kv.pager.records.record_bytes
    assert kv.stats().disk_bytes == 0
    assert list(tmp_path.iterdir()) == []
    assert say(spilled, OTHER, 20, append=False) == say(kv, OTHER, 20, append=False), "places are used again"


#
# the command line
#


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path, Path, list[str]]:
    """A text, the same with a question, another question, and the two answers."""
    with KVFlash.from_file(BUNDLED_MODEL, n_ctx=512, pool="off") as kv:
        prompt = make_prompt(2500, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=2, seed=3)
    res = tmp_path / "text.txt", tmp_path / "asked.txt", tmp_path / "question.txt"
    parts = prompt.text, prompt.text + prompt.needles[0].question, prompt.needles[1].question
    for path, part in zip(res, parts, strict=True):
        path.write_text(part)
    return (*res, [needle.answer for needle in prompt.needles])


def run(*args: Any) -> Result:
    common = ("-c", "4K", "--kvflash", "768", "-b", "256", "-t", "1", "--temp", "0", "-n", "8")
    return CliRunner().invoke(main, ["run", *map(str, common), *map(str, args)])


@pytest.mark.nightly(SNAPSHOT)
def test_a_snapshot_of_something_else_is_a_miss_with_a_reason(
    texts: tuple[Path, Path, Path, list[str]], tmp_path: Path
) -> None:
    text, asked, question, (first, _) = texts
    file = tmp_path / "text.kvsnap"
    assert run("-f", text, "-n", "0", "--save-snapshot", file).exit_code == 0
    done = run("--restore", file, "-f", asked, "-ctk", "q8_0")
    assert done.exit_code == 0
    assert "cannot be used: " in done.stderr
    assert "the whole prompt is read" in done.stderr
    assert first in done.stdout
    done = run("-f", question, "--restore", file)
    assert "the first 1 are those of this text" in done.stderr or "the first 0 are" in done.stderr
    file.write_bytes(file.read_bytes()[:-1])
    done = run("-f", asked, "--restore", file)
    assert "is not a whole snapshot" in done.stderr
    assert first in done.stdout
    done = run("-f", question, "--restore", file, "--append")
    assert done.exit_code == 1
    assert "is not a whole snapshot" in done.stderr


def test_the_prefix_cache_makes_the_second_run_warm(texts: tuple[Path, Path, Path, list[str]], tmp_path: Path) -> None:
    _, asked, _, (first, _) = texts
    folder = tmp_path / "cache"
    for hit in (False, True):
        done = run("-f", asked, "--prefix-cache", folder)
        assert done.exit_code == 0, done.output
        assert first in done.stdout
        assert ("from the prefix cache" in done.stderr) == hit
    listed = CliRunner().invoke(main, ["cache", "ls", "--prefix-cache", str(folder)])
    assert "1 file, " in listed.stdout
    assert "2,5" in listed.stdout
    name = listed.stdout.splitlines()[1].split()[0]
    (path,) = folder.glob("*/*.kvsnap")
    assert CliRunner().invoke(main, ["cache", "verify", "--prefix-cache", str(folder)]).exit_code == 0
    with path.open("r+b") as file:
        file.seek(-5000, 2)
        file.write(b"damage")
    checked = CliRunner().invoke(main, ["cache", "verify", "--prefix-cache", str(folder)])
    assert checked.exit_code == 1
    assert "was changed" in checked.stderr
    for bad in ([], ["zzz"], [name, "--all"]):
        wrong = CliRunner().invoke(main, ["cache", "rm", "--prefix-cache", str(folder), *bad])
        assert wrong.exit_code == 2
        assert path.exists()
    assert CliRunner().invoke(main, ["cache", "rm", "--prefix-cache", str(folder), name]).exit_code == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--append",), "--append needs the text of --restore FILE"),
        (("--save-snapshot", "/no/such/x.kvsnap"), "there is no folder /no/such"),
        (("--restore", "/no/such/x.kvsnap", "--append"), "/no/such/x.kvsnap cannot be read"),
        (("--restore", "/", "--append"), "is a directory"),
        (("--kvflash", "off", "--save-snapshot", "/tmp/x.kvsnap"), "the full cache is in use"),
    ],
)
def test_what_is_wrong_is_one_sentence(args: tuple[str, ...], words: str) -> None:
    done = run("-p", "a", *args)
    assert done.exit_code in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.nightly(SNAPSHOT)
def test_verify_removes_what_is_damaged_and_what_needs_it(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    root = cache.save(read(kv, TEXT[:1280]))
    for text in (TEXT[:1500], np.concatenate([TEXT[:1280], OTHER[:150]])):
        assert cache.save(read(kv, text))
    apart = cache.save(read(kv, OTHER[:300]))
    assert root
    damage(root, resident=False)
    res = CliRunner().invoke(main, ["cache", "verify", "--remove", "--prefix-cache", str(tmp_path)])
    assert res.exit_code == 1
    assert res.stderr.count("warning") == 1
    assert "1 file in" in res.stderr
    assert "1 damaged; 3 removed, with those that need their records" in res.stderr
    assert [entry.path for entry in cache.entries()] == [apart]
