"""A sequence of an engine: a prompt in, typed events out."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import native
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.engine.generation import Generation
from pyllama_kvflash.engine.going_back import keep_common
from pyllama_kvflash.engine.guard import Claim, Guard, guarded
from pyllama_kvflash.engine.stats import stats_of
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import Done, Event, Reselect, Stats, Warn
from pyllama_kvflash.loading.load import Loaded
from pyllama_kvflash.native import Sampling, Summaries, Tokens
from pyllama_kvflash.policy import Queries, Scorer
from pyllama_kvflash.pool.checkpoints import Checkpoints
from pyllama_kvflash.pool.pager import Pager
from pyllama_kvflash.pool.residency import Residency
from pyllama_kvflash.snapshot.capture import Capture, OnRecord
from pyllama_kvflash.snapshot.file import SnapshotFile
from pyllama_kvflash.snapshot.layout import Identity
from pyllama_kvflash.snapshot.saved import SavedSequence, checked_path

if TYPE_CHECKING:
    from pyllama_kvflash.chat.engine import ChatTemplate

Prompt = str | bytes | Sequence[int] | Tokens
"""A text, or token ids (n,)."""


class KVSequence:
    """One of KVFlash.sequences: up to n_ctx positions, of which the pool keeps some on the device.

    seq: the sequence's number. model, options: the engine's. n_pool: cells of the pool, which all sequences share; None: the
    full cache. warnings: sentences for the user.

    Several threads may use a sequence, one after the other: a call during another thread's call raises InUseError. If another call
    takes or changes the sequence, a generate() or prefill() under way raises InUseError at its next step, and changes nothing.
    """

    def __init__(self, loaded: Loaded, guard: Guard, seq: int = 0) -> None:
        """guard: shared by all sequences of the engine."""
        self.seq = seq
        self.sequence = loaded.sequences[seq]
        self.model = loaded.model
        self.ctx = self.sequence.ctx
        self.options = loaded.options
        self.n_pool = loaded.n_pool
        self.warnings = loaded.warnings + self.sequence.warnings
        self.guard = guard
        self._loaded = loaded
        checkpoints = Checkpoints(self.sequence)
        self._saved = SavedSequence(self.sequence, checkpoints)
        self._templates: dict[str | None, ChatTemplate] = {}  # by their source; None: the model's own
        drafts = loaded.drafts[seq] if loaded.drafts else None
        self.decoder = Decoder(self.sequence, checkpoints, drafts, loaded.n_batch, guard)

    #
    # generation
    #

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        append: bool = False,
    ) -> Iterator[Event]:
        """Read a prompt and produce up to max_tokens tokens (-1: until the context is full; 0: only read). Yields typed events.

        prompt: text (BOS is added as the model's metadata says), or token ids, taken as they are. The prompt replaces the
        sequence's text. The common prefix of both stays and is not read again, so a second question about a text costs only its own
        tokens. `Stats.n_prompt` counts the tokens read: at least one, since the last token gives logits. The whole prompt is read
        if only BOS is common. A recurrent state, or an overwritten sliding window, is rolled back to the last checkpoint within the
        prefix (see rollback()). Without a checkpoint, the whole prompt is read. Call clear() first to read everything anew.

        The prefix stays as it was computed. Batches then begin at other positions than in a fresh prompt, so logits may differ by
        rounding. Tokens of an earlier answer in the prefix, as in a chat, were decoded through the pool. With `prefill` "pool",
        the whole prefix was decoded so, and attended to chunks chosen for the earlier prompt. If decoding has become lossless
        (`min_agreement`), decoding remains lossless while part of the text stays.

        append: keep the context and the last token produced, and read the prompt after them. With an empty prompt, the answer
        continues as if it had not been interrupted. A character that the interruption cut in two comes with the following text.
        stop: strings that end the text and are not shown. The generator begins, and takes the sequence, when its first event is
        requested.

        Raises UsageError (the prompt is empty, too long, not Unicode text or not in the vocabulary; max_tokens, stop or
        sampling is invalid), and HostMemoryError if the prompt exceeds `host_limit`; both leave the sequence unchanged. Also raises
        InUseError, PoolError, HostMemoryError and NativeError.
        """
        yield from self._run(prompt, sampling, append=append, max_tokens=max_tokens, stop=stop)

    def _run(self, prompt: Prompt, sampling: Sampling | None, *, max_tokens: int, **how: Any) -> Iterator[Event]:
        check_max_tokens(max_tokens)
        sampling = sampling or Sampling()
        run = self.guard.run(self._begin, prompt, max_tokens=max_tokens, sampling=sampling, **how)
        yield from run.rest()
        answer = run.answer
        yield from answer.shown()
        stats = self.stats(seed=None if sampling.greedy else sampling.seed, **run.counts)
        yield Done(answer.reason or "interrupted", answer.flush(), stats)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        template: str | None = None,
    ) -> Iterator[Event]:
        """Answer a conversation, with the model's chat template. Yields the events of generate().

        messages: in OpenAI's form, `{"role": "user", "content": "..."}`; roles are system, user and assistant. If the last message
        is the assistant's, the answer continues it. Give all messages each time: only new text is read (see generate()). The
        answer is not added to `messages`. max_tokens, sampling, stop: as for generate(). template: Jinja source that replaces the
        model's own. Without any template, messages become lines "role: text", the start of the next such line ends the answer, and
        a Warn says so.

        Raises UsageError (an invalid message, or one that the template refuses), and the errors of generate().
        """
        from pyllama_kvflash.chat.engine import ChatTemplate, check_messages  # noqa: PLC0415 (slow)

        self.guard.check_open()
        check_messages(messages)
        if template not in self._templates:
            self._templates[template] = ChatTemplate(self.model, template)
        rendering = self._templates[template]
        if rendering.warning:
            yield Warn(rendering.warning)
        tokens, stop = rendering.tokens(self.model, messages), (*rendering.stop, *stop)
        yield from self._run(tokens, sampling, max_tokens=max_tokens, stop=stop, marks=rendering.begins(tokens))

    def _begin(self, prompt: Prompt, *, append: bool = False, **options: Any) -> Generation:
        given = prompt if isinstance(prompt, str | bytes) else self.model.ids(prompt)
        self.sequence.recover()  # a token that was being decoded again becomes pending
        tokens = self._prompt_tokens(given, append=append)
        if len(given) == 0:
            tokens = tokens[:0]  # the pending token begins the answer
        return Generation(self.decoder, tokens, whole=not append, **options)

    @guarded
    def generation(
        self,
        tokens: Tokens,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        preserved: Collection[int] = (),
        marks: Sequence[int] = (),
    ) -> Generation:
        """Return a Generation: generate() step by step, for callers that take turns. tokens: (n,) int32, read after the text in the
        context. preserved: special tokens that are shown as text. marks: positions where the next prompt may diverge from this one,
        such as the starts of messages.
        """
        return Generation(
            self.decoder, tokens, max_tokens=max_tokens, sampling=sampling, stop=stop, preserved=preserved, marks=marks
        )

    def prefill(self, tokens: Sequence[int] | Tokens) -> Iterator[Event]:
        """Decode tokens in batches after the text in the context. The last token gets logits. tokens: (n,).

        Chooses chunks anew for the last tokens, which are then decoded again (tail replay). Yields Paged, Reselect, Warn and
        Prefill. Raises the errors of generate().
        """
        ids = self.model.ids(tokens)
        yield from self.guard.run(self._claimed, len(ids)).each(self.decoder.prefill(ids))

    def _claimed(self, n: int) -> Claim:
        """Take the sequence, to decode n tokens. Raises UsageError if they do not fit."""
        self.decoder.check_fits(n, self.n_tokens)
        return self.decoder.claim()

    @guarded
    def decode(self, tokens: Sequence[int] | Tokens, outputs: int = native.LAST) -> list[Event]:
        """Decode one batch after the text in the context. Then score and move chunks as scheduled.

        tokens: (n,), at most n_batch. outputs: which tokens get logits (native.NONE, LAST, ALL). Returns the events: Paged,
        Reselect, Warn. Raises UsageError (the context is full, a token is not in the vocabulary), InUseError, PoolError,
        HostMemoryError, Interrupted and NativeError; the sequence is then unchanged.
        """
        ids = self.model.ids(tokens)
        self._claimed(len(ids))
        return self.decoder.decode(ids, outputs)

    @guarded
    def clear(self) -> None:
        """Clear the sequence and its records; pins stay. The next prompt is read from its first token."""
        self.decoder.claim()
        self.decoder.clear()

    @guarded
    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions. If the last chunks of the kept text are out, they are paged in.

        logits() is out of date until the next decode. A recurrent state, or an overwritten sliding window, can be rolled back only
        to a checkpoint; UnsupportedError names the last checkpoint before n_tokens. Checkpoints are copies in host memory, at most
        `checkpoint_limit` bytes in all. They are made at the starts of a conversation's messages, before the end of other prompts,
        and every 4,096 tokens. keep_common() finds the best one.
        """
        self.sequence.check_kept(n_tokens)
        self.decoder.claim()
        self.decoder.rollback(n_tokens)

    @guarded
    def keep_common(self, tokens: Sequence[int] | Tokens) -> int:
        """Keep only the common prefix with a prompt, as generate() does. Returns the number of positions kept. They end at a
        checkpoint if the model's memory can be rolled back only to one. tokens: the prompt, (n,); its last token is never kept.
        """
        ids = self.model.ids(tokens)
        self.decoder.claim()
        return keep_common(self.decoder, ids)[0]

    @guarded
    def expect(self, n_tokens: int) -> None:
        """Announce n_tokens more tokens. Threads then allocate host memory for the chunks, and no decode waits for memory. Optional.
        Raises HostMemoryError if the chunks exceed `host_limit`.
        """
        if self.sequence.pager:
            self.sequence.pager.expect(n_tokens)

    @guarded
    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        """Return a copy of a token's logits, (n_vocab,) float32. i: its index in the last batch; -1: this sequence's last token.

        The logits are not checked: damaged weights or an f16 overflow give NaN, for which generate() raises BadLogitsError.
        """
        return self.ctx.logits(i)

    @guarded
    def stats(self, /, **counts: Any) -> Stats:
        """Return current memory and page traffic. counts: other fields of Stats, such as n_prompt; fields not given are 0."""
        return stats_of(self._loaded, self.sequence, checkpoint_bytes=self.decoder.checkpoints.n_bytes, **counts)

    @property
    def summaries(self) -> Summaries | None:
        """Summaries of the keys of sealed chunks; None without a pool, or if the scorer needs none."""
        self.guard.check_open()
        return self.sequence.pager.summaries if self.sequence.pager else None

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> Tokens:
        """Return the token ids (n,) int32 of a text. add_special: add BOS and EOS as the model's metadata asks for."""
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int] | Tokens) -> str:
        """Return the text of tokens, without special ones. Broken UTF-8 becomes U+FFFD."""
        return b"".join(self.model.piece(int(t)) for t in tokens).decode("utf-8", "replace")

    def _prompt_tokens(self, prompt: str | bytes | Tokens, *, append: bool) -> Tokens:
        if len(prompt) == 0 and not (append and self.sequence.pending is not None):
            msg = "the prompt is empty: give at least one character, or one token"
            raise UsageError(msg)
        tokens = self.tokenize(prompt, add_special=not append) if isinstance(prompt, str | bytes) else prompt
        if append and self.sequence.pending is not None:
            tokens = np.concatenate([[self.sequence.pending], tokens]).astype(np.int32)
        at = self.sequence.n_tokens if append else 0
        self.decoder.check_fits(len(tokens), at)
        if self.sequence.pager and len(prompt):
            self.sequence.pager.check_limit(at + len(tokens))
        return tokens

    #
    # the sequence
    #

    @property
    def n_tokens(self) -> int:
        """Positions written so far."""
        self.guard.check_open()
        return self.sequence.n_tokens

    @property
    def tokens(self) -> Tokens:
        """The tokens written so far, (n_tokens,) int32, a copy."""
        self.guard.check_open()
        return self.sequence.tokens

    @property
    def n_batch(self) -> int:
        """The largest batch, in tokens, that fits the pool beside its sinks, tail and pinned chunks."""
        return self.decoder.n_batch

    @property
    def n_draft(self) -> int:
        """The longest draft, in tokens; 0 without speculative decoding."""
        return self.decoder.drafts.n_max if self.decoder.drafts else 0

    @property
    @guarded
    def resident_bytes(self) -> int:
        """Device bytes of full-attention KV: the pool, the codes of all sequences and the panes, or the whole context."""
        return self.sequence.resident_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes allocated for the records of all sequences."""
        self.guard.check_open()
        return self.sequence.host_bytes

    #
    # relevance
    #

    @property
    def policy(self) -> str:
        """The current scorer's name; if there is no scorer, "fresh" (each layer chooses) or "lru", and "full" without a pool."""
        if self.sequence.pager is None:
            return "full"
        if (guests := self.sequence.pager.guests) and guests.chooses:
            return "fresh"
        return self.scorer.name if self.scorer else "lru"

    @property
    def scorer(self) -> Scorer | None:
        """The current scorer; None with fresh, lru or the full cache."""
        return self.sequence.selector.scorer if self.sequence.selector else None

    @guarded
    def use(self, scorer: Scorer) -> None:
        """Replace the scorer. The new scorer rates the same layers; its summaries are made from the stored records.

        Raises UsageError (there was no scorer: lru, full cache), UnsupportedError and HostMemoryError.
        """
        if self.sequence.selector is None:
            msg = f"policy {self.policy} has no scorer to replace: open the model with one"
            raise UsageError(msg)
        self.sequence.selector.use(scorer)

    @guarded
    def queries(self) -> Queries:
        """Return the last token's queries, (n_head, n_embd_head_k) for each pooled layer; empty without a scorer."""
        return self.sequence.queries()

    @guarded
    def reselect(self) -> Reselect | None:
        """Score all chunks with the last token's queries, and page in the best. None: no chunk is out, or there is no scorer."""
        if self.sequence.selector is None or not self.sequence.selector.needed:
            return None
        events = list(self.sequence.reselect_now("decode", [self.sequence.queries()]))
        return next((e for e in events if isinstance(e, Reselect)), None)

    #
    # residency: the calls below need a pool, and raise UsageError without one
    #

    @property
    def pager(self) -> Pager:
        """The pager (ledger, host store and moves), for subclasses."""
        self.guard.check_open()
        return self.sequence.paged

    @guarded
    def residency(self) -> Residency:
        """Return where every chunk is now, as arrays."""
        return self.sequence.residency()

    @guarded
    def pin(self, start: int, end: int) -> None:
        """Pin positions [start, end): keep their chunks on the device, and page in those that are out.

        The range may include positions not written yet. Raises PoolError, and pins nothing, if too few unpinned blocks would
        remain.
        """
        self.sequence.pin(start, end)

    @guarded
    def unpin(self, start: int, end: int) -> None:
        """Unpin the chunks of positions [start, end)."""
        self.pager.unpin(start, end)

    @guarded
    def page_in(self, chunk: int) -> None:
        """Page in a chunk, in place of the coldest one. Harmless if the chunk is already resident. Raises PoolError."""
        self.sequence.page_in(chunk)

    @guarded
    def page_out(self, chunk: int) -> None:
        """Evict a chunk; its record stays in the host store. Raises PoolError if the chunk is protected."""
        self.sequence.page_out(chunk)

    @guarded
    def check_integrity(self) -> None:
        """Raise LedgerError unless ledger, host store and native pool agree. Meant for tests and idle moments."""
        self.sequence.check_integrity()

    #
    # snapshots
    #

    @property
    @guarded
    def identity(self) -> Identity:
        """The identity that snapshots must match to be restored here. Raises UsageError without a pool."""
        return self._saved.identity

    @property
    @guarded
    def checkpoints(self) -> list[int]:
        """The positions below n_tokens at which save() can cut the sequence."""
        return self._saved.checkpoints

    def save(self, path: str | Path, n_tokens: int | None = None, on_record: OnRecord | None = None) -> int:
        """Write a snapshot of the first n_tokens positions (None: all). Returns its size in bytes.

        The file is written under another name and renamed once it is complete. n_tokens: a multiple of `chunk`; with a
        recurrent state or a sliding window, one of `checkpoints`. on_record: called with (records written, records in all).

        Raises UsageError (nothing to save, no pool, a wrong n_tokens, a file of a model in use) and SnapshotError (the
        file cannot be written).
        """
        return self.capture(n_tokens).write(checked_path(path), on_record)

    @guarded
    def capture(self, n_tokens: int | None = None) -> Capture:
        """Capture what save() would write now, to write it later or in a thread. Raises UsageError.

        The capture keeps the records, and can be written even after close().
        """
        return self._saved.capture(n_tokens)

    @guarded
    def restore(self, snapshot: str | Path | SnapshotFile, prompt: Sequence[int] | Tokens | None = None) -> int:
        """Replace the sequence by a snapshot. prompt: (n,); only the common prefix of the snapshot and prompt[:-1] is restored.

        Returns the number of positions. Read the rest with generate(..., append=True), or give generate() the whole prompt. With
        append and an empty prompt, the answer continues after the last token produced. Nothing is computed; records are read when
        needed. In a pool of the same size that no other sequence shares, the sequence is restored exactly. Elsewhere the hottest
        chunks are paged in; with policy "fresh", each layer chooses its own chunks when the next token is decoded.

        Raises SnapshotError, with the reason, if the snapshot is damaged, or belongs to another model, cache or text; the
        sequence is then empty. A record is checked when it is first used: if it is damaged, generate() reads the text anew,
        and other calls raise SnapshotError.
        """
        tokens = None if prompt is None else self.model.ids(prompt)
        file = snapshot if isinstance(snapshot, SnapshotFile) else SnapshotFile(checked_path(snapshot))
        _ = self._saved.identity  # raises UsageError before anything is forgotten
        self.decoder.claim()
        self.decoder.clear()
        return self._saved.restore(file, tokens)
