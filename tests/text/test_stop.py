"""`StopBuffer`: what it lets through, whatever pieces the text comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.text.stop import StopBuffer


def feed(stops, pieces):
    """(what each push returned, whether it stopped, what flush returned)."""
    buffer = StopBuffer(stops)
    out = [buffer.push(piece) for piece in pieces]
    return out, buffer.stopped, buffer.flush()


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stopped", "rest"),
    [
        ((), ["a", "b"], ["a", "b"], False, ""),
        (("END",), ["aE", "N", "D", "b"], ["a", "", "", ""], True, ""),
        (("END",), ["aE", "N", "X"], ["a", "", "ENX"], False, ""),
        (("END",), ["aE", "N"], ["a", ""], False, "EN"),
        (("END",), ["xENDy"], ["x"], True, ""),
        (("END",), ["END"], [""], True, ""),
        (("aab",), ["aaab"], ["a"], True, ""),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""], True, ""),
        (("ab", "b"), ["x", "a", "b"], ["x", "", ""], True, ""),
        (("b", "ab"), ["xab"], ["x"], True, ""),
        (("ab", "xxabyy"), ["xxabyy"], ["xx"], True, ""),
        (("ab", "xxabyy"), ["xx", "ab", "yy"], ["", "xx", ""], True, ""),
        (("é",), ["caf", "é!"], ["caf", ""], True, ""),
    ],
)
def test_examples(stops, pieces, out, stopped, rest):
    assert feed(stops, pieces) == (out, stopped, rest)


TEXT = st.text(alphabet="abc", max_size=12)


@given(TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_stop_that_ends_first_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, stopped, rest = feed(stops, pieces)

    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert "".join(out) == text[: ends[0] - longest]
        assert rest == ""
    else:
        assert "".join(out) + rest == text


@given(TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_become_a_stop_is_held_back(text, stops):
    buffer = StopBuffer(stops)
    given_out = ""
    for end, character in enumerate(text, start=1):
        given_out += buffer.push(character)
        if buffer.stopped:
            return
        held = text[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
