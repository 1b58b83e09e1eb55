"""What must be true of every schedule: refused in full sentences, or right by both checkers."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.workload import WorkloadSpec, adversarial_inputs, check, random_inputs

#: Names of `adversarial_inputs`, and the random ones.
INPUTS = (
    "random",
    "large",
    "zero_rows",
    "constant_rows",
    "denormal",
    "one_hot",
    "alternating",
)
# A line of JSON an example, for counting what a long run refused and passed.
_JOURNAL = "CROSSFUSE_FUZZ_JOURNAL"


@dataclass(frozen=True)
class Verdict:
    """What became of a schedule that broke no promise.

    Attributes
    ----------
    rule : str
        The rule that refused it, "tvm" for a refusal by a primitive of TVM, "" if it passed.
    text : str
        The refusal.
    """

    rule: str
    text: str

    @property
    def passed(self) -> bool:
        return not self.rule

    def __str__(self) -> str:
        return f"refused by {self.rule}" if self.rule else "passed"


def judge(spec: WorkloadSpec, build: Callable[[], Any], *inputs: str) -> Verdict:
    """Build, lower and run a schedule; anything but a refusal or a right result is raised.

    It runs on random inputs, if no others are named.
    """
    try:
        sch = build()
    except ScheduleRefused as error:
        return _refused(error)
    except ir.ScheduleError as error:
        return Verdict("tvm", str(error).strip().splitlines()[-1])
    try:
        image = lower(sch).image
    except LoweringRefused as error:
        return _refused(error)
    for name in inputs or ("random",):
        print(f"on inputs: {name}")  # shown where it fails
        _run(spec, sch, image, arguments(spec, name))
    return Verdict("", "")


def arguments(spec: WorkloadSpec, inputs: str) -> dict[str, Any]:
    """Inputs by the name of their case."""
    if inputs == "random":
        return random_inputs(spec)
    return dict(adversarial_inputs(spec))[inputs]


def journal(plan: Any, outcome: str) -> None:
    """Append an outcome to the file that CROSSFUSE_FUZZ_JOURNAL names, if it does."""
    path = os.environ.get(_JOURNAL)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"plan": repr(plan), "outcome": outcome}) + "\n")


def _run(spec: WorkloadSpec, sch: Any, image: Any, given: dict[str, Any]) -> None:
    # The emulator first: it reports an access out of bounds, which would break this process.
    emulation = emulate(image, given, seed=len(image.cuda))
    emulation.raise_if_wrong()
    (emulated,) = emulation.outputs.values()
    check(spec, given, emulated)
    report = run_sequential(sch, given)
    report.raise_if_wrong()
    (sequential,) = report.outputs.values()
    check(spec, given, sequential)


def _refused(error: RefusedError) -> Verdict:
    for field in fields(error.refusal):
        value = getattr(error.refusal, field.name)
        assert isinstance(value, str) and value.strip(), f"{field.name} is empty in: {error}"
        assert "\n" not in value, f"{field.name} has several lines in: {error}"
    assert len(str(error)) < 1500, f"longer than anyone reads: {error}"
    _assert_no_mistake_of_ours(error.__cause__)
    return Verdict(error.refusal.rule, str(error))


def _assert_no_mistake_of_ours(cause: BaseException | None) -> None:
    """A limit of TVM may be why something is refused; a bug in our code may not pass for one."""
    if cause is None or isinstance(cause, (RefusedError, ir.ScheduleError)):
        return
    frames = traceback.extract_tb(cause.__traceback__)
    raised = frames[-1].filename if frames else ""
    assert "crossfuse" not in raised, "".join(traceback.format_exception(cause))
