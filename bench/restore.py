"""What a restore takes, phase by phase, beside a plain read of the file by as many threads; then new tokens are read exactly.

python bench/restore.py --shape-dir /dev/shm/kvflash-shapes           the 8B shape in q8_0 at 64K and 128K, on a GPU: some 150 s
python bench/restore.py --shape narrow --contexts 8192 --pool 1024    the same bytes a token in a small model, for a CPU
python bench/restore.py --cold --model FILE --policies lru qk         beside reading all of the text anew

A short text is read, and its records stand for all chunks of a long one: the time of a restore does not depend on what it says. With
--cold the long text itself is read, which gives the time to the first token without a snapshot.
"""

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from kvflash_bench.shapes import SHAPES, Shape, shape_file
from kvflash_bench.steps import decode_steps, hardware
from kvflash_bench.tables import markdown
from pyllama_kvflash import KVFlash
from pyllama_kvflash.native import Context, Record
from pyllama_kvflash.native.checksum import Checksum
from pyllama_kvflash.native.guests import Guests
from pyllama_kvflash.options import cores
from pyllama_kvflash.snapshot.file import SnapshotFile

NEW = 24  # tokens that are read after a restore
BLOCK = 4 << 20  # bytes of a plain read
CHUNK_FIELD = slice(32, 36)  # of a record: its number, see struct kvf_record in kvflash.h

SHAPES["narrow"] = Shape(n_layer=36, n_embd=256, n_ff=256, n_head=8, n_head_kv=8, n_head_dim=128, n_vocab=512)


