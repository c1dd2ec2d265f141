"""The one rule by which a prompt takes the place of a text: what both begin with stays, as far as the model's memory goes back."""

from pyllama_kvflash.engine.decoder import Decoder
from pyllama_kvflash.errors import Interrupted, KVFlashError, SnapshotError, UnsupportedError
from pyllama_kvflash.native import Tokens
from pyllama_kvflash.text import n_common


def keep_common(decoder: Decoder, tokens: Tokens) -> tuple[int, SnapshotError | None]:
    """Leave only what a sequence has in common with a prompt (n,) int32, less its last token, which must give logits.

    A recurrent state, or a sliding window that was overwritten, goes back to the last checkpoint in that.

    Returns the number of positions, and a damage that was found. It is 0, and all is forgotten, if only BOS is the same, or
    if the memory cannot go back (there is no checkpoint; a damaged snapshot).
    """
    n, damage = n_common(decoder.sequence.tokens, tokens[:-1]), None
    try:
        if n > 1 and (n := _go_back(decoder, n)):
            return n, None
    except Interrupted:  # nothing is forgotten then
        raise
    except SnapshotError as err:
        damage = err
    except KVFlashError:  # then all is read
        pass
    decoder.clear()
    return 0, damage


def _go_back(decoder: Decoder, n_tokens: int) -> int:
    """Go back to n_tokens positions, or to the last checkpoint before. Returns the positions kept; 0: there is none."""
    try:
        decoder.rollback(n_tokens)
    except UnsupportedError:
        n_tokens = decoder.checkpoints.before(n_tokens)
        if n_tokens:
            decoder.rollback(n_tokens)
    return n_tokens
