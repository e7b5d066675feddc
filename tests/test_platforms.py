"""What keeps the package working on systems that the tests do not run on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import simulated_platform


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_every_module_is_imported_on_other_platforms(platform: str) -> None:
    command = [sys.executable, simulated_platform.__file__, platform]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
