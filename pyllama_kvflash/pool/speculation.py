"""Speculative decoding: drafts that the target verifies in one batch, while that is faster than decoding plainly.

llama.cpp's own implementations make the drafts (`native.Speculator`). This module adds the gate. It also limits the drafter's
context to a window of the text. A drafter of kind "draft" reads it only when a draft is needed.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pyllama_kvflash.errors import BadLogitsError, KVFlashError, NativeError, UnsupportedError, UsageError
from pyllama_kvflash.events import DraftStats, Warn
from pyllama_kvflash.native import Context, Model, Speculator, Tokens
from pyllama_kvflash.options import Spec
from pyllama_kvflash.policy.draft_length import DraftLength
from pyllama_kvflash.policy.gate import Gate

_NATIVE = {"draft": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "ngram": "ngram-simple"}
_MARKOV = "markov_w1"  # a tensor that marks DSpark drafters
_GLANCE = 256  # tokens that a drafter reads to try a closed gate: few, because most tries fail
_CHOICES = (1, 2, 4, 8)  # lengths to choose from if none is given: few, because each batch width needs its own graph
N_GRAM = 4  # tokens that must match earlier text; llama.cpp's default of 12 rules out shorter drafts


@contextmanager
def _named(spec: Spec, target: Context) -> Iterator[None]:
    """Name the drafter, and its kind, in errors."""
    try:
        yield
    except KVFlashError as err:
        msg = f"{spec.model or target.model.path} cannot draft as {spec.kind}: {err}"
        raise type(err)(msg) from None


def drafter_bytes(
    spec: Spec, target: Context, at: Sequence[int], *, n_batch: int, n_ubatch: int, n_seq: int, where: dict[str, Any]
) -> list[int]:
    """Return how many bytes drafting takes on each device in `at` (indices into native.devices()). Allocates nothing.

    Counts the weights, and the buffers and a window's KV for each of n_seq sequences. The KV counts on every device, because
    its placement is unknown.

    target: a context of a model loaded with no_alloc. where: the devices, as for Model.load. Raises the errors of DraftModel.
    """
    if spec.kind == "ngram":
        return [0 for _ in at]
    with _named(spec, target), ExitStack() as stack:
        model = _model(spec, target.model, stack, no_alloc=True, **where)
        drafter = stack.enter_context(_context(spec, model, target, n_batch=n_batch, n_ubatch=n_ubatch))
        return _bytes(spec, drafter, at, n_seq)


def _bytes(spec: Spec, drafter: Context, at: Sequence[int], n_seq: int) -> list[int]:
    kv = drafter.kv_bytes()
    weights = drafter.model.weights() if spec.model is not None else []
    each = kv.attn + kv.swa + kv.recurrent
    return [sum(w.size for w in weights if w.device == i) + n_seq * (drafter.compute_bytes(i) + each) for i in at]


def _model(spec: Spec, target: Model, stack: ExitStack, **options: Any) -> Model:
    """Return the drafter's model, which `stack` closes. If the spec names no model, return the target: its own heads draft."""
    if spec.model is None:
        return target
    return stack.enter_context(Model.load(Path(spec.model), **options, mtp=spec.kind == "mtp"))


def _context(spec: Spec, model: Model, target: Context, *, n_batch: int, n_ubatch: int, n_threads: int = 1) -> Context:
    """Return the drafter's context, for batches as large as the target's."""
    n_draft = spec.most + 1
    return Context(
        model,
        n_ctx=spec.window + n_batch + n_draft,
        n_batch=max(n_batch, n_draft),
        n_ubatch=max(n_ubatch, n_draft),
        n_threads=n_threads,
        other=target,
        mtp=spec.kind == "mtp",
        n_outputs=n_draft,
    )


def _check_dflash(model: Model, target: Model) -> None:
    """Raise UnsupportedError for a drafter with which llama.cpp would abort, or would fail only while drafting."""
    if model.meta("general.architecture") != "dflash":
        return  # the library refuses it
    width, wide = _width(model), _width(target)
    if width != wide:
        msg = f"it was made for a target with embeddings of size {width}, and {target.path} has {wide}: use it with its own target"
        raise UnsupportedError(msg)
    mask = model.meta("tokenizer.ggml.mask_token_id") or ""
    if not mask.isdecimal() or int(mask) >= model.n_vocab:
        msg = (
            "its vocabulary has no mask token, the placeholder for tokens to guess: convert it together with its target"
        )
        raise UnsupportedError(msg)


def _width(model: Model) -> str | None:
    return model.meta(f"{model.meta('general.architecture')}.embedding_length")


