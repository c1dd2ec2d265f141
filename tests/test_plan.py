"""`kvflash plan`: the ways to hold a context on a card, what they take, and what is expected of them."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, refused
from support.changes import CLI, ENGINE
from support.commands import good, invoke

from kvflash_bench.shapes import SHAPES, write_outline
from pyllama_kvflash.loading import expected, planning
from pyllama_kvflash.loading import load as loading
from pyllama_kvflash.loading.need import DRIVER
from pyllama_kvflash.loading.offers import SMALL_BATCH, Offer, best
from pyllama_kvflash.native import Model, devices, pretending
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.options import Options

pytestmark = pytest.mark.native
environment = commands.environment

RESULTS = Path(__file__).parent.parent / "docs" / "results"
GIB = 1 << 30


def planned(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(good("plan", "--json", "--ram", "8G", "--headroom", "0", *args).stdout)
    return found


def bad(code: int, *args: str) -> str:
    """What a command says that ends with this exit code."""
    res = invoke(*args)
    assert res.exit_code == code, res.output
    return res.stderr


def ways(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The first way of each kind."""
    return {way["kind"]: way for way in reversed(found["ways"])}


def rows(text: str) -> dict[str, list[list[str]]]:
    """Rows of all tables by their first cell, without bold."""
    res: dict[str, list[list[str]]] = {}
    for line in re.findall(r"^\|.*\|$", text.replace("*", ""), re.MULTILINE):
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        res.setdefault(name, []).append(cells)
    return res


def test_what_is_expected_was_measured() -> None:
    """Each figure is in its row of the documents that name its run."""
    choices, results = (rows((RESULTS / name).read_text()) for name in ("choices.md", "../RESULTS.md"))
    for kind, rates in expected.FULL_DECODE.items():
        assert choices[f"full cache, {kind}"][0] == [f"{rate:.1f}" for rate in rates]
    others = {"f16": "full cache, f16", "q4_0": "full cache, q4_0", "RAM": "full cache, q8_0, in RAM"}
    for kind, name in others.items():
        assert [float(cell) for cell in choices[name][-1][2:4]] == list(expected.OTHER_DECODE[kind])
    coded = rows((RESULTS / "coarse.md").read_text())
    names = {"f16": "full, f16", "4": "`fresh`, `4`", "2": "`fresh`, `2`"}
    for name, rates in ((names[kind], rates) for kind, rates in expected.CODED_DECODE.items()):
        assert [str(rate) for rate in rates] in [row[1:] for row in coded[name]]
    for name, uncoded in {
        "full cache": expected.UNCODED_DECODE["q8_0"],
        "`qk`": expected.UNCODED_DECODE["pool"],
    }.items():
        at = next(row for row in results[name] if f"{uncoded[0]}" in row)
        assert [at[0], at[1], at[3]] == [f"{rate:.1f}" for rate in uncoded]
    hybrid = rows((RESULTS / "cuda.md").read_text())
    ways = ("f16", "q8_0", "q4_0", "4")
    for i, context in enumerate(("8K", "64K", "128K", "256K")):
        rates = [expected.HYBRID_DECODE[way][i] for way in ways]
        assert rates in [
            [float(cell.replace(",", "").split()[0]) for cell in row]
            for row in hybrid[context]
            if len(row) == len(ways) and all(re.match(r"\d", cell) for cell in row)
        ]
    far = expected.HYBRID_FAR_DECODE
    told = "full f16 {} at 8K and {} at 128K, a pool of 4K in q8_0 with 2 bits {} and {}".format(*far["f16"], *far["2"])
    assert told in (RESULTS / "cuda.md").read_text()
    assert f"`--no-kv-offload` at 8K: {expected.HYBRID_RAM_DECODE} tok/s" in (RESULTS / "cuda.md").read_text()
    cpu = rows((RESULTS / "cpu.md").read_text())
    for kind, name in (("f16", "full cache, f16"), ("pool", "pool 4,096, f16, `fresh`, `4`")):
        assert cpu[name][0] == [f"{rate:.1f}" for rate in expected.CPU_DECODE[kind]]
    least, most = expected.LOSSLESS
    assert (
        f"Of the full f16 cache's speed lossless decoding has {least} to {most}"
        in (RESULTS / "lossless.md").read_text()
    )
    for document in ("README.md", "docs/FAQ.md"):
        assert f"{least} to {most}" in (RESULTS.parent.parent / document).read_text()


