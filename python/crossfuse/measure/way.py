"""Ways to compute something, and their times, as values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of ways, and what their `source` is.
LIBRARY = "library"  # path of a kernel library
GRAPH = "graph"  # path of a torch.fx.GraphModule that torch.save wrote
PROGRAM = "program"  # path of a program that torch.export.save wrote
SPEC = "spec"  # text of a workload, computed by torch


@dataclass(frozen=True)
class Given:
    """An input of a way, whose values are drawn by whoever times it."""

    shape: tuple[int, ...]
    #: As torch calls it.
    dtype: str
    #: In elements; empty if contiguous.
    stride: tuple[int, ...] = ()
    #: Whether it is read from memory, as weights are; else it stays in the L2 cache if it fits.
    cold: bool = True


@dataclass(frozen=True)
class Way:
    """A way to compute something: a kernel of ours, or torch."""

    #: A constant of this module, which says what `source` is.
    kind: str
    source: str
    #: Inputs; empty for a spec, which knows its own.
    given: tuple[Given, ...] = ()
    #: Mode of ``torch.compile`` for ways of torch; None is eager.
    mode: str | None = None


@dataclass(frozen=True)
class Taken:
    """Outcome of timing a way."""

    #: Median of the times; the next field is the least of them. None without a time.
    microseconds: float | None = None
    least: float | None = None
    #: Why there is no time.
    message: str = ""