class DraftModel:
    """The draft model, shared by the drafts of all sequences of a context.

    listening: the native target contexts whose layers output features for the draft model.
    broken: whether the draft model gave invalid logits; drafting ends then.
    """

    def __init__(
        self, spec: Spec, target: Context, *, n_batch: int, n_ubatch: int, where: dict[str, Any], n_threads: int
    ) -> None:
        """target: the target's context. n_batch, n_ubatch: that context's batch sizes. where: the devices, as for Model.load.

        Raises UsageError (n_ubatch is too small), ModelError, UnsupportedError and NativeError, each naming the drafter.
        """
        self.spec = spec
        self.name = _NATIVE.get(spec.kind, "draft-dflash")  # llama.cpp's name of the implementation
        self.listening: set[Any] = {target.handle}
        self.n_batch = n_batch
        self._n_ubatch = n_ubatch
        self._n_threads = n_threads
        self._model: Model | None = None
        self.broken = False
        self._stack = ExitStack()
        with _named(spec, target):
            if target.kv_bytes().recurrent and target.n_rollback < spec.most:
                msg = "the target has a recurrent state, which llama.cpp cannot roll back over rejected tokens"
                raise UnsupportedError(msg)
            if target.kv_bytes().recurrent and n_ubatch < spec.most + 2:
                msg = (
                    f"a recurrent state can be rolled back over {spec.most} tokens only if `n_batch` and `n_ubatch` are at least"
                    f" {spec.most + 2}: use larger batches (a larger `pool` allows them) or a smaller `spec.n_max`"
                )
                raise UsageError(msg)
            if spec.kind != "ngram":
                self._load(target.model, where)

    def _load(self, target: Model, where: dict[str, Any]) -> None:
        model = self._model = _model(self.spec, target, self._stack, **where)
        try:
            if self.spec.kind == "dflash":
                _check_dflash(model, target)
                if any(w.name.startswith(_MARKOV) for w in model.weights()):
                    self.name = "draft-dspark"
        except KVFlashError:
            self.close()
            raise

    def context(self, target: Context) -> Context | None:
        """Return a draft context for one sequence; None if drafting needs no model.

        Raises UnsupportedError and NativeError.
        """
        if self._model is None:
            return None
        n_ubatch, n_threads = self._n_ubatch, self._n_threads
        res = _context(self.spec, self._model, target, n_batch=self.n_batch, n_ubatch=n_ubatch, n_threads=n_threads)
        if res.kv_bytes().recurrent:
            res.close()
            msg = (
                "it has a recurrent state, which cannot be rolled back over rejected tokens: use a drafter without one"
            )
            raise UnsupportedError(msg)
        return res

    def close(self) -> None:
        """Free the model. Harmless when called again."""
        self.listening.clear()  # it would keep the contexts alive
        self._stack.close()


