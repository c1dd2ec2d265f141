"""A small model that reads the target's text: its attention rates the target's chunks."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyllama_kvflash.errors import Interrupted, KVFlashError, ScorerError, UsageError
from pyllama_kvflash.native import Model, Summaries, Tokens
from pyllama_kvflash.options import MAX_TOKENS, Options
from pyllama_kvflash.policy import Queries, Scores, View, ZMax
from pyllama_kvflash.policy.sizing import SINKS
from pyllama_kvflash.scorers.crosstok import Retokenizer, char_spans, spread

NAMES = ("{stem}-draft.gguf", "draft-scorer.gguf")
"""File names of a scorer's model, next to its target or in the cache folder."""

_CONTEXT = 8  # context of the small model, as a multiple of the target's
_POOL = 2048  # tokens of its pool
_TAIL = 4  # how many last tokens' queries are used


class SmallEngine(Protocol):
    """The part of an engine that a reader uses. KVFlash has it."""

    options: Options
    model: Model

    @property
    def tokens(self) -> Tokens:
        """The tokens read so far, (n,) int32."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens read so far."""

    @property
    def summaries(self) -> Summaries | None:
        """Summaries of the keys of the full chunks."""

    def tokenize(self, text: str | bytes, *, add_special: bool = True) -> Tokens:
        """Return the token ids (n,) int32 of a text."""

    def prefill(self, tokens: Tokens) -> Iterator[object]:
        """Read tokens in batches."""

    def decode(self, tokens: Tokens) -> object:
        """Read tokens in one batch."""

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits of the last token, (n_vocab,) float32."""

    def queries(self) -> Queries:
        """Return the queries of the last token."""

    def rollback(self, n_tokens: int) -> None:
        """Keep the first n_tokens tokens."""

    def clear(self) -> None:
        """Remove all tokens."""

    def close(self) -> None:
        """Free the model."""


OpenEngine = Callable[[Path, Options], SmallEngine]


def find_scorer_model(given: str | None, target: Path) -> Path:
    """Return the file of a scorer's model: the given one, or the first of NAMES that exists.

    The search covers the target's folder, the folder in KVFLASH_DRAFT_DIR, and then $XDG_CACHE_HOME/kvflash
    (~/.cache/kvflash). Raises UsageError if no file is found.
    """
    if given is not None:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvflash"
    folders = [target.parent, *([Path(d)] if (d := os.environ.get("KVFLASH_DRAFT_DIR")) else []), cache]
    places = [folder / name.format(stem=target.stem) for folder in folders for name in NAMES]
    for place in places:
        if place.is_file():
            return place
    msg = f"no scorer model is found: give one (`scorer_model`), or put it at {' or '.join(map(str, places))}"
    raise UsageError(msg)


class Reader:
    """The scorer of policies "drafter" and "crosstok": `ZMax` on the queries of a small model's last tokens.

    The small model is loaded on first use. It runs in a pool of its own and keeps the text, so that it reads only new
    tokens for the next scoring. If its tokenizer differs from the target's ("crosstok"), it reads the target's text in its
    own tokens, and their scores are mapped to the target's tokens by spans of characters.
    """

    summary: str | None = None
    query = "last"

    def __init__(
        self, path: Path, target: Model, options: Options, open_engine: OpenEngine, *, retokenize: bool = False
    ) -> None:
        """Prepare the reader, without loading the small model.

        path: file of the small model.
        target: the model whose chunks are scored.
        options: the target's options; n_ctx, n_threads and chunk are used.
        open_engine: loads the small model.
        retokenize: map by text even if the tokenizers are the same.
        """
        self.name = "crosstok" if retokenize else "drafter"
        self.path = path
        self._target = target
        self._options = options
        self._open = open_engine
        self._retokenize = retokenize
        self._kv: SmallEngine | None = None
        self._queries: list[Queries] = []
        self._retokenizer: Retokenizer | None = None

    def close(self) -> None:
        """Free the model. Harmless when called again."""
        if self._kv is not None:
            self._kv.close()
            self._kv = None

    def score(self, view: View) -> Scores:
        """Return scores (n_chunks,) float64. Chunks that the small model has not read to their end get the lowest score.

        Raises ScorerError if the small model does not load or run, and Interrupted.
        """
        try:
            kv = self._loaded()
            if self._retokenizer is None:
                self._read(kv, view.tokens)
                scores = self._chunk_scores(kv)
            else:
                scores = self._through_text(kv, self._retokenizer, view)
        except Interrupted:
            raise
        except (KVFlashError, OSError, ValueError) as err:
            raise ScorerError(str(err)) from err
        res = np.full(len(view.candidates), scores.min(initial=0.0))
        res[: len(scores)] = scores[: len(res)]
        return res

    def _loaded(self) -> SmallEngine:
        if self._kv is None:
            o = self._options
            # positions cost a pool nothing, and another tokenizer may need more of them for the same text
            n_ctx = min(_CONTEXT * (o.n_ctx + _POOL), MAX_TOKENS)
            small = Options(
                n_ctx=n_ctx,
                chunk=o.chunk,
                n_threads=o.n_threads,
                pool=_POOL,
                prefill="pool",
                policy=ZMax(),
                replay=0,
            )
            kv = self._open(self.path, small)
            if self._retokenize or not same_tokenizer(kv.model, self._target):
                self.name = "crosstok"
                self._retokenizer = Retokenizer(
                    lambda text: [int(t) for t in kv.tokenize(text, add_special=False)], kv.model.piece
                )
            self._kv = kv
        return self._kv

    def _read(self, kv: SmallEngine, tokens: npt.NDArray[np.int32]) -> None:
        """Let the small model read these tokens to the end. A common prefix with the tokens read before is not read again."""
        have = kv.tokens
        n = min(len(have), len(tokens))
        differ = np.flatnonzero(have[:n] != tokens[:n])
        keep = int(differ[0]) if len(differ) else n
        if keep == len(tokens) == len(have) and self._queries:
            return
        keep = min(keep, max(0, len(tokens) - _TAIL))
        if keep < len(have):
            try:
                kv.rollback(keep)
            except KVFlashError:  # a recurrent state cannot be rolled back
                kv.clear()
                keep = 0
        new = tokens[keep:]
        for _ in kv.prefill(new[:-_TAIL]) if len(new) > _TAIL else ():
            pass
        self._queries = []
        for token in new[-_TAIL:]:
            kv.decode(np.array([token], np.int32))
            self._queries.append(kv.queries())
        if not np.isfinite(kv.logits().max()):  # also for NaN: the queries and keys are then meaningless
            msg = f"the logits of {self.path} are NaN or infinite: its weights are damaged"
            raise ScorerError(msg)

    def _chunk_scores(self, kv: SmallEngine) -> Scores:
        """Return a score for each full chunk of the small model. The first chunks get the lowest score, because all heads
        attend to them.
        """
        summaries = kv.summaries
        n = len(summaries) if summaries is not None else 0
        candidates = np.ones(n, np.bool_)
        candidates[:SINKS] = False
        view = View(kv.tokens, kv.options.chunk, np.zeros(n, np.int64), candidates, self._queries, summaries)
        scores = ZMax().score(view)
        return np.where(candidates, scores, scores[candidates].min(initial=0.0))

    def _through_text(self, kv: SmallEngine, retokenizer: Retokenizer, view: View) -> Scores:
        """Read the target's text in the small model's tokens. Returns the best score within each target chunk's text."""
        pieces = _pieces(self._target, view.tokens)
        retokenizer.update(b"".join(pieces))
        special = kv.tokenize("", add_special=True)  # BOS, if the small model has one
        self._read(kv, np.concatenate([special, retokenizer.tokens]).astype(np.int32))
        scores = self._chunk_scores(kv)
        if len(scores) == 0:
            return scores
        each = np.full(kv.n_tokens, scores.min())
        n = len(scores) * kv.options.chunk
        each[:n] = np.repeat(scores, kv.options.chunk)
        mine = spread(each[len(special) :], retokenizer.spans, char_spans(pieces))
        return np.maximum.reduceat(mine, np.arange(0, len(mine), view.chunk))


def same_tokenizer(a: Model, b: Model) -> bool:
    """Return whether every token id stands for the same text in both models."""
    return a.n_vocab == b.n_vocab and all(a.piece(i) == b.piece(i) for i in range(a.n_vocab))


def _pieces(model: Model, tokens: npt.NDArray[np.int32]) -> Sequence[bytes]:
    known = {int(t): model.piece(int(t)) for t in np.unique(tokens)}
    return [known[int(t)] for t in tokens]
