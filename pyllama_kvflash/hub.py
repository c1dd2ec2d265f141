"""Models of the Hugging Face Hub: parse their names, choose a repository's model file, and translate the Hub's errors.

Downloaded files are in the Hub's own cache. huggingface_hub is imported only when it is needed.
"""

import errno
import io
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from pyllama_kvflash.errors import KVFlashError, ModelError, UsageError
from pyllama_kvflash.gguf_header import SPLIT, Header, parts

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # llama.cpp's

Progress = Callable[[str, int, int | None], None]  # called with a file's name, bytes done, bytes in all
Note = Callable[[str], None]

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^@:]+))?(?::([\w.-]+))?", re.ASCII)
_NO_MODEL = re.compile(r"(?i:mmproj|imatrix)|(?:mtp|eagle3|dflash|dspark)-")  # as in llama.cpp
_TAG = re.compile(
    r"(?<![^\W_])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?(?:16|32)|(?:MX|NV)FP4\w*))(?=[-./]|$)", re.IGNORECASE
)
_HEADER = 8 << 20  # bytes of a file that are requested first: most headers are shorter
_COMMIT = re.compile(r"[0-9a-f]{40}")

_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectionError",  # from requests, and from the system
    "Timeout",
    "TimeoutError",
    "ConnectError",  # from httpx
    "NetworkError",
    "ProxyError",
    "RemoteProtocolError",
    "TimeoutException",
}


class Wanted(NamedTuple):
    """A model on the Hub: a repository, a revision (None: main), and a file or a quantisation.

    offline: take the file from the cache only.
    """

    repo: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None
    offline: bool = False

    @classmethod
    def parse(cls, text: str, file: str | None = None, *, offline: bool = False) -> "Wanted":
        """Parse user/model, user/model:quant or user/model@revision:quant; a file takes precedence over a quant.

        Raises UsageError.
        """
        match = _NAME.fullmatch(text)
        if not match:
            msg = (
                f"-hf {text} is not a model of the Hub: give user/model, user/model:quant or user/model@revision:quant"
            )
            raise UsageError(msg)
        return cls(match[1], match[2], match[3], file, offline)

    def __str__(self) -> str:
        at, colon = (f"@{self.revision}" if self.revision else ""), (f":{self.quant}" if self.quant else "")
        return f"{self.repo}{at}{colon}"

    @property
    def name(self) -> str:
        """The repository and its revision, for messages."""
        return "hf:" + str(self._replace(quant=None))


#
# which file
#


def models(names: Iterable[str]) -> list[str]:
    """Return the files that can be the model, sorted: no projector, imatrix or draft head, and of a split model only the first part."""
    res = []
    for name in sorted(names):
        split = SPLIT.fullmatch(name)
        if name.endswith(".gguf") and not _NO_MODEL.search(_base(name)) and (not split or int(split[2]) == 1):
            res.append(name)
    return res


def tag(name: str) -> str:
    """Return the quantisation in a file's name, in capitals: the last one there, else the last in its folder's name, else ""."""
    stem = _stem(name)
    found = _TAG.findall(_base(stem)) or _TAG.findall(stem)
    return str(found[-1]).upper() if found else ""


def choose(names: Iterable[str], quant: str | None = None) -> str | None:
    """Return the model among a repository's files; None if none has the quantisation.

    Without `quant`, the model is a Q4_K_M, else a Q8_0, else the first file. Of several matches, those whose tag() is
    exactly the wanted quantisation come first, then those in a single file, then the shortest name.
    """
    files = models(names)
    for wanted in [quant.upper()] if quant else DEFAULT_QUANTS:
        word = re.compile(rf"(?:^|[-./]){re.escape(wanted)}(?=[-./]|$)")
        fitting = [n for n in files if wanted == tag(n) or word.search(_stem(n).upper())]
        if fitting:
            return min(fitting, key=lambda n: (tag(n) != wanted, bool(SPLIT.fullmatch(n)), len(n), n))
    return files[0] if files and not quant else None


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return split[1] if split else name.removesuffix(".gguf")


#
# download
#


def fetch(wanted: Wanted, progress: Progress | None = None, note: Note = lambda _: None) -> Path:
    """Return the file of a model (the first part of a split one), downloaded into the Hub's cache unless it is there.

    If the download fails, a cached file is taken, with a note. Raises UsageError and ModelError.
    """
    hub = library()
    if wanted.offline or _constants().HF_HUB_OFFLINE:
        return _offline(wanted, note)
    try:
        with _tamed(note):
            return _download(hub, wanted, progress, note)
    except KVFlashError:
        raise
    except Exception as err:  # noqa: BLE001 (from the library, its HTTP client, and the system)
        return _instead(wanted, err, note)


