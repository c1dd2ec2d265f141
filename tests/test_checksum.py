"""Checksums of records and codes."""

import numpy as np
import pytest

from pyllama_kvflash.native.checksum import Checksum, checksum

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("data", "want"),
    [  # of xxhsum -H2
        (b"", "99aa06d3014798d86001c324468d497f"),
        (b"a", "a96faf705af16834e6c632b61e964e1f"),
        (b"abc", "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_it_is_xxh3(data: bytes, want: str) -> None:
    assert checksum(data).hex() == want


def test_whatever_pieces_it_comes_in() -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    for size in (1, 255, 256, 257, 4096):
        res = Checksum()
        for i in range(0, len(data), size):
            res.update(data[i : i + size])
        assert res.digest() == checksum(data)
    data[5_000] ^= 1
    assert checksum(data) != res.digest()
