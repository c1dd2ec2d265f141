"""Fields that other servers know: with a value that has no effect they are taken, unknown ones are named, and others are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
from support import serving
from support.serving import Running

pytestmark = [pytest.mark.native, pytest.mark.slow]

environment = serving.environment
server = serving.server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SAYS: dict[str, Any] = {"messages": [{"role": "user", "content": "On and on."}], "max_tokens": 1}
NEUTRAL: dict[str, Any] = {
    "add_special_tokens": True, "best_of": 1, "cache_prompt": True, "echo": False, "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "functions": [], "guidance_scale": 1, "guided_regex": "", "image_data": [],
    "length_penalty": 1, "logits_processors": [], "lora": [], "min_tokens": 0, "modalities": ["text"], "n_discard": 0,
    "n_keep": 0, "negative_prompt": "", "no_repeat_ngram_size": 0, "num_beams": 1, "penalty_alpha": 0, "prediction": None,
    "prompt_logprobs": 0, "skip_special_tokens": True, "smoothing_factor": 0, "suffix": "", "tfs": 1, "tfs_z": 1.0, "top_a": 0,
    "use_beam_search": False, "user": "me",
}  # fmt: skip
"""As front ends send them with each request."""


def test_neutral_values_are_taken(server: Running) -> None:
    res = server.post({**SAYS, **NEUTRAL}, CHAT)
    assert res.status_code == 200, res.text
    assert "KVFlash-Warning" not in res.headers


def test_unknown_fields_are_named_once(server: Running) -> None:
    body = {"max_token": 5, "bl\n\u00e9": [], "stream_options": {"usage": True}, "stream": True}
    messages = [{"role": "user", "content": "On and on.", "mood": "glad"}]
    for _ in range(2):
        res = server.post({**SAYS, **body, "messages": messages}, CHAT)
        assert res.status_code == 200, res.text
        assert res.headers["KVFlash-Warning"].split(" | ") == [
            f"{name} is not a known field, and has no effect"
            for name in ("'max_token'", "'bl\\n\\xe9'", "'stream_options.usage'", "'messages[0].mood'")
        ]
    assert sum("'max_token'" in note for note in server.notes) == 1


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with Running(strict=True) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**SAYS, "max_token": 5}, "max_token"),
        (CHAT, {**SAYS, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (CHAT, {**SAYS, "messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        (COMPLETION, {"prompt": "x", "messages": []}, "messages"),
        ("/v1/messages", {**SAYS, "thoughts": 1}, None),
    ],
)
def test_a_strict_server_refuses_them(strict: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    res = strict.post(body, path)
    assert res.status_code == 400, res.text
    error = res.json()["error"]
    assert "is not a known field: leave it out" in error["message"]
    assert error.get("param") == param
