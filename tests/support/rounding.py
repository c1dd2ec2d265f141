"""What rounding does to an answer: sums run in another order in other cells, in a batch of another width, on another CPU.

Where two tokens are as likely but for that, another one is chosen, and all that follows is another text. So answers that
are not of the same batches in the same cells are compared by the logits that each token was chosen by, and go on alike.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_kvflash.engine import generation
from pyllama_kvflash.native import Context, Sampler
from pyllama_kvflash.native.lib import ffi, lib

Logits = npt.NDArray[np.float32]
Distance = Callable[[Logits, Logits], float]


def largest(got: Logits, want: Logits) -> float:
    """The largest difference."""
    return float(np.abs(got - want).max())


def relative_rms(got: Logits, want: Logits) -> float:
    """The difference as a share of the logits, both as root mean squares."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def n_flips(got: Logits, want: Logits, tie: float) -> int:
    """Rows (n, n_vocab) whose likeliest token is another one, which `want` finds less likely by more than a tie."""
    n = np.arange(len(want))
    return int(np.sum(want[n, want.argmax(1)] - want[n, got.argmax(1)] > tie))


class Chosen:
    """The logits that tokens were chosen by, each under a key. Those that come later under the same one may differ by `limit`,
    and become the first ones: whoever samples next, samples from the same numbers.
    """

    def __init__(self, limit: float, distance: Distance = largest) -> None:
        self.limit, self.distance = limit, distance
        self.rows: dict[Hashable, Logits] = {}
        self.n_held = 0

    def hold(self, ctx: Context, i: int, key: Hashable) -> None:
        """Those of token i of the last batch, before they are sampled from."""
        row = ctx.logits(i)
        if key not in self.rows:
            self.rows[key] = row
            return
        apart = self.distance(row, self.rows[key])
        assert apart <= self.limit, f"logits differ by {apart:.3g}, and rounding by {self.limit:.3g} at most"
        ptr = lib.llama_get_logits_ith(ctx.output.native, ctx.output.row(i))
        ffi.memmove(ptr, self.rows[key], self.rows[key].nbytes)
        self.n_held += 1


@contextlib.contextmanager
def held(chosen: Chosen, at: int = 0) -> Iterator[None]:
    """The n-th token of an answer is chosen by the logits that are known for it. at: of its first one."""
    n = itertools.count(at)

    class Held(Sampler):
        def sample(self, ctx: Context, i: int = -1) -> int:
            chosen.hold(ctx, i, next(n))
            return super().sample(ctx, i)

        def fork(self) -> Any:  # it only guesses
            res: Any = super().fork()
            res.__class__ = Sampler
            return res

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "Sampler", Held)
        yield
