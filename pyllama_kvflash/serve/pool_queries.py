"""Calls that other threads queue for the scheduler's thread, the only one that may touch the sequences."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pyllama_kvflash.serve.slot import Slot

T = TypeVar("T")
Query = Callable[[Sequence[Slot]], T]
"""A function that the scheduler calls with its slots, between two turns. It must be quick."""


class PoolQueries:
    """Queries that wait for the scheduler's thread. Any thread may add one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Query[Any], Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, query: Query[T]) -> Future[T]:
        """Add a query. Returns a future with the query's result or error."""
        future: Future[T] = Future()
        self._waiting.append((query, future))
        return future

    def answer(self, slots: Sequence[Slot]) -> None:
        """Run the queries that wait now. Queries added meanwhile wait for the next call, so that this call ends."""
        for _ in range(len(self)):
            query, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(query(slots))
                except BaseException as err:  # noqa: BLE001 (the caller gets it)
                    future.set_exception(err)

    def refuse(self, err: Exception) -> None:
        """Fail all waiting queries. err: the error that their futures raise."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(err)
