"""The page at /: what it is served with, what it asks about the pool, and, in a real browser, what one does on it."""

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support import serving
from support.oracles import ON_GPU
from support.serving import (
    NAME,
    SMALL,
    Asked,
    Running,
    between_turns,
    check_all,
    long_text,
    scheduling,
    tokens_of,
    until,
)

from pyllama_kvflash import KVFlash
from pyllama_kvflash.pool.residency import Residency
from pyllama_kvflash.serve import webui
from pyllama_kvflash.serve.job import NotReady, Phase

pytestmark = pytest.mark.native

environment = serving.environment
server = serving.server
N_CHUNK = 64
ROOT = Path(__file__).resolve().parent.parent


def ask(running: Running, text: str, max_tokens: int = 8) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return dict(running.post(body, "/v1/chat/completions").json())


def pool(running: Running) -> dict[str, Any]:
    res = running.http.get("/kvflash/pool")
    assert res.status_code == 200, res.text
    return dict(res.json())


def refused(res: httpx.Response, status: int, *words: str) -> None:
    assert res.status_code == status, res.text
    message = res.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.fixture(scope="module")
def read() -> Iterator[Running]:
    """A server, for all that leave it as it was, whose first sequence has more than the pool holds, with chunks that are scored."""
    with Running(n_batch=256, policy="qk") as running:
        ask(running, long_text(2600))
        until(running.idle)
        yield running


#
# files
#


def test_files_say_what_a_browser_may_do(server: Running) -> None:
    for path in webui.OPEN:
        res = server.http.get(path)
        assert res.status_code == 200
        policy = dict(part.strip().split(" ", 1) for part in res.headers["content-security-policy"].split(";"))
        assert (
            policy["default-src"]
            == policy["base-uri"]
            == policy["form-action"]
            == policy["frame-ancestors"]
            == "'none'"
        )
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data:"
        assert res.headers["x-content-type-options"] == "nosniff"
        assert res.headers["referrer-policy"] == "no-referrer"
        assert res.headers["cache-control"] == "no-cache"
        kind = {"": "text/html", "css": "text/css", "js": "text/javascript", "mjs": "text/javascript"}[
            path.rpartition(".")[2].strip("/")
        ]
        assert res.headers["content-type"] == f"{kind}; charset=utf-8"
        assert server.http.head(path).status_code == 200
        refused(server.http.post(path), 405)


STATIC = Path(webui.__file__).with_name("static")


def test_every_file_is_served_and_none_of_ours_names_another_host() -> None:
    """Each of ours is short enough to be read at once."""
    ours = [path for path in STATIC.iterdir() if path.is_file()]
    libraries = [path for path in (STATIC / "lib").iterdir() if path.suffix != ".txt"]
    served = {f"/static/{path.relative_to(STATIC)}" for path in (*ours, *libraries)}
    assert served == webui.OPEN - {"/"} | {"/static/index.html"}
    for path in ours:
        text = path.read_text("utf-8").replace("xmlns='http://www.w3.org/2000/svg'", "")
        assert "http:/" not in text.replace("https", "http"), path
        assert "innerHTML" not in text
        assert not re.search(r"""["'`(]/[a-z]""", re.sub(r"//.*", "", text)), (
            f"{path}: a proxy may have it below a path"
        )
        assert "style=" not in text
        assert len(text.splitlines()) <= 400, path


