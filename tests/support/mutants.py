"""Small changes to our C++ that kvflash-fuzz must notice, and which of them to try: see test_fuzz.py.

Only .cpp files are changed: llama.cpp includes the headers. What lies in patches/ is out of reach.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from support import asan
from support.changes import Changes


@dataclass(frozen=True)
class Mutant:
    """Replace old by new in a file; $ in new stands for old. old must match exactly once, ignoring whitespace."""

    breaks: str
    file: str
    old: str
    new: str
    model: str = field(default="qwen3", kw_only=True)
    options: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def source(self) -> str:
        """Its file, as git names it."""
        return f"{asan.NATIVE}/{self.file}.cpp"

    def is_hidden_by(self, changes: Changes | None) -> bool:
        """Whether these changes could stop the fuzzer from finding it; None: unknown, so yes."""
        return changes is None or changes.touch(re.escape(self.source), SHARED)

    def changed(self) -> str:
        """The text of its file with the change."""
        pattern = r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", self.old))
        source = asan.ROOT / self.source
        text, n = re.subn(pattern, lambda m: self.new.replace("$", m[0]), source.read_text())
        assert n == 1, f"{self.old!r} occurs {n} times in {source.name}"
        return text

    def apply(self, folder: Path) -> None:
        """Write the changed file to a folder."""
        (folder / f"{self.file}.cpp").write_text(self.changed())


SEEDS = ("4", "5", "9", "10")  # tried in order: small chunks, large pools; the first seed finds most mutants
LAYERS = "for (const auto & layer : kv.layers) { add("

CODES, FOUR_BITS = (("--steps", "100", "--coarse", bits) for bits in ("32", "4"))

MUTANTS = [
    # placement
    Mutant(
        "rows are placed one too far", "pool/pool", "block*n_chunk + pos%n_chunk", "block*n_chunk + (pos + 1)%n_chunk"
    ),
    Mutant("used blocks are given out", "pool/pool", "b_next < n_block(kv) && !is_free(kv, b_next)", "false"),
    Mutant("two chunks share a block", "pool/pool", "block = b_next++;", "block = b_next;"),
    Mutant("a chunk ends a row too late", "pool/pool", "it->first >= p0 +", "it->first > p0 +"),
    Mutant("one row in a block is none", "pool/pool", "!cells.is_empty(block*kv.pool_chunk + i)", "i > 0 && $"),
    Mutant("the next context is pooled, too", "pool/pool", "scope::~scope() { g_setup = nullptr;", "scope::~scope() {"),
    # records
    Mutant(
        "rows go to and come from the next block",
        "pool/move",
        "r.dev + block*r.size",
        "r.dev + (block ^ 1)*r.size",
    ),
    Mutant(
        "the last row is not copied",
        "pool/record",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*kv.pool_chunk); if",
        "ggml_row_size(layer.k->type, layer.k->ne[0])*(kv.pool_chunk - 1)); if",
    ),
    Mutant(
        "the last layer is not copied",
        "pool/record",
        LAYERS,
        "for (const auto & layer : kv.layers) { if (&layer == &kv.layers.back()) { break; } add(",
    ),
    Mutant(
        "K and V change places",
        "pool/record",
        LAYERS,
        "for (auto layer : kv.layers) { std::swap(layer.k, layer.v); add(",
    ),
    Mutant(
        "a column is not copied",
        "pool/record",
        "i < layer.v->ne[0]; ++i",
        "i < layer.v->ne[0] - 1; ++i",
        options=("--no-fa",),
    ),
    Mutant(
        "layers share the rows of the first",
        "pool/record",
        LAYERS,
        "for (const auto & each : kv.layers) { (void) each; const auto & layer = kv.layers[0]; add(",
    ),
    Mutant("records of other types are taken", "pool/record", "got.type_k != want.type_k", "false"),
    Mutant("metadata is not cleared", "pool/record", "memset(dst, 0, meta_bytes(kv));", ""),
    Mutant("records of other models are taken", "pool/record", "got.fingerprint != want.fingerprint", "false"),
    # paging
    Mutant("a drop forgets the last row", "pool/record", "cells.rm(idx);", "if (i + 1 < kv.pool_chunk) { $ }"),
    Mutant(
        "a page-in moves positions",
        "pool/record",
        "chunk*(llama_pos) kv.pool_chunk + i);",
        "chunk*(llama_pos) kv.pool_chunk + i + 1);",
    ),
    Mutant("a page-in fills up a chunk", "pool/record", "if (rec.mask & (1ull << i))", "if (true)"),
    Mutant("a page-in forgets the tokens", "pool/record", "cells.ext_set(idx, ext);", ""),
    Mutant("a page-in overwrites a chunk", "pool/record", "if (!is_free(kv, block))", "if (false)"),
    Mutant("used blocks are scribbled on", "pool/record", "if (!is_free(kv, b)) { continue; }", ""),
    # copies under way
    Mutant("queries lie upon each other", "pool/move", "to += r.size;", ""),
    Mutant("the width of the graph is made up", "pool/record", "res.n_kv = kv.pool_n_kv;", "res.n_kv = kv.get_size();"),
    # summaries
    Mutant("a share is of one chunk's own", "pool/score", "dst[c] += sums[c] / all;", "dst[c] += sums[c];"),
    Mutant("a row counts as one key", "pool/score", "res[g] = res[g] * scale + count;", "res[g] = res[g] * scale;"),
    Mutant("the last query alone counts", "pool/score", "dst[c] = std::max(dst[c], mine[c]);", "dst[c] = mine[c];"),
    Mutant(
        "all layers have the first one's scale",
        "api/relevance",
        "q[i], n_q, scales[i], dst",
        "q[i], n_q, scales[0], dst",
    ),
    Mutant(
        "an edge has a key too many",
        "pool/score",
        "if (t < n_edge) { sums[1] += e; }",
        "if (t <= n_edge) { sums[1] += e; }",
    ),
    Mutant("the last keys are all keys", "pool/score", "if (t >= k.n - n_edge) { sums[2] += e; }", "sums[2] += e;"),
    # the sliding window
    Mutant(
        "a window is packed",
        "pool/window",
        "bool own = head.size == kv.get_size();",
        "bool own = false;",
        model="gemma4",
    ),
    Mutant(
        "a window's columns are all the first",
        "pool/window",
        "ggml_backend_tensor_set(t, in + from, at, n);",
        "ggml_backend_tensor_set(t, in, at, n);",
        model="gemma4",
        options=("--no-fa",),
    ),
    Mutant(
        "the size of a window is believed",
        "pool/window",
        "size != sizeof(head) + head.n_cell",
        "size > (1u << 30) + head.n_cell",
        model="gemma4",
    ),
    # codes
    Mutant(
        "all segments have the first one's mean",
        "coarse/codes",
        "mean(u * UNIT / SEGMENT, h)",
        "mean(0, h)",
        options=CODES,
    ),
    Mutant(
        "queries are spread as those of the first head",
        "coarse/codes",
        "x[i] * spread[(size_t) head * d + i]",
        "x[i] * spread[i]",
        options=CODES,
    ),
    Mutant(
        "scales come back in the slot of the first head",
        "coarse/coarse",
        "copy(its.scale(u, head), UNIT",
        "copy(its.scale(u, 0), UNIT",
        options=FOUR_BITS,
    ),
    Mutant("a tile ends with its last unit", "coarse/codes", "GGML_PAD(n_unit, TILE)", "n_unit", options=FOUR_BITS),
    Mutant(
        "a unit is in the pool and outside",
        "guests/fresh",
        "s.common[pos / UNIT] = 1;",
        "s.common[pos / UNIT] = pos / UNIT != 1;",
        options=CODES,
    ),
    Mutant(
        "guests outlive their codes",
        "guests/fresh",
        "if (unit >= (int32_t) s.n_unit()) { unit = -1; }",
        "",
        options=CODES,
    ),
    Mutant("codes outlive their positions", "api/args", "fresh->truncate(seq, p);", "", options=CODES),
    Mutant("rows do not come with a table", "guests/slots", "fetching && units[slot] >= 0", "false", options=FOUR_BITS),
    # the C API
    Mutant(
        "a shortage is not reported",
        "api/decode",
        "case NO_ROOM: throw kvf_failure(KVF_E_NO_BLOCK",
        "case NO_ROOM: break; case 99: throw kvf_failure(KVF_E_NO_BLOCK",
    ),
    Mutant("an old error stays", "api/guard", "g_error.clear();", ""),
    Mutant(
        "the mirror forgets a position less", "api/decode", "kv.seq_rm(seq, p0, p1);", "kv.seq_rm(seq, p0, p1 - 1);"
    ),
    Mutant(
        "a failed rollback is not reported",
        "api/decode",
        "!llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1)",
        "$ && false",
        model="qwen35",
    ),
    # panes
    Mutant(
        "a layer comes a row too short",
        "exact/panes",
        "copy(l, from, pos, true);",
        "copy(l, from, pos > 0 ? pos - 1 : 0, true);",
    ),
    Mutant("a layer stays in another one's pane", "exact/panes", "{ load(order[i].layer); }", "{}"),
    Mutant(
        "a pane is taken for what it was before",
        "exact/panes",
        "pane.holds == layer ? std::min(pane.n, pos) : 0",
        "std::min(pane.n, pos)",
    ),
    Mutant(
        "rows that were forgotten are kept",
        "exact/panes",
        "pane.n = std::min(pane.n, pos);\n        }\n    }\n}",
        "}}}",
    ),
    Mutant("new rows are not written", "exact/panes", "copy(l, pos, pos + n, false);", ""),
    Mutant(
        "V goes to another place", "exact/panes", "host + l.offs_v + first * row_v", "host + l.offs_k + first * row_v"
    ),
    Mutant(
        "the cells of earlier positions are empty",
        "exact/exact",
        "cells.seq_add(i, seq);\n    }\n    kv.v_heads",
        "}\n    kv.v_heads",
    ),
    Mutant("a record says too few positions", "exact/exact", "mask |= 1ull << i;", "mask |= 1ull << (i / 2);"),
]


#
# which
#

SHARED = (
    r"CMakeLists\.txt|patches/.*|vendor/llama\.cpp\.lock|pyllama_kvflash/native/src/.*\.h"
    r"|tests/(native/fuzz\.cpp|test_fuzz\.py|support/(asan|changes|mutants|tiny)\.py)"
)
"""The fuzzer itself, and everything all our C++ is built with or into: a change there may hide any of them."""
