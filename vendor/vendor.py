"""Keep vendor/llama.cpp equal to the pinned llama.cpp source plus patches/*.patch.

The source comes from the llama-cpp-python sdist that vendor/llama.cpp.lock pins by hash.
`fill` makes the tree, `check` proves that it is right, `patches` writes edits back into the patches.
"""

import argparse
import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

KEPT = ("ggml", "src", "include", "common", "cmake", "vendor", "licenses", "LICENSE", "CMakeLists.txt")
SDIST_VARIABLE = "KVFLASH_LLAMA_SDIST"
STAMP_NAME = ".kvflash-vendor.json"


class VendorError(Exception):
    """A problem that the user has to fix; the message is one sentence."""


@dataclass(frozen=True)
class Layout:
    """The paths of the repository, below its root (an absolute path)."""

    root: Path

    @property
    def vendor(self) -> Path:
        return self.root / "vendor"

    @property
    def lock(self) -> Path:
        return self.vendor / "llama.cpp.lock"

    @property
    def tree(self) -> Path:
        return self.vendor / "llama.cpp"

    @property
    def patches(self) -> Path:
        return self.root / "patches"


@dataclass(frozen=True)
class Pin:
    """The single requirement that the lock holds."""

    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    @classmethod
    def read(cls, layout: Layout) -> "Pin":
        """Read the lock. Raises VendorError unless it is exactly one pinned and hashed requirement."""
        line = layout.lock.read_text("utf-8", "replace").strip()
        match = re.fullmatch(r"([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})", line)
        if not match:
            raise VendorError(f"{layout.lock} is not one line `name==version --hash=sha256:<64 hex digits>`")
        return cls(*match.groups())


@dataclass(frozen=True)
class Patch:
    """A patch file: free text (the header), then a plain unified diff of upstream files."""

    name: str
    header: bytes
    diff: bytes

    @property
    def digest(self) -> str:
        """The digest of what is applied, without the header."""
        return _digest(self.diff)

    def claims(self) -> set[str]:
        """Return the files that the header's `Files:` lines name."""
        lines = re.findall(rb"^(?:# ?)?Files:(.*)$", self.header, re.MULTILINE)
        return {name.decode("utf-8", "replace") for line in lines for name in line.split()}

    def files(self) -> set[str]:
        """Return the files that it claims or changes. Raises VendorError if it is malformed."""
        names = self.claims()
        if self.diff:
            names |= {item.source[2:].decode() for item in _parse(self.name, self.diff)}
        if not names:
            raise VendorError(f"patches/{self.name} holds neither a `--- a/...` diff nor a `Files:` line")
        return names

    @classmethod
    def read_all(cls, layout: Layout) -> list["Patch"]:
        """Read all patches, in the order in which they apply."""
        patches = []
        for path in sorted(layout.patches.glob("*.patch")):
            text = path.read_bytes()
            start = re.search(rb"^--- a/", text, re.MULTILINE)
            end = start.start() if start else len(text)
            patches.append(cls(path.name, text[:end], text[end:]))
        return patches


@dataclass(frozen=True)
class Stamp:
    """The pin and patches that the tree was made from, and the digest that each file had then."""

    pin: str
    patches: dict[str, str]
    files: dict[str, str]

    @classmethod
    def read(cls, layout: Layout) -> "Stamp":
        """Read it from the tree. Raises VendorError if `fill` did not finish the tree."""
        if not os.path.lexists(layout.tree):
            raise VendorError(f"{layout.tree} does not exist: run `make vendor`")
        try:
            stamp = cls(**json.loads((layout.tree / STAMP_NAME).read_bytes()))
            missing = [name for name in stamp.files if not (layout.tree / name).is_file()]
        except (OSError, ValueError, TypeError):
            missing = [f"a valid {STAMP_NAME}"]
        if missing:
            raise VendorError(f"{layout.tree} lacks {_list(missing)}: delete it and run `make vendor`")
        return stamp

    def write(self, tree: Path) -> None:
        _write(tree / STAMP_NAME, json.dumps(asdict(self), indent=0).encode())


