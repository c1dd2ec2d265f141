"""Codes against the full cache, from one reading of each text: answers given token by token (KLD), and answers of a model's own.

Rows that an exact pass reads are the full cache's, whatever the pool. So each text is read once, on a GPU if there is one, and
saved; then every variant is restored from that and decodes on the CPU. Several processes may share a folder:

    python bench/coarse.py read MODEL FOLDER --texts prose code json --types f16 q8_0
    python bench/coarse.py kld MODEL FOLDER --texts prose --variants full/type=q8_0 fresh/pool=1024/coarse=4
    python bench/coarse.py answers MODEL FOLDER --texts list:1 single_2:1 --variants full fresh/pool=512/coarse=4
    python bench/coarse.py table FOLDER

A text is prose, code, or a task of `kvflash bench ruler`, with a seed after a colon. A variant is a policy and fields of Options;
`type` is of the cache, `bits` of codes that no user has (32: exact), `late` whether layers choose for the next token. `tokens`
writes what study/sim3.py reads.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_bench import kld
from kvflash_bench.long_texts import IN_ORDER, LONG
from kvflash_bench.prompts import Prompts
from kvflash_bench.ruler import _grammar, answer
from kvflash_bench.ruler_texts import make_text
from pyllama_kvflash import KVFlash, Options
from pyllama_kvflash.engine import load_plan
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import coarse

N_SCORE, SEED = 256, 11
HERE = Path(__file__).parent
NOVEL = HERE.parent / "bench/kvflash_bench/data/moby-dick.txt"
TARGET = {"prose": 300_000, "code": 0}
FORM_OF = coarse.CoarseForm.of


def plain(kind: str) -> str:
    """Prose from the middle of a novel; code from Python's library."""
    if kind == "prose":
        return NOVEL.read_text()[TARGET[kind] :]
    files = sorted(Path(os.__file__).parent.glob("asyncio/*.py")) + sorted(Path(os.__file__).parent.glob("[a-f]*.py"))
    return "\n".join(f.read_text(errors="replace") for f in files)


def texts(kv: KVFlash, name: str, n: int) -> tuple[Tokens, Tokens, Any]:
    """The prompt, the right tokens after it, and the questions (None: it is continued)."""
    kind, _, seed = name.partition(":")
    if kind in TARGET:
        tokens = kv.tokenize(plain(kind))[:n]
        return tokens[:-N_SCORE], tokens[-N_SCORE:], None
    prompts = Prompts(kv.model)
    questions = make_text(kind, n, prompts.count, NOVEL.read_text(), int(seed or SEED))
    right = prompts.answered(questions) if kind in LONG else (prompts.first(questions[0]), np.zeros(0, np.int32))
    return *right, questions


def form(bits: str) -> coarse.CoarseForm:
    """Bits that no user has: one number, or those of keys+values."""
    k, _, v = bits.partition("+")
    return coarse.CoarseForm(int(k), int(v or k))


