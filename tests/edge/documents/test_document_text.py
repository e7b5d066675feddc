"""Text of files of several formats, and its passages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.edge.documents.document_text import PASSAGE_CHARACTERS, document_text, split_passages


def test_html_loses_its_tags_and_keeps_its_lines() -> None:
    page = b"<style>p {\n secret }</style>\n<p>Fish &amp;\nchips</p><script>\nhidden()\n</script><td>a</td><td>b</td>"
    text = document_text("page.HTML", page)
    assert text is not None
    assert [line.split() for line in text.split("\n")] == [[], [], ["Fish", "&"], ["chips"], [], ["a", "b"]]
    assert document_text("page.txt", b"<p>as it is") == "<p>as it is"


@pytest.mark.parametrize("broken", ["<![foo", "<!--", "<a b='", "</", "&#xffffffff;", "<script>x" * 3])
def test_broken_html_is_read_somehow(broken: str) -> None:
    text = document_text("a.html", f"<p>before</p>{broken}".encode())
    assert text is not None
    assert "before" in text


@pytest.mark.parametrize("data", [b"a\0b", b"%PDF-1.7 text", bytes(range(128, 256))])
def test_what_is_not_text_is_left_out(data: bytes) -> None:
    assert document_text("a.txt", data) is None


def test_other_encodings_and_line_ends_are_read_as_far_as_they_go() -> None:
    assert document_text("a.txt", "a café au lait\r\nb\rc".encode("latin-1")) == "a caf\ufffd au lait\nb\nc"
    assert document_text("a.txt", b"\xef\xbb\xbfa" + b"b" * 9000 + b"\0") == "a" + "b" * 9000 + "\ufffd"


def test_passages_end_with_paragraphs_and_overlap() -> None:
    paragraphs = [f"Paragraph {number}. " + "word " * 60 + "\n" + "more " * 60 for number in range(9)]
    text = "\n\n".join(paragraphs)
    found = list(split_passages(text))
    assert len(found) > 2
    for start, end, line in found:
        assert text[start:end].endswith("more")
        assert line == text.count("\n", 0, start) + 1
    lines = ["line of text number " + str(number) for number in range(300)]
    text = "\n".join(lines)
    found = list(split_passages(text))
    for (_, end, _), (start, _, _) in pairwise(found):
        assert 0 < end - start <= 250
    assert all(text[start:end].split("\n")[0] == lines[line - 1] for start, end, line in found)


@given(st.text(st.sampled_from("ab \n\t."), max_size=400), st.integers(1, 40))
def test_every_word_is_in_a_passage(text: str, times: int) -> None:
    text *= times
    found = list(split_passages(text))
    covered = "".join(
        each if any(start <= place < end for start, end, _ in found) else " " for place, each in enumerate(text)
    )
    assert covered.split() == text.split()
    assert all(0 < end - start <= PASSAGE_CHARACTERS for start, end, _ in found)
    assert all(line == text.count("\n", 0, start) + 1 for start, _, line in found)


@pytest.mark.parametrize("piece", ["a", "\n", " ", "a ", "a\n", " \n", "<a ", "&", "é"])
def test_huge_lines_and_many_small_ones_are_split(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    found = list(split_passages(text))
    assert all(end - start <= PASSAGE_CHARACTERS for start, end, _ in found)
    assert len(found) <= 2_000
