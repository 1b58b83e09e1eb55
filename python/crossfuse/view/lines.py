"""Finds the line of a schedule that made a line of CUDA: by tensors, loops and instructions.

A line of the schedule names blocks and loops; blocks write tensors, and loops have variables, whose
names are in the generated text. Primitives that become instructions rather than names are found by
these. What neither names (a reordering) has no line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir

#: What a part of a schedule's line says, and what of the CUDA comes of it.
_WORDS = (
    (re.compile(r"crossfuse\.cluster_axis"), ("cluster_ctaid", "clusterid", "cluster_dims")),
    (re.compile(r"crossfuse\.dsm_"), ("mapa", "barrier_cluster", "cluster_sync", "_dsm")),
    (re.compile(r'thread_axis="blockIdx'), ("blockIdx", "clusterid")),
    (re.compile(r'thread_axis="threadIdx'), ("threadIdx",)),
    (re.compile(r"crossfuse\.stages"), ("mbarrier", "stage_ptr", "parity_ptr")),
    (re.compile(r"crossfuse\.grid_stage"), ("flag",)),
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_KERNEL = re.compile(r'extern "C" __global__')
#: A loop's variable that is too short to tell: `i` is in every kernel.
_SHORT = 2


@dataclass(frozen=True)
class ScheduleLine:
    """A line of a schedule, and how to recognise CUDA that comes of it."""

    #: As Python.
    text: str
    #: Tensors and loop variables that it is about, as the CUDA spells them.
    names: frozenset[str] = frozenset()
    #: Instructions that come of it.
    words: tuple[str, ...] = ()


def schedule_lines(sch: Any) -> tuple[ScheduleLine, ...]:
    """The trace of a schedule, a line for each instruction.

    Without a trace the lines are those of its function, without names.
    """
    instructions = list(sch.trace.insts) if sch.trace is not None else []
    if not instructions:
        return tuple(map(ScheduleLine, str(sch.mod.script()).splitlines()))
    # The first two lines are the import and the head of the function.
    texts = str(sch.trace).splitlines()[2:]
    return tuple(
        ScheduleLine(text.strip(), _names(sch, each), _words(text))
        for text, each in zip(texts, instructions, strict=True)
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for pattern, words in _WORDS if pattern.search(text) for word in words)


def _names(sch: Any, instruction: Any) -> frozenset[str]:
    """Names of what an instruction made, or of what it was applied to where it made nothing."""
    found = _tensors(sch, instruction.outputs) or _tensors(sch, instruction.inputs)
    return frozenset(found)


def _tensors(sch: Any, variables: Iterable[Any]) -> set[str]:
    names: set[str] = set()
    for each in variables:
        try:
            there = sch.get(each)
        except (ValueError, RuntimeError, TypeError, IndexError):
            continue  # Later lines have taken it away, or it is a number.
        if isinstance(there, ir.SBlock):
            names |= {_spelt(str(region.source.name)) for region in there.writes}
        elif isinstance(there, ir.For) and len(str(there.loop_var.name)) > _SHORT:
            names.add(_spelt(str(there.loop_var.name)))
    return names


def _spelt(name: str) -> str:
    return re.sub(r"\W", "_", name)


@dataclass(frozen=True)
class CudaText:
    """Generated CUDA, in helpers and kernels."""

    #: What stands before the kernels: functions around single instructions.
    helpers: str
    #: Of the kernels.
    lines: tuple[str, ...]
    #: For each of these, the numbers of the schedule's lines that made it.
    made_by: tuple[tuple[int, ...], ...]


def linked(schedule: Sequence[ScheduleLine], cuda: str) -> CudaText:
    """Find the lines of a schedule behind each line of its kernels."""
    first = _KERNEL.search(cuda)
    start = first.start() if first else 0
    lines = tuple(cuda[start:].splitlines())
    return CudaText(cuda[:start], lines, tuple(_makers(schedule, each) for each in lines))


def _makers(schedule: Sequence[ScheduleLine], text: str) -> tuple[int, ...]:
    identifiers = set(_IDENTIFIER.findall(text))
    return tuple(
        number
        for number, line in enumerate(schedule)
        if any(word in text for word in line.words)
        or any(_is(name, each) for name in line.names for each in identifiers)
    )


def _is(name: str, identifier: str) -> bool:
    """Whether an identifier of the CUDA is a tensor's, perhaps with a scope or number appended."""
    stem = re.sub(r"_(shared|local|dsm|dyn|global|rf).*$", "", name)
    return identifier in (name, stem) or identifier.startswith(f"{stem}_")
