"""The Python API: what the documents show, events, figures, opening and closing."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import needles
from support.changes import ENGINE, crossed
from support.models import Geometry, model_file
from support.runs import GREEDY, LRU, Open, feed, out, text_of

from pyllama_kvflash import Done, KVFlash, Paged, Prefill, Token
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt

pytestmark = pytest.mark.native

SMALL = LRU
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def document() -> NeedlePrompt:
    """1,400 tokens with four codes."""
    return needles.document(1400, seed=3)


#
# what the documents show
#


@pytest.mark.parametrize("page", ["README.md", "docs/API.md", "docs/SCORERS.md"])
def test_examples_of_the_documents(
    page: str,
    document: NeedlePrompt,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the README's saves a snapshot
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    prompt = document.text + document.needles[-1].question
    for block in blocks:
        code = block.replace('"model.gguf"', repr(str(BUNDLED_MODEL)))
        exec(compile(code, page, "exec"), {"prompt": prompt})
    if page == "README.md":
        assert document.needles[-1].answer in capsys.readouterr().out


#
# events
#


def test_events_come_in_order(opened: Open, document: NeedlePrompt) -> None:
    kv = opened("needle")
    events = list(kv.generate(document.text, max_tokens=80, sampling=GREEDY))
    kinds = [type(e) for e in events]
    first_token = kinds.index(Token)
    assert Prefill not in kinds[first_token:]
    assert set(kinds[:first_token]) == {Prefill, Paged}
    assert kinds[-1] is Done
    assert kinds.count(Done) == 1

    n = len(kv.tokenize(document.text))
    prefill = [e for e in events if isinstance(e, Prefill)]
    assert [e.done for e in prefill] == [*range(64, n, 64), n]
    assert {e.total for e in prefill} == {n}
    assert all(a.seconds < b.seconds and a.host_bytes <= b.host_bytes for a, b in itertools.pairwise(prefill))
    assert {e.resident_bytes for e in prefill} == {kv.resident_bytes}

    paged = [e for e in events if isinstance(e, Paged)]
    assert [e.pos for e in paged] == sorted({e.pos for e in paged})
    gone = [c for e in paged for c in e.drops]
    assert len(gone) == len(set(gone))
    assert all(0 < c < e.pos // 64 - 3 for e in paged for c in e.drops)  # neither the sink nor the tail
    assert all(e.page_ins == () for e in paged)
    assert gone == out(kv)

    done = events[-1]
    assert isinstance(done, Done)
    assert done.reason in {"length", "eos"}
    stats = done.stats
    tokens = [e for e in events if isinstance(e, Token)]
    assert (stats.n_prompt, stats.n_generated) == (n, len(tokens))
    assert (stats.n_ctx, stats.n_pool) == (16384, 768)
    assert (stats.pages_out, stats.pages_in) == (len(gone), 0)
    assert stats.chunks == len(kv.residency().resident)
    assert stats.resident == stats.chunks - len(gone)
    assert stats.stored == kv.n_tokens // 64
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.prefill_rate == pytest.approx(n / stats.prefill_s)
    assert stats.seed is None
    assert text_of(events) == kv.detokenize([e.id for e in tokens])


def test_prompt_as_text_bytes_or_tokens(opened: Open) -> None:
    kv = opened("needle")
    text = "The secret code for the red boat"
    forms = [text, text.encode(), kv.tokenize(text), kv.tokenize(text).tolist(), tuple(kv.tokenize(text).tolist())]
    texts = [text_of(list(kv.generate(form, max_tokens=8, sampling=GREEDY))) for form in forms]
    assert len(set(texts)) == 1
    assert texts[0]


def test_reasons(opened: Open) -> None:
    kv = opened("needle", n_ctx=256, pool="off")

    def last(**kwargs: Any) -> Done:
        event = list(kv.generate("The secret code for the", sampling=GREEDY, **kwargs))[-1]
        assert isinstance(event, Done)
        return event

    assert last(max_tokens=3).reason == "length"
    assert last(max_tokens=0).stats.n_generated == 0
    assert last(max_tokens=8, stop=[" "]).reason == "stop"
    assert last(max_tokens=-1).reason in {"context", "eos"}


#
# figures
#


@pytest.mark.sampled(ENGINE)
@pytest.mark.parametrize(
    ("name", "cache"), crossed(["qwen3", "needle", "qwen35", "gemma4"], [("f16", 64), ("q8_0", 34), ("q4_0", 18)])
)
def test_device_bytes_are_those_of_the_pool(
    opened: Open, tiny_path: Callable[[str], Path], name: str, cache: tuple[str, int]
) -> None:
    kind, block_bytes = cache
    token_bytes = Geometry.read(model_file(name, tiny_path)).token_bytes(block_bytes)
    kv = opened(name, type_k=kind, type_v=kind, n_ctx=5000)
    assert kv.resident_bytes == 768 * token_bytes
    feed(kv, 1500, 64)
    stats = kv.stats()
    assert stats.kv_device_bytes == kv.resident_bytes == 768 * token_bytes
    assert stats.kv_full_bytes == 5120 * token_bytes  # in steps of 256 cells
    assert (stats.other_device_bytes > 0) == (name in {"qwen35", "gemma4"})
    full = opened(name, type_k=kind, type_v=kind, n_ctx=5000, pool="off")
    assert full.stats().kv_device_bytes == full.stats().kv_full_bytes == stats.kv_full_bytes


#
# opening and closing
#


AFTER_CLOSE = """
import sys
from pyllama_kvflash import KVFlash
kv = KVFlash.from_file(sys.argv[1], n_ctx=4096, pool=1024, n_threads=1)
kv.decode(kv.tokenize("one two three"))
kv.close()
for call in sys.argv[2:]:
    try:
        eval(call)
    except Exception:
        print("said so:", call)
