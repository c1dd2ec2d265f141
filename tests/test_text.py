"""Text comes out whole: no broken character, nothing of a stop string, nothing lost, however the bytes are cut."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.properties import CHECK
from support.texts import cut

from pyllama_kvflash.text import TextStream, to_json


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    """As the engine does: no more pieces after a stop; flush at the end."""
    stream, shown = TextStream(stop), []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.stopped:
            break
    shown.append(stream.flush())
    return shown, stream.stopped


def until(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first; of those that end together, the longest."""
    ends = [(i + len(s), i) for s in stops if s and (i := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


#
# UTF-8
#


@pytest.mark.parametrize(("tail", "shown"), [(b"\xe2\x82", "a\ufffd"), (b"\xf0", "a\ufffd"), (b"", "a")])
def test_flush_shows_that_a_character_is_incomplete(tail: bytes, shown: str) -> None:
    stream = TextStream()
    assert stream.push(b"a" + tail) == "a"
    assert "a" + stream.flush() == shown
    assert stream.flush() == ""


@given(data=st.binary(max_size=40), at=st.lists(st.integers(0, 40), max_size=8))
@CHECK
def test_any_bytes_decode_as_in_one_piece(data: bytes, at: list[int]) -> None:
    shown, stopped = run(cut(data, at), [])
    assert "".join(shown) == data.decode("utf-8", "replace")
    assert not stopped


#
# stop strings
#


def test_a_stop_string_cut_within_a_character() -> None:
    data = "x€€y".encode()
    for i in range(len(data) + 1):
        shown, stopped = run([data[:i], data[i:]], ["€€"])
        assert ("".join(shown), stopped) == ("x", True)


letters = st.text("ab€ \n", max_size=30)


@given(text=st.text(max_size=60) | letters, at=st.lists(st.integers(0, 90), max_size=12))
@CHECK
def test_without_a_stop_everything_is_shown(text: str, at: list[int]) -> None:
    assume("\ufffd" not in text)
    shown, stopped = run(cut(text.encode(), at), [])
    assert ("".join(shown), stopped) == (text, False)


@given(
    text=letters,
    stops=st.lists(st.text("ab€ \n", max_size=4), max_size=3),
    at=st.lists(st.integers(0, 60), max_size=12),
)
@example(text="aab", stops=["ab"], at=[1, 2])
@settings(CHECK, max_examples=400)
def test_shown_is_the_text_up_to_the_first_stop(text: str, stops: list[str], at: list[int]) -> None:
    """Whatever the cuts, and with nothing held back that could not begin a stop string."""
    shown, stopped = run(cut(text.encode(), at), stops)
    assert "".join(shown) == until(text, stops)
    assert stopped == any(s and s in text for s in stops)


@given(text=letters, stops=st.lists(st.text("ab€ \n", min_size=1, max_size=4), max_size=3))
@CHECK
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stream, shown, seen = TextStream(stops), "", ""
    for char in text:
        shown += stream.push(char.encode())
        seen += char
        if stream.stopped:
            return
        held = seen[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stops)
        assert shown + held == seen


#
# JSON
#


def test_json_has_no_nan() -> None:
    """null takes its place, wherever it is. Other values are as they are."""
    inf = float("inf")
    assert (
        to_json({"a": [1.5, inf, (-inf, "NaN")], "b": {"c": inf - inf}})
        == '{"a": [1.5, null, [null, "NaN"]], "b": {"c": null}}'
    )
    assert to_json("é", ensure_ascii=False) == '"é"'
