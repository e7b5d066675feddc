from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.text.detokenizer import StopMatcher

TEXT = st.text(alphabet="ab\n", max_size=30)


@given(text=TEXT, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3), data=st.data())
def test_text_ends_at_the_first_stop_sequence_however_it_is_split(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops)
    shown = pushed = ""
    for piece in pieces:
        shown += matcher.push(piece)
        pushed += piece
        if not matcher.stopped:
            # Only text that begins some stop sequence is held back.
            held = pushed.removeprefix(shown)
            assert shown + held == pushed
            assert not held or any(stop.startswith(held) for stop in stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        assert matcher.stopped
        assert shown == text[: min(ends)[1]]
    else:
        assert not matcher.stopped
        assert shown + matcher.flush() == text


def test_text_after_a_stop_sequence_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abcE") == "abc"
    assert matcher.push("ND more") == ""
    assert matcher.push("again") == ""
    assert matcher.flush() == ""
