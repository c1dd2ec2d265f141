"""Summaries of the keys of sealed chunks, made in threads during the computation."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from pyllama_kvflash.errors import HostMemoryError
from pyllama_kvflash.native import Layer, Record, Summaries

_THREADS = 8


class Summariser:
    """The summaries of one sequence's chunks, and the threads that make them from the chunks' records."""

    def __init__(self, layers: Sequence[Layer], chunk: int, record: Callable[[int], Record], n_threads: int) -> None:
        """chunk: positions of a chunk. record: returns a chunk's record."""
        self.summaries: Summaries | None = None
        self._layers = layers
        self._chunk = chunk
        self._record = record
        self._pending: deque[Future[None]] = deque()
        self._worker = ThreadPoolExecutor(1, "kvflash-summary")
        n_threads = min(_THREADS, n_threads)
        self._threads = ThreadPoolExecutor(n_threads, "kvflash-summary-many") if n_threads > 1 else None

    def close(self) -> None:
        """End the threads."""
        self._worker.shutdown(cancel_futures=True)
        if self._threads:
            self._threads.shutdown()

    def use(self, kind: str | None, chunks: Sequence[int]) -> None:
        """Keep summaries of this kind from now on, and summarise `chunks` at once. None: keep none.

        Raises UnsupportedError (the model's keys have an unsupported form) and HostMemoryError.
        """
        self.finish()
        self.summaries = None
        if kind is None:
            return
        summaries = Summaries(self._layers, self._chunk, kind)
        _reserve(summaries, len(chunks))
        for chunk in chunks:
            summaries.put(chunk, self._record(chunk))
        self.summaries = summaries

    def expect(self, n: int) -> None:
        """Announce n chunks in all: a thread allocates the memory for their summaries."""
        if self.summaries is not None:
            with suppress(RuntimeError):  # no memory for a thread: reserve() takes what it needs
                (self._threads or self._worker).submit(_try_reserve, self.summaries, n)

    def reserve(self, n: int) -> None:
        """Allocate the memory for n chunks. Raises HostMemoryError."""
        if self.summaries is not None:
            _reserve(self.summaries, n)

    def begin(self, n: int) -> None:
        """Begin to summarise each of the first n chunks that has no summary yet."""
        if self.summaries is None:
            return
        try:
            self._pending.append(self._worker.submit(self._put, self.summaries, n, self._threads))
        except RuntimeError:  # no memory for a thread
            self._put(self.summaries, n)

    def _put(self, summaries: Summaries, n: int, threads: ThreadPoolExecutor | None = None) -> None:
        try:
            if threads and n - len(summaries) > 1:
                with suppress(RuntimeError):  # no memory for a thread
                    summaries.put_all(n, self._record, threads)
            for chunk in range(len(summaries), n):
                summaries.put(chunk, self._record(chunk))
        except MemoryError:
            raise _no_memory(summaries, n) from None

    @property
    def pending(self) -> list[Future[None]]:
        """The summaries that are being made."""
        return list(self._pending)

    def collect(self) -> None:
        """Forget finished summaries. Raises their errors."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait for all summaries under way. Raises their errors."""
        while self._pending:
            self._pending.popleft().result()

    def give_up(self) -> None:
        """Wait for all summaries under way, and ignore their errors: the step that was cut off has reported them."""
        while self._pending:
            self._pending.popleft().exception()

    def truncate(self, n: int) -> None:
        """Keep the summaries of the first n chunks."""
        if self.summaries is not None:
            self.summaries.truncate(n)


def _reserve(summaries: Summaries, n: int) -> None:
    try:
        summaries.reserve(n)
    except MemoryError:
        raise _no_memory(summaries, n) from None


def _try_reserve(summaries: Summaries, n: int) -> None:
    with suppress(MemoryError):  # reserve() reports it
        summaries.reserve(n)


def _no_memory(summaries: Summaries, n: int) -> HostMemoryError:
    size = n * summaries.chunk_bytes / 2**20
    return HostMemoryError(f"no host memory for {size:.1f} MiB of key summaries: use `policy` lru")
