"""Nothing that was indexed is lost when a process is killed, and the next one goes on."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from edgerun.edge.documents.document_index import DocumentIndex
from support.processes import started

FILES = 60
INDEXING = """
import sys
from pathlib import Path
from edgerun.edge.documents.document_index import DocumentIndex

def say(_, fraction):
    print(round(fraction * 60), flush=True)

DocumentIndex(Path(sys.argv[1])).update(say)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.nightly)])
def test_killing_the_process_loses_nothing(tmp_path: Path, cache: Path, kills: int) -> None:
    chance = random.Random(kills)
    for kill in range(kills):
        folder = tmp_path / f"folder {kill}"
        folder.mkdir()
        for number in range(FILES):
            path = folder / f"{number:02}.txt"
            path.write_text(f"zebra number{number} " * chance.randint(1, 600), encoding="utf-8")
            os.utime(path, (1, 1))
        with started([sys.executable, "-c", INDEXING, str(folder)], stdout=-1) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(chance.randint(1, FILES // 2))]
            time.sleep(chance.random() * 0.004)
            process.kill()
            lines += process.stdout.readlines()
            process.wait()
        stored = max(int(line) for line in lines if line.endswith(b"\n"))
        with DocumentIndex(folder) as index:
            with closing(sqlite3.connect(index.path)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
            assert len(index.search(" ".join(f"number{each}" for each in range(stored)), 10_000)) >= stored
            # One further file may have been stored that the process could not say any more.
            assert index.update().read in {FILES - stored, FILES - stored - 1}
            for number in range(FILES):
                assert index.search(f"number{number}", 1)[0].source == f"{folder.name}/{number:02}.txt"
    assert len(list((cache / "documents").glob("*.sqlite3"))) == kills
