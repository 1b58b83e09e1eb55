"""Chooses by measured times: kernels of ours against one another, and against separate kernels.

Times are cached by content and by the name of the GPU, so that each distinct group is timed once,
in whichever process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse import schema
from crossfuse.cache import Entry, content_key, shelf
from crossfuse.hardware import Device
from crossfuse.measure.job import Taken, Way
from crossfuse.measure.timer import Timer

#: Plans that are timed.
FEW = 4
#: Share of a time that two measurements of the same kernel differ by: what is not faster by more
#: than this does not replace what it competes with.
NOISE = 0.02
_KIND = "measured"
#: What is reported of separate kernels.
SEPARATE = "separate kernels"


@dataclass(frozen=True)
class Entrant:
    """A kernel of ours that competes."""

    #: Place of its plan in the ranking, from 0.
    place: int
    #: Family and tiles, for people.
    name: str
    #: Microseconds by the planner.
    estimate: float | None
    #: How to run it; None where it was not built.
    way: Way | None
    #: Why it was not built.
    message: str = ""


@dataclass(frozen=True)
class Timed:
    """What was measured of a way.

    Attributes
    ----------
    place : int
        See `Entrant`; -1 of separate kernels.
    name : str
        See `Entrant`.
    estimate : float | None
        See `Entrant`.
    taken : Taken
        Its time, or why it has none.

    Examples
    --------
    >>> Timed(0, "l2", 9.0, Taken(10.0, 9.9)).text
    'l2 10.00 us'
    """

    place: int
    name: str
    estimate: float | None
    taken: Taken

    @property
    def text(self) -> str:
        """Its time in words."""
        time = self.taken.microseconds
        return f"{self.name} " + (f"{time:.2f} us" if time else f"none ({self.taken.message})")


@dataclass(frozen=True)
class Measured:
    """Times of a group's kernels and of its separate kernels.

    Attributes
    ----------
    gpu : str
        Where.
    ours : tuple[Timed, ...]
        The first few of the plan, in its order.
    baseline : Timed | None
        Separate kernels; None where nothing but kernels of ours computes the group.

    Examples
    --------
    >>> first = Timed(0, "l2", 9.0, Taken(10.0, 9.9))
    >>> second = Timed(1, "dsm", 9.5, Taken(8.0, 7.9))
    >>> found = Measured("NVIDIA H200", (first, second), Timed(-1, SEPARATE, 9.0, Taken(8.1, 8.0)))
    >>> found.best.name, found.fuse  # the second; by 1 % it does not replace separate kernels
    ('dsm', False)
    """

    gpu: str
    ours: tuple[Timed, ...]
    baseline: Timed | None = None

    @property
    def best(self) -> Timed | None:
        """The first kernel of ours that no other beats by more than noise; None if none ran."""
        ran = [each for each in self.ours if each.taken.microseconds is not None]
        best = ran[0] if ran else None
        for each in ran[1:]:
            assert best is not None
            best = each if faster(each.taken, best.taken) else best
        return best

    @property
    def fuse(self) -> bool | None:
        """Whether the best kernel of ours beats separate kernels by more than noise.

        None where one of both has no time, and nothing is known.
        """
        best, other = self.best, self.baseline
        if best is None:
            return False
        if other is None or other.taken.microseconds is None:
            return None
        return faster(best.taken, other.taken)

    @property
    def times(self) -> tuple[float, float] | None:
        """Microseconds of the best kernel and of separate ones; None where one has none."""
        best, other = self.best, self.baseline
        if best is None or other is None:
            return None
        ours, separate = best.taken.microseconds, other.taken.microseconds
        return None if ours is None or separate is None else (ours, separate)

    @property
    def text(self) -> str:
        """All times on one line, and which won."""
        best = self.best
        every = [*self.ours, *([self.baseline] if self.baseline else [])]
        times = ", ".join(each.text for each in every)
        won = SEPARATE if self.fuse is False else best.name if best else "nothing"
        return f"measured on {self.gpu}: {times}; {won} won"

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self)


def faster(one: Taken, other: Taken) -> bool:
    """Whether a time is less than another one by more than noise.

    Noise is `NOISE` of the other time, or by what the repeats of either differ, if that is more.
    """
    if one.microseconds is None or other.microseconds is None:
        return other.microseconds is None and one.microseconds is not None
    spreads = [each.microseconds - (each.least or each.microseconds) for each in (one, other)]  # type: ignore[operator]
    return one.microseconds + max(NOISE * other.microseconds, *spreads) < other.microseconds


def measured_choice(
    timer: Timer,
    target: Device,
    parts: Sequence[str],
    label: str,
    entrants: Callable[[], Sequence[Entrant]],
    baseline: Callable[[], Way | None],
) -> Measured:
    """Time a group's kernels, or read the times from the cache.

    `parts` are the cache key: texts of all that determines what is timed, the function, its plans,
    options, and separate kernels. `entrants` builds the first few plans, at least one, and
    `baseline` the separate kernels, if there is a way; neither is called on a hit. Where nothing
    has a time, nothing is cached. `label` is for people.
    """
    key = content_key(target, _KIND, timer.gpu, *parts)
    known = _read(key)
    if known is not None:
        return known
    ours = tuple(
        Timed(each.place, each.name, each.estimate, _taken(timer, each)) for each in entrants()
    )
    way = baseline()
    other = None if way is None else Timed(-1, SEPARATE, None, timer.time(way))
    found = Measured(timer.gpu, ours, other)
    if found.best is not None:
        data = json.dumps(found.to_json()).encode()
        shelf(_KIND).write(key, Entry(data, {"label": f"{label} on {timer.gpu}"}))
    return found


def _taken(timer: Timer, entrant: Entrant) -> Taken:
    return Taken(message=entrant.message) if entrant.way is None else timer.time(entrant.way)


def _read(key: str) -> Measured | None:
    """The cached times; None where there are none, or they are damaged."""
    return shelf(_KIND).read(key, lambda entry: schema.read(Measured, entry.data))
