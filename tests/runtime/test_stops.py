from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.text.stops import StopMatcher

TEXT = st.text(alphabet="ab\n", max_size=30)


@given(text=TEXT, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3), data=st.data())
def test_pieces_end_at_the_first_stop_however_they_are_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        # Nothing is held back without need: what is held begins some stop string.
        held = text[: len(shown)] == shown and not matcher.stopped
        if held:
            pending = "".join(pieces)[len(shown) : sum(map(len, pieces[: pieces.index(piece) + 1]))]
            assert len(pending) < max((len(stop) for stop in stops), default=1)
    ends = [text.find(stop) for stop in stops if stop in text]
    if ends:
        assert matcher.stopped
        assert shown == text[: min(ends)]
    else:
        assert not matcher.stopped
        assert shown + matcher.flush() == text


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abcE") == "abc"
    assert matcher.push("ND more") == ""
    assert matcher.push("again") == ""
    assert matcher.flush() == ""
