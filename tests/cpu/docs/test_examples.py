"""Public names have docstrings with examples, and the examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from null.docs.test_docstrings import definitions
from public_names import Name, public_names

#: Of numpydoc, that public names have.
SECTIONS = {"Parameters", "Attributes", "Returns", "Yields", "Raises"}

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
    "crossfuse.meta_schedule.builder.GpuRunner": "its process measures on a GPU",
    "crossfuse.runtime.PeerKernel": "several GPUs run it",
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


@pytest.mark.slow
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


def test_functions_say_what_they_take_and_give() -> None:
    """Sections of numpydoc, of every public function and of methods of public classes.

    Whether these name all that there is, tests/null/docs/test_docstrings.py asks.
    """
    lacking = []
    for path, function in functions():
        text = inspect.getdoc(function) or ""
        signature = inspect.signature(function)
        if set(signature.parameters) - {"self", "cls"} and "Parameters\n" not in text:
            lacking.append(f"{path}: Parameters")
        gives = signature.return_annotation not in (None, "None", signature.empty)
        if gives and not re.search(r"^(Returns|Yields)\n-", text, re.M):
            lacking.append(f"{path}: Returns")
    assert lacking == []


@pytest.mark.slow
def test_what_is_not_public_has_no_sections() -> None:
    """A line, and a paragraph that says why: not a second signature."""
    values = [each.value for each in names()]
    # Methods that public classes inherit are theirs.
    bases = {base for each in values if inspect.isclass(each) for base in each.__mro__}
    public = {each.path.rpartition(".")[2] for each in public_names()}
    public |= {each.__name__ for each in bases}
    unknown = [
        where
        for where, (_, found) in definitions().items()
        if found.keys() & SECTIONS and where.partition(": ")[2].partition(".")[0] not in public
    ]
    assert unknown == []


def functions() -> Iterator[tuple[str, Any]]:
    """Public functions, and public methods of public classes that take something."""
    for each in names():
        if inspect.isfunction(each.value):
            yield each.path, each.value
        elif inspect.isclass(each.value):
            for name, member in vars(each.value).items():
                function = getattr(member, "__func__", member)
                takes = inspect.isfunction(function) and function.__code__.co_argcount > 1
                ours = takes and function.__module__ == each.value.__module__
                if ours and (name == "__call__" or not name.startswith("_")):
                    yield f"{each.path}.{name}", function
