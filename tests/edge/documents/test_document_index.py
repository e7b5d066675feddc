"""The index of a folder: what is read again, what is left out, what is found, and damage."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.edge.documents import document_index
from edgerun.edge.documents.document_index import DocumentIndex, IndexUpdate, with_index
from edgerun.errors import CancelledError, EdgeError, InputError
from support.commands import Patch

pytestmark = pytest.mark.usefixtures("cache")

WORDS = ("harbour", "ledger", "copper", "meadow", "signal", "velvet", "granite", "lantern", "orchard", "thunder")


def write(folder: Path, name: str, text: str | bytes, age_s: int = 60) -> Path:
    """Write a file that changed some time ago."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    then = path.stat().st_mtime_ns - age_s * 10**9
    os.utime(path, ns=(then, then))
    return path


def sources(index: DocumentIndex, question: str, limit: int = 5) -> list[str]:
    return [f"{each.source}:{each.line}" for each in index.search(question, limit)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def test_the_file_with_the_answer_is_first_of_200(folder: Path) -> None:
    chance = random.Random(1)
    for number in range(200):
        lines = [" ".join(chance.choices(WORDS, k=12)) for _ in range(60)]
        if number == 137:
            lines[40] = "The lease of the bakery in Ghent ends on the third of May."
        write(folder, f"part {number % 7}/{number}.md", "\n".join(lines))
    with DocumentIndex(folder) as index:
        assert index.update() == IndexUpdate(200, 200)
        (first, *_) = index.search("When does the lease of our bakery end?", 5)
    assert (first.source, "third of May" in first.text) == ("notes/part 4/137.md", True)
    assert first.line <= 41 < first.line + first.text.count("\n") + 1


def test_only_what_has_changed_is_read_again(folder: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        write(folder, name, f"the {name[0]} file has zebras")
    with DocumentIndex(folder) as index:
        assert index.update() == IndexUpdate(3, 3)
        assert index.update() == IndexUpdate(3, 0)
        write(folder, "b.txt", "now it has giraffes", age_s=30)
        (folder / "c.txt").unlink()
        assert index.update() == IndexUpdate(2, 1)
        assert (sources(index, "zebras"), sources(index, "giraffes")) == (["notes/a.txt:1"], ["notes/b.txt:1"])
        os.utime(folder / "a.txt")  # another time, the same content, and it may change again at that time
        assert [index.update().read for _ in range(2)] == [1, 1]
    with DocumentIndex(folder) as again:
        assert sources(again, "zebras") == ["notes/a.txt:1"]
        (folder / "a.txt").write_bytes(b"NOW it has okapis everywhere")
        os.utime(folder / "a.txt", ns=(1, 1))
        again.update()
        assert (sources(again, "zebras"), sources(again, "okapis")) == ([], ["notes/a.txt:1"])


def test_a_file_that_changes_while_it_is_read_is_read_again(folder: Path, monkeypatch: Patch) -> None:
    path = write(folder, "a.txt", "first")
    genuine = document_index.open_regular

    def changing(opened: Path, most: int) -> object:
        file = genuine(opened, most)
        write(folder, "a.txt", "second text", age_s=3)
        return file

    monkeypatch.setattr(document_index, "open_regular", changing)
    with DocumentIndex(folder) as index:
        index.update()
        monkeypatch.undo()
        write(folder, path.name, "third text!", age_s=3)
        assert index.update().read == 1
        assert sources(index, "third") == ["notes/a.txt:1"]


def test_what_is_left_out_is_counted(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(document_index, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(document_index, "MAX_TOTAL_BYTES", 1500)
    for name in (".git/config", ".hidden.txt", "node_modules/x/a.js", "sub/__pycache__/a.txt"):
        write(folder, name, "zebra")
    write(folder, "picture.png", b"\x89PNG\0\0zebra")
    write(folder, "large.txt", "zebra " * 200)
    write(folder, "m.txt", "zebra " * 150)
    write(folder, "n.txt", "zebra " * 150)
    with DocumentIndex(folder) as index:
        expected = {"not text": 1, "too large": 1, "beyond the limit of a folder": 1}
        assert index.update() == IndexUpdate(1, 1, expected)
        assert index.update() == IndexUpdate(1, 0, expected)
        (folder / "m.txt").unlink()
        assert index.update() == IndexUpdate(1, 1, {"not text": 1, "too large": 1})
        assert sources(index, "zebra") == ["notes/n.txt:1"]
        monkeypatch.setattr(document_index, "MAX_FILES", 2)
        assert index.update().skipped == {"too large": 1, "beyond the limit of a folder": 1}


@pytest.mark.skipif(sys.platform == "win32", reason="needs links, pipes and permissions")
def test_links_pipes_and_unreadable_files_are_left_out(folder: Path) -> None:
    secret = write(folder.parent, "outside/secret.txt", "zebra")
    (folder / "link.txt").symlink_to(secret)
    (folder / "linked").symlink_to(secret.parent)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    write(folder, "a.txt", "zebra")
    closed = write(folder, "closed.txt", "zebra")
    closed.chmod(0)
    readable = os.access(closed, os.R_OK)  # by the superuser
    with DocumentIndex(folder) as index:
        assert index.update().skipped == ({} if readable else {"not readable": 1})
        assert [each.split(":")[0] for each in sources(index, "zebra")][:1] == ["notes/a.txt"]
        assert len(sources(index, "zebra")) == 1 + readable
        assert stat.S_IMODE(index.path.stat().st_mode) == 0o600
    (folder.parent / "way").symlink_to(folder)
    with DocumentIndex(folder.parent / "way") as same:
        assert same.path == index.path


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not have such names")
def test_odd_file_names(folder: Path) -> None:
    for name in ("new\nline.txt", "quo\"te'.txt", "-x.txt", "☃ snow.txt"):
        write(folder, name, "zebra")
    (Path(os.fsdecode(os.fsencode(str(folder)) + b"/\xff\xfe.txt"))).write_bytes(b"zebra")
    with DocumentIndex(folder) as index:
        assert index.update().documents == 5
        assert len(sources(index, "zebra")) == 5
        assert sources(index, "snow") == ["notes/☃ snow.txt:1"]
        for path in folder.iterdir():
            path.unlink()
        assert index.update() == IndexUpdate(0, 0)
        assert sources(index, "zebra") == []


def test_names_count_and_words_are_stemmed(folder: Path) -> None:
    write(folder, "taxes/rates.txt", "numbers, nothing else")
    write(folder, "other.txt", "A tax on windows was raised. " + "filler words here " * 20)
    with DocumentIndex(folder) as index:
        index.update()
        assert sources(index, "tax rate") == ["notes/taxes/rates.txt:1", "notes/other.txt:1"]
        assert sources(index, "raising WINDOW") == ["notes/other.txt:1"]


def test_chinese_and_japanese_are_found_without_spaces(folder: Path) -> None:
    write(folder, "a.txt", "東京の人口は多い。大阪は西にある。")
    write(folder, "b.txt", "京都は古い都。")
    with DocumentIndex(folder) as index:
        index.update()
        assert sources(index, "東京の人口は何ですか")[0] == "notes/a.txt:1"
        assert sources(index, "京都") == ["notes/b.txt:1"]
        (folder / "a.txt").unlink()
        index.update()
        assert sources(index, "東京") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=st.text() | st.text(st.sampled_from("\"'()*^:-+ aNEARODT{}\0\n_²"), max_size=30))
def test_any_text_is_a_question(folder: Path, question: str) -> None:
    write(folder, "a.txt", "NEAR a OR b AND c NOT d")
    with DocumentIndex(folder) as index:
        index.update()
        index.search(question, 3)
    assert len(document_index.match_query("word" + " w".join(map(str, range(10_000)))).split(" OR ")) == 64


def test_a_single_file_and_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    path = write(folder, "one.py", "def zebra():\n    pass\n")
    with DocumentIndex(path) as index:
        assert index.update() == IndexUpdate(1, 1)
        assert sources(index, "zebra") == ["one.py:1"]
        assert [each.text for each in index.whole(100, 1) or []] == ["def zebra():\n    pass\n"]
        assert index.whole(10, 1) is None
        path.unlink()
        with pytest.raises(InputError, match="does not exist any more; name another folder or file"):
            index.update()
    for missing in ("missing", "nul\0"):
        with pytest.raises(InputError, match="cannot be read"):
            DocumentIndex(tmp_path / missing)


def test_reading_can_be_cancelled_and_goes_on(folder: Path) -> None:
    for number in range(5):
        write(folder, f"{number}.txt", "zebra")
    seen: list[float] = []
    with DocumentIndex(folder) as index:
        with pytest.raises(CancelledError):
            index.update(lambda _, fraction: seen.append(fraction), lambda: len(seen) == 3)
        assert index.update() == IndexUpdate(5, 2)
    assert seen == [0.0, 0.2, 0.4]


@pytest.mark.parametrize("damage", ["header", "pages", "empty"])
def test_a_damaged_index_is_made_anew(folder: Path, damage: str) -> None:
    for number in range(20):
        write(folder, f"{number}.txt", "zebra " * 400)
    with DocumentIndex(folder) as index:
        index.update()
    data = bytearray(index.path.read_bytes())
    start, end = {"header": (0, 100), "pages": (4096, len(data)), "empty": (0, 0)}[damage]
    data[start:end] = b"\xa5" * (end - start)
    index.path.write_bytes(b"" if damage == "empty" else data)
    found = with_index(folder, lambda again: (again.update().documents, len(again.search("zebra", 5))))
    assert found == (20, 5)


def test_an_index_that_cannot_be_kept_is_one_clear_line(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(write(tmp_path, "file", "")))
    with pytest.raises(EdgeError, match="the index .* failed: .*; name another folder for indexes with EDGERUN_CACHE"):
        with_index(folder, DocumentIndex.update)


def test_several_readers_and_writers_of_one_index(folder: Path) -> None:
    for number in range(30):
        write(folder, f"{number}.txt", f"zebra {number}")
    failed: list[BaseException] = []

    def update() -> None:
        try:
            with DocumentIndex(folder) as index:
                index.update()
                assert len(index.search("zebra", 100)) == 30
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    with DocumentIndex(folder) as index, closing(sqlite3.connect(index.path)) as connection:
        connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
        assert connection.execute("SELECT count(*) FROM passage").fetchone() == (30,)
