"""The plumbing that every command shares: refusals, exit codes, JSON and the version."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import crossfuse
from crossfuse.cli import app
from crossfuse.cli.output import JsonFlag, RefusingGroup, print_json
from crossfuse.errors import Refusal, ScheduleRefused

REFUSAL = Refusal("cluster-extent", "loop i", "17", "at most 16", "split the loop by 16 [or less]")


@pytest.fixture
def refusing_app() -> typer.Typer:
    """An app with a command for each way to end."""
    made = typer.Typer(cls=RefusingGroup, pretty_exceptions_enable=False)

    @made.command()
    def refuse(as_json: JsonFlag = False) -> None:
        raise ScheduleRefused(REFUSAL)

    @made.command()
    def crash(as_json: JsonFlag = False) -> None:
        raise KeyError("lost")

    @made.command()
    def write(as_json: JsonFlag = False) -> None:
        Path("/proc/nope").mkdir()

    @made.command()
    def unread(as_json: JsonFlag = False) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    @made.command()
    def answer(as_json: JsonFlag = False) -> None:
        print_json({"as_json": as_json})

    @made.command()
    def parse(value: str = typer.Option(..., callback=_refuse), as_json: JsonFlag = False) -> None:
        print_json(value)

    return made


def _refuse(value: str) -> str:
    raise ScheduleRefused(REFUSAL)


def test_output_that_nobody_reads_any_more_is_no_error(refusing_app: typer.Typer) -> None:
    result = CliRunner().invoke(refusing_app, ["unread"])
    assert (result.exit_code, result.stderr) == (1, "")


def test_refusal_is_one_line_on_stderr_with_exit_code_2(refusing_app: typer.Typer) -> None:
    result = CliRunner().invoke(refusing_app, ["refuse"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "cluster-extent: loop i: found 17; limit: at most 16. "
        "Instead: split the loop by 16 [or less].\n"
    )


def test_refusal_is_red_where_colour_is_shown(
    refusing_app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(refusing_app, ["refuse"], color=True)
    assert result.stderr.startswith("\x1b[31mcluster-extent")


@pytest.mark.parametrize(
    "arguments", [["refuse", "--json"], ["parse", "--value", "1", "--json"]], ids=["body", "option"]
)
def test_refusal_with_json_has_the_five_facts(
    refusing_app: typer.Typer, arguments: list[str]
) -> None:
    result = CliRunner().invoke(refusing_app, arguments)
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "refused": {
            "rule": "cluster-extent",
            "where": "loop i",
            "found": "17",
            "limit": "at most 16",
            "instead": "split the loop by 16 [or less]",
        }
    }


def test_other_exceptions_pass_through_with_exit_code_1(refusing_app: typer.Typer) -> None:
    result = CliRunner().invoke(refusing_app, ["crash", "--json"])
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)
    assert result.stdout == ""


def test_files_that_cannot_be_written_are_refused(refusing_app: typer.Typer) -> None:
    result = CliRunner().invoke(refusing_app, ["write", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["refused"]["where"] == "/proc/nope"
    assert "found no such file or directory; limit: a file that can be read, or w" in result.stderr


def test_other_exceptions_show_a_traceback(tmp_path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "import typer\n"
        "from crossfuse import cli\n"
        "@cli.app.command()\n"
        "def crash() -> None:\n"
        "    raise KeyError('lost')\n"
        "cli.main()\n"
    )
    result = subprocess.run([sys.executable, script, "crash"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("KeyError: 'lost'\n")


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_json_flag_reaches_the_command(refusing_app: typer.Typer, arguments: list[str]) -> None:
    result = CliRunner().invoke(refusing_app, ["answer", *arguments])
    assert json.loads(result.stdout) == {"as_json": bool(arguments)}


def test_version_option() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"crossfuse {crossfuse.__version__}\n"


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(app, [])
    assert "doctor" in result.output
    assert "Traceback" not in result.output


def test_module_runs_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "crossfuse", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"crossfuse {crossfuse.__version__}\n"
