"""Times ways in a supervised process on a GPU, which is replaced when it hangs or dies."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TextIO

from crossfuse.errors import EnvironmentRefused, Rule
from crossfuse.hardware import Device, device_of, find_gpus
from crossfuse.measure.job import Request, Taken, Timing, Way
from crossfuse.schema import Damaged, parse, typed

_refused = Rule(EnvironmentRefused, "measure")

# What hangs or faults in a worker costs its process, and has no time.

#: The program that measures. It is run and not imported: it knows all ways to compute a workload,
#: which the benchmarks have.
WORKER = (sys.executable, "-m", "crossfuse.bench.worker")
#: Seconds in which a float64 reference is worked out.
REFERENCE_SECONDS = 600.0


class Measurer:
    """A process that measures one job after another, replaced whenever one may have harmed it.

    A job that hangs, dies, fails or computes something wrong costs its process, so that it cannot
    harm the next one. If others were measured there before, one of those may have done the harm, so
    it is measured once more in a process of its own. `command` starts the process, `preparing` is
    the limit of a preparation in seconds.
    """

    def __init__(
        self, command: Sequence[str] = WORKER, preparing: float = REFERENCE_SECONDS
    ) -> None:
        self._peer = Peer(command)
        self._limit = preparing
        self._prepared: Request | None = None
        #: Whether the process has measured something.
        self._used = False
        #: Preparations of which the answer is still to come.
        self._preparing = 0

    def start(self) -> None:
        """Start the process before its first request, so that imports are done by then."""
        with suppress(NoAnswer):
            self._peer.start()

    def prepare(self, request: Request) -> None:
        """Let the process prepare jobs of a workload in the meantime, as far as needs no GPU."""
        self._prepared, self._used = replace(request, measure=False), False
        # That it does not start, the measurement will find too.
        with suppress(NoAnswer):
            self._peer.send(asdict(self._prepared))
            self._preparing += 1

    def measure(self, request: Request, timeout: float) -> tuple[Timing, int]:
        """Measure a job, of the prepared workload if there is one; returns also how often.

        `timeout` is in seconds, for each measurement, until the process and its children are
        killed. Where there is no answer the timing says ``timeout`` or ``crashed``.
        """
        attempts, earlier = 0, ""
        while True:
            alone = not self._used
            start = time.perf_counter()
            timing = self._attempt(request, timeout)
            message = f"{timing.message}; {earlier}" if earlier else timing.message
            seconds = round(time.perf_counter() - start, 3)
            timing = replace(timing, message=message, seconds=seconds)
            attempts += 1
            # A baseline that is less accurate than the rule has a time, and does no harm.
            if not timing.fault or timing.microseconds is not None:
                return timing, attempts
            earlier = f"beside others it was {timing.status} at first: {timing.message}"
            # A kernel that faults leaves CUDA unusable in its process.
            self._peer.close()
            self._preparing, self._used = 0, False
            if alone or timing.status == "timeout":
                return timing, attempts

    def close(self) -> None:
        """Kill the process, for good: a measurement under way ends without another one."""
        self._peer.retire()

    def _attempt(self, request: Request, timeout: float) -> Timing:
        if self._prepared is not None and not self._preparing and not self._peer.running:
            self.prepare(self._prepared)
        self._used = True
        try:
            while self._preparing:
                self._preparing -= 1
                self._peer.receive(self._limit)
            return typed(Timing, self._peer.ask(asdict(request), timeout))
        except NoAnswer as error:
            return Timing(error.status, error.message)
        except Damaged as error:
            return Timing("crashed", f"an answer that is none: {type(error).__name__}: {error}")


# Ways of one choice, timed together.

#: Seconds for one kernel; and for what torch compiles first, which may try many kernels of its own.
SECONDS, COMPILING = 60.0, 900.0


class Timer:
    """Times ways one after another on a GPU, see `crossfuse.measure.timer.Measurer`.

    `index` is that of the GPU in CUDA, `gpu` its name as the driver has it, and `target` its name
    as a target. Limits of one answer are in seconds, see `SECONDS`.
    """

    def __init__(
        self,
        index: int,
        gpu: str,
        target: str,
        program: tuple[str, ...] = WORKER,
        seconds: float = SECONDS,
        compiling: float = COMPILING,
    ) -> None:
        self.gpu, self.target = gpu, target
        self._measurer = Measurer((*program, str(index)))
        self._limits = seconds, compiling

    def time(self, way: Way) -> Taken:
        """Time a way; whatever goes wrong is an answer without a time."""
        limit = self._limits[0] if way.mode is None else self._limits[1]
        found, _ = self._measurer.measure(Request(way=way), limit)
        if found.microseconds is not None:
            return Taken(found.microseconds, found.minimum)
        killed = found.status in ("crashed", "timeout")
        return Taken(message=f"{found.status}: {found.message}" if killed else found.message)

    def close(self) -> None:
        """Release the GPU and the process."""
        self._measurer.close()


def find_timer(index: int = 0) -> Timer:
    """The timer of a GPU by its CUDA index; refused without torch or a Hopper GPU."""
    gpus = find_gpus()
    fits = index < len(gpus) and gpus[index].capability == (9, 0)
    if fits and find_spec("torch") is not None:
        return Timer(index, gpus[index].name, device_of(gpus[index]).name)
    names = ", ".join(each.name for each in gpus) or "no CUDA device"
    raise _refused(
        "this machine",
        found="no torch" if fits else names,
        limit="torch and a GPU of compute capability 9.0",
        instead="leave measure out: the planner's estimates choose then",
    )


@contextmanager
def timing(target: Device, index: int = 0) -> Iterator[Timer]:
    """The timer of a GPU as a context; refused where the GPU is not the target of the kernels."""
    timer = find_timer(index)
    try:
        if timer.target != target.name:
            raise _refused(
                f"target {target.name}",
                found=f"{timer.gpu}, which is {timer.target}",
                limit="kernels for the GPU that measures them",
                instead="leave the target out, or measure",
            )
        yield timer
    finally:
        timer.close()


# Worker processes under supervision, killed when they hang, and the serving end in them.


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
