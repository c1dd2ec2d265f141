"""What is wrong with the files of a model: read only if llama.cpp does not load it, for it names neither sizes nor parts."""

from pathlib import Path

from pyllama_kvflash.gguf_header import Header


def why_unloadable(path: Path) -> str:
    """Return what is wrong with a model's files, and what to do; "" if nothing is, or this cannot be told."""
    size = 0
    try:
        size = path.stat().st_size
        need = Header.read(path).needed()
    except EOFError:
        return f"its header ends beyond its {size:,} bytes, so it is incomplete or damaged: download it again"
    except (OSError, ValueError):
        return ""
    return f"it is incomplete, with {size:,} of {need:,} bytes: download it again" if size < need else ""