"""
BAD_TOKEN = """
import sys
from pyllama_kvflash import KVFlash, KVFlashError
with KVFlash.from_file(sys.argv[1], n_ctx=1024, pool="off", n_threads=1) as kv:
    for call in sys.argv[2:]:
        try:
            eval(call)
        except KVFlashError:
            print("said so:", call)
"""


def check_refused(code: str, model: Path, *calls: str) -> None:
    """In a process of its own, which a read of what is not there would end."""
    res = subprocess.run(
        [sys.executable, "-c", code, model, *calls], capture_output=True, text=True, timeout=60, check=False
    )
    assert (res.returncode, res.stdout.splitlines()) == (0, [f"said so: {call}" for call in calls]), res.stderr


def test_use_after_close_is_an_error() -> None:
    check_refused(
        AFTER_CLOSE,
        BUNDLED_MODEL,
        "kv.tokenize('a b c')",
        "kv.detokenize([5, 6])",
        "list(kv.generate('a'))",
        "kv.decode([1])",
        "kv.logits()",
        "kv.clear()",
        "kv.rollback(1)",
        "kv.residency()",
        "kv.stats()",
    )


def test_tokens_that_do_not_exist() -> None:
    unknown = "kv.detokenize([10**6])", "kv.detokenize([-1])", "list(kv.generate([10**6]))", "list(kv.generate([-1]))"
    check_refused(BAD_TOKEN, BUNDLED_MODEL, *unknown)


def test_model_without_a_vocabulary(tiny_path: Callable[[str], Path]) -> None:
    calls = "kv.tokenize('a')", "kv.detokenize([5])", "list(kv.generate('a'))", "list(kv.generate([5]))"
    check_refused(BAD_TOKEN, tiny_path("qwen3"), *calls)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_of_progress_ends_the_load(tiny_path: Callable[[str], Path], error: type[BaseException]) -> None:
    def stop_it(_done: float) -> None:
        raise error("enough")

    with pytest.raises(error, match="enough"):
        KVFlash.from_file(tiny_path("qwen3"), progress=stop_it, **SMALL)
    KVFlash.from_file(tiny_path("qwen3"), **SMALL).close()


@pytest.mark.parametrize(
    "options",
    [
        {"pool": 0},
        {"pool": -1},
        {"pool": "lots"},
        {"n_ctx": -1},
        {"n_ctx": 1 << 40},
        {"n_batch": -1},
        {"n_ubatch": 0},
        {"chunk": 48},
        {"policy": "best"},
        {"type_k": "q9"},
        {"flash_attn": "maybe"},
        {"n_threads": 0},
        {"tail": 0},
    ],
    ids=lambda o: "_".join(f"{k}={v}" for k, v in o.items()),
)
def test_bad_options(tiny_path: Callable[[str], Path], options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(UsageError, match=re.escape(name)) as caught:
        KVFlash.from_file(tiny_path("qwen3"), **{**SMALL, **options})
    assert (f"{value:,}" if isinstance(value, int) else value) in str(caught.value)
