"""The page at /: its files, and the paths by which it shows and pins chunks of the pool."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyllama_kvflash.errors import KVFlashError
from pyllama_kvflash.events import Checked, Reselect, Stats
from pyllama_kvflash.pool.residency import Residency
from pyllama_kvflash.serve.http import JSONResponse
from pyllama_kvflash.serve.pool_queries import Query, T
from pyllama_kvflash.serve.protocols import fields
from pyllama_kvflash.serve.protocols.request_error import RequestError, invalid
from pyllama_kvflash.serve.scheduler import NotReady, Phase, Scheduler
from pyllama_kvflash.serve.slot import Slot

_FOLDER = Path(__file__).with_name("static")
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript"}
_NAMES = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.suffix in _KINDS)
_FILES = {"/" if name == "index.html" else f"/static/{name}": name for name in _NAMES}

OPEN = frozenset(_FILES)
"""Paths that need no key: a browser cannot send one for them, and they hold no data."""

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
_PIN = {"sequence": int, "chunk": int, "pinned": bool}

Read = Callable[[Request], Awaitable[bytes]]
"""Returns a request's body. Raises RequestError unless it is declared to be JSON."""


def routes(scheduler: Scheduler, name: str, read: Read, *, needs_key: bool) -> list[Route]:
    """Return the routes of the page. name: of the model. needs_key: whether the page must ask for a key."""
    pool = _Pool(scheduler, name, read)
    return [
        *(Route(path, _file(file, needs_key=needs_key)) for path, file in _FILES.items()),
        Route("/kvflash/pool", pool.look),
        Route("/kvflash/chunk", pool.text),
        Route("/kvflash/pin", pool.pin, methods=["POST"]),
    ]


def _file(name: str, *, needs_key: bool) -> Callable[[Request], Awaitable[Response]]:
    # the page learns here whether there is a key: a trial request would log an error in the browser's console
    data = (_FOLDER / name).read_bytes().replace(b"{{needs_key}}", b"yes" if needs_key else b"no")

    async def answer(_request: Request) -> Response:
        return Response(data, headers=_HEADERS, media_type=_KINDS[Path(name).suffix])

    return answer


#
# queries for the scheduler's thread
#


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence at one moment.

    reading: tokens of its prompt that are read, and all of them; None: no prompt is being read.
    residency: None without a pool. pins: pinned chunks.
    """

    busy: bool
    reading: tuple[int, int] | None
    n_tokens: int
    n_texts: int
    stats: Stats
    residency: Residency | None
    n_layer: int
    sinks: int
    tail: int
    pins: frozenset[int]
    reselect: Reselect | None
    checked: Checked | None
    compared: tuple[int, int, float] | None  # in this answer: compared tokens, agreed ones, mean divergence


def _seen(slot: Slot, stats: Stats) -> _Sequence:
    seq, serving = slot.seq, slot.serving
    ledger = seq.pager.ledger if seq.n_pool is not None else None
    meter = seq.decoder.meter.stats if seq.decoder.meter else None
    return _Sequence(
        busy=serving is not None,
        reading=(seq.n_tokens, serving.generation.n_text) if serving and slot.reading else None,
        n_tokens=seq.n_tokens,
        n_texts=slot.n_texts,
        stats=stats,
        residency=seq.residency() if ledger else None,
        n_layer=seq.ctx.pool_info().n_layer if ledger else 0,
        sinks=ledger.n_sinks if ledger else 0,
        tail=min(max(0, ledger.n_chunks - ledger.n_tail), ledger.n_sealed) if ledger else 0,
        pins=frozenset(ledger.pins) if ledger else frozenset(),
        reselect=slot.reselect,
        checked=slot.checked,
        compared=(meter.checked, meter.agreed, meter.kld_sum / meter.checked) if meter and meter.checked else None,
    )


def _slot(slots: Sequence[Slot], sequence: int, chunk: int) -> Slot:
    """Return the slot of a sequence that has this chunk. Raises RequestError."""
    if sequence >= len(slots):
        raise RequestError(404, f"there is no sequence {sequence}: there are {len(slots)}, from 0", code="not_found")
    slot = slots[sequence]
    n = -(-slot.seq.n_tokens // slot.seq.options.chunk)
    if chunk >= n:
        msg = f"there is no chunk {chunk}: sequence {sequence} has {n} now"
        raise RequestError(404, msg, param="chunk", code="not_found")
    return slot


def _text(slots: Sequence[Slot], *, sequence: int, chunk: int) -> dict[str, Any]:
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


def _pin(slots: Sequence[Slot], *, sequence: int, chunk: int, pinned: bool) -> dict[str, Any]:
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
    """The handlers. Only the scheduler's thread touches the sequences."""

    def __init__(self, scheduler: Scheduler, name: str, read: Read) -> None:
        self._scheduler, self._name, self._read = scheduler, name, read
        self._run = secrets.token_hex(8)  # the count of texts restarts with each process

    async def look(self, _request: Request) -> Response:
        """Return the pool as it is now; while the model is not ready, only the phase."""
        metrics = self._scheduler.metrics

        def seen(slots: Sequence[Slot]) -> list[_Sequence]:
            return [_seen(slot, metrics.pages(slot.seq)) for slot in slots]

        try:
            found = await asyncio.wrap_future(self._scheduler.query(seen))
        except NotReady:
            phase = self._scheduler.phase
            status = Phase.STOPPING if phase == Phase.READY else phase  # it stopped just now
            return JSONResponse({"status": status.value, "model": self._name}, headers=_FRESH)
        return JSONResponse(self._view(found), headers=_FRESH)

    async def text(self, request: Request) -> Response:
        """Return the text of a chunk."""
        sequence, chunk = (_number(request.query_params.get(name), name) for name in ("sequence", "chunk"))
        return JSONResponse(await self._query(partial(_text, sequence=sequence, chunk=chunk)), headers=_FRESH)

    async def pin(self, request: Request) -> Response:
        """Pin or unpin a chunk."""
        wanted = _pin_of(fields.parse_json(await self._read(request)))
        return JSONResponse(await self._query(partial(_pin, **wanted)), headers=_FRESH)

    async def _query(self, query: Query[T]) -> T:
        try:
            return await asyncio.wrap_future(self._scheduler.query(query))
        except NotReady:
            msg = "the model is loading, or the server is stopping: try again in a few seconds"
            raise RequestError(503, msg, code="unavailable", headers={"Retry-After": "5"}) from None

    def _view(self, found: Sequence[_Sequence]) -> dict[str, Any]:
        scheduler, stats = self._scheduler, found[0].stats
        kv, total = scheduler.kv, scheduler.metrics.total
        running = [s.compared for s in found if s.busy and s.compared]  # the others are in the totals
        return {
            "status": scheduler.phase.value,
            "run": self._run,
            "model": self._name,
            "policy": kv.policy if kv else "",
            "pool_cells": stats.n_pool,
            "chunk": kv.options.chunk if kv else 0,
            "n_ctx": stats.n_ctx,
            "device_kv_bytes": stats.device_kv_bytes,
            "full_kv_bytes": stats.kv_full_bytes,
            "host_bytes": stats.host_bytes,
            "coarse_bytes": stats.coarse_bytes,
            "disk_bytes": stats.disk_bytes,
            "gpu": stats.gpu_bytes > 0,
            "queue": max(0, scheduler.n_admitted - sum(s.busy for s in found)),
            "pages_in": int(total("pages_in")),
            "pages_out": int(total("pages_out")),
            "guests_fetched": int(total("guests_fetched")),
            "n_layer": found[0].n_layer,
            "reselects": sum(s.stats.reselects for s in found),
            "reselect_s": round(sum(s.stats.reselect_s for s in found), 6),
            "meter": bool(kv and kv.decoder.meter),
            "checked": int(total("checked_tokens")) + sum(n for n, _, _ in running),
            "agreed": int(total("agreed_tokens")) + sum(n for _, n, _ in running),
            "sequences": [_sequence(i, s) for i, s in enumerate(found)],
        }


