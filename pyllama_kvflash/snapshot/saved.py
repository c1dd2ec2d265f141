"""A sequence that can be saved while it goes on, and put back: in this process or another one."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from pyllama_kvflash.engine.loading import Loaded
from pyllama_kvflash.errors import KVFlashError, PoolError, RecordError, SnapshotError, UsageError
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.pool.sequence import PooledSequence
from pyllama_kvflash.snapshot.capture import Capture, OnRecord, capture, identity_of, put_back, usable
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import Identity

_CHECKPOINTS = 4  # that are kept: of a model of 27 B one takes some 150 MiB


class SavedSequence(PooledSequence):
    """Adds save() and restore(). A plain cache can be cut at any chunk's end; a recurrent state or a sliding window only where
    a checkpoint of it was made: before the end of each prompt (`Options.snapshots`), and where it was saved.
    """

    def __init__(self, loaded: Loaded, beside: Self | None = None) -> None:
        """Use KVFlash.from_file."""
        super().__init__(loaded, beside)
        held = self.ctx.kv_bytes()
        self._stateful = held.recurrent > 0 or held.swa > 0
        self._checkpoints: dict[int, bytes] = {}  # by position

    @cached_property
    def identity(self) -> Identity:
        """What a snapshot must be of for this sequence to take it. Raises UsageError without a pool."""
        if self._pager is None:
            msg = (
                "a snapshot is made of a pool's chunks, and the full cache is in use: open the model with snapshots"
                " (snapshots=True), which keeps a pool even where it covers the context"
            )
            raise UsageError(msg)
        return identity_of(self.ctx, fingerprint(self.model.path))

    #
    # save
    #

    def save(self, path: str | Path, n_tokens: int | None = None, on_record: OnRecord | None = None) -> int:
        """Write a snapshot of the first n_tokens positions (None: all); the bytes it has.

        The file is written under another name, and renamed once it is whole. n_tokens: a multiple of the chunk, and of a
        model with a recurrent state or a sliding window one of `checkpoints`. on_record: progress, (done, of).

        Raises UsageError (nothing there, no pool, another n_tokens) and SnapshotError (it cannot be written).
        """
        return self.capture(n_tokens).write(_checked(path), on_record)

    def capture(self, n_tokens: int | None = None) -> Capture:
        """What save() would write now, to be written later, or in a thread, while this sequence goes on. Raises UsageError."""
        n = self.n_tokens if n_tokens is None else n_tokens
        self._recover()
        identity = self.identity
        if not 0 <= n <= self.n_tokens or (n < self.n_tokens and n not in self.checkpoints):
            at = ", ".join(map(str, [*self.checkpoints[-8:], self.n_tokens]))
            msg = f"{n} positions cannot be saved of {self.n_tokens}: give one of {at}, or leave it out for all"
            raise UsageError(msg)
        states = [(pos, state) for pos, state in sorted(self._checkpoints.items()) if pos <= n]
        if self._stateful and n not in self._checkpoints:
            states.append((n, self.ctx.save_partial()))
        whole, selector = n == self.n_tokens, self._selector
        return capture(
            self.pager,
            identity,
            self.tokens[:n],
            states,
            n_ctx=self.options.n_ctx,
            pending=self._pending if whole else None,
            scoring=selector.saved() if whole and selector else Scoring(),
        )

    @property
    def checkpoints(self) -> list[int]:
        """Numbers of positions, fewer than there are, that can be saved by themselves."""
        if self._stateful:
            return [pos for pos in sorted(self._checkpoints) if pos < self.n_tokens]
        return list(range(self.options.chunk, self.n_tokens, self.options.chunk))

    def _mark(self, n: int) -> int:
        """After how many of n tokens that are to be read a checkpoint is made: at the last chunk's end. 0: none is."""
        if not (self.options.snapshots and self._stateful and self._pager):
            return 0
        chunk = self.options.chunk
        return max(0, (self.n_tokens + n - 1) // chunk * chunk - self.n_tokens)

    def _checkpoint(self) -> None:
        self._checkpoints[self.n_tokens] = self.ctx.save_partial()
        while len(self._checkpoints) > _CHECKPOINTS:
            del self._checkpoints[min(self._checkpoints)]

    #
    # restore
    #

    def restore(self, snapshot: str | Path | SnapshotFile, prompt: Sequence[int] | Tokens | None = None) -> int:
        """Put a snapshot back in place of what is there: all of it, or as much as a prompt's tokens begin with, but for the
        last one. How many positions there are now: what comes after them is to be read, with generate(..., append=True), which
        without a prompt goes on after the last token that was produced.

        Nothing of it is computed, and records are read from the file when they are needed. In a pool of the same size, all
        chunks are where they were, and what comes then is what would have come. Else the hottest are brought back.

        Raises SnapshotError, with the reason, if it is damaged, or of another model, cache or text; the sequence is empty
        then. Records are checked when they are used for the first time: generate() reads the text anew if one was damaged,
        other calls raise SnapshotError.
        """
        file = snapshot if isinstance(snapshot, SnapshotFile) else SnapshotFile(_checked(snapshot))
        identity = self.identity
        self.clear()
        n = usable(file.outline, identity, None if prompt is None else np.ascontiguousarray(prompt, np.int32))
        if n > self.options.n_ctx:
            msg = f"{file.path} cannot be used: it has {n} positions, and the context {self.options.n_ctx}: use a larger -c"
            raise SnapshotError(msg)
        try:
            with self._step():
                state = put_back(file, self.pager, n)
                if state:
                    self.ctx.restore_partial(state, n)
                self._history.frombytes(file.contents.tokens[:n].tobytes())
        except (PoolError, RecordError) as err:
            self.clear()
            msg = f"{file.path} cannot be used: {err}"
            raise SnapshotError(msg) from None
        except (KVFlashError, KeyboardInterrupt):
            self.clear()
            raise
        chunk = self.options.chunk  # elsewhere the record of the chunk goes on, or is another one's by now
        self._checkpoints = {pos: blob for pos, blob in file.contents.states if pos <= n and pos % chunk == 0}
        pending = int(file.contents.sequence["pending"])
        if prompt is None:
            self._pending = pending if pending >= 0 else None
            if self._selector is not None:
                self._selector.resume(file.contents.scoring)
        return n

    def clear(self) -> None:
        """Forget the sequence and its records; pins stay."""
        super().clear()
        self._checkpoints.clear()

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. The last chunks that remain are brought back if they are out.

        logits() has nothing to do with it until the next decode. Raises UnsupportedError if a recurrent state, or a
        sliding window that was overwritten, cannot go back.
        """
        super().rollback(n_tokens)
        self._checkpoints = {pos: state for pos, state in self._checkpoints.items() if pos <= n_tokens}


def _checked(path: str | Path) -> Path:
    """Raise UsageError for a path that cannot be a file."""
    res = Path(path)
    if "\0" in str(path):
        msg = f"{str(path)!r} is no file name: it has a zero byte"
        raise UsageError(msg)
    with suppress(OSError):  # which opening it says
        if res.is_dir():
            msg = f"{path} is a directory: give the name of a snapshot in it, such as {res / 'text.kvsnap'}"
            raise UsageError(msg)
    return res
