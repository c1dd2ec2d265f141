"""Find a drafter: in a folder, or in a repository of the Hugging Face Hub."""

from pathlib import Path
from typing import NamedTuple

from pyllama_kvflash import hub
from pyllama_kvflash.errors import UsageError

_HUB = "hf:"
_FILES = ["config.json", "README.md", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]


class Source(NamedTuple):
    """A folder on this machine, and the drafter's name."""

    folder: Path
    name: str

    @property
    def files(self) -> list[Path]:
        """The files of the folder that may be read."""
        return sorted(path for pattern in _FILES for path in self.folder.glob(pattern))


def find_source(text: str) -> Source:
    """Return the source that `text` names: a folder, or hf:owner/repo[@revision], which is downloaded into the Hub's cache.

    Raises UsageError and ModelError.
    """
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
        msg = f"hf:{repo} is not a repository: give hf:owner/repo"
        raise UsageError(msg)
    return hub.snapshot(repo, revision, _FILES)
