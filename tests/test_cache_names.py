"""The prefix cache knows the name of the model that its snapshots are of."""

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
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.snapshot.cache import PrefixCache

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"n_ctx": 1024, "pool": 768, "n_threads": 1, "snapshots": True, "prefill": "pool"}
LARGE = 1 << 40
TEXT, OTHER = np.random.default_rng(7).integers(0, 4000, (2, 200)).astype(np.int32)


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(KVFlash.from_file(BUNDLED_MODEL, **SMALL))


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


def test_a_name_that_cannot_be_written_costs_no_snapshot(opened: Open, tmp_path: Path) -> None:
    kv, cache = opened(), PrefixCache(tmp_path, LARGE)
    path = cache.save(read(kv, TEXT))
    assert path
    (path.parent / "model").unlink()
    (path.parent / "model").mkdir()
    assert cache.save(read(kv, OTHER))
    assert len(cache.entries()) == 2
