"""The folder of the prefix cache: the names of models in it, the dates of its files, and what is left of it."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support.runs import Open

from pyllama_kvflash import KVFlash
from pyllama_kvflash.cli import main
from pyllama_kvflash.files import AHEAD
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.protocols import anthropic_request, responses_store
from pyllama_kvflash.serve.protocols.responses_store import Kept, ResponseStore, new_id
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 1024, "pool": 768, "n_threads": 1, "snapshots": True, "prefill": "pool"}
LARGE = 1 << 40
TEXT, OTHER = np.random.default_rng(7).integers(0, 4000, (2, 200)).astype(np.int32)


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


def test_a_list_names_the_model(opened: Open, tmp_path: Path) -> None:
    """Whatever lies in place of the file with its name; without one, by its fingerprint."""
    kv, cache = opened(), PrefixCache(tmp_path / "cache", LARGE)
    path = cache.save(read(kv, TEXT))
    assert path
    named = path.parent / "model"

    def listed() -> str:
        return (
            CliRunner()
            .invoke(main, ["cache", "ls", "--prefix-cache", str(cache.folder)])
            .stdout.splitlines()[1]
            .split()[-1]
        )

    assert named.read_text() == listed() == BUNDLED_MODEL.name
    for other, shown in ((b"[b]a\xff\n.gguf", "[b]a\ufffd\ufffd.gguf"), (b"", "")):
        named.write_bytes(other)
        assert listed() == (shown or f"{kv.identity.fields['fingerprint']:016x}")
    named.unlink()
    (tmp_path / "secret").write_text("secret")
    named.symlink_to(tmp_path / "secret")
    assert listed() == f"{kv.identity.fields['fingerprint']:016x}"
    cache.save(read(kv, OTHER))
    assert (tmp_path / "secret").read_text() == "secret"
    assert listed() == BUNDLED_MODEL.name
    assert not list(path.parent.glob("*.part"))


def test_a_date_ahead_counts_as_the_oldest(opened: Open, tmp_path: Path) -> None:
    """Of a clock that was changed since: it stayed for ever, and pushed out whatever was new."""
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    texts = [np.roll(TEXT, i)[:100] for i in range(3)]
    ahead, kept, new = (cache.save(read(kv, text)) for text in texts)
    assert ahead
    assert kept
    os.utime(ahead, (0, time.time() + AHEAD + 60))
    os.utime(kept, (0, time.time() + max(anthropic_request._TTL.values())))
    assert [entry.path for entry in cache.entries()] == [kept, new, ahead]
    assert cache.restore(kv, np.append(texts[0], 5)) == 100
    assert [entry.path for entry in cache.entries()] == [kept, ahead, new], "it was used now"
    os.utime(ahead, (0, 4e9))
    done = CliRunner().invoke(main, ["cache", "ls", "--prefix-cache", str(tmp_path)])
    assert [line.split()[4:6] == ["date", "ahead"] for line in done.stdout.splitlines()[1:4]] == [False, False, True]
    assert cache.evict(2 * kept.stat().st_size + 100) == [ahead]


def test_nothing_is_left_of_a_cache(opened: Open, tmp_path: Path) -> None:
    """Snapshots, the names of models, responses, the lock, and what a killed process left; but what the cache did not write."""
    kv, folder = opened(), tmp_path / "cache"
    cache, store = PrefixCache(folder, LARGE), ResponseStore(folder / responses_store.FOLDER)
    for options in ({}, {"chunk": 32}):
        path = cache.save(read(opened(**options), TEXT[:100]))
        assert path
    store.keep(Kept([], {"id": new_id(), "output": []}))
    store.close()
    for name, parent in (
        ("x.kvsnap", path.parent),
        ("model", path.parent),
        ("resp_1", folder / responses_store.FOLDER),
    ):
        part = parent / f".{name}.{os.getpid()}.0123abcd.part"
        part.touch()
        os.utime(part, (0, 4e9))
    other = cache.save(read(kv, TEXT[:100]))
    assert other
    (other.parent / "notes.txt").write_text("mine")
    done = CliRunner().invoke(main, ["cache", "rm", "--all", "--prefix-cache", str(folder)])
    assert (done.exit_code, "3 files removed" in done.stderr) == (0, True)
    assert list(folder.rglob("*")) == [other.parent, other.parent / "notes.txt"]