def test_how_far_answers_are_was_measured() -> None:
    """On a GPU, with the same model, prompt and machine."""
    coded = rows((RESULTS / "coarse.md").read_text())

    def means(cells: list[str]) -> list[float]:
        return [float(cell.split(";")[0]) for cell in cells]

    for (bits, kind), texts in expected.KLD.items():
        if bits == "off":
            continue
        name = f"codes of {bits} bits" + ("" if kind == "f16" else f", cache in {kind}")
        found = {row[0]: means(row[2:4]) for row in coded[name] if len(row) == 5}
        for i, pool in enumerate(("1,024", "2,048")):
            assert found[pool] == [texts["prose"][i], texts["code"][i]]
    for kind in ("q8_0", "q4_0"):
        far = next(means(row[2:4]) for row in coded[f"full cache, {kind}"] if row[0] == "-")
        assert far == list(expected.FULL_KLD[kind].values())
    table = (RESULTS.parent / "RESULTS.md").read_text()
    for share, row in (("6.25 %", 0), ("12.5 %", 1)):
        prose, code = (expected.KLD["off", "f16"][text][row] for text in ("prose", "code"))
        assert re.search(rf"\| {share} \| [\d.]+ % \| {prose}\d?; [\d.]+ \| {code}; ", table), share


def test_speed_is_interpolated_and_never_beyond_what_was_measured() -> None:
    coded = expected.CODED_DECODE
    for bits in ("4", "2"):
        for n, rate, full in zip(expected.CODED_CONTEXTS, coded[bits], coded["f16"], strict=True):
            assert expected.speed("pool", n, bits) == pytest.approx(rate / full)
    assert expected.speed("pool", 8192, "4") < expected.speed("pool", 20_000, "4") < expected.speed("pool", 65_536, "4")
    assert expected.speed("pool", 1 << 20, "4") == expected.speed("pool", 131_072, "4")
    for n in (8192, 65_536, 262_144):
        assert expected.speed("pool", n) > expected.speed("pool", n, "4")
    for n, rate, full in zip(
        expected.HYBRID_CONTEXTS, expected.HYBRID_DECODE["4"], expected.HYBRID_DECODE["f16"], strict=True
    ):
        assert expected.hybrid_speed("pool", n, "4") == pytest.approx(rate / full)
    assert expected.hybrid_speed("pool", 8192) is None, "not measured"
    assert expected.speed("q4_0", 1024) == expected.speed("q4_0", 32_768)
    assert all(expected.speed("f16", n) == 1 for n in (1024, 40_000, 1 << 20))


def test_divergence_falls_with_the_pool_and_is_unknown_below_the_smallest() -> None:
    assert expected.divergence(0.06, "4") is None
    assert expected.divergence(0.125, "2", "q8_0") is None, "it was not measured"
    assert expected.divergence(0.125, "4", "q8_0") == pytest.approx({"prose": 0.0035, "code": 0.00073})
    for bits in expected.BITS:
        small, large = expected.divergence(0.07, bits), expected.divergence(0.1, bits)
        assert small is not None
        assert large is not None
        assert all(large[text] < small[text] for text in small)
        assert expected.divergence(0.9, bits) == expected.divergence(0.125, bits)


