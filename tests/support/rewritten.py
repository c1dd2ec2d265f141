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
    copy_metadata(reader, writer, replaced)
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


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, replaced: Mapping[str, Any] = NONE) -> None:
    """All keys of a file, but its architecture, which the writer has. replaced: values in place of the file's."""
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, replaced.get(field.name, field.contents()), field.types[0], sub)


def with_template(path: Path, template: str) -> Path:
    """The bundled model with a chat template."""
    return rewritten(path, template=template)
