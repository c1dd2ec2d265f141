"""How a new prompt replaces a text: their common prefix stays, as far as the model's memory can be rolled back."""

from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.errors import Interrupted, KVFlashError, SnapshotError, UnsupportedError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.text import n_common


def keep_common(decoder: Decoder, tokens: Tokens) -> tuple[int, SnapshotError | None]:
    """Keep only the common prefix of a sequence and a prompt. tokens: the prompt, (n,) int32, whose last token is always read.

    A recurrent state, or an overwritten sliding window, is rolled back to the last checkpoint within that prefix.

    Returns the number of positions kept, and the damage found in a snapshot, or None. Everything is cleared, and the number is
    0, if only BOS is common, or if the memory cannot be rolled back (no checkpoint; a damaged snapshot).
    """
    n, damage = n_common(decoder.sequence.tokens, tokens[:-1]), None
    try:
        if n > 1 and (n := _go_back(decoder, n)):
            return n, None
    except Interrupted:  # the sequence stays as it is
        raise
    except SnapshotError as err:
        damage = err
    except KVFlashError:  # the whole prompt is read
        pass
    decoder.clear()
    return 0, damage


def _go_back(decoder: Decoder, n_tokens: int) -> int:
    """Roll back to n_tokens positions, or to the last checkpoint before that. Returns the positions kept; 0: no checkpoint."""
    try:
        decoder.rollback(n_tokens)
    except UnsupportedError:
        n_tokens = decoder.checkpoints.before(n_tokens)
        if n_tokens:
            decoder.rollback(n_tokens)
    return n_tokens
