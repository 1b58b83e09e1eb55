"""Worker processes under supervision, killed when they hang, and the serving end in them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from crossfuse.schema import Damaged, parse

#: Seconds in which a process imports what it needs, on a machine whose cores are all busy.
STARTING = 180.0
#: A killed process that the driver does not let go is left behind.
_DYING = 10.0
_TAIL = 600
_LOOK = 0.2


class NoAnswer(Exception):
    """A process was killed, or ended, before it answered.

    The status is ``timeout`` or ``crashed``; the message says after how long, or how it ended, with
    the end of its standard error.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Peer:
    """A process that answers one request after another, each a line of JSON.

    It is started by the first request; after `NoAnswer` it is gone and the next request starts
    another one. The program writes a line when it is ready, then one of JSON for each request.
    `environment` is added to the variables of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(os.environ) | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._log: IO[bytes] | None = None
        self._ready = False
        self._retired = False

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process now, so that it imports what it needs in the meantime.

        `NoAnswer` is raised if there is no such program, or the peer has been retired.
        """
        if self.running:
            return
        self.close()
        if self._retired:
            raise NoAnswer("crashed", "nothing is started any more")
        # Open as long as the process is.
        self._log = tempfile.TemporaryFile(prefix="crossfuse-peer-")  # noqa: SIM115
        try:
            # A session of its own: an interrupt at the terminal is for this process alone.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer("crashed", f"the worker does not start: {error}") from error
        self._process, self._ready = process, False
        self._lines = queue.SimpleQueue()
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, self._lines), daemon=True)
        reader.start()

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request of JSON values, starting the process if need be, for `receive`."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        # It may have died already, which `receive` will tell.
        with suppress(OSError):
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Any:
        """Wait for the answer to the request that was sent first.

        `timeout` is in seconds from here, or from when the process is ready to serve. Without an
        answer the process is killed and `NoAnswer` raised.
        """
        if not self._ready:
            self._line(STARTING)
            self._ready = True
        line = self._line(timeout)
        try:
            return parse(line)
        except Damaged:
            self.close()
            raise NoAnswer("crashed", f"no JSON in its answer {line[:_TAIL]!r}") from None

    def ask(self, request: Mapping[str, Any], timeout: float) -> Any:
        """Send a request and wait for its answer, see `send` and `receive`."""
        self.send(request)
        return self.receive(timeout)

    def close(self) -> None:
        """Kill the process and its children."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
        if self._log is not None:
            self._log.close()
            self._log = None

    def retire(self) -> None:
        """Close for good: no request starts a process again, whichever thread asks."""
        self._retired = True
        self.close()

    def _line(self, timeout: float) -> bytes:
        """The next line that the process writes."""
        end = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(_LOOK, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= end:
                    raise self._failed("timeout", f"no answer in {timeout:g} s") from None
                # A child that outlives it keeps the pipe open, so that no end is read.
                if self.running or not self._lines.empty():
                    continue
                line = None
            if line is None:
                raise self._failed("crashed", self._end())
            return line

    def _end(self) -> str:
        """How the process ended, in words."""
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_DYING)
        if code is None:
            return "no answer any more"
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{end} without an answer"

    def _failed(self, status: str, message: str) -> NoAnswer:
        said = ""
        if self._log is not None and status == "crashed":
            self._log.seek(0)
            said = self._log.read().decode("utf-8", errors="replace").strip()[-_TAIL:]
        self.close()
        return NoAnswer(status, f"{message}. {said}".strip() if said else message)


def execute(command: Sequence[str], output: Path, log: Path, timeout: float) -> int | None:
    """Run a command in a process group of its own; its exit code, or None if it was killed.

    `output` and `log` are files for standard output and error. The process and its children are
    killed after `timeout` seconds.
    """
    # Files and not pipes: a child that outlives the process would keep a pipe open.
    with output.open("wb") as sink, log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=errors,
            start_new_session=True,
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also on an interrupt, which does not reach the other session.
        if process.returncode is None:
            _kill(process)


def _read(source: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    # Closed under it when the process is killed.
    with suppress(ValueError, OSError):
        for line in source:
            lines.put(line)
    lines.put(None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and every other one of its group, which is its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DYING)
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


# The serving end: requests in, answers out, a line each.

#: Answers a request.
Serve = Callable[[Mapping[str, Any]], Any]


def serve_lines(make: Callable[[], Serve]) -> None:
    """Serve until standard input ends; the first line written says that the process is ready.

    `make` imports what takes long, then gives the function that answers requests. Whatever else is
    printed goes to standard error.
    """
    answers = own_stdout()
    requests = _requests()
    serve = make()
    answers.write("ready\n")
    while True:
        answers.flush()
        answers.write(json.dumps(serve(requests.get())) + "\n")


def own_stdout() -> TextIO:
    """Reserve standard output for answers; what libraries print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return answer


def _requests() -> queue.SimpleQueue[Any]:
    """Requests, read by a thread of its own, so that their end can end the process at any time."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            found.put(parse(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found
