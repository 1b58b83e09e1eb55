"""What tests of the tile form share."""

from __future__ import annotations

from typing import Any

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.emulate.llvm import run_sequential, run_serial
from crossfuse.emulate.serialise import serialise
from crossfuse.lower.extract import only_function
from crossfuse.schedule.rules.stream import schedule_cascade_tiles


def found(function: Any) -> tuple[Site, Derivation]:
    """The only cascade of a function."""
    (site,) = detect(function)
    return site, derive(site.cascade)


def scheduled(function: Any, **tiles: Any) -> Any:
    """The function in tile form, bound."""
    return schedule_cascade_tiles(*found(function), CascadeTiles(**tiles))


def run(schedule: Any, inputs: Any) -> Any:
    """Outputs on the CPU, the same forwards and backwards."""
    report = run_sequential(schedule, inputs)
    report.raise_if_wrong()
    return report.outputs


class Compiled:
    """A schedule compiled once for several inputs, run forwards."""

    def __init__(self, schedule: Any) -> None:
        self.function = only_function(schedule)
        self.serial = serialise(schedule)

    def __call__(self, inputs: Any) -> Any:
        return run_serial(self.serial, self.function, inputs)