class Drafts:
    """The drafts of one sequence. The caller must report everything that happens to the sequence, in order.

    length: chooses the length of the next draft.
    """

    def __init__(self, model: DraftModel, target: Context) -> None:
        """target: the context of the sequence. Raises UnsupportedError and NativeError, each naming the drafter."""
        self.spec = model.spec
        self.stats = DraftStats()
        self._gate = Gate(self.spec.gate)
        self._model = model
        self._target = target
        self._n_read = 0  # positions up to which the drafter has read, or skipped
        self._n_kept = 0  # tokens of the last history that are still in the sequence
        self._until = 0  # end of the prompt: the drafter reads only a window before it
        self._n_vocab = target.model.n_vocab
        self._warnings: list[Warn] = []
        self._drafter: Context | None = None
        self._stack = ExitStack()
        try:
            with _named(self.spec, target):
                self._open(target)
        except KVFlashError:
            self.close()
            raise

    def _open(self, target: Context) -> None:
        spec, drafter = self.spec, self._model.context(target)
        if drafter is not None:
            self._stack.enter_context(drafter)
        self._drafter = drafter
        n_gram = min(N_GRAM, spec.most)
        try:
            self._spec = Speculator(
                self._model.name, target, drafter, n_max=spec.most, n_gram=n_gram, window=spec.window, p_min=spec.p_min
            )
        except NativeError as err:
            if "vocab" not in str(err):
                raise
            msg = "its vocabulary differs from the target's: use a drafter with the same vocabulary"
            raise UnsupportedError(msg) from None
        self._stack.callback(self._spec.close)
        shorter = [] if spec.n_max else [n for n in _CHOICES if n < self.n_max]
        self.length = DraftLength([*shorter, self.n_max], self._gate)

    def close(self) -> None:
        """Free the drafter. Harmless when called again."""
        self._stack.close()

    @property
    def n_max(self) -> int:
        """The longest draft, in tokens. The drafter's own limit may be below the requested one."""
        return self._spec.n_max

    def n_bytes(self, at: Sequence[int], n_seq: int) -> list[int]:
        """Return how many bytes the drafts of n_seq sequences take on each device in `at`. See drafter_bytes()."""
        return _bytes(self.spec, self._drafter, at, n_seq) if self._drafter else [0 for _ in at]

    @property
    def reads_features(self) -> bool:
        """Whether the drafter reads features of the target's layers, and so needs batches of a single sequence."""
        return self.spec.kind in ("dflash", "eagle3", "mtp")

    #
    # the sequence
    #

    def expect(self, n_end: int) -> None:
        """Announce a prompt that ends at position n_end: the drafter needs the features of the prompt's last window only."""
        self._until = n_end

    def before(self, ctx: Context, pos: int, n: int) -> None:
        """Before n tokens are decoded at pos, switch the output of layer features on or off, as the drafter needs.

        ctx: the context that decodes the tokens: the target's, or the exact pass's.
        """
        if self.reads_features:
            prompt, listening = pos < self._until, self._model.listening
            wanted = pos + n > self._until - self.spec.window if prompt else self._gate.open or not self._gate.closed
            wanted = wanted and not self._model.broken
            if wanted != (ctx.handle in listening):
                self._spec.listen(ctx, wanted)
                listening ^= {ctx.handle}

    def decoded(self, ctx: Context, tokens: Tokens, pos: int) -> None:
        """Let the drafter read tokens that a context has decoded. tokens: (n,) int32, at positions pos, pos + 1, ..."""
        if self.reads_features and ctx.handle in self._model.listening:
            self._read(ctx, tokens, pos)

    def begin(self, history: Sequence[int]) -> None:
        """Begin an answer after `history`."""
        self._spec.begin(np.array(history, np.int32))
        self._n_kept = len(history)
        self.stats = DraftStats()

    def truncate(self, n: int) -> None:
        """Follow the sequence, which was cut to n tokens."""
        self._n_kept = min(self._n_kept, n)
        self._n_read = min(self._n_read, n)

    def _read(self, ctx: Context, tokens: Tokens, pos: int) -> None:
        if pos > self._n_read and self._drafter:
            self._drafter.clear()  # it accepts no gap
        self._spec.process(ctx, self._known(tokens), pos)
        self._n_read = pos + len(tokens)

    def _known(self, tokens: Tokens) -> Tokens:
        """Return the tokens, with 0 in place of those outside the drafter's vocabulary."""
        return np.where(tokens < self._drafter.model.n_vocab, tokens, 0) if self._drafter else tokens

    #
    # a step
    #

    def guess(self, history: "array[int]", token: int, at_most: int) -> Tokens:
        """Draft the continuation of `history` and `token`, which is not decoded yet.

        Returns (m,) int32, m <= at_most. Empty: decode plainly.
        """
        if self._model.broken:
            return np.empty(0, np.int32)
        self._catch_up(history)
        kept = min(self._n_kept, len(history))
        known = self._known(np.array([*history[kept:], token], np.int32))
        try:
            res = self._spec.draft(known, kept, min(at_most, self.n_max))
        except BadLogitsError as err:  # the answer does not depend on the drafter
            self._model.broken = True
            self._warnings.append(Warn(f"{self.spec.model or self._target.model.path} no longer drafts: {err}"))
            return np.empty(0, np.int32)
        self._n_kept = len(history)
        if not len(res):
            return res
        there = (res >= 0) & (res < self._n_vocab)  # the drafter may have a larger vocabulary, or be broken
        return res if there.all() else res[: int(there.argmin())]

    def _catch_up(self, history: "array[int]") -> None:
        """Let a drafter of kind "draft" read the tokens it missed. It reads only when a draft is needed."""
        if self.spec.kind != "draft":
            return
        reach = min(_GLANCE, self.spec.window) if self._gate.closed else self.spec.window
        start = max(self._n_read, len(history) - reach)
        for at in range(start, len(history), self._model.n_batch):
            part = np.array(history[at : min(at + self._model.n_batch, len(history))], np.int32)
            self._read(self._target, part, at)

    def checked(self, n_guessed: int, n_right: int, seconds: float, guessing_s: float, width: int) -> None:
        """Record that n_right of n_guessed drafted tokens were accepted, in a batch of `width` tokens.

        seconds: the time of the whole step. guessing_s: the part of `seconds` that drafting took.
        """
        self.length.checked(n_guessed, n_right, guessing_s, seconds - guessing_s, width)
        self._spec.accept(n_right)
        self.stats.draft_steps += 1
        self.stats.drafted += n_guessed
        self.stats.accepted += n_right

    def warnings(self) -> list[Warn]:
        """Return the warnings since the last call."""
        res, self._warnings = self._warnings, []
        return res

    def plain(self, seconds: float) -> None:
        """Record that a step without a draft took `seconds`."""
        self.stats.plain_steps += 1
        self.stats.gated_steps += self.length.plain(seconds)
