"""llama-server's own endpoints: /completion, /infill and what is around them, in its form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import agents, serving
from support.changes import ENGINE, SERVE
from support.rewritten import rewritten
from support.serving import NAME, SMALL, Running, long_text

from pyllama_kvflash import KVFlash
from pyllama_kvflash.native import Model
from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.serve.protocols.fim import File, infill
from pyllama_kvflash.serve.scheduler import Scheduler

pytestmark = [pytest.mark.native, pytest.mark.slow]

environment = serving.environment
server = serving.server

ASKED: dict[str, Any] = {"prompt": "On and on and on and", "n_predict": 5}
PARTS = {"index", "content", "tokens", "id_slot", "stop", "tokens_predicted", "tokens_evaluated"}
TIMES = {f"{n}_{what}" for n in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")} | {
    "cache_n"
}


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\n")
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: ")]


def test_a_completion(server: Running) -> None:
    """Its text is that of the OpenAI protocol."""
    plain = server.text(prompt=ASKED["prompt"], max_tokens=5)
    for path in ("/completion", "/completions"):
        res = server.post(ASKED, path).json()
        assert res["content"] == plain
        assert (res["stop"], res["stop_type"], res["stopping_word"]) == (True, "limit", "")
        assert res["tokens_predicted"] == res["timings"]["predicted_n"] == 5
        assert set(res["timings"]) == TIMES
        assert res["timings"]["cache_n"] + res["timings"]["prompt_n"] == res["tokens_evaluated"]


def test_a_stream(server: Running) -> None:
    more = {"stream": True, "timings_per_token": True, "return_progress": True, "cache_prompt": False}
    found = events(server.post({**ASKED, "prompt": long_text(400), **more}, "/completion").text)
    assert all(set(event) >= PARTS for event in found)
    read = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    assert [r["processed"] for r in read] == sorted({r["processed"] for r in read})
    assert read[-1]["processed"] == read[-1]["total"] == found[-1]["tokens_evaluated"]
    assert {r["cache"] for r in read} == {0}
    said = [event for event in found if event["content"]]
    assert [event["timings"]["predicted_n"] for event in said] == sorted(e["tokens_predicted"] for e in said)
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True]
    whole = server.post({**ASKED, "prompt": long_text(400)}, "/completion").json()["content"]
    assert "".join(event["content"] for event in found) == whole


def test_probabilities(server: Running) -> None:
    res = server.post({**ASKED, "n_probs": 3}, "/completion").json()
    found = res["completion_probabilities"]
    assert "".join(token["token"] for token in found) == res["content"]
    with Model.load(BUNDLED_MODEL, no_alloc=True) as model:
        for token in found:
            assert len(token["top_logprobs"]) == 3
            for one in (token, *token["top_logprobs"]):
                assert model.piece(one["id"], special=True) == bytes(one["bytes"])
                assert one["logprob"] <= 0


def test_only_some_fields(server: Running) -> None:
    res = server.post({**ASKED, "response_fields": ["content", "timings/predicted_n", "nothing/here"]}, "/completion")
    assert set(res.json()) == {"content", "predicted_n"}


def test_only_read(server: Running) -> None:
    """As front ends warm a prompt."""
    res = server.post({**ASKED, "n_predict": 0}, "/completion").json()
    assert (res["content"], res["tokens_predicted"]) == ("", 0)


def test_a_slot_of_choice(server: Running) -> None:
    """A prompt goes to the sequence that is asked for, also where another one knows it, and is read anew if that is asked for."""
    prompt = long_text(300)
    slots = [server.post({**ASKED, "prompt": prompt, "id_slot": i}, "/completion").json() for i in (0, 1, 1)]
    assert [slot["id_slot"] for slot in slots] == [0, 1, 1]
    assert slots[2]["timings"]["cache_n"] == slots[2]["tokens_evaluated"] - 1
    again = server.post({**ASKED, "prompt": prompt, "id_slot": 1, "cache_prompt": False}, "/completion").json()
    assert again["timings"]["cache_n"] <= 1  # BOS
    texts = [slot["n_tokens"] for slot in server.http.get("/slots").json()]
    assert texts[0] == texts[1] > 250


@pytest.mark.sampled(SERVE, ENGINE)
@pytest.mark.parametrize(
    "options",
    [
        {"pool": "off"},
        {"pool": 512, "policy": "auto"},
        *(pytest.param(more, marks=pytest.mark.nightly(SERVE)) for more in (
            {"pool": 512, "policy": "lru"}, {"pool": 512, "policy": "qk", "share": 0}, {"pool": 512, "prefill": "pool"},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_without_what_is_known_an_answer_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    """At temperature 0, on one sequence, whatever that had before. A prompt that is known is read in other batches."""
    asked = {"prompt": long_text(700), "max_tokens": 40, "logprobs": 3}  # beyond the opening
    with Running(n_parallel=1, **{"n_batch": 64, **options}) as server:

        def answer(**how: Any) -> tuple[int, Any]:
            found = server.post({**asked, **how}).json()
            return agents.usage(found)[1], found["choices"][0]

        first = answer(cache_prompt=False)
        assert answer(max_tokens=3)[0] > 600
        server.text(prompt=long_text(300)[99:], max_tokens=30)
        assert answer(cache_prompt=False) == first
        assert first[0] == 0


def test_around_it(server: Running) -> None:
    get = server.http.get
    (model,) = get("/models").json()["data"]
    assert get(f"/v1/models/{NAME}").json() == model
    assert get("/v1/models/a/b").status_code == 404
    assert get("/lora-adapters").json() == []
    messages = {"messages": [{"role": "user", "content": "So on."}]}
    assert server.http.post("/apply-template", json=messages).json() == {"prompt": "So on."}


def test_autocompletion_may_give_up_later(server: Running) -> None:
    res = server.post({**ASKED, "t_max_predict_ms": 500, "n_indent": 4, "t_max_prompt_ms": 0}, "/completion")
    assert res.status_code == 200
    assert res.headers["KVFlash-Warning"].count("is left out: ") == 2


#
# fill in the middle
#

IDS = {"pre": 4001, "suf": 4002, "mid": 4003, "rep": 4004, "sep": 4005}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with tokens for it, in the places of others."""
    tokens = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in IDS.items()}
    return rewritten(tmp_path_factory.mktemp("fim") / "coder.gguf", tokens=tokens)


