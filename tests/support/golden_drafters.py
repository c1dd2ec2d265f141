"""Write tests/data/drafters.json: what upstream's converter makes of the synthetic drafters. Run by hand at a new pin.

    tar xzf vendor/cache/llama_cpp_python-*.tar.gz -C /tmp/sdist --strip-components=1
    /tmp/venv/bin/pip install torch transformers sentencepiece       (not needed for anything else here)
    PYTHONPATH=tests /tmp/venv/bin/python -m support.golden_drafters /tmp/sdist/vendor/llama.cpp

The one thing changed in upstream's converter is the name of the pre-tokenizer: it knows those of real models alone.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from support import drafters

GOLDEN = Path(__file__).parent.parent / "data" / "drafters.json"
RUNS = [
    *((name, "auto") for name in drafters.DRAFTERS),
    ("dense", "q8_0"),
    ("gemma", "q8_0"),
    ("gemma", "bf16"),
    ("swa", "f32"),
]

CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import conversion
conversion.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def describe(reader: Any) -> dict[str, Any]:
    """Metadata with types, and tensors with type, shape and a digest. Long values are digests, too."""
    keys = {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            long = isinstance(value, list) and len(value) > 16
            keys[key] = [[kind.name for kind in field.types], digest(json.dumps(value).encode()) if long else value]
    tensors = {
        t.name: [t.tensor_type.name, [int(n) for n in t.shape], digest(np.ascontiguousarray(t.data).tobytes())]
        for t in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def main(upstream: Path) -> None:
    sys.path.insert(0, str(upstream / "gguf-py"))
    import gguf  # noqa: PLC0415 (upstream's)

    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for mrope in (False, True):
            drafters.write_target_folder(folder / f"target-{mrope}", mrope=mrope)
        for name, outtype in RUNS:
            source, out = folder / f"drafter-{name}", folder / f"{name}-{outtype}.gguf"
            drafters.write_drafter(name, source)
            target = folder / f"target-{name in drafters.MROPE}"
            command = [source, "--target-model-dir", target, "--outfile", out, "--outtype", outtype]
            subprocess.run([sys.executable, "-c", CONVERT, upstream, *command], check=True)
            golden[f"{name} {outtype}"] = describe(gguf.GGUFReader(out))
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(run)}: {json.dumps(value)}" for run, value in golden.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