@pytest.mark.skipif(any(d.gpu for d in devices()), reason="there is a GPU")
def test_a_plan_is_what_is_looked_at_here_on_another_device() -> None:
    """The same weights, KV and buffers; the host has the embeddings, and the GPU has them, too, as they make the logits."""
    found = planned("--memory", "2G", "-c", "16K")
    for kind, options in (("f16", {"pool": "off"}), ("pool", {"pool": 8192})):
        (here,) = planning.planned(BUNDLED_MODEL, Options(n_ctx=16_384, **options)).memory
        gpu, host = ways(found)[kind]["needs"]
        with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
            embeds = next(w.size for w in model.weights() if w.name == "token_embd.weight")
        assert (gpu["gpu"], host["gpu"]) == (True, False)
        assert (gpu["weights"], host["weights"]) == (here.weights, embeds)
        assert (gpu["kv"], host["records"]) == (here.kv, here.records)
        assert gpu["panes"] == here.panes
        assert gpu["buffers"] == pytest.approx(here.buffers, rel=0.2)
        assert gpu["program"] == DRIVER
    in_ram = ways(found)["RAM"]["needs"]
    assert [need["kv"] for need in in_ram] == [0, ways(found)["q8_0"]["needs"][0]["kv"]]


@pytest.mark.nightly(ENGINE)
def test_a_pool_has_the_most_bits_that_fit(tmp_path: Path) -> None:
    """Rather a small pool with codes than a large one without; and the command names them."""
    path = tmp_path / "8b.gguf"
    write_outline(SHAPES["8b"], path)

    def least(bits: str) -> int:
        small = {} if bits == "off" else {"n_ubatch": SMALL_BATCH, "codes_in_panes": True}
        options = Options(n_ctx=131_072, pool=1024, split_mode="none", coarse=bits, **small)
        with pretending(64 * GIB, 64 * GIB):
            return sum(need.total for need in planning.planned(path, options).memory if need.gpu) >> 20

    args = (str(path), "--ram", "64G", "-c", "128K", "--memory")
    for bits, fewer in ((expected.BITS[0], expected.BITS[1]), (expected.BITS[-1], "off")):
        mib = least(bits)
        pool = ways(planned(*args, f"{mib + 1}M"))["pool"]
        assert (pool["options"]["coarse"], pool["fits"]) == (bits, True)
        assert f"--kvflash-coarse {bits}" in pool["command"]
        assert any(need["coarse"] for need in pool["needs"]) == (bits != "off")
        assert ways(planned(*args, f"{mib - 1}M"))["pool"]["options"]["coarse"] == fewer


def test_what_can_have_no_codes_has_a_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = loading.probe
    for module in (loading, planning):
        monkeypatch.setattr(module, "probe", lambda *given: replace(probe(*given), uncoded="it has none"))
    pools = [way for way in planned("--memory", "4G", "-c", "128K")["ways"] if way["kind"] == "pool"]
    assert {(way["n_pool"], way["options"]["coarse"]) for way in pools} == {(16_384, "off")}


