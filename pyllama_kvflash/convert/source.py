"""Where a drafter lies: a folder, or a repository of the Hugging Face Hub."""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pyllama_kvflash.errors import KVFlashError, ModelError, UsageError

_HUB = "hf:"
_FILES = ["config.json", "README.md", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]


class Source(NamedTuple):
    """A folder on this machine, and what it is called."""

    folder: Path
    name: str


def find_source(text: str) -> Source:
    """A folder, or hf:owner/repo[@revision], which is downloaded into the Hub's cache. Raises UsageError and ModelError."""
    if text.startswith(_HUB):
        repo, at, revision = text.removeprefix(_HUB).partition("@")
        if at and not revision:
            msg = f"{text} names no revision: give hf:{repo}@BRANCH, a tag or a commit, or leave the @ out"
            raise UsageError(msg)
        return Source(_download(repo, revision or None), repo)
    folder = Path(text)
    try:
        if not folder.exists():
            msg = f"{text} does not exist: give the drafter's folder, or hf:owner/repo"
            raise UsageError(msg)
        if not folder.is_dir():
            msg = f"{text} is a file: give the folder that has the drafter's config.json and safetensors"
            raise UsageError(msg)
        return Source(folder, folder.resolve().name)
    except OSError as err:
        msg = f"{text} cannot be read: {err.strerror}"
        raise UsageError(msg) from None


def _download(repo: str, revision: str | None) -> Path:
    if repo.count("/") != 1 or not all(repo.split("/")):
        msg = f"hf:{repo} is no repository: give hf:owner/repo"
        raise UsageError(msg)
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        msg = "hf: needs huggingface-hub: pip install 'pyllama-kvflash[convert]', or give a folder"
        raise UsageError(msg) from None
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=_FILES))
    except Exception as err:  # noqa: BLE001 (of the library, of what carries its requests, and of the system)
        raise _translated(repo, err) from None


def _translated(repo: str, err: Exception) -> KVFlashError:
    """An error of huggingface_hub as one sentence. Its classes have moved between modules, and kept their names."""
    kinds = {kind.__name__ for kind in type(err).__mro__}
    if "GatedRepoError" in kinds:
        why = f"it is gated: accept its terms on https://huggingface.co/{repo}, and log in with `hf auth login`"
        return ModelError(f"hf:{repo} cannot be downloaded, for {why}")
    if "RevisionNotFoundError" in kinds:
        return UsageError(f"hf:{repo} has no such revision: give a branch, a tag or a commit of it after the @")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return UsageError(f"hf:{repo} does not exist, or is private and you are not logged in (`hf auth login`)")
    if kinds & {
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ConnectionError",
        "ConnectError",
        "TimeoutException",
    }:
        return ModelError(f"hf:{repo} is not in the cache, and the Hub cannot be reached: go online, or give a folder")
    reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
    return ModelError(f"hf:{repo} cannot be downloaded: {reason}")
