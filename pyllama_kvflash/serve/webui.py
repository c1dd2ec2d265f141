"""The web page at /: its files, and the endpoints with which it shows the pool and pins chunks."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.events import Stats
from pyllama_kvflash.policy import Ledger
from pyllama_kvflash.serve.http import JSONResponse, Read
from pyllama_kvflash.serve.job import NotReady, Phase
from pyllama_kvflash.serve.pool_queries import Query
from pyllama_kvflash.serve.protocols import fields
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid
from pyllama_kvflash.serve.scheduler import Scheduler
from pyllama_kvflash.serve.settings import Settings
from pyllama_kvflash.serve.slot import Slot

_FOLDER = Path(__file__).with_name("static")
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript"}
_NAMES = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.suffix in _KINDS)
_FILES = {"/" if name == "index.html" else f"/static/{name}": name for name in _NAMES}

OPEN = frozenset(_FILES)
"""Paths that need no key: a browser cannot send a key for them, and they hold no data."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FRESH = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def routes(scheduler: Scheduler, settings: Settings, read: Read) -> list[Route]:
    """Return the routes of the page."""
    pool = _Pool(scheduler, settings.name, read)
    return [
        *(Route(path, _file(file, needs_key=bool(settings.api_key))) for path, file in _FILES.items()),
        Route("/kvflash/pool", pool.look),
        Route("/kvflash/chunk", pool.text),
        Route("/kvflash/pin", pool.pin, methods=["POST"]),
    ]


def _file(name: str, *, needs_key: bool) -> Callable[[Request], Awaitable[Response]]:
    # this tells the page whether a key is needed: a trial request would log an error in the browser's console
    data = (_FOLDER / name).read_bytes().replace(b"{{needs_key}}", b"yes" if needs_key else b"no")

    async def answer(_request: Request) -> Response:
        return Response(data, headers=_HEADERS, media_type=_KINDS[Path(name).suffix])

    return answer


#
# queries for the scheduler's thread
#


_OF_ALL = ("n_ctx", "device_kv_bytes", "kv_full_bytes", "host_bytes", "coarse_bytes", "disk_bytes")
_OF_SEQUENCE = ("guest_blocks", "resident", "pages_in", "pages_out", "reselects", "reselect_s")
_OF_CHOICE = ("pos", "page_ins", "drops", "score_s", "apply_s")
"""Fields that the page gets under the same names: those of Stats for the pool, of Stats for a sequence, and of Reselect."""


