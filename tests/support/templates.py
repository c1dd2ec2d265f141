"""The bundled model with a chat template of its own."""

from pathlib import Path

import gguf

from pyllama_kvflash.needle import BUNDLED_MODEL


def with_template(path: Path, template: str) -> Path:
    """The bundled model with a chat template."""
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    writer = gguf.GGUFWriter(path, "qwen3")
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