def fill(layout: Layout) -> str:
    """Make the tree the pinned source plus the patches, unless it is. Returns what was done, in one line.

    The old tree is replaced only at the very end. Raises VendorError, or OSError for disk errors.
    """
    with _alone(layout) as staging:
        pin, patches = Pin.read(layout), Patch.read_all(layout)
        digests = {patch.name: patch.digest for patch in patches}
        stamp = Stamp.read(layout) if os.path.lexists(layout.tree) else None
        if stamp and (stamp.pin, stamp.patches) == (pin.sha256, digests):
            return f"{layout.tree} is up to date"
        new, old = staging / "new", staging / "old"
        _build(layout, pin, patches, new)
        files = _digests(new)
        present = _digests(layout.tree) if stamp else {}
        # Only now, so that an edit that was saved meanwhile is seen too.
        if stamp and (edited := _differing(present, stamp.files)):
            raise VendorError(
                f"{layout.tree} has local edits ({_list(edited)}): "
                f"`make patches` keeps them, deleting {layout.tree} drops them"
            )
        # Build tools compare times: a file that stays the same must not look new, and one that changes must.
        now = time.time_ns()
        for name, digest in files.items():
            same = present.get(name) == digest
            os.utime(new / name, ns=(now, (layout.tree / name).stat().st_mtime_ns if same else now))
        Stamp(pin.sha256, digests, files).write(new)
        if stamp:
            layout.tree.rename(old)
        try:
            new.rename(layout.tree)
        except BaseException:
            if stamp:
                old.rename(layout.tree)
            raise
    return f"{layout.tree} is now {pin.name} {pin.version} + {len(patches)} patches"


def check(layout: Layout) -> str:
    """Compare the tree with a fresh copy of the pinned source plus the patches. Returns one line.

    Raises VendorError if a patch does not apply, or a file differs, is missing or is not expected.
    """
    with _alone(layout) as staging:
        Stamp.read(layout)
        pin, patches = Pin.read(layout), Patch.read_all(layout)
        _build(layout, pin, patches, staging / "new")
        if differing := _differing(_digests(layout.tree), _digests(staging / "new")):
            raise VendorError(f"{layout.tree} differs from the pin + patches in {_list(differing, 50)}")
    return f"{layout.tree} equals {pin.name} {pin.version} + {len(patches)} patches"


def regenerate(layout: Layout) -> str:
    """Rewrite the diffs in the patches from the tree, and keep their headers. Returns one line.

    Raises VendorError, with no patch touched, if a file that differs from upstream is in no patch or in two, or if no
    patch can express an edit.
    """
    with _alone(layout) as staging:
        pin, patches, stamp = Pin.read(layout), Patch.read_all(layout), Stamp.read(layout)
        if stamp.pin != pin.sha256:
            raise VendorError(f"{layout.tree} is from another pin: put that back into {layout.lock} first")
        owners = _owners(patches)
        pristine = staging / "new"
        _build(layout, pin, [], pristine)
        upstream, present = _digests(pristine), _digests(layout.tree)
        if extra := sorted(present.keys() - upstream.keys()):
            raise VendorError(f"patches cannot add files: move {_list(extra)} out of {layout.tree}")
        if unknown := sorted(owners.keys() - upstream.keys()):
            raise VendorError(f"patches/{owners[unknown[0]]} names {unknown[0]}, which is not upstream's")
        if unowned := [name for name in _differing(present, upstream) if name not in owners]:
            raise VendorError(
                f"no patch names {_list(unowned, 50)}: create patches/NNNN-name.patch whose header has "
                f"the line `Files: {' '.join(unowned[:50])}`, then run `make patches` again"
            )
        rewritten = [_rewritten(patch, layout.tree, pristine) for patch in patches]
        changes = [(old, new) for old, new in zip(patches, rewritten, strict=True) if old != new]
        for old, new in changes:
            # The tree wins, but a change that came with `git pull` must not vanish unnoticed.
            if old.diff and old.digest not in stamp.patches.values():
                lost = f"patches/{old.name} had changes that the tree lacks, see `git diff`"
                print(f"vendor: note: {lost}", file=sys.stderr)
            _write(layout.patches / new.name, new.header + new.diff)
        Stamp(pin.sha256, {patch.name: patch.digest for patch in rewritten}, present).write(layout.tree)
    return f"{len(changes)} of {len(patches)} patches rewritten"


