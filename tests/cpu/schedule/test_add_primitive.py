"""Primitives that users add to `tvm.s_tir.Schedule`."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm_ffi import structural_equal

from crossfuse.errors import ScheduleRefused
from crossfuse.schedule.install import add_primitive
from crossfuse.workload import parse, prim_func


def quarters(sch: Any, loop: Any) -> Any:
    """Four CTAs share a loop."""
    outer, inner = sch.split(loop, [4, None])
    sch.cluster_bind(outer)
    return inner


def test_a_primitive_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "quarters", quarters, raising=False)  # taken away in the end
    assert add_primitive(quarters) is quarters
    func = prim_func(parse("gemm:M=32,K=64,N=32"))
    sch: Any = Schedule(func)
    sch.quarters(sch.get_loops(sch.get_sblock("gemm0"))[0])
    assert sch.cluster_layout().axes == (("x", 4),)
    again = Schedule(func)
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    assert structural_equal(sch.mod, again.mod)


@pytest.mark.parametrize("name", ["split", "cluster_bind", "copy"])
def test_names_that_schedules_have_are_refused(name: str) -> None:
    def function(sch: Any) -> None:
        """Of another name."""

    function.__name__ = name
    there = vars(Schedule)[name]
    with pytest.raises(ScheduleRefused) as caught:
        add_primitive(function)
    assert str(caught.value) == (
        f"add-primitive: function '{name}': found a method of tvm.s_tir.Schedule that has this "
        "name; limit: a name that schedules do not have yet. Instead: give the function another "
        "name."
    )
    assert vars(Schedule)[name] is there
