"""Processes in groups of their own, which a timeout ends as a whole, and workers among them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from crossfuse.bench.job import Job, Timing
from crossfuse.schema import Damaged, read

_TAIL = 600
# A killed process that the driver does not let go is left behind.
_SECONDS_TO_DIE = 10.0


def execute(command: Sequence[str], paths: Sequence[Path], timeout: float) -> int | None:
    """Run a command in a process group of its own; gives its exit code, None where it was killed.

    `paths` are files for standard input, output and error. After `timeout` seconds the process and
    its children are killed.
    """
    source, answer, log = paths
    with source.open("rb") as file:
        return _end(_start(command, file, answer, log), timeout)


class Worker:
    """A process that gets its job, prepares, and measures when it is let.

    The command is that of `crossfuse.bench.worker`.
    """

    def __init__(self, command: Sequence[str], job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="crossfuse-job-")
        # Files and not pipes: a child that outlives the worker would keep a pipe open.
        self._paths = [Path(self._folder.name) / name for name in ("answer", "log")]
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        try:
            self._process = _start(command, subprocess.PIPE, *self._paths)
        except OSError as error:
            self._failure = f"the worker does not start: {error}"
            return
        self._write(f"{json.dumps(job.to_json())}\n".encode())

    def measure(self, timeout: float) -> Timing:
        """Let it measure, and wait for its answer at most `timeout` seconds.

        Without an answer the status is ``timeout`` or ``crashed``, and nothing of its process group
        is left. Seconds of the timing count from here.
        """
        start = time.perf_counter()
        with self._folder:
            timing = self._measured(timeout)
        return replace(timing, seconds=round(time.perf_counter() - start, 2))

    def stop(self) -> None:
        """Kill a worker that shall not measure any more."""
        with self._folder:
            if self._process is not None and self._process.poll() is None:
                _kill(self._process)

    def _measured(self, timeout: float) -> Timing:
        if self._process is None:
            return Timing("crashed", self._failure)
        self._write(None)
        code = _end(self._process, timeout)
        answer, log = self._paths
        return _answer(answer) or _no_answer(code, timeout, _read(log))

    def _write(self, line: bytes | None) -> None:
        """Write a line to the worker, or close its input so that it may measure."""
        assert self._process is not None
        assert self._process.stdin is not None
        # It may have died already, which its exit code will tell.
        with suppress(BrokenPipeError):
            if line is None:
                self._process.stdin.close()
            else:
                self._process.stdin.write(line)
                self._process.stdin.flush()


def _start(
    command: Sequence[str], source: IO[bytes] | int, answer: Path, log: Path
) -> subprocess.Popen[bytes]:
    with answer.open("wb") as sink, log.open("wb") as errors:
        return subprocess.Popen(
            command, stdin=source, stdout=sink, stderr=errors, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Wait for a process, or kill it after so many seconds; its exit code, if it has one."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also on an interrupt, which does not reach the other session.
        if process.returncode is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was not waited for yet, and every other one of its group."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        return


def _answer(path: Path) -> Timing | None:
    """The timing that the worker wrote, if it got so far."""
    try:
        return read(Timing, _read(path))
    except Damaged:
        return None


def _no_answer(code: int | None, timeout: float, log: str) -> Timing:
    if code is None:
        return Timing("timeout", f"no answer in {timeout:g} s")
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Timing("crashed", f"{end} without an answer. {log.strip()[-_TAIL:]}".strip())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
