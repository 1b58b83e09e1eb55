"""Programs of subcommands: options, exit codes, JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.files import write_json
from study.subcommands import program, run

TEXT = """Does things.

    first line
    second line
"""


def parser() -> argparse.ArgumentParser:
    made, commands = program(TEXT)
    done = commands.add_parser("done")
    done.add_argument("path", type=Path)
    done.set_defaults(do=lambda given: write_json(given.path, {"command": given.command}))
    commands.add_parser("refused").set_defaults(do=refused)
    return made


def refused(given: argparse.Namespace) -> None:
    raise refuse(ArtefactRefused, "rule", "here", found="one", limit="two", instead="use two")


def test_what_is_asked_for_is_done(tmp_path: Path) -> None:
    path = tmp_path / "new" / "done.json"
    assert run(parser(), ["done", str(path)]) == 0
    assert path.read_text() == json.dumps({"command": "done"}, indent=1) + "\n"


def test_refusals_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parser(), ["refused"]) == 2
    told = capsys.readouterr()
    assert told.err == "rule: here: found one; limit: two. Instead: use two.\n"
    assert told.out == ""


def test_a_subcommand_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(parser(), [])
    assert ended.value.code == 2
    assert "command" in capsys.readouterr().err


def test_lines_of_the_description_stay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(parser(), ["--help"])
    assert "    first line\n    second line\n" in capsys.readouterr().out
