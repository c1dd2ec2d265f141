"""Logits of NaN or infinity: an error with a name wherever a token is chosen by them, and never an answer or a figure."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)

from support import commands, drafting, tiny
from support.commands import check_error, invoke
from support.drafting import SMALL
from support.runs import GREEDY, Open, text_of
from support.serving import Running

from pyllama_kvflash import KVFlash, Sampling, Warn
from pyllama_kvflash.errors import BadLogitsError
from pyllama_kvflash.serve.scheduler import Scheduler

pytestmark = pytest.mark.native

environment = commands.environment
files = drafting.files
opened = drafting.opened

POISONED: dict[str, tuple[str, Any]] = {
    "output NaN": ("output.weight", np.nan),
    "one row inf": ("output.weight", lambda t: np.where(np.arange(len(t))[:, None] == 5, np.inf, t)),
    "norm NaN": ("output_norm.weight", np.nan),
    "K NaN": ("blk.1.attn_k.weight", np.nan),
    "V inf": ("blk.1.attn_v.weight", np.inf),
}
WORDS = "are NaN or infinite: its weights are damaged"
PROMPT = drafting.TOKENS[:300]  # more than a pool of 256
SAMPLED = Sampling(temperature=0.8, seed=1)
ALL_TEXTS = "root ::= [^\\x00]*"


def poisoned(path: Path, tensor: str, value: Any) -> Path:
    """A tiny model with a tensor of bad values."""

    def make(w: tiny.Writer) -> None:
        tiny.qwen3(w, n_layer=2)
        data = tiny.written(w, tensor)
        data[...] = value(data) if callable(value) else value

    tiny.write_worded(path, "qwen3", make)
    return path


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned(tmp_path_factory.mktemp("bad") / "bad.gguf", *POISONED["one row inf"])


@pytest.mark.parametrize("pool", [256, "off"])
@pytest.mark.parametrize("name", POISONED)
def test_no_token_is_chosen(tmp_path: Path, name: str, pool: Any) -> None:
    """By the likeliest, by chance, or under a grammar. What was computed can be looked at."""
    with KVFlash.from_file(poisoned(tmp_path / "bad.gguf", *POISONED[name]), **{**SMALL, "pool": pool}) as kv:
        for sampling in (
            GREEDY,
            SAMPLED,
            Sampling(temperature=0, grammar=ALL_TEXTS),
            Sampling(seed=1, grammar=ALL_TEXTS),
        ):
            with pytest.raises(BadLogitsError, match=WORDS):
                list(kv.generate(PROMPT, max_tokens=4, sampling=sampling))
            if kv.n_pool:
                kv.check_integrity()
        kv.clear()
        list(kv.prefill(PROMPT[:4]))
        assert not np.all(np.isfinite(kv.logits()))


def test_zeros_are_finite(tmp_path: Path) -> None:
    with KVFlash.from_file(poisoned(tmp_path / "m.gguf", "output.weight", 0.0), **{**SMALL, "pool": "off"}) as kv:
        list(kv.prefill(PROMPT[:4]))
        assert kv.ctx.checked_logits().tolist() == [0.0] * tiny.N_VOCAB


@pytest.mark.parametrize("at", [0, 31, 500, tiny.N_VOCAB + 3])
def test_one_bad_logit_is_found_wherever_it_is(tmp_path: Path, at: int) -> None:
    """Also after the last whole vector of a vocabulary."""
    n = tiny.N_VOCAB + 8

    def make(w: tiny.Writer) -> None:
        drafting.dense(w)
        tiny.written(w, "output.weight")[at] = np.nan

    drafting.resized("qwen3", make, n)(tmp_path / "m.gguf")
    with KVFlash.from_file(tmp_path / "m.gguf", **{**SMALL, "pool": "off"}) as kv:
        list(kv.prefill(PROMPT[:4]))
        assert np.flatnonzero(np.isnan(kv.logits())).tolist() == [at]
        with pytest.raises(BadLogitsError, match=f"1 of the model's {n} logits {WORDS}"):
            kv.ctx.checked_logits()


def test_commands_end_with_the_sentence(bad: Path, tmp_path: Path) -> None:
    """No figure is written, either."""
    for more in (("--temp", "0"), ("--json",), ("--kvflash-mode", "lossless", "--kvflash", "512")):
        res = invoke("run", bad, "-p", "Hello", "-c", "1K", "-n", "4", "--no-chat-template", *more)
        assert WORDS in check_error(res, 1, "-ctk/--cache-type-k")
    for bench, n_ctx in (("niah", "1K"), ("kld", "2K")):
        res = invoke("bench", bench, bad, "--contexts", n_ctx, "-o", tmp_path / bench)
        assert WORDS in check_error(res, 1)
        assert not list((tmp_path / bench).iterdir())


NAN_TOKEN = 5


def spoiled(arch: str) -> Callable[[tiny.Writer], None]:
    """A model that computes NaN from one token on."""

    def make(w: tiny.Writer) -> None:
        tiny.MODELS[arch](w)
        tiny.written(w, "token_embd.weight")[NAN_TOKEN] = np.nan

    return make


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3", {"pool": 512, "prefill": "exact"}),
        ("qwen3", {"pool": 512, "policy": "fresh"}),
        ("qwen3", {"pool": "off", "flash_attn": "off"}),
        ("qwen35", {"pool": "off"}),
        ("mamba", {"pool": "off"}),
    ],
)
def test_what_was_bad_stays_in_no_cell(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    """A cell that is masked counts 0 times what is in it, and 0 times NaN is NaN: others would fail for good."""
    tiny.write_worded(tmp_path / "m.gguf", arch, spoiled(arch))
    prompt = np.where(PROMPT[:200] == NAN_TOKEN, 6, PROMPT[:200]).astype(np.int32)

    def answer(seq: Any, **how: Any) -> str:
        return text_of(list(seq.generate(prompt, max_tokens=4, sampling=Sampling(temperature=0, **how))))

    with KVFlash.from_file(tmp_path / "m.gguf", **{**SMALL, "n_parallel": 2, **options}) as kv:
        want = answer(kv)
        kv.clear()
        with pytest.raises(BadLogitsError):
            answer(kv, logit_bias=((NAN_TOKEN, 1000.0),))
        kv.clear()
        assert answer(kv.sequences[1]) == want
        kv.sequences[1].clear()
        assert answer(kv) == want


def test_a_bad_scorer_makes_room_for_qk(tmp_path: Path, opened: Open) -> None:
    """Without a word of numpy's."""
    path = poisoned(tmp_path / "scorer.gguf", *POISONED["K NaN"])
    kv = opened("qwen3", policy="drafter", scorer_model=path, pool=256)
    [warning] = [e.text for e in kv.generate(PROMPT, max_tokens=4, sampling=GREEDY) if isinstance(e, Warn)]
    assert warning.endswith("NaN or infinite: its weights are damaged; using qk")