def _rewritten(patch: Patch, tree: Path, pristine: Path) -> Patch:
    """Return the patch with the diff between `pristine` and `tree`, and prove it by applying it to `pristine`."""
    diff = b""
    for name in sorted(patch.files()):
        old, new = (io.BytesIO((top / name).read_bytes()).readlines() for top in (pristine, tree))
        path = name.encode()
        # One line of context: a patch carries as little of upstream's text as possible.
        part = b"".join(difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + path, b"b/" + path, n=1))
        if part:
            with contextlib.suppress(VendorError):  # the comparison below reports it
                _apply(patch.name, part, pristine)
        if (pristine / name).read_bytes() != (tree / name).read_bytes():
            raise VendorError(f"no patch can say the edits in {name}: do its lines end in plain newlines?")
        diff += part
    if not diff and not patch.claims():
        raise VendorError(f"patches/{patch.name} would be empty, as its files equal upstream's: delete it")
    glue = b"" if patch.header.endswith(b"\n") or not (patch.header and diff) else b"\n"
    return Patch(patch.name, patch.header + glue, diff)


def _owners(patches: list[Patch]) -> dict[str, str]:
    """Return which patch has which file. Raises VendorError if two patches have the same one."""
    owners: dict[str, str] = {}
    for patch in patches:
        for name in sorted(patch.files()):
            if name in owners:
                raise VendorError(f"patches/{owners[name]} and patches/{patch.name} both have {name}")
            owners[name] = patch.name
    return owners