def _picked(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _sequence(slot: Slot, stats: Stats) -> dict[str, Any]:
    """Return a sequence's state for the page. `state` and `kind` have one character per chunk: there may be thousands of chunks."""
    seq, serving = slot.seq, slot.serving
    r = seq.residency() if seq.n_pool is not None else None
    meter = seq.decoder.meter.stats if seq.decoder.meter else None
    return {
        "id": seq.seq,
        "busy": serving is not None,
        "reading": (seq.n_tokens, serving.generation.n_text) if serving and slot.reading else None,
        "n_tokens": seq.n_tokens,
        "text_id": slot.n_texts,
        "state": "".join(str(int(there)) for there in r.resident) if r else "",
        "kind": _kinds(seq.pager.ledger) if r else "",
        "score": r.score.tolist() if r else [],
        "layers": r.layers.tolist() if r and stats.guest_blocks else [],
        **_picked(stats, _OF_SEQUENCE),
        "reselect": _picked(slot.reselect, _OF_CHOICE) if slot.reselect else None,
        "compared": (meter.checked, meter.agreed) if meter and meter.checked else None,  # of this answer
    }


def _kinds(ledger: Ledger) -> str:
    """Return a letter for each chunk: p (pinned), s (an attention sink), t (in the tail), or - (none of these)."""
    tail = min(max(0, ledger.n_chunks - ledger.n_tail), ledger.n_sealed)
    pinned = dict.fromkeys(ledger.pins, "p")
    usual = ("s" if i < ledger.n_sinks else "t" if i >= tail else "-" for i in range(ledger.n_chunks))
    return "".join(pinned.get(i, letter) for i, letter in enumerate(usual))


def _slot(slots: Sequence[Slot], sequence: int, chunk: int) -> Slot:
    """Return a sequence's slot. Raises RequestError if there is no such sequence, or if it has no such chunk."""
    if sequence >= len(slots):
        raise RequestError(404, f"there is no sequence {sequence}: there are {len(slots)}, from 0", code="not_found")
    slot = slots[sequence]
    n = -(-slot.seq.n_tokens // slot.seq.options.chunk)
    if chunk >= n:
        msg = f"there is no chunk {chunk}: sequence {sequence} has {n} now"
        raise RequestError(404, msg, param="chunk", code="not_found")
    return slot


def _text(slots: Sequence[Slot], sequence: int, chunk: int) -> dict[str, Any]:
    slot = _slot(slots, sequence, chunk)
    n = slot.seq.options.chunk
    tokens = slot.seq.tokens[chunk * n : (chunk + 1) * n]
    return {
        "sequence": sequence,
        "chunk": chunk,
        "text_id": slot.n_texts,
        "start": chunk * n,
        "end": chunk * n + len(tokens),
        "text": slot.seq.detokenize(tokens),
    }


def _pin(slots: Sequence[Slot], sequence: int, chunk: int, *, pinned: bool) -> dict[str, Any]:
    slot = _slot(slots, sequence, chunk)
    if slot.seq.n_pool is None:
        msg = "there is no pool, so all chunks stay on the device: start the server with --kvflash"
        raise RequestError(409, msg, code="no_pool")
    if pinned != (chunk in slot.seq.pager.ledger.pins):
        if not pinned and chunk not in slot.pins:
            msg = f"chunk {chunk} is pinned by --set pins: start the server without it to unpin it"
            raise RequestError(409, msg, param="chunk", code="pinned_by_option")
        try:
            slot.pin(chunk) if pinned else slot.unpin(chunk)
        except KVFlashError as err:
            raise RequestError(409, str(err), param="chunk", code="cannot_pin") from None
    return {"sequence": sequence, "chunk": chunk, "pinned": pinned}


#
# answers to the page
#


class _Pool:
    """The page's handlers. They query the scheduler's thread, the only one that may touch the sequences."""

    def __init__(self, scheduler: Scheduler, name: str, read: Read) -> None:
        self._scheduler, self._name, self._read = scheduler, name, read
        self._run = secrets.token_hex(8)  # tells processes apart: n_texts restarts with each

    async def look(self, _request: Request) -> Response:
        """Return the pool's present state or, while the model is not ready, only the phase."""
        metrics = self._scheduler.metrics

        def seen(slots: Sequence[Slot]) -> dict[str, Any]:
            stats = [metrics.pages(slot.seq) for slot in slots]
            return self._view(stats[0], [_sequence(*one) for one in zip(slots, stats, strict=True)])

        try:
            found = await asyncio.wrap_future(self._scheduler.query(seen))
        except NotReady:
            phase = self._scheduler.phase
            status = Phase.STOPPING if phase == Phase.READY else phase  # it stopped just now
            return JSONResponse({"status": status.value, "model": self._name}, headers=_FRESH)
        for sequence in found["sequences"]:  # here, to spare the scheduler's thread
            sequence["score"] = [_short(x) for x in sequence["score"]]
        return JSONResponse(found, headers=_FRESH)

    async def text(self, request: Request) -> Response:
        """Return the text of a chunk."""
        given = {k: int(v) for k, v in request.query_params.items() if re.fullmatch(r"[0-9]{1,9}", v)}
        place = _place(given)
        return await self._answer(lambda slots: _text(slots, *place))

    async def pin(self, request: Request) -> Response:
        """Pin or unpin a chunk."""
        given = fields.parse_json(await self._read(request))
        place, pinned = _place(given), given.get("pinned")
        if not isinstance(pinned, bool):
            raise invalid("pinned must be true or false", "pinned", "invalid_type")
        return await self._answer(lambda slots: _pin(slots, *place, pinned=pinned))

    async def _answer(self, query: Query[dict[str, Any]]) -> Response:
        return JSONResponse(await asyncio.wrap_future(self._scheduler.query(query)), headers=_FRESH)

    def _view(self, stats: Stats, sequences: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what the page shows. stats: the first sequence's stats, from which the whole pool's figures come."""
        scheduler = self._scheduler
        kv, total = scheduler.kv, scheduler.metrics.total
        running = [s["compared"] for s in sequences if s["busy"] and s["compared"]]  # ended answers are in the totals
        return {
            "status": scheduler.phase.value,
            "run": self._run,
            "model": self._name,
            "policy": kv.policy if kv else "",
            "pool_cells": stats.n_pool,
            "chunk": kv.options.chunk if kv else 0,
            **_picked(stats, _OF_ALL),
            "gpu": stats.gpu_bytes > 0,
            "queue": max(0, scheduler.n_admitted - sum(s["busy"] for s in sequences)),
            **{name: int(total(name)) for name in ("pages_in", "pages_out", "guests_fetched")},
            "n_layer": kv.ctx.pool_info().n_layer if kv and kv.n_pool is not None else 0,
            "meter": bool(kv and kv.decoder.meter),
            "checked": int(total("checked_tokens")) + sum(n for n, _ in running),
            "agreed": int(total("agreed_tokens")) + sum(n for _, n in running),
            "sequences": sequences,
        }


def _short(x: float) -> float | None:
    """Return a number with three significant digits; None for infinity and NaN, which JSON lacks."""
    return float(f"{x:.3g}") if math.isfinite(x) else None


def _place(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sequence and the chunk that a request names. Raises RequestError."""
    for name in ("sequence", "chunk"):
        if type(given.get(name)) is not int or given[name] < 0:
            msg = f"{name} must be an integer from 0, as in /kvflash/chunk?sequence=0&chunk=12"
            raise invalid(msg, name, "invalid_value")
    return given["sequence"], given["chunk"]
