"""Fixtures that most test files use, how the tests are shared out to several processes, and what `make test` leaves out.

A fixture that only some files use is in tests/support: a file takes it by a name of its own, `opened = drafting.opened`.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import changes, tiny

if TYPE_CHECKING:
    from pyllama_kvflash import KVFlash
    from pyllama_kvflash.native import Model


if "PYTEST_XDIST_WORKER" in os.environ:
    # threads that wait for each other in one process take the core from another: a decode takes eight times as long
    os.environ.setdefault("KVFLASH_TEST_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What builds begins: it takes minutes, and a file is run by one process, which keeps its models.

    Nightly tests (see CONTRIBUTING.md) are left out where KVFLASH_NIGHTLY says so. It is a commit, or "changed", which stands for
    changes.base_commit(): those whose files have changed since then are run.
    """
    items.sort(key=lambda item: item.path.stem != "test_fuzz")
    wanted = os.environ.get("KVFLASH_NIGHTLY", "all")
    since = changes.Changes.find(changes.ROOT, None if wanted == "changed" else wanted)
    if since:
        changes.leave_out_nightly(items, since)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a tiny random model (see tiny.MODELS), written when it is first asked for."""
    directory = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def path(name: str) -> Path:
        res = directory / f"{name}.gguf"
        tiny.write(name, res)
        return res

    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Callable[[str], Path]) -> Iterator[Callable[[str], "Model"]]:
    """A tiny random model in memory, loaded when it is first asked for."""
    from pyllama_kvflash.native import Model  # noqa: PLC0415 (tests without it run where nothing was built)

    with contextlib.ExitStack() as stack:

        @functools.cache
        def model(name: str) -> Model:
            return stack.enter_context(Model.load(tiny_path(name)))

        yield model


@pytest.fixture(scope="session")
def needle_path() -> Path:
    """The bundled model that finds needles."""
    return changes.ROOT / "pyllama_kvflash" / "needle" / "needle-7m-q8_0.gguf"


def _split(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Where a test does not say on which GPUs the layers of a model are, they are split as `how` has it."""
    from pyllama_kvflash.native import Model  # noqa: PLC0415 (as above)

    load = Model.load

    def split(path: Path, **options: Any) -> Model:
        says = options.get("tensor_split") or options.get("split_mode", "layer") != "layer"
        return load(path, **options if says else {**options, **how})

    monkeypatch.setattr(Model, "load", split)


@pytest.fixture(scope="session", autouse=True)
def evenly() -> Iterator[None]:
    """Each of several GPUs has as many layers. By default they are split by free memory, which other tests take meanwhile: an engine
    would have a layer on another GPU than the one that it is compared with.
    """
    try:
        from pyllama_kvflash.native import gpus, init  # noqa: PLC0415 (as above)
    except ImportError:
        yield
        return
    init()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if (n := len(gpus())) > 1:
            _split(monkeypatch, tensor_split=(1.0,) * n)
        yield


@pytest.fixture(scope="session", autouse=True)
def pool_alone() -> Iterator[None]:
    """With policies that score chunks for all layers, a token attends to the pool alone unless codes are asked for: their tests are
    about what the pool holds, and with codes nothing outside it is unseen.
    """
    try:
        from pyllama_kvflash.loading import bits  # noqa: PLC0415 (as above)
    except ImportError:
        yield
        return
    forms = bits.forms

    def fewer(options: Any) -> tuple[str, ...]:
        return forms(options) if options.policy in ("auto", "fresh") else ("off",)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bits, "forms", fewer)
        yield


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[None]:
    """Models are on one GPU, however many there are: what a file counts is that of one device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _split(monkeypatch, split_mode="none")
        yield


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts say that copies run beside the computation, as on a GPU: scoring then begins at one token and is applied some
    tokens later. On a CPU all of that happens at one token.
    """
    from pyllama_kvflash.native import Context  # noqa: PLC0415 (as above)

    monkeypatch.setattr(Context, "pinned", property(lambda _self: True))


@pytest.fixture
def at_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opposite: a scoring takes its time from decoding, on a GPU, too. What is computed where stays as it is."""
    from pyllama_kvflash.native import Context  # noqa: PLC0415 (as above)

    monkeypatch.setattr(Context, "pinned", property(lambda _self: False))


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, tiny_path: Callable[[str], Path], needle_path: Path
) -> Iterator[Callable[..., "KVFlash"]]:
    """Open a tiny model, or the needle model, as SMALL of the test's module says unless told otherwise; closed after it."""
    from pyllama_kvflash import KVFlash  # noqa: PLC0415 (as above)

    with contextlib.ExitStack() as stack:

        def open_(name: str = "qwen3", **options: Any) -> KVFlash:
            path = needle_path if name == "needle" else tiny_path(name)
            return stack.enter_context(KVFlash.from_file(path, **{**request.module.SMALL, **options}))

        yield open_
