"""A builder and a runner that time candidates by planted costs; some hang, die or are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from crossfuse.meta_schedule.task import Tasks


@derived_object
class NoteBuilder(PyBuilder):
    """Writes which kernel a module is, and compiles nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.built = 0

    def build(self, build_inputs: list[Any]) -> list[Any]:
        found = []
        for each in build_inputs:
            self.built += 1
            path = self._folder / f"{self.built}" / "note.json"
            path.parent.mkdir(parents=True)
            path.write_text(_said(each.mod))
            found.append(BuilderResult(str(path), None))
        return found


@derived_object
class PlantedRunner(PyRunner):
    """Times a chain's kernels by the estimate with costs of its own; other modules in 1 ms."""

    def __init__(self, tasks: Tasks, module: Any = None, broken: str = "") -> None:
        super().__init__()
        self._tasks, self._module, self._broken = tasks, module, broken
        self.asked: list[str] = []
        self.times: list[float | None] = []

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        return [_Future(self._time(Path(str(each.artifact_path)))) for each in runner_inputs]

    def _time(self, path: Path) -> Any:
        text = path.read_text()
        self.asked.append(text)
        time = self._seconds(text)
        self.times.append(time)
        if time is None:
            return RunnerResult(None, "timeout: killed after 0.1 s")
        return RunnerResult([time], None)

    def _seconds(self, text: str) -> float | None:
        if not text or self._module is None:
            return 1e-3
        said = json.loads(text)
        if said["family"] == self._broken:
            return None
        task = self._tasks.of(self._module)
        assert task is not None
        point = task.space.find(said["family"], said["tiles"])
        assert point is not None
        size = int(task.space.kernel(point).cluster)
        return float(task.space.prior[point]) * (1 + 0.05 * size) * 1e-6


@derived_object
class _Future(PyRunnerFuture):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self._found = found

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._found


def _said(module: Any) -> str:
    """The note that a module's root block carries."""
    from crossfuse import _tvm as ir
    from crossfuse.schedule.planned import NOTE

    sch = ir.Schedule(module)
    (name,) = (str(each.name_hint) for each in module.functions)
    root = sch.get(sch.get_sblock("root", func_name=name))
    return str(root.annotations.get(NOTE, ""))
