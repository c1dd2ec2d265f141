"""A warm turn against a cold one: time to the first token, and what a restore takes beside a plain read of the file, one run.

python bench/warm.py --context 65536 --pool 1024                                        the bundled needle-7m
python bench/warm.py --model SmolLM2-135M-Instruct.Q4_1.gguf --context 8000 --pool 1024
python bench/warm.py --shape 8b --context 131072 --pool 4096 -ub 2048 -ct q8_0          random weights: about time
"""

import argparse
import os
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.shapes import shape_file
from pyllama_kvflash.bench.steps import hardware
from pyllama_kvflash.needle import BUNDLED_MODEL

SUFFIX = 24  # tokens of the next turn


def first_token(kv: KVFlash, tokens: Any, *, append: bool) -> tuple[float, list[int]]:
    """Seconds to the first token of a greedy answer, and its tokens. By tokens alone: the shapes have no tokenizer."""
    if not append:
        kv.clear()
    begin = time.perf_counter()
    for _ in kv.prefill(tokens):
        pass
    ids = [int(kv.ctx.checked_logits().argmax())]
    took = time.perf_counter() - begin
    for _ in range(15):
        kv.decode(ids[-1:])
        ids.append(int(kv.ctx.checked_logits().argmax()))
    return took, ids


def uncached(path: Path) -> None:
    """Have the system forget what it keeps of a file in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> float:
    """Seconds that reading a file takes."""
    buffer, begin = bytearray(16 << 20), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def held() -> dict[str, float]:
    """MiB of this process that no file has, and those that are pages of files."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0]: int(row[1]) / 1024 for row in rows if row[0] in {"RssAnon:", "RssFile:"}}


def main() -> None:
    """A row for a file on disk and one for a file in memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--shape-dir", type=Path, default=None)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-ct", default="f16")
    parser.add_argument("--policy", default="qk")
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"n_ctx": args.context + 512, "pool": args.pool, "n_ubatch": args.ub, "snapshots": True}
    options |= {"type_k": args.ct, "type_v": args.ct, "policy": args.policy, "share": 0}
    with ExitStack() as stack:
        path = stack.enter_context(shape_file(args.shape, args.shape_dir)) if args.shape else args.model
        file = Path(stack.enter_context(TemporaryDirectory(dir=args.folder))) / "turn.kvsnap"
        with KVFlash.from_file(path, **options) as kv:
            prompt = rng.integers(0, kv.model.n_vocab - 8, args.context, dtype=np.int32)
            more = rng.integers(0, kv.model.n_vocab - 8, SUFFIX, dtype=np.int32)
            for _ in kv.prefill(prompt):
                pass
            begin = time.perf_counter()
            size = kv.save(file)
            saved = time.perf_counter() - begin
            _, want = first_token(kv, more, append=True)
            whole = kv.tokens[: args.context]
            cold, _ = first_token(kv, np.concatenate([whole, more]), append=False)
        uncached(file)
        plain = read(file)
        rows = []
        for where in ("disk", "memory"):
            if where == "disk":
                uncached(file)
            with KVFlash.from_file(path, **options) as kv:
                before, begin = held(), time.perf_counter()
                kv.restore(file)
                restored = time.perf_counter() - begin
                took, ids = first_token(kv, more, append=True)
                mib = [after - had for after, had in zip(held().values(), before.values(), strict=True)]
                rows.append((where, restored, restored + took, mib, ids == want))
    print(f"{args.context:,} tokens, pool {args.pool:,}, {args.ct}, {args.policy}; {hardware()}")
    print(f"file {size / 2**20:,.0f} MiB, saved in {saved:.2f} s; a plain read of it takes {plain:.2f} s")
    print("\n| file in | restore | first token | cold | times as fast | MiB taken | of files | same text |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for where, restored, took, (own, files), same in rows:
        print(
            f"| {where} | {restored:.3f} s | {took:.3f} s | {cold:.2f} s | {cold / took:.1f} | {own:,.0f} | {files:,.0f} |"
            f" {'yes' if same else 'no'} |"
        )


if __name__ == "__main__":
    main()
