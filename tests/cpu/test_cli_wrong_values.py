"""Every option of every command takes what it says, or ends in exit code 2 with a paragraph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from crossfuse.cli import app

CHAIN = "gemm:M=16,K=64,N=16"
#: What comes before an option: a workload that is quick, and where files go.
GIVEN = {
    "explain": (CHAIN,),
    "compile": (CHAIN, "--output", "out"),
    "emulate": (CHAIN,),
    "demo": ("--output", "out"),
    "bench": (CHAIN, "--dry-run"),
    "timeline": (CHAIN,),
    "view": (CHAIN, "--out", "view.html"),
    "tune": (CHAIN, "--work-dir", "tuned", "--trials", "0"),
    "bundle make": (CHAIN, "--out", "bundle", "--build-there", "--keep", "1"),
    "bundle measure": ("bundle",),
    "bundle collect": ("bundle",),
}
NUMBERS = ("", "x", "-1", "1.5.2", "9" * 25, "nan", "1e400")
TEXTS = ("", "x", "-1", "9" * 5000, "a,,b", "\x1b[31m", "../..", "gemm:M=1e9")
PATHS = (".", "/dev/null/x", "n" * 300, "/proc/none", "")
#: Options that name a folder, which this one is.
FOLDERS = ("--output", "--out", "--work-dir", "--database")


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def cases() -> list[tuple[str, str, str]]:
    """Command, option and a value that is wrong for most options of its kind."""
    found = []
    for name, command in leaves(typer.main.get_command(app)):
        for option in command.params:
            if not option.opts[0].startswith("-") or getattr(option, "is_flag", False):
                continue
            number = isinstance(option.default, (int, float))
            path = option.default is None or isinstance(option.default, Path)
            paths = [each for each in PATHS if each.strip(".") or option.opts[0] not in FOLDERS]
            for value in NUMBERS if number else paths if path else TEXTS:
                found.append((name, option.opts[0], value))
    return found


def test_all_commands_with_options_are_tried() -> None:
    names = {name for name, _ in leaves(typer.main.get_command(app))}
    assert GIVEN.keys() <= names
    assert {name for name, *_ in cases()} - GIVEN.keys() <= {"cache prune", "calibrate"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option"), list(dict.fromkeys((name, option) for name, option, _ in cases()))
)
def test_wrong_values(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for value in (each for name, known, each in cases() if (name, known) == (command, option)):
        line = [*command.split(), *GIVEN.get(command, ()), option, value]
        found = CliRunner().invoke(app, line)
        end = found.exception
        assert end is None or isinstance(end, SystemExit), (line, end)
        assert found.exit_code in (0, 2), (line, found.output)
        if found.exit_code == 2:
            assert found.stderr.strip(), line
            assert "Traceback" not in found.stderr
            assert "\x1b[31m" not in found.stderr
