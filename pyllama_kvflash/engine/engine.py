"""The engine: a model, its pool, and the sequences that share it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Self, Unpack

from pyllama_kvflash.engine.decoder import Step, decode_each
from pyllama_kvflash.engine.guard import Guard, guarded
from pyllama_kvflash.engine.sequence import KVSequence
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Event
from pyllama_kvflash.keywords import Keywords, shows_options
from pyllama_kvflash.loading.load import Loaded, load
from pyllama_kvflash.options import Options
from pyllama_kvflash.pool.step import Part


class KVFlash(KVSequence):
    """A model and its pool, with n_parallel sequences that share it. The engine itself is the first sequence.

    Load an engine with from_file(). Engines are context managers. With `pool="off"`, or a pool that covers the context, an engine
    runs on llama.cpp's full cache.

    notes: sentences about the pool and the placement of weights and KV. memory: each device's memory with a full context.

    close() may be called from any thread at any time; later calls raise UsageError. An engine that nothing refers to is closed.
    """

    @classmethod
    @shows_options
    def from_file(
        cls, path: str | Path, *, progress: Callable[[float], None] | None = None, **options: Unpack[Keywords]
    ) -> Self:
        """Load a GGUF file. options: the fields of Options. progress: called with 0.0 to 1.0 during loading.

        Raises UsageError (an option), ModelError (the file), UnsupportedError (the model's cache cannot be pooled) and TypeError
        (Options has no such field).
        """
        known = {field.name for field in fields(Options)}
        for name in options.keys() - known:
            near = get_close_matches(name, known, 1)
            msg = f"from_file() has no option {name!r}{f': did you mean {near[0]!r}?' if near else ': Options lists them'}"
            raise TypeError(msg)
        return cls.open(Path(path), Options(**options), progress)

    @classmethod
    def open(cls, path: Path, options: Options, progress: Callable[[float], None] | None = None) -> Self:
        """Load a GGUF file, with the options as one object. Raises the errors of from_file()."""
        return cls(load(path, options, cls.open, progress))

    def __init__(self, loaded: Loaded) -> None:
        """Use from_file() instead."""
        guard = Guard(loaded.close, str(loaded.model.path))
        super().__init__(loaded, guard)
        self._others = tuple(KVSequence(loaded, guard, i) for i in range(1, len(loaded.sequences)))
        self.notes = loaded.notes
        self.memory = loaded.memory

    @property
    def sequences(self) -> tuple[KVSequence, ...]:
        """All sequences. Use each as if it were alone, one call at a time; decode_each() decodes one token for each of several sequences at once."""
        return (self, *self._others)

    def close(self) -> None:
        """Free the context and the model, for all sequences. If another thread is in a call (a batch, or a token), wait for its
        end. If this thread is in a call, as in a signal handler, return at once; the engine is then closed when that call ends.
        """
        self.guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @guarded
    def decode_each(self, tokens: Mapping[int, int]) -> dict[int, list[Event]]:
        """Decode one token of each of several sequences in one batch. tokens: {index in `sequences`: token}.

        Returns the events of each sequence. Raises the errors of decode(). Get a sequence's logits with its own logits().
        """
        sequences = self.sequences
        for i in tokens:
            if not 0 <= i < len(sequences):
                msg = f"there is no sequence {i}: `n_parallel` is {len(sequences)}"
                raise UsageError(msg)
        decoders = [sequences[i].decoder for i in tokens]
        one = [self.model.ids([token]) for token in tokens.values()]
        for decoder in decoders:
            decoder.check_joins()
        for decoder in decoders:
            decoder.claim()
        happened = decode_each([Step(d, Part(d.sequence, t)) for d, t in zip(decoders, one, strict=True)])
        return dict(zip(tokens, happened, strict=True))