class Tiled(SnapshotFile):
    """A snapshot of a long text, whose chunks have the records of a short one in turn, and no codes."""

    def __init__(self, path: Path, n_tokens: int) -> None:
        super().__init__(path)
        had, chunk = self.contents, self.contents.identity.fields["chunk"]
        self._n = len(had.tokens) // chunk
        chunks, sequence = np.resize(had.chunks[: self._n], n_tokens // chunk), had.sequence.copy()
        chunks["state"], chunks["block"], sequence["n_tokens"], sequence["n_kv"] = 0, -1, n_tokens, 0
        tokens = np.resize(had.tokens[: self._n * chunk], n_tokens)
        self.contents = replace(had, tokens=tokens, chunks=chunks, sequence=sequence, plan=((), ()), guests=None)

    def fill(self, i: int, place: Record) -> None:
        """Put the record that chunk i has into a place, with its number."""
        super().fill(i % self._n, place)
        place[CHUNK_FIELD] = np.frombuffer(i.to_bytes(4, "little"), np.uint8)


class Phases:
    """Seconds of all threads in some calls, and when the first began and the last ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = threading.local()
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.begin = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is done here; within another phase, also as a part of that."""
        outer = getattr(self._within, "name", "")
        self._within.name = name = outer + name
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._within.name = outer
            with self._lock:
                self.seconds[name] += end - begin
                self.first[name] = min(self.first.get(name, end), begin)
                self.last[name] = max(self.last.get(name, 0), end)

    def timed(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as a phase."""

        def res(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return f(*args, **kwargs)

        return res

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the phases of a restore."""
        with ExitStack() as stack:
            for owner, attribute, name in (
                (Context, "host_buffer", "take and pin memory"),
                (SnapshotFile, "fill", "records"),
                (SnapshotFile, "codes", "codes"),
                (Guests, "restore_codes", "codes to their place"),
                (os, "preadv", ", read"),
                (Checksum, "update", ", checksum"),
            ):
                stack.enter_context(patch.object(owner, attribute, self.timed(name, getattr(owner, attribute))))
            yield

    def table(self) -> str:
        """Return them as Markdown."""
        rows = [
            [name, *(f"{s:.2f} s" for s in (seconds, self.first[name] - self.begin, self.last[name] - self.begin))]
            for name, seconds in sorted(self.seconds.items())
            if self.first.get(name, 0) >= self.begin and not name.startswith(",")
        ]
        return markdown(["phase", "all threads", "from", "to"], rows)


def uncached(path: Path) -> None:
    """Have the system forget what it keeps of a file in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(path: Path) -> float:
    """Seconds that reading a file takes with a thread for each core."""
    room = threading.local()

    def read(at: int) -> None:
        if not hasattr(room, "block"):
            room.block = bytearray(BLOCK)
        os.preadv(fd, [room.block], at)

    fd, begin = os.open(path, os.O_RDONLY), time.perf_counter()
    with ThreadPoolExecutor(cores()) as threads:
        for _ in threads.map(read, range(0, path.stat().st_size, BLOCK)):
            pass
    took = time.perf_counter() - begin
    os.close(fd)
    return took


def reads(kv: KVFlash, more: Any) -> tuple[float, Any]:
    """Seconds that reading new tokens takes, and the logits of the last one."""
    begin = time.perf_counter()
    for _ in kv.prefill(more):
        pass
    logits = kv.ctx.checked_logits().copy()
    return time.perf_counter() - begin, logits


@dataclass
class Saved:
    """A snapshot of a long text, the tokens that follow and their logits. cold: seconds to read all of it anew; 0: not measured."""

    file: Path
    context: int
    more: Any
    logits: Any
    cold: float


@dataclass
class Bench:
    """A model file, what it is opened with, and a folder for snapshots. short: tokens of the text whose records stand for all.
    steps: tokens to decode after a restore.
    """

    model: Path
    options: dict[str, Any]
    folder: Path
    short: int
    steps: int

    def open(self, context: int) -> KVFlash:
        """Open the model for a text and more."""
        return KVFlash.from_file(self.model, n_ctx=context + 512, **self.options)

    def make(self, context: int, *, cold: bool) -> Saved:
        """Write a snapshot of a long text, which is read with `cold`."""
        rng, file, part, took = np.random.default_rng(0), self.folder / "text.kvsnap", self.folder / "part.kvsnap", 0.0
        with self.open(context) as kv:
            n_vocab, begin = kv.model.n_vocab - 8, time.perf_counter()
            reads(kv, rng.integers(0, n_vocab, self.short, dtype=np.int32))
            if cold:
                kv.clear()
                took, _ = reads(kv, rng.integers(0, n_vocab, context, dtype=np.int32))
            else:
                kv.save(part)
                kv.restore(Tiled(part, context))
                part.unlink()
                for chunk in range(context // kv.options.chunk):
                    kv.pager.records.stored(chunk).checksum = None  # that of the record of the short text
            made = time.perf_counter()
            size = kv.save(file)
            saved = time.perf_counter()
            more = rng.integers(0, n_vocab, NEW, dtype=np.int32)
            new, logits = reads(kv, more)
        print(f"\n## {context:,} tokens, {self.options['policy']}: {size / 1e9:.2f} GB", end="")
        print(f", made in {made - begin:.1f} s, saved in {saved - made:.1f} s", flush=True)
        return Saved(file, context, more, logits, took + new if cold else 0.0)

    def restore(self, saved: Saved, where: str, read: float) -> None:
        """Restore a snapshot in a newly opened model, and print what that takes. read: seconds of a plain read."""
        phases = Phases()
        with phases.watch(), self.open(saved.context) as kv:
            if where == "disk":
                uncached(saved.file)
            phases.reset()
            kv.restore(saved.file)
            restored = time.perf_counter() - phases.begin
            took, logits = reads(kv, saved.more)
            steps = median(decode_steps(kv, self.steps, []).seconds) if self.steps else 0
        rate = f"; then {1 / steps:.1f} tokens a second" if steps else ""
        whole = restored + took
        same = "the same logits" if np.array_equal(logits, saved.logits) else "OTHER LOGITS"
        print(f"\n**From {where}**: restored in {restored:.2f} s, {NEW} tokens read in {took:.2f} s, {same};")
        cold = f"; cold {saved.cold:.2f} s, {saved.cold / whole:.1f} times as long" if saved.cold else ""
        print(f"in all {whole:.2f} s, {whole / read:.2f} times a plain read ({read:.2f} s){cold}{rate}\n")
        print(phases.table(), flush=True)


def main() -> None:
    """For each policy and context: a snapshot, and restores of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--shape-dir", type=Path, default=None)
    parser.add_argument("--model", type=Path, default=None, help="a file in place of a shape")
    parser.add_argument("--contexts", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--pool", type=int, default=4096)
    parser.add_argument("-ub", type=int, default=2048)
    parser.add_argument("-ct", default="q8_0")
    parser.add_argument("--coarse", default="auto", help="as --kvflash-coarse")
    parser.add_argument("--policies", nargs="+", default=["fresh"])
    parser.add_argument("--cold", action="store_true", help="read each text as a whole, and time that")
    parser.add_argument(
        "--steps", type=int, default=0, help="tokens to decode after each restore, and how fast that is"
    )
    parser.add_argument("--folder", type=Path, default=None, help="of the snapshots, on the disk to measure")
    args = parser.parse_args()
    options = {"pool": args.pool, "n_ubatch": args.ub, "type_k": args.ct, "type_v": args.ct, "coarse": args.coarse}
    options |= {"snapshots": True, "share": 0, "prefill": "exact"}
    what = args.model.name if args.model else args.shape
    print(f"# Restores, {what}, {args.ct}, pool {args.pool:,}; {hardware()}, {cores()} threads")
    with ExitStack() as stack:
        model = args.model or stack.enter_context(shape_file(args.shape, args.shape_dir))
        folder = Path(stack.enter_context(TemporaryDirectory(dir=args.folder)))
        for policy, context in product(args.policies, args.contexts):
            bench = Bench(model, {**options, "policy": policy}, folder, 2 * args.pool, args.steps)
            saved = bench.make(context, cold=args.cold)
            uncached(saved.file)
            from_disk = plain(saved.file)
            bench.restore(saved, "memory", plain(saved.file))
            bench.restore(saved, "disk", from_disk)
            saved.file.unlink()


if __name__ == "__main__":
    main()
