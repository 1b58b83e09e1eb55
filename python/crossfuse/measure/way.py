"""Ways to compute something, and their times, as values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Kinds of ways, and what their `source` is.
LIBRARY = "library"  # path of a kernel library
GRAPH = "graph"  # path of a torch.fx.GraphModule that torch.save wrote
PROGRAM = "program"  # path of a program that torch.export.save wrote
SPEC = "spec"  # text of a workload, computed by torch


@dataclass(frozen=True)
class Given:
    """An input, as it is drawn.

    Attributes
    ----------
    shape : tuple[int, ...]
        Extents.
    dtype : str
        Of the elements, as torch calls it.
    stride : tuple[int, ...]
        In elements; empty of a contiguous one.
    cold : bool
        Whether it is read from memory, such as weights; else it stays in the L2 cache if it fits.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    cold: bool = True


@dataclass(frozen=True)
class Way:
    """A way to compute something.

    Attributes
    ----------
    kind, source : str
        What it is; see the constants of this module.
    given : tuple[Given, ...]
        Inputs; a workload of a spec knows its own.
    mode : str | None
        Of torch's ways the mode of ``torch.compile``; None is eager.
    """

    kind: str
    source: str
    given: tuple[Given, ...] = ()
    mode: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Way:
        """Read what `to_json` wrote."""
        given = (
            Given(tuple(each["shape"]), each["dtype"], tuple(each["stride"]), each["cold"])
            for each in value["given"]
        )
        return Way(value["kind"], value["source"], tuple(given), value["mode"])


@dataclass(frozen=True)
class Taken:
    """What timing a way found.

    Attributes
    ----------
    microseconds, least : float | None
        Median and least time; None where there is none.
    message : str
        Why there is none.
    """

    microseconds: float | None = None
    least: float | None = None
    message: str = ""
