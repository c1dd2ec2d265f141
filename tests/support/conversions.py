"""Drafters as their makers publish them, changed as a test says, and their targets."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_kvflash.convert import Source
from support import drafters

Edit = Callable[[drafters.Config, drafters.Tensors], None]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The target's GGUF, without M-RoPE and with it."""
    folder = tmp_path_factory.mktemp("targets")
    res = {mrope: folder / f"target-{mrope}.gguf" for mrope in (False, True)}
    for mrope, path in res.items():
        drafters.write_target(path, mrope=mrope)
    return res


def written(name: str, tmp_path: Path) -> Source:
    folder = tmp_path / f"drafter-{name}"
    drafters.write_drafter(name, folder)
    return Source(folder, folder.name)


def edited(name: str, edit: Edit, tmp_path: Path) -> Source:
    """A drafter's folder after a change of its config and tensors."""
    config, tensors, dtype = drafters.DRAFTERS[name]()
    edit(config, tensors)
    folder = tmp_path / f"drafter-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    drafters.write_safetensors(folder / "model.safetensors", tensors, dtype)
    return Source(folder, folder.name)
