"""How much each chunk matters now. A scorer sees all chunks, resident or not; higher is hotter."""

from collections.abc import Mapping

import numpy as np

from pyllama_kvflash.policy.ledger import Ledger
from pyllama_kvflash.policy.plan import Scorer, Scores


def lru(ledger: Ledger) -> Scores:
    """Least recently used: a chunk is used when it is written or paged in. It knows nothing of what the chunks say."""
    return ledger.touched.astype(np.float64)


POLICIES: Mapping[str, Scorer] = {"lru": lru}
"""Built-in policies by the name that `--kvflash-policy` takes."""
