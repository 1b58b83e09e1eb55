"""Public names have docstrings with examples, and the examples run."""

from __future__ import annotations

import ast
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
        "crossfuse.compile_bins",
        "crossfuse.compiler.CompiledBins",
        "crossfuse.load",
        "crossfuse.load_dispatch",
        "crossfuse.load_kernels",
        "crossfuse.meta_schedule.builder.NvccBuilder",
        "crossfuse.meta_schedule.plugs.plugs",
        "crossfuse.relax.BuildKernels",
        "crossfuse.relax.FuseCascades",
        "crossfuse.relax.FuseChains",
        "crossfuse.runtime.Artefact",
        "crossfuse.runtime.Dispatch",
        "crossfuse.runtime.KernelObject",
        "crossfuse.runtime.Kernels",
        "crossfuse.runtime.LoadedKernel",
        "crossfuse.runtime.Manifest",
        "crossfuse.runtime.ResourceUsage",
        "crossfuse.runtime.build_library",
        "crossfuse.runtime.build_object",
        "crossfuse.runtime.write_dispatch",
        "crossfuse.runtime.write_kernels",
    }
)
#: Names whose examples cannot run here, and why.
WITHOUT = {
    "crossfuse.compiler.time_kernel": "it times calls on a GPU",
    "crossfuse.meta_schedule.runner.GpuRunner": "its process measures on a GPU",
}


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
        if has_example(each)
    ]


def has_example(name: Name) -> bool:
    """Whether a docstring shows more than imports and what is skipped."""
    return any(
        not each.options.get(doctest.SKIP) and not _only_imports(each.source)
        for each in doctest.DocTestParser().get_examples(name.text)
    )


def _only_imports(source: str) -> bool:
    return all(isinstance(each, (ast.Import, ast.ImportFrom)) for each in ast.parse(source).body)


@pytest.mark.parametrize("name", with_example())
def test_the_example_runs(name: Name) -> None:
    home = import_module(name.value.__module__)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    said: list[str] = []
    for each in doctest.DocTestFinder(recurse=False).find(name.value, globs=dict(vars(home))):
        runner.run(each, out=said.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(said)


def test_every_public_name_has_a_docstring() -> None:
    assert [each.path for each in names() if not each.text.strip()] == []


def test_every_public_name_has_an_example() -> None:
    lacking = {each.path for each in names() if not has_example(each)}
    assert not lacking - WITHOUT.keys(), "write an Examples section with >>> for these"
    assert not WITHOUT.keys() - lacking, "these have an example: take them off WITHOUT"


def test_functions_say_what_they_take_give_and_refuse() -> None:
    """Sections of numpydoc, of every public function that takes something."""
    lacking = []
    for each in names():
        code = getattr(each.value, "__code__", None)
        if code is not None and code.co_argcount and "Parameters\n" not in each.text:
            lacking.append(each.path)
    assert lacking == []