def _sequence(i: int, s: _Sequence) -> dict[str, Any]:
    """Return a sequence for the page. Each chunk is a letter or a digit, because there may be thousands."""
    r = s.residency
    return {
        "id": i,
        "busy": s.busy,
        "reading": s.reading,
        "n_tokens": s.n_tokens,
        "text_id": s.n_texts,
        "state": "".join(str(int(there)) for there in r.resident) if r else "",
        "kind": "".join(_kind(s, c) for c in range(len(r.resident))) if r else "",
        "score": [_short(x) for x in r.score.tolist()] if r else [],
        "layers": r.layers.tolist() if r and s.stats.guest_blocks else [],
        "guest_blocks": s.stats.guest_blocks,
        "resident": s.stats.resident,
        "stored": s.stats.stored,
        "pages_in": s.stats.pages_in,
        "pages_out": s.stats.pages_out,
        "reselects": s.stats.reselects,
        "reselect_s": round(s.stats.reselect_s, 6),
        "reselect": _reselect(s.reselect) if s.reselect else None,
        "compared": s.compared,
        "checked": (
            {"pos": s.checked.pos, "n": s.checked.n, "agreed": s.checked.agreed, "kld": _short(s.checked.kld)}
            if s.checked
            else None
        ),
    }


def _kind(s: _Sequence, chunk: int) -> str:
    if chunk in s.pins:
        return "p"
    if chunk < s.sinks:
        return "s"
    return "t" if chunk >= s.tail else "-"


def _reselect(event: Reselect) -> dict[str, Any]:
    return {
        "pos": event.pos,
        "reason": event.reason,
        "page_ins": event.page_ins,
        "drops": event.drops,
        "score_s": round(event.score_s, 6),
        "apply_s": round(event.apply_s, 6),
        "missed": _short(event.missed),
    }


def _short(x: float) -> float | None:
    """Return a number with three digits; None for infinity and NaN, which JSON lacks."""
    return float(f"{x:.3g}") if math.isfinite(x) else None


#
# requests of the page
#


def _number(text: str | None, name: str) -> int:
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        msg = f"{name} must be a number from 0, as in /kvflash/chunk?sequence=0&chunk=12"
        raise invalid(msg, name, "invalid_value")
    return int(text)


def _pin_of(body: dict[str, Any]) -> dict[str, Any]:
    """Check the body of /kvflash/pin. Raises RequestError."""
    for name, kind in _PIN.items():
        if type(body.get(name)) is not kind or (kind is int and body[name] < 0):
            msg = f"{name} must be {'true or false' if kind is bool else 'a number from 0'}"
            raise invalid(msg, name, "invalid_type")
    if unknown := sorted(body.keys() - _PIN.keys()):
        msg = f"{unknown[0][:100]} is not a field of this request: it has {', '.join(_PIN)}"
        raise invalid(msg, unknown[0], "unknown_field")
    return body
