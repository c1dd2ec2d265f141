"""How well attention mass is estimated from summaries, on a real model.

A text of a RULER task is read with everything resident and answered greedily. The queries of each token of the answer then
rank the chunks by their mass by all keys, and by each summary: the share of the best chunks' mass that a choice by the
estimate has, for choices of 2, 10 and 26 chunks (what is left in pools of 512, 1,024 and 2,048 tokens beside sinks and tail).

    python bench/mass.py MODEL.gguf --context 8192 --tasks multiquery,vt,multikey_2 --tokens 24
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import KVFlash
from pyllama_kvflash.bench.prompts import Prompts
from pyllama_kvflash.bench.ruler_texts import SAMPLE, make_text
from pyllama_kvflash.native import Summaries

KINDS = ("exact", "centroid:1", "centroid:2", "centroid:4", "centroid:8", "centroid:16", "runs:4", "runs:8", "mean")
ROOMS = (2, 10, 26)
TAIL = 4

Masses = npt.NDArray[np.float64]  # (n_layer, n_token, n_chunk)


def queries_of(kv: KVFlash, prompt: npt.NDArray[np.int32], n: int) -> list[list[npt.NDArray[np.float32]]]:
    """Of the prompt's last token and those of a greedy answer: for each, an array a layer."""
    for _ in kv.prefill(prompt):
        pass
    res = [list(kv.queries())]
    for _ in range(n - 1):
        kv.decode(np.array([kv.logits().argmax()], np.int32))
        res.append(list(kv.queries()))
    return res


def masses(kv: KVFlash, asked: list[list[npt.NDArray[np.float32]]], n_chunk: int, kind: str) -> Masses:
    """Of the first n_chunk chunks, by a summary."""
    layers, scales = kv.ctx.tapped(), kv.ctx.query_scales()
    res = np.empty((len(layers), len(asked), n_chunk))
    for i, layer in enumerate(layers):
        summaries = Summaries([layer], kv.options.chunk, kind)
        for chunk in range(n_chunk):
            summaries.put(chunk, kv.pager.records.get(chunk))
        for t, queries in enumerate(asked):
            res[i, t] = summaries.mass([0], [queries[i][None]], [float(scales[i])])[0]
    return res


def captured(true: npt.NDArray[np.float64], estimate: npt.NDArray[np.float64], room: int) -> float:
    """Mass of the chunks that the estimate ranks first, over that of the best ones: the mean over tokens."""
    mine = np.take_along_axis(true, np.argsort(-estimate, axis=-1)[:, :room], -1).sum(-1)
    best = np.sort(true, axis=-1)[:, -room:].sum(-1)
    return float((mine / best).mean())


def main() -> None:
    """Print a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tasks", default="multiquery,vt,multikey_2")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    n_ctx = args.context + 256
    with KVFlash.from_file(args.model, n_ctx=n_ctx, pool=n_ctx, snapshots=True) as kv:
        prompts, book = Prompts(kv.model), SAMPLE.read_text("utf-8")
        for task in args.tasks.split(","):
            kv.clear()
            questions = make_text(task, args.context, prompts.count, book, args.seed)
            prompt = prompts.first(questions[0])
            asked = queries_of(kv, prompt, args.tokens)
            n_chunk = len(prompt) // kv.options.chunk
            found = {kind: masses(kv, asked, n_chunk, kind) for kind in KINDS}
            own = slice(kv.options.sinks, n_chunk - TAIL)
            true = found["exact"].sum(0)[:, own]
            print(f"\n{task}, {len(prompt)} tokens\n\n| estimate | " + " | ".join(f"best {r}" for r in ROOMS) + " |")
            print("|---|" + "---:|" * len(ROOMS))
            rows = {kind: m.sum(0) for kind, m in found.items()}
            for every in (2, 3, 4):
                rows[f"exact, every {every}. layer"] = found["exact"][every // 2 :: every].sum(0)
                rows[f"centroid:4, every {every}. layer"] = found["centroid:4"][every // 2 :: every].sum(0)
            for name, mass in rows.items():
                cells = " | ".join(f"{captured(true, mass[:, own], r):.3f}" for r in ROOMS)
                print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
