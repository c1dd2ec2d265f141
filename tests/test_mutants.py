"""The oracles of tests/native/fuzz.cpp can fail: each of these changes to our C++ makes them.

Changed are the copies that test_fuzz.py builds, and only .cpp files: llama.cpp includes the headers. What lies in
patches/ is out of reach here.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import test_fuzz
from test_fuzz import NATIVE, SOURCE, build, copy_sources, fuzz

pytestmark = test_fuzz.pytestmark


@dataclass(frozen=True)
class Mutant:
    """In a file, old becomes new, where $ is old again. old occurs once, however it is spaced."""

    breaks: str
    file: str
    old: str
    new: str
    model: str = field(default="qwen3", kw_only=True)
    options: tuple[str, ...] = field(default=(), kw_only=True)

    def apply(self) -> None:
        """Write the changed copy."""
        pattern = r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", self.old))
        name = f"kvflash-{self.file}.cpp"
        text, n = re.subn(pattern, lambda m: self.new.replace("$", m[0]), (SOURCE / name).read_text())
        assert n == 1, f"{self.old!r} occurs {n} times in {name}"
        (NATIVE / name).write_text(text)


SEEDS = ("4", "5", "9")  # small chunks, large pools: the first seed finds most mutants
LAYERS = "for (const auto & layer : kv.layers) { add("

MUTANTS = [
    # placement
    Mutant("rows are placed one too far", "pool", "block*n_chunk + pos%n_chunk", "block*n_chunk + (pos + 1)%n_chunk"),
    Mutant("used blocks are given out", "pool", "b_next < n_block(kv) && !is_free(kv, b_next)", "false"),
    Mutant("two chunks share a block", "pool", "block = b_next++;", "block = b_next;"),
    Mutant("a chunk ends a row too late", "pool", "it->first >= p0 +", "it->first > p0 +"),
    Mutant("one row in a block is none", "pool", "!cells.is_empty(block*kv.pool_chunk + i)", "i > 0 && $"),
    Mutant("the next context is pooled, too", "pool", "scope::~scope() { g_setup = nullptr;", "scope::~scope() {"),
    # records
    Mutant(
        "rows go to and come from the next block",
        "move",
        "r.dev + block*r.size",
        "r.dev + (block ^ 1)*r.size",
    ),
    Mutant(
        "the last row is not copied",
        "record",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*kv.pool_chunk); if",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*(kv.pool_chunk - 1)); if",
    ),
    Mutant(
        "the last layer is not copied",
        "record",
        LAYERS,
        "for (const auto & layer : kv.layers) { if (&layer == &kv.layers.back()) { break; } add(",
    ),
    Mutant(
        "K and V change places",
        "record",
        LAYERS,
        "for (auto layer : kv.layers) { std::swap(layer.k, layer.v); add(",
    ),
    Mutant(
        "a column is not copied",
        "record",
        "i < layer.v->ne[0]; ++i",
        "i < layer.v->ne[0] - 1; ++i",
        options=("--no-fa",),
    ),
    Mutant(
        "layers share the rows of the first",
        "record",
        LAYERS,
        "for (const auto & each : kv.layers) { (void) each; const auto & layer = kv.layers[0]; add(",
        model="gemma4",
    ),
    Mutant("records of other types are taken", "record", "got.type_k != want.type_k", "false"),
    Mutant("metadata is not cleared", "record", "memset(dst, 0, meta_bytes(kv));", ""),
    Mutant("records of other models are taken", "record", "got.fingerprint != want.fingerprint", "false"),
    # paging
    Mutant("a drop forgets the last row", "record", "cells.rm(idx);", "if (i + 1 < kv.pool_chunk) { $ }"),
    Mutant(
        "a page-in moves positions",
        "record",
        "chunk*(llama_pos) kv.pool_chunk + i);",
        "chunk*(llama_pos) kv.pool_chunk + i + 1);",
    ),
    Mutant("a page-in fills up a chunk", "record", "if (rec.mask & (1ull << i))", "if (true)"),
    Mutant("a page-in forgets the tokens", "record", "cells.ext_set(idx, ext);", ""),
    Mutant("a page-in overwrites a chunk", "record", "if (!is_free(kv, block))", "if (false)"),
    Mutant("used blocks are scribbled on", "record", "if (is_free(kv, b)) { mover(", "if (true) { mover("),
    # copies under way
    Mutant("a block may be used while a chunk lands", "pool", "return !mover(kv).is_landing(block);", "return true;"),
    Mutant("a chunk lands twice", "record", "if (mover(kv).landing_of(seq, chunk)) {", "if (false) {"),
    Mutant("queries lie upon each other", "move", "to += r.size;", ""),
    Mutant("clear leaves what is landing", "api", "llama_kvflash::mover(*kv).landings.clear();", ""),
    Mutant("the width of the graph is made up", "record", "res.n_kv = kv.pool_n_kv;", "res.n_kv = kv.get_size();"),
    # the C API
    Mutant(
        "a shortage is not reported",
        "api",
        "case 1: throw kvf_failure(KVF_E_NO_BLOCK",
        "case 1: break; case 99: throw kvf_failure(KVF_E_NO_BLOCK",
    ),
    Mutant("an old error stays", "api", "g_error.clear();", ""),
    Mutant("the mirror forgets a position less", "api", "kv.seq_rm(seq, p0, p1);", "kv.seq_rm(seq, p0, p1 - 1);"),
    Mutant(
        "a failed rollback is not reported",
        "api",
        "!llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1)",
        "$ && false",
        model="qwen35",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _restored() -> Iterator[None]:
    yield
    copy_sources()


@pytest.mark.parametrize(("model", "options"), sorted({(mutant.model, mutant.options) for mutant in MUTANTS}))
def test_unchanged(tiny_path: Callable[[str], Path], model: str, options: tuple[str, ...]) -> None:
    copy_sources()
    build()
    for seed in SEEDS:
        res = fuzz(tiny_path(model), "--seed", seed, *options)
        assert res.returncode == 0, res.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks.replace(" ", "-"))
def test_mutant(tiny_path: Callable[[str], Path], mutant: Mutant) -> None:
    copy_sources()
    mutant.apply()
    build()
    for seed in SEEDS:
        res = fuzz(tiny_path(mutant.model), "--seed", seed, *mutant.options)
        if res.returncode != 0:
            break
    assert res.returncode != 0, res.stdout
    assert re.search(r"1 failure: |ERROR: AddressSanitizer|runtime error: |Assertion ", res.stdout), res.stdout