class _Collector(logging.Handler):
    """Keeps what patch_ng logs, because it reports errors in no other way."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"b(['\"])(.*?)\1", r"\2", record.getMessage())
        self.messages.append(" ".join(text.split()))


def _patch_ng(name: str, problem: str, action: Callable[[Any], Any]) -> Any:
    """Call `action` with patch_ng, and turn a false result, a warning or a crash into a VendorError."""
    try:
        import patch_ng  # type: ignore[import-untyped]
    except ImportError:
        raise VendorError(f"patch-ng is missing: run `{sys.executable} -m pip install patch-ng`") from None
    logger, collector, result = logging.getLogger("patch_ng"), _Collector(), None
    logger.propagate = False
    logger.addHandler(collector)
    try:
        result = action(patch_ng)
    except (LookupError, TypeError, ValueError) as error:  # hunks out of order, for one
        collector.messages.append(repr(error))
    finally:
        logger.removeHandler(collector)
    # Warnings count whatever the result: if "already patched", apply() changes nothing and returns True.
    if not result or collector.messages:
        raise VendorError(f"patches/{name} {problem}: {', '.join(collector.messages[:2])}")
    return result


def _parse(name: str, diff: bytes) -> Any:
    patch_set = _patch_ng(name, "is malformed", lambda patch_ng: patch_ng.fromstring(diff))
    # patch_ng skips text between and after hunks, and with it the end of a hunk whose line counts are too small.
    if patch_set.warnings or any(item.header for item in patch_set):
        raise VendorError(f"patches/{name} is malformed: its diff has lines that belong to no hunk")
    for item in patch_set:
        if item.source[:2] != b"a/" or item.target != b"b/" + item.source[2:]:
            raise VendorError(f"patches/{name} does more than change files: see {item.target.decode()}")
    return patch_set


def _apply(name: str, diff: bytes, tree: Path) -> None:
    """Apply a diff exactly: patch_ng never accepts an offset, and fuzz only when told to."""
    patch_set = _parse(name, diff)
    with contextlib.chdir(tree):
        _patch_ng(name, "does not apply", lambda _: patch_set.apply(strip=1))


def _build(layout: Layout, pin: Pin, patches: list[Patch], target: Path) -> None:
    """Unpack the pinned source into `target` and apply the patches."""
    _owners(patches)
    sdist = _sdist(layout, pin)
    prefix = f"{pin.stem}/vendor/llama.cpp/"
    if not hasattr(tarfile, "data_filter"):
        raise VendorError("this Python's tarfile has no extraction filters: use Python 3.11.4 or newer")

    def keep(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        name = member.name.removeprefix(prefix)
        if name == member.name or not member.isreg() or name.split("/")[0] not in KEPT:
            return None
        return tarfile.data_filter(member.replace(name=name, deep=False), path)

    target.mkdir()
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(target, filter=keep)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise VendorError(f"{sdist} is not a readable tar file: {reason}") from None
    if not any(target.iterdir()):
        raise VendorError(f"{sdist} has no llama.cpp source in {prefix}")
    for patch in patches:
        if patch.diff:
            _apply(patch.name, patch.diff, target)


def _sdist(layout: Layout, pin: Pin) -> Path:
    """Return the verified sdist: the file that the environment names, else the cached one, else a download."""
    if named := os.environ.get(SDIST_VARIABLE):
        path, origin, remedy = Path(named).absolute(), f"{SDIST_VARIABLE}={named}", "name the right file"
    else:
        path = layout.vendor / "cache" / f"{pin.stem}.tar.gz"
        origin, remedy = str(path), "delete it to download it again"
        if not path.exists():
            _download(layout, pin, path)
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise VendorError(f"{origin} cannot be read: {error.strerror}") from None
    if actual != pin.sha256:
        raise VendorError(f"{origin} has the wrong sha256 (expected {pin.sha256}, actual {actual}): {remedy}")
    return path


def _download(layout: Layout, pin: Pin, path: Path) -> None:
    offline = f"or name a downloaded sdist in {SDIST_VARIABLE}"
    # Even to download only, pip asks the sdist's build backend for metadata, here without isolation.
    for module, fix in (("pip", "ensurepip"), ("scikit_build_core", "pip install scikit-build-core")):
        if importlib.util.find_spec(module) is None:
            need = f"downloading {pin.name} needs {module}, which is missing"
            raise VendorError(f"{need}: run `{sys.executable} -m {fix}`, {offline}")
    print(f"downloading {pin.name} {pin.version} (77 MB) ...", file=sys.stderr, flush=True)
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        command = [sys.executable, "-m", "pip", "download", "-r", str(layout.lock), "-d", directory]
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
        # `python -m` imports from the working directory first: let it be an empty one. And when this runs
        # inside a build of our own, the nested build must not look for its backend where ours is.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("_PYPROJECT_HOOKS_")}
        pip = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        files = list(Path(directory).iterdir())
        if pip.returncode or len(files) != 1:
            errors = re.findall(r"(?im)^error: *(.*)", pip.stderr)
            reason = errors[-1] if errors else f"pip exited with {pip.returncode}"
            raise VendorError(f"pip could not download {pin.name} ({reason}): check the network, {offline}")
        files[0].replace(path)


@contextlib.contextmanager
def _alone(layout: Layout) -> Iterator[Path]:
    """Keep other runs on this repository waiting. Yields a directory beside the tree, which is removed at the end."""
    with (layout.vendor / ".lock").open("w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        for stale in layout.vendor.glob(".llama.cpp.staging-*"):  # from killed runs, because the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        staging = layout.vendor / f".llama.cpp.staging-{os.getpid()}"
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or, when the disk is full, not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digests(tree: Path) -> dict[str, str]:
    """Return the digest of every file in the tree but the stamp, by name."""
    files = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*") if path.is_file()}
    files.pop(STAMP_NAME, None)
    return {name: _digest(path.read_bytes()) for name, path in files.items()}


def _differing(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _list(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def main(arguments: list[str] | None = None) -> int:
    """Run one command on the repository that holds this script. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Keep vendor/llama.cpp equal to the pinned source + patches.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, function, text in (
        ("fill", fill, "make vendor/llama.cpp the pinned source + patches (nothing to do if it is)"),
        ("check", check, "make it afresh elsewhere and compare the two"),
        ("patches", regenerate, "rewrite patches/*.patch from the edits in vendor/llama.cpp"),
    ):
        commands.add_parser(name, help=text, description=text).set_defaults(function=function)
    function = parser.parse_args(arguments).function
    try:
        print(f"vendor: {function(Layout(Path(__file__).resolve().parent.parent))}")
    except (VendorError, OSError) as error:
        print(f"vendor: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