def test_libraries_are_those_that_are_named() -> None:
    """Unchanged, with their licences."""
    said = [line.split() for line in (STATIC / "lib" / "VERSIONS.txt").read_text("utf-8").splitlines()[4:]]
    assert {row[0] for row in said} == {path.name for path in (STATIC / "lib").iterdir() if path.suffix != ".txt"}
    notice = (ROOT / "NOTICE").read_text("utf-8")
    for name, package, version, *_, licence, digest in said:
        data = (STATIC / "lib" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name
        assert version.encode() in data[:3000], name
        assert (STATIC / "lib" / licence).stat().st_size > 1000, package
    for name in ("marked", "DOMPurify", "highlight.js", "PDF.js"):
        assert f"- {name}, " in notice


def test_without_the_page_there_is_nothing() -> None:
    with Running(webui=False) as running:
        for path in (*webui.OPEN, "/kvflash/pool", "/kvflash/chunk?sequence=0&chunk=0"):
            refused(running.http.get(path), 404)
        refused(running.post({}, "/kvflash/pin"), 404)
    with Running(webui=False, api_key="secret") as running:
        refused(httpx.get(running.url), 401)


def test_the_files_need_no_key_and_the_pool_does() -> None:
    with Running(api_key="secret") as running, httpx.Client(base_url=running.url) as stranger:
        for path in webui.OPEN:
            assert stranger.get(path).status_code == 200
        assert 'data-needs-key="yes"' in stranger.get("/").text
        for path in ("/kvflash/pool", "/kvflash/chunk?sequence=0&chunk=0", "/static/", "/static/x"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("/kvflash/pin", json={}).status_code == 401
        assert pool(running)["status"] == "ok"


#
# the pool
#


def test_the_pool_is_what_residency_says(read: Running) -> None:
    found = pool(read)
    kv = read.scheduler.kv
    assert kv
    ledger, stats, seen = kv.pager.ledger, between_turns(read.scheduler, KVFlash.stats)[0], residency(read)
    assert found["status"] == "ok"
    assert (found["model"], found["policy"]) == (NAME, "qk")
    assert (found["pool_cells"], found["chunk"], found["n_ctx"]) == (SMALL["pool"], N_CHUNK, SMALL["n_ctx"])
    assert (found["device_kv_bytes"], found["host_bytes"]) == (stats.device_kv_bytes, stats.host_bytes)
    assert found["device_kv_bytes"] > 0
    assert (found["meter"], found["gpu"]) == (False, ON_GPU)
    first, second = found["sequences"]
    assert first["n_tokens"] == kv.n_tokens > SMALL["pool"]
    assert first["state"] == "".join("01"[int(there)] for there in seen.resident)
    assert first["state"].count("1") == first["resident"] == stats.resident
    assert "0" in first["state"]
    assert [c in "ps" or c == "t" for c in first["kind"]] == seen.protected.tolist()
    assert first["kind"][0] == "s"
    assert first["kind"][-4:] == "tttt"
    for said, score in zip(first["score"], seen.score, strict=True):
        assert (said is None) == bool(np.isnan(score))
        assert said is None or said == pytest.approx(score, rel=0.01, abs=1e-30)
    assert any(score is not None for score in first["score"])
    assert first["reselect"]["pos"] <= ledger.n_tokens
    assert first["reselects"] == stats.reselects >= 1
    assert (first["pages_in"], first["pages_out"]) == (stats.pages_in, stats.pages_out)
    assert found["pages_out"] >= stats.pages_out
    assert (first["layers"], first["guest_blocks"], found["guests_fetched"], found["coarse_bytes"]) == ([], 0, 0, 0)
    assert second["n_tokens"] == 0
    assert (second["state"], second["kind"], second["score"]) == ("", "", [])
    assert not first["busy"]
    assert first["reading"] is None


def coded_bytes(kv: KVFlash) -> int:
    """Of the codes of a sequence."""
    room = kv.pager.guests
    assert room
    return room.n_bytes(kv.stats().coarse_tokens)


def test_what_layers_chose_is_told() -> None:
    """For each chunk in how many of them it is; and what the codes of all sequences take, and what was fetched by them."""
    with Running(n_batch=256, policy="fresh", coarse="4", pool=1024) as running:
        for text in (long_text(1800), f"Another. {long_text(1500)}"):
            ask(running, text)
            until(running.idle)
        found, seen = pool(running), between_turns(running.scheduler, KVFlash.residency)
        stats, (one, other) = between_turns(running.scheduler, KVFlash.stats), found["sequences"]
        assert (found["policy"], found["n_layer"]) == ("fresh", 6)
        one_has, other_has = between_turns(running.scheduler, coded_bytes)
        assert found["coarse_bytes"] == stats[0].coarse_bytes == stats[1].coarse_bytes >= one_has + other_has
        assert (found["coarse_bytes"] > one_has + other_has) == ON_GPU, "there with what attending to them takes"
        assert min(one_has, other_has) > 0
        assert found["guests_fetched"] == stats[0].guests_fetched == stats[1].guests_fetched > 0
        for said, where, its in zip((one, other), seen, stats, strict=True):
            assert said["layers"] == where.layers.tolist()
            assert any(0 < n < 6 and state == "0" for n, state in zip(said["layers"], said["state"], strict=True))
            assert said["guest_blocks"] == its.guest_blocks > 0
        until(lambda: running.metrics()["sequences_busy"] == 0)
        metrics = running.metrics()
        assert metrics["coarse_bytes"] == found["coarse_bytes"]
        assert metrics["kv_device_bytes"] == found["device_kv_bytes"] == stats[0].device_kv_bytes
        assert metrics["guests_fetched_total"] == found["guests_fetched"]
        check_all(running.scheduler)


def test_a_full_cache_is_said_to_be_one() -> None:
    with Running(pool="off") as running:
        ask(running, long_text(300))
        found = pool(running)
        assert found["pool_cells"] is None
        assert found["policy"] == "full"
        assert found["sequences"][0]["state"] == ""
        assert found["sequences"][0]["n_tokens"] > 290
        assert running.http.get("/kvflash/chunk?sequence=0&chunk=1").json()["end"] == 128
        refused(pin(running, 1), 409, "there is no pool", "--kvflash")


def test_while_there_is_no_pool_it_says_why(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.scheduler, "phase", Phase.LOADING)
        assert pool(server) == {"status": "loading", "model": NAME}
        refused(server.http.get("/kvflash/chunk?sequence=0&chunk=0"), 503, "loading")
        refused(pin(server, 0), 503, "loading")
    assert pool(server)["status"] == "ok"


#
# the text of a chunk
#


def test_the_text_of_a_chunk_is_that_of_its_tokens(read: Running) -> None:
    kv = read.scheduler.kv
    assert kv
    tokens = kv.tokens
    last = (len(tokens) - 1) // N_CHUNK
    for chunk in (0, 7, last):
        found = read.http.get("/kvflash/chunk", params={"sequence": 0, "chunk": chunk}).json()
        part = tokens[chunk * N_CHUNK : (chunk + 1) * N_CHUNK]
        assert found == {
            "sequence": 0, "chunk": chunk, "text_id": pool(read)["sequences"][0]["text_id"],
            "start": chunk * N_CHUNK, "end": chunk * N_CHUNK + len(part), "text": kv.detokenize(part),
        }  # fmt: skip
    refused(read.http.get("/kvflash/chunk", params={"sequence": 0, "chunk": last + 1}), 404, f"no chunk {last + 1}")
    refused(read.http.get("/kvflash/chunk", params={"sequence": 2, "chunk": 0}), 404, "no sequence 2")
    refused(read.http.get("/kvflash/chunk", params={"sequence": 1, "chunk": 0}), 404, "has 0 now")


#
# pins
#


def pin(running: Running, chunk: Any, pinned: Any = True, sequence: Any = 0, **more: Any) -> httpx.Response:
    return running.http.post("/kvflash/pin", json={"sequence": sequence, "chunk": chunk, "pinned": pinned, **more})


def residency(running: Running) -> Residency:
    return between_turns(running.scheduler, KVFlash.residency)[0]


def test_a_pin_brings_a_chunk_back_and_keeps_it(read: Running) -> None:
    out = pool(read)["sequences"][0]["state"].index("0")
    for _ in range(2):  # harmless when repeated
        assert pin(read, out).json() == {"sequence": 0, "chunk": out, "pinned": True}
    found = pool(read)["sequences"][0]
    assert (found["state"][out], found["kind"][out]) == ("1", "p")
    assert residency(read).protected[out]
    for _ in range(2):
        assert pin(read, out, False).json()["pinned"] is False
    assert pool(read)["sequences"][0]["kind"][out] == "-"
    assert not residency(read).protected[out]
    check_all(read.scheduler)


def test_a_pin_stays_with_the_conversation_and_goes_with_it() -> None:
    with Running(n_parallel=1) as running:
        messages = [{"role": "user", "content": long_text(1000)}]
        body = {"messages": messages, "max_tokens": 4}
        said = running.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"]
        first = pool(running)["sequences"][0]
        assert pin(running, 12).status_code == 200
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        assert (
            running.post(body, "/v1/chat/completions").json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 900
        )
        assert pool(running)["sequences"][0]["kind"][12] == "p"
        ask(running, "Another one. " + long_text(1000))
        found = pool(running)["sequences"][0]
        assert "p" not in found["kind"]
        assert found["text_id"] > first["text_id"]


def test_what_is_no_pin_is_refused(read: Running) -> None:
    for wrong in (-1, 1.5, "1", None, True, [1], {}):
        refused(pin(read, wrong), 400, "chunk must be an integer from 0")
        refused(pin(read, 1, sequence=wrong), 400, "sequence must be an integer from 0")
    for wrong in (0, 1, "true", None):
        refused(pin(read, 1, pinned=wrong), 400, "pinned must be true or false")
    refused(pin(read, 10**30), 404, "there is no chunk")
    refused(pin(read, 1, sequence=9), 404, "there is no sequence 9")
    refused(read.http.post("/kvflash/pin", content=b"{}", headers={"Origin": "http://x"}), 415, "application/json")
    refused(read.http.post("/kvflash/pin", content=b"{", headers={"Content-Type": "application/json"}), 400, "not JSON")
    refused(read.http.post("/kvflash/pin", json=[1]), 400)
    refused(read.http.get("/kvflash/pin"), 405)
    assert "p" not in json.dumps([s["kind"] for s in pool(read)["sequences"]])


#
# questions to the scheduler's thread
#


def test_whoever_asks_is_answered_between_turns() -> None:
    with scheduling() as scheduler:
        assert scheduler.query(len).result(30) == 2
        asked = Asked(scheduler, tokens_of(1500), 30)
        counts = [scheduler.query(lambda slots: slots[0].seq.n_tokens).result(30) for _ in range(20)]
        assert counts == sorted(counts)
        assert asked.done.n_answer == 30
        with pytest.raises(ZeroDivisionError):
            scheduler.query(lambda _: 1 // 0).result(30)
        assert scheduler.query(len).result(30) == 2, "it goes on"


def test_a_question_that_comes_too_late_is_refused() -> None:
    asked: list[Future[int]] = []
    with scheduling() as scheduler:

        def late(_: object) -> int:
            asked.append(scheduler.query(len))  # waits for the next turn, which there is none of
            scheduler.end()
            return 1

        assert scheduler.query(late).result(30) == 1
    with pytest.raises(NotReady):
        asked[0].result(30)
    with pytest.raises(NotReady):
        scheduler.query(len)
