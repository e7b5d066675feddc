"""Nothing phones home: edge-run switches off the telemetry of the libraries that it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from support.forbidden_network import KILLED, network_can_be_forbidden, without_network
from support.processes import EDGE_RUN

# Without speculation, nothing is measured before the answer.
REQUEST = ["-p", "find files larger than 100 MB", "-n", "4", "--spec", "off"]
STAY = (
    "import sys, time, edgerun\n"
    "with edgerun.load() as model:\n"
    "    print(model.generate('list files', max_tokens=8).text)\n"
    "    time.sleep(float(sys.argv[1]))\n"
)
SHOW = (
    "import os, edgerun; from huggingface_hub import constants;"
    "print(os.environ['ORT_DISABLE_TELEMETRY'], os.environ['HF_HUB_DISABLE_TELEMETRY'],"
    "constants.HF_HUB_DISABLE_TELEMETRY)"
)
FROM_THE_OUTSIDE = ("PATH", "PYTHONPATH", "SYSTEMROOT")

forbidding = cache(network_can_be_forbidden)


def environment(home: Path, **variables: str) -> dict[str, str]:
    """That of a user who has set nothing, with every folder that programs write to below `home`.

    ONNX Runtime sends nothing where it finds the variables of a CI system, so none is passed on.
    """
    folders = {
        name: str(home / "user") for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "APPDATA", "TMPDIR", "TEMP")
    }
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        folders[name] = str(home / "user" / name)
    (home / "user").mkdir()
    outside = {name: os.environ[name] for name in FROM_THE_OUTSIDE if name in os.environ}
    return {**outside, **folders, "EDGERUN_CACHE": str(home / "edge-run"), "PYTHONDONTWRITEBYTECODE": "1", **variables}


def run(command: list[str], home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command`, without network where that can be forbidden."""
    return subprocess.run(
        without_network(*command) if forbidding() else command,
        env=environment(home, **variables),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def written_elsewhere(home: Path) -> list[Path]:
    """What was written outside edge-run's own cache folder."""
    return [path for path in (home / "user").rglob("*") if path.is_file()]


def test_an_answer_writes_nothing_outside_the_cache_and_opens_no_socket(tmp_path: Path) -> None:
    result = run([*EDGE_RUN, *REQUEST], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("find")
    assert written_elsewhere(tmp_path) == []


@pytest.mark.nightly
def test_a_process_that_stays_alive_opens_no_socket(tmp_path: Path) -> None:
    result = run([sys.executable, "-c", STAY, "40"], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert written_elsewhere(tmp_path) == []


@pytest.mark.nightly
def test_a_process_with_telemetry_opens_sockets_which_these_tests_see(tmp_path: Path) -> None:
    if not forbidding():
        pytest.skip("needs Linux and seccomp")
    assert run([sys.executable, "-c", STAY, "40"], tmp_path, ORT_DISABLE_TELEMETRY="0").returncode == KILLED
    assert written_elsewhere(tmp_path)


def test_importing_edgerun_switches_telemetry_off(tmp_path: Path) -> None:
    result = run([sys.executable, "-W", "error", "-c", SHOW], tmp_path)
    assert (result.stdout, result.stderr) == ("1 1 True\n", "")


def test_what_the_user_has_set_is_kept(tmp_path: Path) -> None:
    chosen = {"ORT_DISABLE_TELEMETRY": "0", "HF_HUB_DISABLE_TELEMETRY": "0"}
    result = run([sys.executable, "-W", "error", "-c", SHOW], tmp_path, **chosen)
    assert (result.stdout, result.stderr) == ("0 0 False\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="ONNX Runtime has no telemetry client of its own on Windows")
def test_a_program_that_imports_onnxruntime_first_is_warned_once(tmp_path: Path) -> None:
    program = "import onnxruntime\nimport edgerun, importlib\nimportlib.reload(edgerun)\n"
    result = run([sys.executable, "-c", program], tmp_path)
    assert result.returncode == 0
    assert result.stderr.startswith("<string>:2: RuntimeWarning: onnxruntime was imported before edgerun")
    assert "set the environment variable ORT_DISABLE_TELEMETRY to 1" in result.stderr
    assert result.stderr.count("Warning") == 1


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_program_that_has_chosen_is_not_warned(tmp_path: Path, value: str) -> None:
    program = "import onnxruntime, edgerun"
    result = run([sys.executable, "-c", program], tmp_path, ORT_DISABLE_TELEMETRY=value)
    assert (result.returncode, result.stderr) == (0, "")