def outline(wanted: Wanted, folder: Path, note: Note = lambda _: None) -> Path:
    """Return a file with a model's header, and a hole in place of the tensors. The file can be opened with no_alloc.

    A model that was downloaded before is returned instead. folder: where the file, or each part of a split model, is written.
    Raises UsageError and ModelError.
    """
    hub = library()
    if wanted.offline or _constants().HF_HUB_OFFLINE:
        return _offline(wanted, note)
    try:
        with _tamed(note):
            names = _chosen(hub, wanted, note)
            if (there := _cached(wanted)) is not None and there.as_posix().endswith(f"/{names[0]}"):
                return there
            for name in names:
                _write_header(hub, hub.hf_hub_url(wanted.repo, name, revision=wanted.revision), folder / _base(name))
    except KVFlashError:
        raise
    except Exception as err:  # noqa: BLE001 (as in fetch)
        return _instead(wanted, err, note)
    return folder / _base(names[0])


def _write_header(hub: Any, url: str, path: Path) -> None:
    """Download the header of a file on the Hub, in requests of growing size until it is complete, and extend `path` to the full size."""
    found = hub.get_hf_file_metadata(url)
    size, n = int(found.size), _HEADER
    while True:
        given = {**hub.utils.build_hf_headers(), "Range": f"bytes=0-{min(n, size) - 1}"}
        answer = hub.utils.get_session().get(found.location, headers=given)
        answer.raise_for_status()
        path.write_bytes(answer.content[:n])
        try:
            Header.read(path)
            break
        except EOFError:
            if n >= size:  # the file itself ends too early: opening it reports that
                return
        except ValueError:
            return
        n *= 2
    os.truncate(path, size)


def snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """Download a repository's files that match the patterns, and return their folder. Raises UsageError and ModelError."""
    hub = library()
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as err:  # noqa: BLE001 (as in fetch)
        raise translated(f"hf:{repo}", err, "a folder") from None


def library() -> Any:
    """Return huggingface_hub, which takes a while to import."""
    return import_module("huggingface_hub")


def _constants() -> Any:
    return import_module("huggingface_hub.constants")


def _download(hub: Any, wanted: Wanted, progress: Progress | None, note: Note) -> Path:
    first, *others = _chosen(hub, wanted, note)
    path = Path(_get(hub, wanted.repo, first, wanted.revision, progress))
    # the branch may move during a long download: take all parts from the first one's commit
    commit = path.parents[first.count("/")].name
    for name in others:
        _get(hub, wanted.repo, name, commit, progress)
    return path


def _get(hub: Any, repo: str, name: str, revision: str | None, progress: Progress | None) -> str:
    if progress is None:
        hub.utils.disable_progress_bars()
    takes_bar = "tqdm_class" in signature(hub.hf_hub_download).parameters  # an old version shows its own bar
    bar = {"tqdm_class": _bar(partial(progress, _base(name)))} if progress and takes_bar else {}
    return str(hub.hf_hub_download(repo, name, revision=revision, **bar))


def _offline(wanted: Wanted, note: Note) -> Path:
    path = _cached(wanted)
    if path is None:
        why = "`offline`" if wanted.offline else "HF_HUB_OFFLINE"
        what = wanted.file or wanted.quant or "a model"
        msg = f"{wanted.name}: {what} is not in the cache, and nothing is downloaded: run it once without {why}"
        raise ModelError(msg)
    note(f"{wanted.name}: offline; using {path.name} from the cache")
    return path


def _instead(wanted: Wanted, err: Exception, note: Note) -> Path:
    """After an error of the Hub, return the cached file, with a note.

    Raises the translated error if nothing is cached, or if the request itself was wrong.
    """
    kinds = _kinds(err)
    problem = translated(wanted.name, err, "a file")
    path = None if kinds & {"RevisionNotFoundError", "HFValidationError"} else _cached(wanted)
    if path is None:
        raise problem from None
    why = f"{wanted.name}: the Hub cannot be reached" if kinds & _UNREACHABLE else problem
    note(f"{why}; using {path.name} from the cache")
    return path


