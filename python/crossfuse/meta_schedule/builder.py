"""A Builder of MetaSchedule that makes libraries of ours with nvcc, and a Runner for this GPU."""

from __future__ import annotations

import importlib
import inspect
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from threading import Lock
from typing import Any

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerInput, RunnerResult

from crossfuse.bench.job import OURS
from crossfuse.bench.problem import is_function, keep, name_of, path_of, tag_of
from crossfuse.calls import checked
from crossfuse.errors import RefusedError
from crossfuse.files import read_text
from crossfuse.hardware import Device, device
from crossfuse.measure.job import LIBRARY, Request, Timing, Way
from crossfuse.measure.timer import REFERENCE_SECONDS, Measurer, NoAnswer, Peer
from crossfuse.meta_schedule.build import LONGEST, Conditions, cores
from crossfuse.meta_schedule.task import Tasks
from crossfuse.runtime.manifest import Manifest
from crossfuse.workload.spec import WorkloadSpec

# Imports TVM's tensor intrinsics in seconds.

_NAME = "tvm.s_tir.tensor_intrin"
_lock = Lock()


def import_intrinsics() -> None:
    """Import what every ``TuneContext`` imports, before it does.

    TVM parses hundreds of functions there, and asks for the call stack at each. Python's `inspect`
    then looks for the module of each frame through all that are loaded; beside torch, which has
    thousands, the import takes minutes instead of seconds. Nobody uses the answer, so that here the
    module is looked up by its name alone.
    """
    with _lock:
        if _NAME in sys.modules:
            return
        usual = inspect.getmodule
        inspect.getmodule = _module_by_name  # type: ignore[assignment]
        try:
            importlib.import_module(_NAME)
        finally:
            inspect.getmodule = usual


def _module_by_name(value: Any, _filename: str | None = None) -> Any:
    return sys.modules.get(getattr(value, "__module__", None) or "")


#: Key of a manifest's metadata that names the workload, for whoever checks the results.
WORKLOAD = "workload"


