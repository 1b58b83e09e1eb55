"""The doctor command prints what the report says and turns it into an exit code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from crossfuse import doctor
from crossfuse.cli import app
from crossfuse.doctor import Check, Report

FINE = Check("python", "ok", "3.11.7")
WARNING = Check("gpu", "warn", "none: the CPU checkers still work", "run on a Hopper GPU")
FAILURE = Check("nvcc", "fail", "none on PATH", "run `pip install 'crossfuse[nvcc]'`")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    """Make the doctor find the given checks."""

    def find(*checks: Check) -> None:
        monkeypatch.setattr(doctor, "collect", lambda: Report("0.1.0", checks))

    monkeypatch.setenv("COLUMNS", "200")
    return find


def test_table_names_every_check_and_the_advice(report) -> None:
    report(FINE, FAILURE)
    result = CliRunner().invoke(app, ["doctor"])
    rows = [line for line in result.stdout.splitlines() if "nvcc" in line]
    assert len(rows) == 1
    # Brackets in the advice are text, not rich's markup.
    assert "run `pip install 'crossfuse[nvcc]'`" in rows[0]
    assert "python" in result.stdout


@pytest.mark.parametrize(
    ("checks", "exit_code"), [((FINE, WARNING), 0), ((FINE, WARNING, FAILURE), 1)]
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_only_a_failure_ends_with_code_1(report, checks, exit_code, options) -> None:
    report(*checks)
    assert CliRunner().invoke(app, ["doctor", *options]).exit_code == exit_code


def test_json_is_the_report(report) -> None:
    report(FINE, WARNING)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout) == {
        "version": "0.1.0",
        "ok": True,
        "checks": [
            {"name": "python", "status": "ok", "found": "3.11.7", "instead": ""},
            {
                "name": "gpu",
                "status": "warn",
                "found": "none: the CPU checkers still work",
                "instead": "run on a Hopper GPU",
            },
        ],
    }
