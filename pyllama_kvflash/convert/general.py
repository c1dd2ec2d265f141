"""A drafter's general.* keys (author, name and so on), from its name and the front matter of its README.md."""

from pathlib import Path
from typing import Any

from pyllama_kvflash.convert.source import Source


def general_keys(gguf: Any, source: Source, n_params: int) -> dict[str, tuple[Any, Any, Any]]:
    """Return the general metadata keys, as gguf's own heuristics derive them. A README.md that they cannot handle is ignored."""
    for card in (_card(gguf, source.folder), {}):
        try:
            return _keys(gguf, source.name, card, n_params)
        except Exception:  # noqa: BLE001, S112 (people write these texts; only the name is needed)
            continue
    return {"general.name": (source.name, gguf.GGUFValueType.STRING, None)}


def _card(gguf: Any, folder: Path) -> dict[str, Any]:
    """Return the texts and lists of texts in the front matter of a folder's README.md."""
    try:
        found = gguf.Metadata.load_model_card(folder)
    except Exception:  # noqa: BLE001 (YAML's errors, and those of the system)
        return {}
    return {key: value for key, value in found.items() if _is_text(value)}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _keys(gguf: Any, name: str, card: dict[str, Any], n_params: int) -> dict[str, tuple[Any, Any, Any]]:
    metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, {}, Path(name), n_params)
    metadata.name = metadata.name or Path(name).name
    metadata.size_label = metadata.size_label or gguf.size_label(n_params, n_params, 0, 0)
    writer = gguf.GGUFWriter(None, "dflash")
    metadata.set_gguf_meta_model(writer)
    found = writer.kv_data[0]
    return {key: (v.value, v.type, v.sub_type) for key, v in found.items() if key != "general.architecture"}
