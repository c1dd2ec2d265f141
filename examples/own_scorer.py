"""A scorer of one's own: chunks that share rare tokens with the end of the text come back to the device.

python examples/own_scorer.py [MODEL.gguf]    without a model: the bundled one
"""

import sys

import numpy as np
import numpy.typing as npt

from pyllama_kvflash import Done, KVFlash, Sampling, Token, View
from pyllama_kvflash.needle import BUNDLED_MODEL, make_prompt


class Words:
    """Scores a chunk by the tokens that it shares with the last 32 ones, rare tokens for more (as BM25 does)."""

    name = "words"
    summary: str | None = None  # it needs no summaries of keys
    query = "last"

    def score(self, view: View) -> npt.NDArray[np.float64]:
        """Return a score for each chunk, (n_chunks,); larger is hotter."""
        n_chunks = -(-len(view.tokens) // view.chunk)
        chunk_of = np.arange(len(view.tokens)) // view.chunk
        scores = np.zeros(n_chunks)
        for token in np.unique(view.tokens[-32:]):
            there = np.unique(chunk_of[view.tokens == token])  # the chunks that have it
            scores[there] += np.log(n_chunks / len(there))
        return scores


def main(model: str = str(BUNDLED_MODEL)) -> None:
    """Answer with the newest chunks alone, and with those that the scorer chooses."""
    for policy in ("lru", Words()):
        # prompts and answers see the pool alone here, so that the choice decides; by default prompts are read exactly, and
        # on the CPU what is outside is seen, too
        with KVFlash.from_file(
            model, n_ctx=8192, pool=1024, policy=policy, prefill="pool", opening=0, coarse="off"
        ) as kv:
            print(f"policy {kv.policy}:")
            prompt = make_prompt(4000, lambda text: len(kv.tokenize(text, add_special=False)), n_needles=4)
            for needle in prompt.needles:
                text = prompt.text + needle.question
                events = kv.generate(text, max_tokens=16, stop=["\n"], sampling=Sampling(temperature=0))
                print(needle.question, "".join(e.text for e in events if isinstance(e, Token | Done)))


if __name__ == "__main__":
    main(*sys.argv[1:])
