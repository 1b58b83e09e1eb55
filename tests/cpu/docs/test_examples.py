"""Public names have docstrings with examples, and the examples run."""

from __future__ import annotations

import doctest
from functools import cache
from importlib import import_module

import pytest

from public_names import Name, public_names

# They compile with nvcc and g++, some seconds each, what tests of their own compile too.
SLOW = frozenset(
    {
        "crossfuse.Compiled",
        "crossfuse.check",
        "crossfuse.compile",
        "crossfuse.load",
        "crossfuse.relax.FuseCascades",
        "crossfuse.relax.FuseChains",
        "crossfuse.runtime.Artefact",
        "crossfuse.runtime.Manifest",
        "crossfuse.runtime.ResourceUsage",
    }
)
# Mostly what functions return, and what needs a GPU. A name that gets an example leaves the list.
WITHOUT = frozenset(
    {
        "crossfuse.compiler.CompiledModel",
        "crossfuse.doctor.Status",
        "crossfuse.emulate.cuda.EmulationReport",
        "crossfuse.emulate.cuda.KINDS",
        "crossfuse.emulate.cuda.recycle_slab",
        "crossfuse.meta_schedule.builder.NvccBuilder",
        "crossfuse.meta_schedule.records.Record",
        "crossfuse.meta_schedule.runner.GpuRunner",
        "crossfuse.planner.dataflow.movement.movement",
        "crossfuse.planner.space.search.search",
        "crossfuse.relax.Argument",
        "crossfuse.relax.ChainOutcome",
        "crossfuse.relax.Outcome",
        "crossfuse.relax.Outlined",
        "crossfuse.runtime.Cubin",
        "crossfuse.runtime.DispatchTable",
        "crossfuse.runtime.KernelObject",
        "crossfuse.runtime.KernelTable",
        "crossfuse.runtime.Kernels",
        "crossfuse.runtime.build_object",
        "crossfuse.runtime.build_library",
        "crossfuse.runtime.compile_cubin",
        "crossfuse.runtime.write_dispatch",
        "crossfuse.schedule.rules.cascade_tiles.schedule_cascade_tiles",
        "crossfuse.schedule.rules.rows_gemm.schedule_rows_gemm",
        "crossfuse.schedule.rules.stream.schedule_stream",
        "crossfuse.torch.Replaced",
    }
)


@cache
def names() -> tuple[Name, ...]:
    """Each object once, by the first of its paths."""
    first: dict[int, Name] = {}
    for each in public_names():
        first.setdefault(id(each.value), each)
    return tuple(first.values())


def with_example() -> list[object]:
    return [
        pytest.param(each, id=each.path, marks=[pytest.mark.nightly] * (each.path in SLOW))
        for each in names()
        if ">>>" in each.text
    ]


@pytest.mark.parametrize("name", with_example())
def test_the_example_runs(name: Name) -> None:
    home = import_module(name.value.__module__)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    said: list[str] = []
    for each in doctest.DocTestFinder(recurse=False).find(name.value, globs=dict(vars(home))):
        runner.run(each, out=said.append)
    assert runner.tries > 0 or "+SKIP" in name.text
    assert not runner.failures, "".join(said)


def test_every_public_name_has_a_docstring() -> None:
    assert [each.path for each in names() if not each.text.strip()] == ["crossfuse.doctor.Status"]


def test_no_public_name_is_new_without_an_example() -> None:
    lacking = {each.path for each in names() if ">>>" not in each.text}
    assert not lacking - WITHOUT, "write an Examples section with >>> for these"
    assert not WITHOUT - lacking, "these have an example: take them off WITHOUT"


def test_functions_say_what_they_take_give_and_refuse() -> None:
    """Sections of numpydoc, of every public function that takes something."""
    lacking = []
    for each in names():
        code = getattr(each.value, "__code__", None)
        if code is not None and code.co_argcount and "Parameters\n" not in each.text:
            lacking.append(each.path)
    assert lacking == []