def test_no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a fingerprint, which only records of a pool that is made have."""
    monkeypatch.setattr(Model, "fingerprint", property(lambda _: pytest.fail("it reads parts of all weights")))
    assert ways(planned("--memory", "4G", "-c", "64K"))["pool"]["fits"]


def too_small_for_q8_0(context: str) -> str:
    """A memory that the full q8_0 cache exceeds by little, on any machine: what is computed takes more on a GPU."""
    return f"{(ways(planned('--memory', '100G', '-c', context))['q8_0']['gpu_bytes'] >> 20) - 32}M"


def test_the_command_runs(tmp_path: Path) -> None:
    text = tmp_path / "a long text.txt"
    text.write_text("The secret code for the door is 4711. " * 20)
    for memory, is_pool in (("4G", False), (too_small_for_q8_0("64K"), True)):
        found = planned("--memory", memory, "-c", "64K")
        way = found["ways"][found["best"]]
        assert (way["kind"] == "pool") == is_pool
        _, *command = shlex.split(way["command"].replace("long.txt", shlex.quote(str(text))))
        stats = json.loads(good(*command, "-n", "2", "--json").stdout)["stats"]
        assert (stats["n_pool"], stats["n_ctx"]) == (way["n_pool"], 65_536)


def test_text_names_each_way_and_marks_the_one_to_take() -> None:
    out = good("plan", "--headroom", "0", "--memory", too_small_for_q8_0("128K"), "--ram", "8G", "-c", "128K").stdout
    words = (
        "full, f16",
        "full, q4_0",
        "full, q8_0 in RAM",
        " bits, lossless",
        "no: GPU",
        "as good as q8_0",
        "avoid",
    )
    assert [word for word in words if word not in " ".join(out.split())] == []
    assert len(re.findall(r"^> pool \d+K", out, re.MULTILINE)) == 1


@pytest.mark.sampled(CLI, ENGINE)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--memory", "100M"),
            ("nothing that is worth running fits: for the nearest (", "GPU lacks ", "smaller quantisation"),
        ),
        (("--memory", "8G", "--ram", "1M"), ("nothing that is worth running fits: ", "RAM lacks")),
        (("--memory", "1.5"), ("'1.5' is not a size",)),
        (("--memory", "8"), ("'8' is a size in bytes: give it a unit, such as 8G",)),
        (("--memory", "-5"), ("--memory is -5: give a size such as 12G",)),
        (("--memory", "8G", "--ram", "0"), ("--ram is 0: give a size",)),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    err = bad(2, "plan", "-c", "128K", "--headroom", "0", *args)
    assert all(word in err for word in words), err


@pytest.mark.skipif(any(d.gpu for d in devices()), reason="there is a GPU")
def test_this_machine_is_planned_for() -> None:
    assert "; no GPU; " in good("plan", "-c", "8K").stdout


@pytest.mark.nightly(ENGINE)
def test_weights_stay_in_ram_where_a_card_is_too_small(tmp_path: Path) -> None:
    """The feed-forward weights of as few layers as possible."""
    path = tmp_path / "8b.gguf"
    write_outline(SHAPES["8b"], path)
    found = planned(str(path), "--memory", "4G", "--ram", "32G", "-c", "32K")
    way = found["ways"][found["best"]]
    n = way["layers_on_cpu"]
    assert 0 < n < SHAPES["8b"].n_layer
    assert way["command"].endswith(" -ub 256 --n-cpu-moe auto")
    assert way["answers"] == "as good as q8_0"
    assert 0.85 * 4 * GIB < way["gpu_bytes"] <= 4 * GIB
    all_on_gpu = ways(planned(str(path), "--memory", "64G", "--ram", "32G", "-c", "32K", "-ub", "128"))["q8_0"]
    assert sum(need["weights"] for need in way["needs"]) == sum(need["weights"] for need in all_on_gpu["needs"])
    told = good("plan", str(path), "--headroom", "0", "--memory", "4G", "--ram", "32G", "-c", "32K").stdout
    assert f", -ncmoe {n} " in told
    short = planned(str(path), "--memory", "4G", "--ram", "32G", "-c", "1K")
    assert " --kvflash off " in short["ways"][short["best"]]["command"], "there is no pool as small"


def test_the_least_far_is_taken_of_what_fits() -> None:
    """A pool in f16 with codes of 4 bits rather than a full q8_0 cache, that rather than other pools, 4 bits rather than lossless decoding,
    that rather than fewer bits, all layers on the GPU rather than not, codes rather than none, and never RAM.
    """
    n_ctx = 131_072

    def offer(kind: str, type_k: str, n_pool: int | None = None, bits: str = "4") -> Offer:
        return Offer(kind, {"type_k": type_k, "coarse": bits}, n_pool, (), {})

    f16, q8, q4, ram = (
        offer(*kinds) for kinds in (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("RAM", "q8_0"))
    )
    best_pool, large, few = (
        offer("pool", "f16", 16_384),
        offer("pool", "q8_0", 16_384),
        offer("pool", "f16", 16_384, "2"),
    )
    small_batch = replace(best_pool, options={**best_pool.options, "n_ubatch": 128})
    lossless = replace(large, options={**few.options, "mode": "lossless"})
    ranked = [
        f16,
        best_pool,
        q8,
        large,
        small_batch,
        offer("pool", "q8_0", 4096),
        offer("pool", "f16", 2048),
        lossless,
        few,
    ]
    moved = [replace(offer("pool", "q8_0", 16_384), n_on_cpu=n) for n in (3, 4)]
    ranked += [*moved, replace(offer("pool", "f16", 16_384, "2"), n_on_cpu=1), offer("pool", "f16", 16_384, "off")]
    for i, wanted in enumerate(ranked):
        assert best([q4, ram, *ranked[:i:-1], wanted], n_ctx) is wanted
    assert best([q4, ram], n_ctx) is None
    slow, fast = replace(f16, host_read=130), replace(best_pool, host_read=100)
    assert best([slow, fast], n_ctx) is fast
    assert best([replace(slow, host_read=120), fast], n_ctx).host_read == 120, "nearly as fast, and closer"
    same = [offer("pool", kind, 4096) for kind in ("f16", "q8_0")]
    assert best(same, n_ctx) is same[0], "neither was measured"


def test_each_way_says_how_far_its_answers_are() -> None:
    found = planned("--memory", "850M", "-c", "128K")
    says = {
        (way["kind"], way["options"].get("type_k", "f16"), way["options"].get("mode")): way for way in found["ways"]
    }
    for key, kld in ((("f16", "f16", None), "f16"), (("q8_0", "q8_0", None), "q8_0"), (("RAM", "q8_0", None), "q8_0")):
        assert says[key]["kld"] == expected.FULL_KLD[kld]
    assert says["pool", "f16", "lossless"]["answers"] == "full cache's"
    assert says["q8_0", "q8_0", None]["answers"] == "as good as q8_0"
    assert says["q4_0", "q4_0", None]["answers"] == "broken"
    assert says["pool", "q8_0", "lossless"]["kld"] == expected.FULL_KLD["q8_0"], "lossless beside a cache in q8_0"
    pool = says["pool", "f16", None]
    assert (pool["kld"] is None) == ("not measured" in pool["answers"])


@pytest.mark.skipif(any(d.gpu for d in devices()), reason="there is a GPU")
def test_the_host_keeps_what_llama_cpp_leaves_there(tmp_path: Path) -> None:
    """Each table that a token's number or place is looked up in."""
    refused.write("bert", tmp_path / "bert.gguf")
    with pretending(GIB, GIB), Model.load(tmp_path / "bert.gguf", no_alloc=True) as model:
        there = {weight.name for weight in model.weights() if not devices()[weight.device].gpu}
    assert there == {"token_embd.weight", "token_types.weight", "position_embd.weight"}


@pytest.mark.skipif(any(d.gpu for d in devices()), reason="there is a GPU")
@pytest.mark.parametrize("name", ["qwen35", "mamba"])
def test_states_are_where_the_cache_is(tiny_path: Callable[[str], Path], name: str) -> None:
    found = ways(planned(str(tiny_path(name)), "--memory", "2G", "-c", "4K"))
    gpu, host = found["RAM"]["needs"]
    assert gpu["states"] == 0
    assert host["states"] == sum(need["states"] for need in found["f16"]["needs"]) > 0


@pytest.mark.parametrize("name", ["gemma4", "deepseek2", "qwen4exp"])
def test_every_kind_of_memory_has_a_plan(tiny_path: Callable[[str], Path], name: str) -> None:
    """One that cannot be pooled has the full cache alone."""
    found = planned(str(tiny_path(name)), "--memory", "2G", "-c", "4K")
    pools = [way for way in found["ways"] if way["kind"] == "pool"]
    assert bool(pools) == (name != "qwen4exp")
    assert all(way["n_pool"] < 4096 for way in pools)
    assert all(way["fits"] for way in found["ways"])
