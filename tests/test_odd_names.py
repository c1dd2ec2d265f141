"""Names that are not UTF-8, or have control characters: models, folders, caches and outputs. They are used as they are, and shown
with U+FFFD.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pyllama_kvflash.native", exc_type=ImportError)
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
from support import commands
from support.commands import USAGE, check_error, good, kvflash
from support.processes import server_process

from pyllama_kvflash.needle import BUNDLED_MODEL
from pyllama_kvflash.text import printable

pytestmark = pytest.mark.native

environment = commands.environment

USER = [{"role": "user", "content": "x"}]
ANSWERS = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 2}},
    "/api/show": {},
    "/completion": {"prompt": "x", "n_predict": 2},
}
LOOKS = ("/v1/models", "/props", "/slots", "/api/tags", "/api/ps", "/health", "/metrics")
SHORT = ("-c", "256", "-n", "2", "-t", "1", "--temp", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder and a model in it whose names are not UTF-8; the model's has a newline and the begin of a colour, too."""
    res = tmp_path_factory.mktemp("odd") / os.fsdecode(b"d\xe9")
    try:
        res.mkdir()
        (res / os.fsdecode(b"m\xe8\x1b[31m\nle.gguf")).symlink_to(BUNDLED_MODEL)
    except OSError as err:
        pytest.skip(f"the file system has no such names: {err.strerror}")
    return res


@pytest.fixture
def model(folder: Path) -> Path:
    return next(folder.glob("*.gguf"))


SHOWN = "m\ufffd\ufffd[31m\ufffdle"


def test_what_is_shown() -> None:
    assert printable(os.fsdecode(b"m\xe8\x1b[31m\nle")) == SHOWN
    assert printable("Zoë 日本\n\x7f", keep="\n") == "Zoë 日本\n\ufffd"


def test_a_server(model: Path, folder: Path) -> None:
    cache = folder / os.fsdecode(b"c\xe0\x1b[31mche")
    args = (model, "-c", "512", "--kvflash", "384", "-t", "1", "--prefix-cache", cache, "--cache-min", "1")
    with server_process(*args) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path in LOOKS:
            assert client.get(path).status_code == 200, path
        assert client.get("/v1/models").json()["data"][0]["id"] == SHOWN
        assert client.get("/props").json()["model_path"].endswith(f"/d\ufffd/{SHOWN}.gguf")
        for path, body in ANSWERS.items():
            assert client.post(path, json=body).status_code == 200, path
        streamed = client.post("/v1/chat/completions", json={**ANSWERS["/v1/chat/completions"], "stream": True})
        assert f'"model":{json.dumps(SHOWN, ensure_ascii=False)}' in streamed.text.replace('": ', '":')
        assert streamed.text.endswith("data: [DONE]\n\n")
    log = "".join(server.said)
    assert "Traceback" not in log
    assert "\x1b" not in log
    listed = good("cache", "ls", "--prefix-cache", cache)
    assert SHOWN[:4] in listed.stdout
    assert "\x1b" not in listed.output


def test_commands(model: Path, folder: Path) -> None:
    """Their JSON is UTF-8 and says the name; what they write has the name it was given."""
    shown = f"{folder.parent}/d\ufffd/{SHOWN}.gguf"
    out, trace, saved = (folder / os.fsdecode(name) for name in (b"\xf6.json", b"\xf6.jsonl", b"\xf6.kvsnap"))
    run = kvflash("run", model, "-p", "x", *SHORT, "--json", "-o", out, "--trace", trace, "--save-snapshot", saved)
    assert run.code == 0, run.err
    assert json.loads(out.read_text("utf-8"))["model"] == shown
    assert json.loads(trace.read_text("utf-8").splitlines()[0])["model"] == shown
    assert saved.stat().st_size
    assert kvflash("run", model, "--restore", saved, "--append", "-p", "y", *SHORT).code == 0
    assert json.loads(kvflash("inspect", model, "--json").out)["model"] == shown
    assert json.loads(kvflash("plan", model, "--memory", "8G", "--json").out)["model"] == shown
    for command in (("inspect", model), ("plan", model, "--memory", "8G"), ("run", model, "-p", "x", *SHORT)):
        res = kvflash(*command)
        assert res.code == 0, res.err
        assert "\x1b" not in res.out + res.err
    warned = kvflash("run", model, "-p", "x", *SHORT, "--restore", model)  # which is not a snapshot
    assert f"warning: {shown} is not a whole snapshot" in warned.err, "a line break in the name begins no line"
    said = kvflash("run", "-p", "x", "-cnv", "-sys", os.fsdecode(b"\xe9"))
    check_error(said, USAGE, "the text given with -sys/--system-prompt is not UTF-8: '\\udce9'")
    error = check_error(kvflash("run", model.with_name("n\x1b[31mone.gguf"), "-p", "x"), USAGE, "n\ufffd[31mone.gguf")
    assert "\x1b" not in error


def test_an_alias_is_shown_as_a_name_is() -> None:
    """It may come from a variable of the environment, with any bytes."""
    with server_process(BUNDLED_MODEL, "-c", "256", "-t", "1", "-a", "bad\x1b[31mname\r\nX: y") as server:
        found = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        assert found == "bad\ufffd[31mname\ufffd\ufffdX: y"