def test_a_broken_drafter_is_told_once_and_drafts_no_more(opened: Open, files: Callable[[str], str]) -> None:
    """The answer is the target's, in any case."""
    want = text_of(list(opened("qwen3").generate(PROMPT[:100], max_tokens=12, sampling=GREEDY)))
    for kind, name in (("draft", "nan"), ("draft", "inf"), ("dflash", "nan dflash")):
        kv = opened("qwen3", {"kind": kind, "model": name})
        events = [*kv.generate(PROMPT[:100], max_tokens=12, sampling=GREEDY)]
        assert text_of(events) == want
        [warning] = [e.text for e in events if isinstance(e, Warn)]
        assert "no longer drafts" in warning
        assert WORDS in warning
        assert events[-1].stats.drafted == 0
        assert not any(isinstance(e, Warn) for e in kv.generate(PROMPT[:90], max_tokens=4, sampling=GREEDY))


#
# the server
#


@pytest.fixture(scope="module")
def server(bad: Path) -> Iterator[Running]:
    pytest.importorskip("uvicorn")

    def open_(progress: Callable[[float], None]) -> KVFlash:
        return KVFlash.from_file(bad, progress=progress, **{**SMALL, "n_parallel": 2})

    with Running(Scheduler(open_, n_queue=8), webui=False) as running:
        yield running


ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
REQUESTS = {
    "/v1/chat/completions": ASKED,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4, "logprobs": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": ASKED,
    "/api/chat": {**ASKED, "stream": False},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_server_answers_with_the_error(server: Running, path: str) -> None:
    res = server.post(REQUESTS[path], path)
    assert res.status_code == 500
    error = res.json()["error"]
    assert WORDS in (error if isinstance(error, str) else error["message"])
    res = server.post({**REQUESTS[path], "stream": True}, path)
    assert res.status_code == 200
    assert WORDS in res.text
    assert '"finish_reason":"' not in res.text
    assert server.idle()


def test_a_stream_ends_with_the_error_and_the_next_request_is_answered(tmp_path: Path) -> None:
    tiny.write_worded(tmp_path / "m.gguf", "qwen3", spoiled("qwen3"))

    def open_(progress: Callable[[float], None]) -> KVFlash:
        return KVFlash.from_file(tmp_path / "m.gguf", progress=progress, **{**SMALL, "pool": "off", "n_parallel": 2})

    with Running(Scheduler(open_, n_queue=8), webui=False) as server:
        want = server.text(prompt="x", max_tokens=4)
        grammar = "root ::= " + " ".join(f"<[{t}]>" for t in (7, NAN_TOKEN, 8))
        res = server.post({"prompt": "x", "max_tokens": 4, "grammar": grammar, "stream": True})
        *parts, error, end = [
            line.removeprefix("data: ") for line in res.text.splitlines() if line.startswith("data: ")
        ]
        assert end == "[DONE]"
        assert WORDS in json.loads(error)["error"]["message"]
        assert "".join(json.loads(part)["choices"][0]["text"] for part in parts)
        assert [server.text(prompt="x", max_tokens=4) for _ in range(3)] == [want] * 3