@pytest.fixture(scope="module")
def coding(coder: Path) -> Iterator[Running]:
    scheduler = Scheduler(lambda progress: KVFlash.from_file(coder, progress=progress, **SMALL), n_queue=8)
    with Running(scheduler) as running:
        yield running


def test_the_prompt_of_an_infill(coder: Path) -> None:
    with KVFlash.from_file(coder, **{**SMALL, "n_parallel": 1}) as kv:

        def tokens(text: str) -> list[int]:
            return list(kv.model.tokenize(text, add_special=False).tolist())

        bos = kv.model.tokenize("").tolist()[:1]
        core = [4001, *tokens("def a("), 4002, *tokens("return"), 4003]
        assert infill(kv, "def a(", "return", at="x") == [*bos, *core]
        found = infill(kv, "def a(", "return", at="x", extra=[File("a.py", "one"), File("", "two")], begun="b")
        others = [4004, *tokens("project\n"), 4005, *tokens("a.py\none"), 4005, *tokens("file\ntwo")]
        assert found == [*bos, *others, *core, *tokens("b")]
        long = infill(
            kv, "def a(", "return", at="x", extra=[File("", long_text(9000)), File("", "the last")], n_answer=100
        )
        assert len(long) == kv.options.n_ctx - 100
        assert long[-len(core) :] == core
        assert tokens("the last") == long[-len(core) - len(tokens("the last")) : -len(core)]


def test_infills_are_answered(coding: Running) -> None:
    """By both protocols, with the same text."""
    asked = {"input_prefix": "The old mill", "input_suffix": "river.", "n_predict": 6}
    res = coding.post(asked, "/infill").json()
    assert res["tokens_predicted"] > 0
    body = {"prompt": "The old mill", "suffix": "river.", "max_tokens": 6}
    assert coding.post(body).json()["choices"][0]["text"] == res["content"]
    more = coding.post({**asked, "input_extra": [{"filename": "a", "text": "b"}]}, "/infill").json()
    assert more["tokens_evaluated"] > res["tokens_evaluated"]
    bad = coding.post({**asked, "input_extra": [{"filename": "a"}]}, "/infill")
    assert bad.json()["error"]["param"] == "input_extra[0].text"
