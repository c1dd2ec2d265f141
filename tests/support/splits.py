"""Models split into several files, as llama.cpp's gguf-split does it."""

from pathlib import Path

import gguf

from support.rewritten import copy_metadata


def split(source: Path, prefix: Path, n: int, *, empty_first: bool = False) -> list[Path]:
    """Write the parts of a model, PREFIX-00001-of-0000N.gguf and so on. empty_first: all tensors are in the others."""
    reader = gguf.GGUFReader(source)
    tensors = reader.tensors
    size = -(-len(tensors) // (n - empty_first))
    res = []
    for i in range(n):
        res.append(prefix.with_name(f"{prefix.name}-{i + 1:05}-of-{n:05}.gguf"))
        writer = gguf.GGUFWriter(res[-1], reader.fields["general.architecture"].contents())
        if i == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(tensors))
        at = max(0, (i - empty_first) * size)
        for tensor in [] if empty_first and i == 0 else tensors[at : at + size]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return res


def change(path: Path, name: str, at: int = 0) -> None:
    """Change a byte of a tensor: of which name, and which byte of it."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + at)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))
