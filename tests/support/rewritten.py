"""The bundled model with other metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from pyllama_kvflash.needle import BUNDLED_MODEL

NONE: Mapping[str, Any] = {}


def rewritten(
    path: Path, replaced: Mapping[str, Any] = NONE, template: str = "", tokens: Mapping[str, int] = NONE
) -> Path:
    """Write it, with other values of some keys, a chat template, and further tokens by their keys."""
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, replaced.get(field.name, field.contents()), kind, sub)
    if template:
        writer.add_chat_template(template)
    for key, token in tokens.items():
        writer.add_uint32(key, token)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_template(path: Path, template: str) -> Path:
    """The bundled model with a chat template."""
    return rewritten(path, template=template)
