"""Times a group's kernels on the GPU, beside what computes the group without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW, Entrant, Measured, measured_choice
from crossfuse.measure.job import LIBRARY, Given, Way
from crossfuse.measure.timer import Timer
from crossfuse.planner.explain.tables import tiles_text
from crossfuse.runtime.artefact import LIBRARIES


@dataclass(frozen=True)
class Separate:
    """What computes a group without a kernel of ours."""

    #: A full description of it, for the cache key.
    text: str
    #: Writes it to a file that another process can run.
    write: Callable[[Path], Way]


@dataclass(frozen=True)
class Measuring:
    """How groups of a model are timed."""

    timer: Timer
    #: Makes what computes a group otherwise, of its outputs, its inputs, which of these are cold,
    #: and sizes of symbols; None where that cannot be said.
    separate: Callable[
        [Sequence[Any], Sequence[Any], Sequence[bool], Mapping[Any, int]], Separate | None
    ]


def measured_kernels(
    timer: Timer,
    target: Device,
    content: Sequence[str],
    label: str,
    plans: Sequence[Any],
    make: Callable[[Any], Any],
    given: Sequence[Given],
    separate: Separate | None,
) -> Measured:
    """Time the first few plans of a group that have kernels, and what computes it otherwise.

    `content` are texts of the function and of what decides how it is scheduled, for the cache key;
    plans are sorted by their estimates, and `make` gives the scheduled function of one, or refuses;
    `given` are the inputs of the kernels. The rest is that of
    `crossfuse.measure.choice.measured_choice`.
    """
    texts = [*content, *(each.to_json() for each in plans), str(given), str(FEW)]
    with TemporaryDirectory(prefix="crossfuse-measure-") as name:
        folder = Path(name)
        return measured_choice(
            timer,
            target,
            [*texts, separate.text if separate is not None else ""],
            label,
            lambda: _entrants(plans, make, tuple(given), target, folder),
            lambda: None if separate is None else separate.write(folder / "separate.pt"),
        )


def _entrants(
    plans: Sequence[Any],
    make: Callable[[Any], Any],
    given: tuple[Given, ...],
    target: Device,
    folder: Path,
) -> list[Entrant]:
    """The first few kernels, built in parallel, and the refusals of plans before them."""
    functions: dict[int, Any] = {}
    found: dict[int, Entrant] = {}
    for place, plan in enumerate(plans):
        name = f"{plan.family} ({tiles_text(plan.tiles)})"
        found[place] = Entrant(place, name, plan.microseconds, None)
        try:
            functions[place] = make(plan)
        except RefusedError as error:
            found[place] = replace(found[place], message=str(error))
        if len(functions) == FEW:
            break
    for place, way in _built(functions, target, folder).items():
        message, source = ("", way) if isinstance(way, Path) else (way, None)
        entry = None if source is None else Way(LIBRARY, str(source), given)
        found[place] = replace(found[place], way=entry, message=message)
    return list(found.values())


def _built(functions: dict[int, Any], target: Device, folder: Path) -> dict[int, Path | str]:
    """Libraries by place, or why there is none."""
    from crossfuse.relax.build_kernels import built

    named = {f"crossfuse_entrant_{place}": func for place, func in functions.items()}
    try:
        made = built(LIBRARIES, named, target, folder)
        return {place: each.shared_object for place, each in zip(functions, made, strict=True)}
    except RefusedError as error:
        if len(functions) == 1:
            return dict.fromkeys(functions, str(error))
        # One that nvcc does not take is not to end the others.
        each_alone = (_built({place: func}, target, folder) for place, func in functions.items())
        return {place: way for one in each_alone for place, way in one.items()}
