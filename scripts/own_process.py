"""Runs a part of a script in a process of its own, which prints what it found as its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def found_apart(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What Python, started with these arguments, printed as JSON in its last line.

    What goes wrong is the entry ``"error"``: the end of what was said, or that it took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {timeout:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": done.stderr.strip().splitlines()[-1:] or "no output"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