@derived_object
@checked
class NvccBuilder(PyBuilder):
    """Lowers scheduled modules to cluster CUDA and compiles them to loadable libraries.

    A thread drives each nvcc. Lowering holds Python's lock for a few tenths of a second, a
    compilation takes ten times as long in processes of its own, so threads keep about ten cores
    busy. Cubins are kept between runs by a hash of the CUDA text and the compiler
    (`crossfuse.runtime.compile_cubin`). Each library has a folder of its own, which MetaSchedule
    removes once it is measured.

    Modules for other targets than CUDA are compiled by TVM, so that a search can be rehearsed on a
    machine without a GPU.

    Parameters
    ----------
    workload : str | WorkloadSpec | PrimFunc | IRModule | Tasks | None
        What the modules compute, recorded in each library: the runner then checks results against
        float64. Of several functions, as those of a model, the tasks that the search works on.
    target : str | Device | None
        Device to compile for and whose limits hold.
    directory : str | os.PathLike[str] | None
        Where folders of libraries go; None takes that for temporary files.
    max_workers : int | None
        Threads; None for one for each core.
    timeout_sec : float
        Seconds for each module, from when it is its turn.

    Examples
    --------
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> mod = schedule_split_k(prim_func(spec), cluster=4).mod
    >>> target = tvm.target.Target("nvidia/nvidia-h100")
    >>> (found,) = NvccBuilder(spec, max_workers=1).build([BuilderInput(mod, target)])
    >>> found.error_msg is None, Path(found.artifact_path).suffix
    (True, '.so')
    """

    def __init__(
        self,
        workload: str | WorkloadSpec | Any = None,
        *,
        target: str | Device | None = None,
        directory: str | os.PathLike[str] | None = None,
        max_workers: int | None = None,
        timeout_sec: float = 300.0,
    ) -> None:
        super().__init__()
        # The search that this builder is for does it otherwise, far slower.
        import_intrinsics()
        self._workload = _text(workload)
        self._functions = _functions(workload)
        self._target = device(target)
        self._directory = directory
        self._workers = max_workers or cores()
        self._timeout = timeout_sec

    def build(self, build_inputs: Sequence[BuilderInput]) -> list[BuilderResult]:
        """Build modules; what does not compile is a result with the reason.

        Parameters
        ----------
        build_inputs : Sequence[BuilderInput]
            Scheduled modules of one function each.

        Returns
        -------
        list[BuilderResult]
            In the same order: the path of the library, or the error's text.
        """
        pool = ThreadPoolExecutor(self._workers)
        try:
            futures = [pool.submit(self._build, each) for each in build_inputs]
            # Those before have had their time when it is the turn of the last ones.
            turns = -(-len(futures) // self._workers)
            return [self._result(each, turns) for each in futures]
        finally:
            # A thread that hangs is left behind; nvcc itself is ended by its own limit.
            pool.shutdown(wait=False, cancel_futures=True)

    def _result(self, future: Future[Path], turns: int) -> BuilderResult:
        try:
            return BuilderResult(str(future.result(self._timeout * turns)), None)
        except FutureTimeout:
            return BuilderResult(None, f"timeout: no library in {self._timeout:g} s")
        except RefusedError as error:
            return BuilderResult(None, f"refused: {error}"[:LONGEST])
        except Exception as error:
            return BuilderResult(None, f"failed: {type(error).__name__}: {error}"[:LONGEST])

    def _build(self, given: BuilderInput) -> Path:
        folder = self._folder()
        try:
            return self._compile(given, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _compile(self, given: BuilderInput, folder: Path) -> Path:
        if str(given.target.kind.name) != "cuda":
            return _by_tvm(given, folder)
        from crossfuse.lower.extract import lower
        from crossfuse.runtime import build_library

        lowered = lower(given.mod, self._target, name="main")
        workload = self._workload or tag_of(given.mod)
        if workload in self._functions:
            # For the runner, beside the library.
            keep(self._functions[workload], folder, workload)
        metadata = {WORKLOAD: workload} if workload else {}
        built = build_library(
            lowered.image,
            folder,
            device=self._target,
            metadata=metadata,
            timeout=self._timeout,
        )
        return built.shared_object

    def _folder(self) -> Path:
        if self._directory is not None:
            os.makedirs(self._directory, exist_ok=True)
        return Path(mkdtemp(prefix="crossfuse-built-", dir=self._directory))


def _by_tvm(given: BuilderInput, folder: Path) -> Path:
    """Compile for another target as TVM's own builder does, without its costly imports."""
    library = tvm.compile(given.mod, target=given.target)
    path = folder / "main.so"
    library.export_library(str(path))
    return path


def _text(workload: Any) -> str:
    """The workload of all modules; empty where each has its own."""
    from crossfuse.workload.suites import resolve

    if workload is None or isinstance(workload, Tasks):
        return ""
    if isinstance(workload, (tvm.ir.IRModule, tvm.tirx.PrimFunc)):
        return name_of(workload)
    return str(resolve(workload) if isinstance(workload, str) else workload)


def _functions(workload: Any) -> Mapping[str, Any]:
    """Functions without a spec, by name; a search adds to its own with time."""
    if isinstance(workload, Tasks):
        return workload.functions
    if isinstance(workload, (tvm.ir.IRModule, tvm.tirx.PrimFunc)):
        return {name_of(workload): workload}
    return {}


def recorded_workload(metadata: Any) -> str:
    """The spec or function that a library's metadata names as its workload; empty without one."""
    return str(metadata.get(WORKLOAD, "") or metadata.get("candidate", {}).get("spec", ""))


# A Runner of MetaSchedule for the GPU of this machine.


#: Called with a library, its workload and its timing as soon as it is measured.
Report = Callable[[Path, str, Timing], None]


@derived_object
@checked
class GpuRunner(PyRunner):
    """Measures libraries one after another, in a process that each of them may ruin.

    Weights are cold and calls replayed from a CUDA graph, as `crossfuse bench` measures. Every
    result is held against float64 before and after it is timed; a wrong one is an error and has no
    time. A candidate that hangs costs its timeout, and one that dies costs a restart of the
    process.

    Parameters
    ----------
    conditions : Conditions | None
        Cache, protocol, repeats, and limits of time.
    report : Callable | None
        Called with the library's path, its workload and its timing, for records that say more than
        MetaSchedule keeps.

    Examples
    --------
    >>> runner = GpuRunner()                                                # doctest: +SKIP
    >>> database = ms.tune_tir(                                             # doctest: +SKIP
    ...     func, target, "out", 64, builder=NvccBuilder(spec), runner=runner, **plugs()
    ... )
    >>> runner.close()                                                      # doctest: +SKIP
    """

    def __init__(self, conditions: Conditions | None = None, report: Report | None = None) -> None:
        super().__init__()
        self._how = conditions or Conditions()
        self._report = report
        self._folder = TemporaryDirectory(prefix="crossfuse-references-")
        self._measurer = Measurer(self._how.measurer)
        self._measurer.start()
        self._prepared = ""
        self._referee = Peer(self._how.builder)
        #: Why a function has no reference; empty where it has one.
        self._without: dict[str, str] = {}
        self._waiting: queue.SimpleQueue[tuple[Path, Future[Timing]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, runner_inputs: Sequence[RunnerInput]) -> list[Any]:
        """Measure libraries in the background.

        Parameters
        ----------
        runner_inputs : Sequence[RunnerInput]
            What `crossfuse.meta_schedule.builder.NvccBuilder` built.

        Returns
        -------
        list[RunnerFuture]
            In the same order.
        """
        futures = []
        for each in runner_inputs:
            future: Future[Timing] = Future()
            self._waiting.put((Path(str(each.artifact_path)), future))
            futures.append(_GpuFuture(future))
        return futures

    def close(self) -> None:
        """End the process that measures; what has not been measured stays undone."""
        with suppress(queue.Empty):
            while (item := self._waiting.get_nowait()) is not None:
                item[1].cancel()
        self._waiting.put(None)
        self._measurer.close()
        self._referee.retire()
        self._thread.join(self._how.timeout)
        self._folder.cleanup()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            path, future = item
            try:
                future.set_result(self._measure(path))
            except Exception as error:
                future.set_exception(error)

    def _measure(self, path: Path) -> Timing:
        spec = _workload(path)
        if not spec:
            return Timing("refused", "nothing to check it against: " + _NO_WORKLOAD)
        if is_function(spec):
            if spec not in self._without:
                self._without[spec] = self._refer(spec, path.parent)
            if self._without[spec]:
                return Timing("refused", f"nothing to check it against: {self._without[spec]}")
        job = replace(self._how.job, spec=spec, variant=OURS)
        request = Request(job, Way(LIBRARY, str(path)), self._folder.name)
        if spec != self._prepared:
            self._measurer.prepare(request)
            self._prepared = spec
        timing, _ = self._measurer.measure(request, self._how.timeout)
        if self._report is not None:
            self._report(path, spec, timing)
        return timing

    def _refer(self, name: str, home: Path) -> str:
        """Have the reference of a function computed; returns why there is none, or nothing."""
        there = path_of(home, name)
        if not there.is_file():
            return f"no function beside the library; {_NO_WORKLOAD}"
        folder = Path(self._folder.name)
        shutil.copy(there, path_of(folder, name))
        request = {"do": "reference", "spec": name, "folder": str(folder)}
        try:
            return str(self._referee.ask(request, REFERENCE_SECONDS)["message"])
        except NoAnswer as error:
            return f"{error.status}: {error.message}"


@derived_object
class _GpuFuture(PyRunnerFuture):
    """A measurement that is under way."""

    def __init__(self, future: Future[Timing]) -> None:
        super().__init__()
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> RunnerResult:
        try:
            timing = self._future.result()
        except Exception as error:
            return RunnerResult(None, f"failed: {type(error).__name__}: {error}")
        if timing.status != "ok" or timing.microseconds is None:
            return RunnerResult(None, f"{timing.status}: {timing.message}")
        return RunnerResult([timing.microseconds * 1e-6], None)


_NO_WORKLOAD = "give the builder the workload, NvccBuilder('S3:M=128'), or the search's tasks"


def _workload(library: Path) -> str:
    """What a library computes, by its manifest."""
    path = library.with_suffix(".json")
    return recorded_workload(Manifest.from_json(read_text(path), str(path)).metadata)
