"""Save a sequence while it continues, and restore it in this process or another."""

from contextlib import suppress
from functools import cached_property
from pathlib import Path

from pyllama_kvflash.errors import HostMemoryError, KVFlashError, PoolError, RecordError, SnapshotError, UsageError
from pyllama_kvflash.files import model_parts
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.policy import Scoring
from pyllama_kvflash.pool.checkpoints import Checkpoints
from pyllama_kvflash.pool.sequence import PooledSequence
from pyllama_kvflash.snapshot.capture import Capture, capture, identity_of, put_back, usable
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import Identity


class SavedSequence:
    """Saves and restores a sequence.

    A plain cache can be cut at the end of any chunk, one with a recurrent state or a sliding window only at a checkpoint. Checkpoints
    are made before the end of each prompt (`Options.snapshots`); a restored snapshot brings its own.
    """

    def __init__(self, sequence: PooledSequence, checkpoints: Checkpoints) -> None:
        self.sequence = sequence
        self._checkpoints = checkpoints

    @cached_property
    def identity(self) -> Identity:
        """The identity that snapshots must match to be restored here.

        Raises UsageError without a pool.
        """
        ctx = self.sequence.ctx
        if self.sequence.pager is None:
            msg = (
                "a snapshot is made of a pool's chunks, and the full cache is in use: open the model with snapshots"
                " (snapshots=True), which keeps a pool even if it covers the context"
            )
            raise UsageError(msg)
        return identity_of(ctx, exact=self.sequence.exact is not None)

    @property
    def checkpoints(self) -> list[int]:
        """The positions below n_tokens at which save() can cut the sequence."""
        n, chunk = self.sequence.n_tokens, self.sequence.options.chunk
        if self.sequence.stateful:
            return [pos for pos in self._checkpoints.at_chunks if pos < n]
        return list(range(chunk, n, chunk))

    #
    # save
    #

    def capture(self, n_tokens: int | None = None) -> Capture:
        """Capture the first n_tokens positions (None: all), so that they can be written while the sequence continues.

        Raises UsageError. See KVSequence.save.
        """
        sequence = self.sequence
        n = sequence.n_tokens if n_tokens is None else n_tokens
        sequence.recover()
        identity = self.identity
        if not 0 <= n <= sequence.n_tokens or (n < sequence.n_tokens and n not in self.checkpoints):
            at = ", ".join(f"{pos:,}" for pos in (*self.checkpoints[-8:], sequence.n_tokens))
            msg = f"{n:,} of {sequence.n_tokens:,} positions cannot be saved: give one of {at}, or leave the number out to save all"
            raise UsageError(msg)
        states = self._checkpoints.saved(n)
        if sequence.stateful and (not states or states[-1][0] != n):
            states.append((n, sequence.ctx.save_partial()))
        whole, selector = n == sequence.n_tokens, sequence.selector
        return capture(
            sequence.paged,
            identity,
            sequence.tokens[:n],
            states,
            n_ctx=sequence.options.n_ctx,
            pending=sequence.pending if whole else None,
            opens_until=sequence.opens_until if whole else 0,
            scoring=selector.saved() if whole and selector else Scoring(),
            inputs=self._inputs,
        )

    @property
    def _inputs(self) -> tuple[tuple[str, Path], ...]:
        """The files that the sequence reads, each with its purpose."""
        options, selector = self.sequence.options, self.sequence.selector
        files = {
            "the model": self.sequence.ctx.model.path,
            "the draft model": options.spec.model if options.spec else None,
            "the scorer model": getattr(selector.scorer, "path", None) if selector else None,
        }
        return tuple((name, part) for name, path in files.items() if path for part in model_parts(path))

    #
    # restore
    #

    def restore(self, file: SnapshotFile, prompt: Tokens | None = None) -> int:
        """Restore a snapshot into the sequence, which must be empty. Returns the number of positions. See KVSequence.restore."""
        sequence = self.sequence
        n = usable(file.outline, self.identity, prompt)
        if n > sequence.options.n_ctx:
            msg = f"{file.path} cannot be used: it has {n:,} positions, and the context has {sequence.options.n_ctx:,}: use a larger `n_ctx`"
            raise SnapshotError(msg)
        try:
            with sequence.step():
                state = put_back(file, sequence.paged, n)
                if state:
                    sequence.ctx.restore_partial(state, n)
                sequence.history.frombytes(file.contents.tokens[:n].tobytes())
        except (PoolError, RecordError, HostMemoryError) as err:
            sequence.clear()
            msg = f"{file.path} cannot be used: {err}"
            raise SnapshotError(msg) from None
        except (KVFlashError, KeyboardInterrupt):
            sequence.clear()
            raise
        chunk = (
            sequence.options.chunk
        )  # a state within a chunk is left out, because the chunk's record is about to change
        self._checkpoints.restored({pos: blob for pos, blob in file.contents.states if pos <= n and pos % chunk == 0})
        pending = int(file.contents.sequence["pending"])
        if prompt is None:
            sequence.pending = pending if pending >= 0 else None
            sequence.opens_until = int(file.contents.sequence["opens_until"])
            if sequence.selector is not None:
                sequence.selector.resume(file.contents.scoring)
        return n


def checked_path(path: str | Path) -> Path:
    """Return a path. Raises UsageError if it cannot be that of a file."""
    res = Path(path)
    if "\0" in str(path):
        msg = f"{str(path)!r} is not a file name: it has a zero byte"
        raise UsageError(msg)
    with suppress(OSError):  # opening the file reports the error
        if res.is_dir():
            msg = f"{path} is a directory: give the name of a snapshot in it, such as {res / 'text.kvsnap'}"
            raise UsageError(msg)
    return res
