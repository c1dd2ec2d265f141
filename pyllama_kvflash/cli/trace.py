"""Write the trace of a run for `kvflash run --trace`; `kvflash plot` draws it."""

import math
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.cli.output import Output
from pyllama_kvflash.errors import OutputError
from pyllama_kvflash.text import to_json

_DIGITS = 6  # digits of a score: a picture needs no more, and a long context has thousands of scores


class TraceWriter:
    """A file with a JSON object on each line, written by Output. In a new file, each line is visible at once, so that a run
    that is cut off leaves its lines.
    """

    def __init__(self, name: str, on_error: Callable[[OutputError], None] | None = None) -> None:
        """Open the file, as Output does. name: "-": stdout. Raises OutputError."""
        self._out = Output(name, on_error)

    def __enter__(self) -> Self:
        self._out.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.__exit__(kind, value, trace)

    def close(self) -> None:
        """Finish the file. Harmless when called again."""
        self._out.close()

    def start(self, **meta: Any) -> None:
        """Write the first line: model, policy, n_ctx, n_pool, chunk, tau."""
        self._line({"event": "start", **meta})

    def event(self, event: dict[str, Any]) -> None:
        """Write an event, as events.as_dict gives it. A score that is None, NaN or infinite is written as null."""
        if event.get("scores") is not None:
            event = {**event, "scores": _plain(event["scores"])}
        self._line(event)

    def layers(self, pos: int, n_layer: int, layers: npt.NDArray[np.float32]) -> None:
        """Write how many of `n_layer` layers hold each chunk when there are `pos` positions. layers: the numbers, (n_chunks,) float32."""
        plain = [int(n) if n.is_integer() else n for n in layers.tolist()]
        self._line({"event": "layers", "pos": pos, "n_layer": n_layer, "layers": plain})

    def _line(self, value: dict[str, Any]) -> None:
        self._out.write(to_json(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def _plain(scores: Iterable[Any]) -> list[float | None]:
    return [None if s is None or not math.isfinite(s) else float(f"{s:.{_DIGITS}g}") for s in scores]
