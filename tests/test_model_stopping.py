"""Stop strings: found across tokens, nothing shown too early, nothing lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.model.stopping import StopStrings


def spell(pieces):
    """A decoder for tokens that index pieces, which are bytes."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def follow(pieces, stops):
    """The follower after pieces, as far as it goes, and the texts it showed on the way."""
    answer, shown = StopStrings(stops, spell(pieces)), []
    for token in range(len(pieces)):
        stopped = answer.add(token)
        shown.append(answer.text)
        if stopped:
            break
    return answer, shown


def test_a_stop_string_across_tokens_is_found_and_never_shown():
    answer, shown = follow([b"one ", b"two<", b"/s", b"> three"], ["</s>"])
    assert (answer.stopped, shown) == (True, ["one ", "one two", "one two", "one two"])
    assert answer.finish() == "one two"


def test_a_false_beginning_is_shown_once_it_is_known_to_be_false():
    answer, shown = follow([b"a<", b"/b", b"!<"], ["</s>"])
    assert (answer.stopped, shown) == (False, ["a", "a</b", "a</b!"])
    assert answer.finish() == "a</b!<"


def test_the_earliest_of_several_ends_the_answer():
    answer, _ = follow([b"x END y STOP"], ["STOP", "END"])
    assert answer.text == "x "


def test_half_a_character_is_held_back():
    pieces = ["\N{SNOWMAN}".encode()[:2], "\N{SNOWMAN}".encode()[2:], b"!"]
    assert follow(pieces, ["\N{SNOWMAN}?"])[1] == ["", "", "\N{SNOWMAN}!"]
    assert follow(pieces, ["\N{SNOWMAN}!"])[0].finish() == ""


def test_what_cannot_be():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""], spell([]))
    answer, _ = follow([b"ab"], ["b"])
    with pytest.raises(ValueError, match="has stopped"):
        answer.add(0)


@given(st.lists(st.text("ab<", min_size=1, max_size=3), max_size=12), st.lists(st.text("ab<", min_size=1), max_size=3))
def test_any_cut_into_tokens_gives_the_text_before_the_earliest_stop(texts, stops):
    pieces, whole = [text.encode() for text in texts], "".join(texts)
    answer, shown = follow(pieces, stops)
    consumed = "".join(texts[: len(shown)])
    found = [consumed.find(stop) for stop in stops if stop in consumed]
    assert answer.finish() == (consumed[: min(found)] if found else whole)
    assert answer.stopped == any(stop in whole for stop in stops)
    assert all(later.startswith(earlier) for earlier, later in pairwise([*shown, answer.finish()]))
