"""Arguments of public calls are what annotations say, and refused in words else."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import crossfuse
from crossfuse.calls import AnySchedule, ClusterSize, Seconds, Seed, checked
from crossfuse.errors import ArgumentRefused, RefusedError, WorkloadRefused

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
from public_names import public_names

if TYPE_CHECKING:
    from somewhere import Strange


@checked
def called(
    text: str = "",
    seed: Seed = 0,
    size: ClusterSize | None = None,
    wait: Seconds = 1.0,
    flag: bool = True,
    names: Sequence[str] = (),
    corner: tuple[int, int] = (0, 0),
    by_name: Mapping[str, int] | None = None,
    strange: Strange | None = None,
    make: Callable[[], int] | None = None,
    schedule: AnySchedule = None,
    anything: Any = None,
) -> bool:
    return True


class Strange:
    """Told by its name."""


class Schedule:
    """Told by its name, too."""


GIVEN: dict[str, tuple[Any, ...]] = {
    "text": ("", "x"),
    "seed": (0, 7, np.int64(3)),
    "size": (None, 1, 16),
    "wait": (1, 0.5, np.float32(2)),
    "flag": (False, np.bool_(True)),
    "names": ((), ["a"], ("a", "b")),
    "corner": ((1, 2), [3, 4]),
    "by_name": (None, {}, {"a": 1}),
    "strange": (None, Strange()),
    "make": (None, len),
    "schedule": (Schedule(),),
    "anything": (None, 3, "x"),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "text": (None, 1, b"x", ["x"]),
    "seed": (-1, 2**31, 1.0, True, "1", None, np.float32(1)),
    "size": (0, 17, True, "4"),
    "wait": (0, -1.0, float("nan"), float("inf"), True, "1"),
    "flag": (1, "yes", None),
    "names": ("ab", None, [1], {"a"}, 3),
    "corner": ((1,), (1, 2, 3), (1, "2"), 4, None),
    "by_name": ([], {1: 1}, {"a": "b"}),
    "strange": (3, Schedule()),
    "make": (3, "len"),
    "schedule": (3, None, Strange()),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_annotations_allow(name: str) -> None:
    for value in GIVEN[name]:
        assert called(**{name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_what_they_do_not_allow(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ArgumentRefused) as caught:
            called(**{name: value})
        assert caught.value.refusal.where == f"{name} of called"
        assert caught.value.refusal.found


def test_python_says_itself_what_is_missing_or_too_much() -> None:
    with pytest.raises(TypeError, match=r"^called\(\) got an unexpected keyword argument 'zzz'$"):
        called(zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"compile\(\) .*'placment'\. Did you mean 'placement'\?"):
        crossfuse.compile("S8", placment="l2")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"compile\(\) missing a required argument: 'source'"):
        crossfuse.compile()  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", [3, None, b"S3", ["S3"]], ids=repr)
def test_a_plan_of_no_workload(wrong: Any) -> None:
    with pytest.raises(ArgumentRefused, match=r"workload of plan: .*id or text of a workload"):
        crossfuse.plan(wrong)


@pytest.mark.parametrize(
    ("wrong", "right"), [("sofmax:rows=8,cols=64", "softmax"), ("gemmm:M=8,K=8,N=8", "gemm")]
)
def test_a_plan_of_an_unknown_kind(wrong: str, right: str) -> None:
    """The kind is looked at before its keys, and cascades are kinds too."""
    with pytest.raises(WorkloadRefused, match=rf"workload-kind: .*write '{right}'"):
        crossfuse.plan(wrong)


#: Values that no parameter takes which is annotated with something; what has a default and is
#: annotated with `Any` may take them.
WRONG = (None, -1, 1.5, "", "nothing of the kind", [], (), {}, object(), b"\0", float("nan"))
#: They start processes, threads or the GPU, or make refusals themselves.
HEAVY = {"refuse", "GpuRunner", "find_nvcc", "find_host_compiler", "collect", "sweep", "reports"}


def functions() -> list[Any]:
    """Public functions, and the constructors of public classes that check what they are given."""
    found = []
    for name in public_names():
        value = name.value
        plain = callable(value) and not inspect.isclass(value)
        checks = inspect.isclass(value) and hasattr(value.__init__, "__wrapped__")
        if (plain or checks) and name.path.rpartition(".")[2] not in HEAVY:
            found.append(pytest.param(value, id=name.path))
    return found


@pytest.mark.parametrize("function", functions())
def test_public_calls_refuse_what_they_do_not_take(function: Any) -> None:
    """All arguments wrong in the same way, then each that is needed while others are as wrong."""
    needed = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if not needed:
        return
    for value in WRONG:
        try:
            function(**dict.fromkeys(needed, value))
        except RefusedError as error:
            assert error.refusal.limit and error.refusal.instead