class Texts:
    """A model, and where its texts are kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.n_ctx = -(-(args.context + args.room) // 256) * 256
        with KVFlash.open(args.model, Options(n_ctx=512, pool="off", n_gpu_layers=0)) as kv:
            self.made = {name: texts(kv, name, args.context) for name in args.texts}

    def snapshot(self, name: str, type_: str) -> Path:
        """Return where a text is saved that a cache of this type has read."""
        return self.folder / f"{self.args.mode_of_prompt}-{name.replace(':', '-')}-{type_}.kvf"

    def prompt(self, name: str) -> Tokens:
        """For answers, the prompt is that of the question; for KLD, it ends where the right answer is one text with it."""
        prompt, _, questions = self.made[name]
        if self.args.mode_of_prompt == "answers" and questions is not None:
            with KVFlash.open(self.args.model, Options(n_ctx=512, pool="off", n_gpu_layers=0)) as kv:
                return Prompts(kv.model).first(questions[0])
        return prompt

    def options(self, **more: Any) -> Options:
        """Return the options of all engines, and more."""
        args = self.args
        return Options(n_ctx=self.n_ctx, opening=0, n_threads=args.threads, flash_attn=args.flash_attn, **more)

    def open(self, name: str, variant: str) -> KVFlash:
        """A variant that has read all of a prompt but its last token."""
        policy, *given = variant.split("/")
        fields: dict[str, Any] = {
            k: int(v) if v.isdigit() and k != "coarse" else v for k, _, v in (p.partition("=") for p in given)
        }
        type_ = str(fields.pop("type", "f16"))
        load_plan.LATE = fields.pop("late", 0)
        bits = str(fields.pop("bits", ""))
        coarse.CoarseForm.of = FORM_OF if not bits else lambda c: None if c == "off" else form(bits)  # type: ignore[method-assign]
        if bits:
            fields["coarse"] = "4"
        if policy == "full":
            fields |= {"pool": self.n_ctx, "snapshots": True, "coarse": "off"}
            policy = "lru"
        kv = KVFlash.open(
            self.args.model, self.options(policy=policy, type_k=type_, type_v=type_, n_gpu_layers=0, **fields)
        )
        kv.restore(self.snapshot(name, type_))
        return kv


def read(t: Texts) -> None:
    """Read each text, and save it."""
    for type_ in t.args.types:
        with KVFlash.open(
            t.args.model, t.options(pool=1024, policy="lru", coarse="off", snapshots=True, type_k=type_, type_v=type_)
        ) as kv:
            for name in t.args.texts:
                path, begin = t.snapshot(name, type_), time.perf_counter()
                if path.exists():
                    continue
                kv.clear()
                for _ in kv.prefill(t.prompt(name)[:-1]):
                    pass
                kv.save(path)
                print(f"{name} {type_}: {kv.n_tokens} tokens in {time.perf_counter() - begin:.0f} s", flush=True)


def forced(t: Texts, name: str, variant: str) -> tuple[Any, float, dict[str, Any]]:
    """The logits before each right token, seconds a token, and figures."""
    with t.open(name, variant) as kv:
        for _ in kv.prefill(t.prompt(name)[-1:]):
            pass
        logits, seconds = kld.forced_logits(kv, t.made[name][1])
        stats = kv.stats()
        sizes = {"kv": stats.kv_device_bytes, "coarse": stats.coarse_bytes, "full": stats.kv_full_bytes}
        return logits, seconds / len(logits), sizes


def keep(t: Texts, **row: Any) -> None:
    """File a result."""
    row |= {"model": Path(t.args.model).stem, "n": t.args.context, "mode": t.args.mode}
    with (t.folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = {k: v for k, v in row.items() if k not in ("answers", "expected")}
    print(json.dumps(shown), flush=True)


def measure(t: Texts) -> None:
    """KLD of the variants from the full f16 cache."""
    for name in t.args.texts:
        base, *_ = forced(t, name, "full")
        for variant in t.args.variants:
            logits, seconds, sizes = forced(t, name, variant)
            keep(t, text=name, variant=variant, ms=1e3 * seconds, **kld.compare(base, logits, t.made[name][1]), **sizes)


def answers(t: Texts) -> None:
    """Scores of greedy answers."""
    for name in t.args.texts:
        questions = t.made[name][2]
        for variant in t.args.variants:
            with t.open(name, variant) as kv:
                prompts, said = Prompts(kv.model), []
                for i, question in enumerate(questions):
                    more = t.prompt(name)[-1:] if i == 0 else [*said[-1].pending, *prompts.further(question)]
                    for _ in kv.prefill(np.array(more, np.int32)):
                        pass
                    said.append(answer(kv, question.n_new, _grammar(question) if t.args.grammar else ""))
            scores = [q.score(a.text, q.expected) for a, q in zip(said, questions, strict=True)]
            task = name.partition(":")[0]
            order = {"in_order": IN_ORDER[task](said[0].text, questions[0].expected)} if task in IN_ORDER else {}
            keep(t, text=name, variant=variant, score=float(np.mean(scores)), **order, answers=[a.text for a in said])


def tokens(t: Texts) -> None:
    """Write the texts for study/sim3.py."""
    found = [
        {"kind": name.partition(":")[0], "ids": prompt.tolist(), "forced": right[:-1].tolist()}
        for name, (prompt, right, _) in t.made.items()
    ]
    (t.folder / "texts.json").write_text(json.dumps(found))


def table(folder: Path) -> None:
    """Print the means of what was measured."""
    rows: dict[tuple[str, str, int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in (folder / "results.jsonl").read_text().splitlines():
        r = json.loads(line)
        at = rows[r["mode"], r["model"], r["n"], r["variant"]]
        at[r["text"].partition(":")[0]].append(r["kld"] if r["mode"] == "kld" else 100 * r["score"])
        if "in_order" in r:
            at[f"{r['text'].partition(':')[0]} in order"].append(100 * r["in_order"])
        if "ms" in r:
            at["ms"].append(r["ms"])
    for (mode, model, n, variant), found in sorted(rows.items()):
        cells = " ".join(
            f"{k} {np.mean(v):.5f}" if mode == "kld" and k != "ms" else f"{k} {np.mean(v):.1f}"
            for k, v in found.items()
        )
        print(f"{mode} {model} {n} {variant}: {cells}")


def main() -> None:
    """Parse the command line."""
    if sys.argv[1:2] == ["table"]:
        return table(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("read", "kld", "answers", "tokens"))
    parser.add_argument("model", type=Path)
    parser.add_argument("folder")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--types", nargs="+", default=["f16"])
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--room", type=int, default=1536)
    parser.add_argument("--for", dest="mode_of_prompt", choices=("kld", "answers"), default=None)
    parser.add_argument(
        "--grammar", action="store_true", help="json is held to its schema, as in `kvflash bench ruler`"
    )
    parser.add_argument(
        "-fa", "--flash-attn", default="auto", help="of all engines (a folder for each): off adds in single precision"
    )
    parser.add_argument("-t", "--threads", type=int, default=None)
    args = parser.parse_args()
    args.mode_of_prompt = args.mode_of_prompt or ("answers" if args.mode == "answers" else "kld")
    {"read": read, "kld": measure, "answers": answers, "tokens": tokens}[args.mode](Texts(args))
    return None


if __name__ == "__main__":
    main()
