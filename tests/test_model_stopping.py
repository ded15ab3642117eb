"""Stop strings: found across tokens and characters, however long the answer, and cut off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.model.stopping import StopStrings, until_stop


def spell(pieces):
    """A decoder for tokens that index pieces, which are bytes."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def stops_at(pieces, stops):
    """After how many of the pieces a stop string is found; None if none is."""
    answer = StopStrings(stops, spell(pieces))
    return next((token + 1 for token in range(len(pieces)) if answer.add(token)), None)


def test_a_stop_string_across_tokens_is_found_when_it_is_whole():
    assert stops_at([b"one ", b"two<", b"/s", b"> three"], ["</s>"]) == 4
    assert stops_at([b"a<", b"/b", b"!<"], ["</s>"]) is None


def test_a_stop_string_across_a_character_in_two_tokens_is_found():
    snowman = "\N{SNOWMAN}".encode()
    assert stops_at([b"x", snowman[:2], snowman[2:] + b"!"], ["\N{SNOWMAN}!"]) == 3


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""], spell([]))


def test_the_text_ends_before_the_earliest_stop():
    assert until_stop("x END y STOP", ["STOP", "END"]) == "x "
    assert until_stop("x", ["STOP"]) == "x"


def test_a_long_answer_is_not_decoded_whole_with_each_token():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "x" * len(ids)

    answer = StopStrings(["y"], decode)
    assert not any(answer.add(0) for _ in range(1000))
    assert max(decoded) <= 128 and len(decoded) < 1050


@given(
    st.lists(st.text("ab\N{SNOWMAN}", min_size=0, max_size=3), min_size=120, max_size=300),
    st.lists(st.text("ab\N{SNOWMAN}", min_size=5, max_size=90), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_any_cut_into_tokens_stops_where_the_whole_text_does(texts, stops, width):
    """Also cut in the middle of characters, and with stop strings longer than what is decoded anew."""
    whole = "".join(texts).encode()
    pieces = [whole[i : i + width] for i in range(0, len(whole), width)]
    stops = [*stops, "".join(texts[-40:]) or "b"]
    until = [whole[: (i + 1) * width].decode(errors="replace") for i in range(len(pieces))]
    expected = next((i + 1 for i, text in enumerate(until) if any(stop in text for stop in stops)), None)
    assert stops_at(pieces, stops) == expected