def _chosen(hub: Any, wanted: Wanted, note: Note) -> list[str]:
    """Return the names of the model's parts in the repository. Raises UsageError, and the library's own errors."""
    info = hub.HfApi().model_info(wanted.repo, revision=wanted.revision)
    names = [file.rfilename for file in info.siblings or ()]
    name = wanted.file or choose(names, wanted.quant)
    if name is None or not models(names):
        raise _none_of(wanted, names)
    missing = [part for part in parts(name) if part not in names]
    if missing:
        msg = f"{wanted.name} has no file {missing[0]}: give one of {', '.join(models(names))}"
        raise UsageError(msg)
    if not wanted.file and not wanted.quant and tag(name).removeprefix("UD-") not in DEFAULT_QUANTS:
        note(f"{wanted.name} has no {' or '.join(DEFAULT_QUANTS)}: taking its first model, {name}")
    return parts(name)


def _cached(wanted: Wanted) -> Path | None:
    """Return the model's file if all parts were downloaded before, else None."""
    root = Path(_constants().HF_HUB_CACHE) / f"models--{wanted.repo.replace('/', '--')}"
    revision = wanted.revision or "main"
    try:
        commit = revision if _COMMIT.fullmatch(revision) else (root / "refs" / revision).read_text().strip()
        folder = root / "snapshots" / commit
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    except (OSError, ValueError):  # there is no cache, or it cannot be read
        return None
    whole = [name for name in names if names.issuperset(parts(name))]
    name = parts(wanted.file)[0] if wanted.file else choose(whole, wanted.quant)
    return folder / name if name in whole else None


@contextmanager
def _tamed(note: Note) -> Iterator[None]:
    """Silence the library's log and its warnings, except the one about a full disk, which becomes a note."""
    import_module("huggingface_hub.utils.logging").set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message="Not enough free disk space")
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        yield


def _bar(progress: Callable[[int, int | None], None]) -> Any:
    """Return a tqdm class that shows nothing itself and reports its progress."""
    base: Any = import_module("tqdm").tqdm

    class Bar(base):  # type: ignore[misc]
        monitor_interval = 0  # start no thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> bool:
            progress(int(self.n), self.total and int(self.total))
            return True

        def update_transfer(self, n: float = 1) -> None:
            """Ignore the bytes on the wire, which Xet counts in addition to those of the file."""

    Bar.set_lock(threading.RLock())  # tqdm's default lock starts a process
    return Bar


#
# errors
#


def _none_of(wanted: Wanted, names: list[str]) -> UsageError:
    files = models(names)
    if not files:
        return UsageError(
            f"{wanted.name} has no GGUF model: take a repository with one (its name often ends in -GGUF), or convert it"
            " with llama.cpp's convert_hf_to_gguf.py"
        )
    tags = sorted({tag(name) for name in files} - {""})
    if not tags:
        return UsageError(f"{wanted.name} has no {wanted.quant}: give a file with -hff, one of {', '.join(files)}")
    return UsageError(f"{wanted.name} has no {wanted.quant}: give one of {', '.join(tags)}")


def _kinds(err: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(err).__mro__}


def translated(name: str, err: Exception, instead: str) -> KVFlashError:
    """Return an error of huggingface_hub as one of ours. instead: what the user can give in place of the repository.

    The library's classes are told apart by name, since they have moved between modules.
    """
    kinds = _kinds(err)
    if "RevisionNotFoundError" in kinds:
        return UsageError(f"{name} has no such revision: give one of its branches, tags or commits after the @")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"} and "GatedRepoError" not in kinds:
        return UsageError(f"{name} does not exist, or is private and you are not logged in (`hf auth login`)")
    if kinds & _UNREACHABLE:
        return ModelError(f"{name} is not in the cache, and the Hub cannot be reached: go online, or give {instead}")
    return ModelError(f"{name} cannot be downloaded{_reason(name, err)}")


def _reason(name: str, err: Exception) -> str:
    """Return the rest of a sentence: why an existing file cannot be downloaded or stored."""
    if "GatedRepoError" in _kinds(err):
        page = f"https://huggingface.co/{name.removeprefix('hf:').partition('@')[0]}"
        return f", because it is gated: accept its terms on {page}, and log in with `hf auth login`"
    if getattr(getattr(err, "response", None), "status_code", None) == HTTPStatus.UNAUTHORIZED:
        return ": the Hub rejects your token; log in again with `hf auth login`, or correct or unset HF_TOKEN"
    if getattr(err, "errno", None) == errno.ENOSPC or "No space left" in str(err):
        return ": no space is left for the Hub's cache; free some, or set HF_HOME to a folder on another disk"
    return ": " + next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
