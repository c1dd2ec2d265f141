"""A warm turn beside a cold one: is it the same text? From a snapshot, as another process would restore it.

python bench/turns.py MODEL TEXT --context 4096 --shares 0.0625 0.125 --tokens 64 --prompts 2

Cold: a prompt of two parts is read at once. Warm: the first part is read and saved, restored in another engine, and the second part
is read after it. Where the texts part, the row says by how much the logits differ there; and by how much the full cache's own differ
at the prompt's end, read in the same two ways: no more means that it is the cut of the batches.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.steps import hardware


def greedy(kv: KVFlash, n: int) -> tuple[list[int], list[Any]]:
    """Return n tokens of an answer, each decoded by itself, and the logits that each was chosen by."""
    rows = [kv.logits()]
    for _ in range(n - 1):
        kv.decode(np.array([rows[-1].argmax()], np.int32))
        rows.append(kv.logits())
    return [int(row.argmax()) for row in rows], rows


def read(kv: KVFlash, *parts: Any) -> KVFlash:
    """Read the parts as one prompt after the other."""
    for part in parts:
        for _ in kv.prefill(part):
            pass
    return kv


def main() -> None:
    """Print a row for each prompt and pool, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0625, 0.125])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("-fa", dest="flash_attn", default="auto")
    args = parser.parse_args()
    print(f"{hardware()}\n\n{args.model.name}, context {args.context:,}, -fa {args.flash_attn}\n")
    print("| text | pool | same tokens | apart | by the cut, full cache |\n|---|---:|---:|---:|---:|")
    options: dict[str, Any] = {"n_ctx": args.context, "flash_attn": args.flash_attn, "share": 0, "snapshots": True}
    data = args.text.read_text(errors="replace")
    with TemporaryDirectory() as folder:
        for i in range(args.prompts):
            with KVFlash.from_file(args.model, **{**options, "snapshots": False}, pool="off") as full:
                tokens = full.tokenize(data[len(data) * i // args.prompts :][: args.context * 8])
                tokens = tokens[: args.context - args.tokens - 16]
                first, second = np.split(tokens, [len(tokens) * 7 // 8 + 5])
                cold_row = read(full, tokens).logits()
                full.clear()
                cut = float(np.abs(cold_row - read(full, first, second).logits()).max())
            for share in args.shares:
                pool, path = round(share * args.context), Path(folder) / "turn.kvsnap"
                shape = {"pool": pool, "chunk": 64 if pool >= 1024 else 32 if pool >= 512 else 16}
                with KVFlash.from_file(args.model, **options, **shape) as kv:
                    want = greedy(read(kv, tokens), args.tokens)
                    kv.clear()
                    read(kv, first).save(path)
                with KVFlash.from_file(args.model, **options, **shape) as kv:
                    kv.restore(path)
                    got = greedy(read(kv, second), args.tokens)
                pairs = zip(want[0], got[0], strict=True)
                n = next((k for k, (a, b) in enumerate(pairs) if a != b), args.tokens)
                at = min(n, args.tokens - 1)
                apart = float(np.abs(want[1][at] - got[1][at]).max())
                print(
                    f"| {args.text.stem} {i} | {pool:,} | {n} of {args.tokens} | {apart:.3f} | {cut:.3f} |", flush=True
                )


if __name__ == "__main__":
    main()
