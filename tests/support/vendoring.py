"""A root with vendor/vendor.py and a fake sdist."""

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "vendor" / "vendor.py"
PREFIX = "llama_cpp_python-1.2/vendor/llama.cpp"
TEN_LINES = "".join(f"line {number}\n" for number in range(1, 11))
UPSTREAM = {
    "LICENSE": "MIT\n",
    "CMakeLists.txt": "project(x)\n",
    "src/a.cpp": TEN_LINES,
    "src/b.cpp": TEN_LINES,
    "ggml/src/c.c": "int c;\n",
}
PATCH_A = """Why a.cpp changes.

--- a/src/a.cpp
+++ b/src/a.cpp
@@ -4,3 +4,3 @@
 line 4
-line 5
+line FIVE
 line 6
"""
PATCH_C = """--- a/ggml/src/c.c
+++ b/ggml/src/c.c
@@ -1 +1,2 @@
+// first
 int c;
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvflash_vendor", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vendor = load()


class Repository:
    """A root with a copy of the script, a fake sdist in the environment, and two patches."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.layout = vendor.Layout(root)
        self.tree = root / "vendor" / "llama.cpp"
        self.patches = root / "patches"
        self.sdist = root / "elsewhere" / "sdist.tar.gz"
        for directory in (self.tree.parent, self.patches, self.sdist.parent):
            directory.mkdir()
        shutil.copy(SCRIPT, self.tree.parent)
        members = {f"{PREFIX}/{name}": text for name, text in UPSTREAM.items()}
        members |= {
            f"{PREFIX}/tools/t.cpp": "pruned\n",
            f"{PREFIX}/README.md": "pruned\n",
            f"{PREFIX}/LICENSE.txt": "pruned\n",
            "llama_cpp_python-1.2/src/z.cpp": "not llama.cpp's\n",
        }
        with tarfile.open(self.sdist, "w:gz") as archive:
            for name, text in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
        self.pin(self.sdist)
        self.patch("0001-a.patch", PATCH_A)
        self.patch("0002-c.patch", PATCH_C)
        monkeypatch.setenv("KVFLASH_LLAMA_SDIST", str(self.sdist))

    def pin(self, sdist: Path) -> None:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        lock = f"llama-cpp-python==1.2 --hash=sha256:{digest}\n"
        (self.tree.parent / "llama.cpp.lock").write_text(lock)

    def patch(self, name: str, text: str) -> Path:
        path = self.patches / name
        path.write_text(text)
        return path

    def fill(self) -> str:
        return str(vendor.fill(self.layout))

    def read(self, name: str) -> str:
        return (self.tree / name).read_text()

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.read(name)
        assert old in text
        (self.tree / name).write_text(text.replace(old, new))

    def state(self) -> dict[str, tuple[bytes, int]]:
        """Every file of the tree, with its time."""
        files = sorted(path for path in self.tree.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    def age(self) -> None:
        """Give every file of the tree an old time."""
        for path in self.tree.rglob("*"):
            os.utime(path, ns=(10**18, 10**18))

    def mtime(self, name: str) -> int:
        return (self.tree / name).stat().st_mtime_ns

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.tree.parent / "vendor.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def staging(self) -> list[Path]:
        return list(self.tree.parent.glob(".llama.cpp.staging-*"))


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path, monkeypatch)


def refused(capsys: pytest.CaptureFixture[str], repo: Repository, command: str = "fill") -> str:
    """The sentence with which main() refuses the command; nothing may be left behind."""
    before = repo.state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vendor, "__file__", str(repo.root / "vendor" / "vendor.py"))
        assert vendor.main([command]) == 1
    assert repo.state() == before
    assert repo.staging() == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vendor: error: ")
    assert captured.err.count("\n") == 1
    return captured.err
