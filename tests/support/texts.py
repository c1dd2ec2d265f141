"""A text of characters of every length, and texts cut anywhere."""

import itertools

SAMPLE = "aé€😀 ß\U0010ffff漢e\u0301z"  # of 1, 2, 3 and 4 bytes, and a combining accent


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """The parts between these places."""
    edges = [0, *sorted(min(i, len(data)) for i in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]
