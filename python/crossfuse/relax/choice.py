"""Which groups of a graph become kernels, by estimates or by times on the GPU.

Chains and cascades are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW, Entrant, Measured, measured_choice
from crossfuse.measure.job import LIBRARY, Given, Way
from crossfuse.measure.timer import Timer
from crossfuse.planner.explain.tables import tiles_text
from crossfuse.planner.families import EAGER
from crossfuse.relax.graph import Graph
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.relax.replace import Replacement
from crossfuse.runtime.artefact import LIBRARIES

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.choice import Runner
    from crossfuse.planner.plan import Plan

#: Steps of the search for the groups that save most together; where it takes more, each takes the
#: place of those that save less. All parts of a row of layers take few for each pair of groups.
_STEPS = 20000


@dataclass(frozen=True)
class PlannedGroup:
    """A group that a kernel may compute: how fast that is, and how fast are separate kernels."""

    #: The fastest first.
    plans: tuple[Plan | CascadePlan, ...]
    #: Times of the first few kernels and of not fusing; places are those of `kernels`.
    measured: Measured | None
    #: The group's result in the model.
    output: Var
    #: The group's inputs in the model, in the order of its function's parameters.
    given: tuple[Var, ...]
    #: One line on the group, for reports.
    summary: str
    #: Estimated microseconds of separate kernels that plans do not know of, such as of a norm.
    apart: float = field(default=0.0, kw_only=True)

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The group's results in the model."""
        return (self.output,)

    @property
    def kernels(self) -> tuple[Plan | CascadePlan, ...]:
        """Plans with kernels of ours, the fastest estimate first."""
        return tuple(each for each in self.plans if each.family != EAGER)

    @property
    def ours(self) -> Plan | CascadePlan:
        """The best plan of a kernel of ours, the fastest if they were measured."""
        best = self.measured.best if self.measured is not None else None
        return self.kernels[0 if best is None else best.place]

    @property
    def family(self) -> str:
        """Family of the best kernel of ours."""
        return self.ours.family

    @property
    def eager(self) -> float:
        """Estimated microseconds of not fusing."""
        every: list[Plan | CascadePlan | Runner] = [*self.plans, *self.plans[0].runners]
        return self.apart + next(each.microseconds for each in every if each.family == EAGER)

    @property
    def times(self) -> tuple[float, float]:
        """Microseconds of the kernel and of not fusing, both measured or both estimated."""
        found = None if self.measured is None else self.measured.times
        return found or (self.ours.microseconds, self.eager)

    @property
    def gain(self) -> float:
        """Microseconds that fusing saves."""
        ours, eager = self.times
        return eager - ours

    @property
    def words(self) -> str:
        """The measurements, for reports; empty without any."""
        return "" if self.measured is None else self.measured.text

    def left(self, always: bool) -> str:
        """Why it is not to be fused, by measurements before estimates; empty if it is.

        `always` fuses even where that is slower.
        """
        if self.measured is not None and self.measured.best is None:
            return "none of its kernels ran"
        fuse = None if self.measured is None else self.measured.fuse
        if always or fuse or (fuse is None and self.gain > 0):
            return ""
        if fuse is None:
            return f"not to fuse is estimated to be faster by {abs(self.gain):.1f} us"
        return "no kernel was measured to be faster than not to fuse"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A group of bindings that one kernel might compute."""

    #: Names of its products or reductions, the last one last.
    names: tuple[str, ...]
    #: None if no kernel does.
    planned: PlannedGroup | None
    #: Why none does.
    reason: str = ""
    #: Variables that no two kernels compute.
    parts: tuple[Any, ...] = ()
    #: Microseconds that not fusing takes beyond what `planned` says of it: of estimates the kernel
    #: that applies an activation to its result. Not fusing a longer group counts that one, too.
    behind: float = 0.0

    @property
    def saved(self) -> float:
        """Microseconds that fusing saves, to be compared with groups that share parts."""
        assert self.planned is not None
        gain = self.planned.gain
        return gain + self.behind if gain > 0 else gain


class Kernels(Protocol):
    """What knows groups of one kind, and makes their kernels."""

    def candidates(self, graph: Graph) -> Iterable[Candidate]:
        """Find all groups of a graph, and plan those that are of this kind."""

    def kernel(self, planned: Any, always: bool) -> Replacement:
        """Schedule a group, and give the call of its kernel; refuses one without a kernel."""


@dataclass(frozen=True)
class Chosen:
    """Groups of a graph that become kernels, and the outcomes of all."""

    replacements: tuple[Replacement, ...]
    #: One for each candidate, in order.
    outcomes: tuple[ChainOutcome, ...]


def choose(function: str, graph: Graph, kernels: Kernels, always: bool = False) -> Chosen:
    """Plan all groups of a graph, and schedule those that pay and do not overlap.

    Of groups that share parts those are taken that save most together. `always` takes those too
    whose estimate says that not to fuse is faster. `function` is the name that reports give.
    """
    outcomes = {
        each: ChainOutcome(function, each.names, "", "", None, None, each.reason)
        for each in kernels.candidates(graph)
    }
    taken: dict[Any, str] = {}
    stored = _Stored(graph)
    replacements: list[Replacement] = []
    pairs = [(each, each.planned) for each in outcomes if each.planned is not None]
    best = _together([(frozenset(each.parts), each.saved) for each, _ in pairs])
    first = {pairs[each][0] for each in best}
    # The others come last: one may take the place of a group that has no kernel.
    for candidate, planned in sorted(pairs, key=lambda e: (e[0] not in first, -e[0].saved)):
        other = next((taken[each] for each in candidate.parts if each in taken), "")
        found = _judged(planned, other, outcomes[candidate], always)
        if not found.text:
            found = replace(found, text=stored.fault(candidate, planned))
        if not found.text:
            try:
                call = kernels.kernel(planned, always)
            except RefusedError as error:
                found = replace(found, family="", text=str(error))
            else:
                replacements.append(call)
                name = str(call.function.name_hint)
                taken |= dict.fromkeys(candidate.parts, name)
                stored.take(candidate, planned, name)
                found = replace(found, name=name, text=planned.summary, bins=call.bins)
        outcomes[candidate] = found
    return Chosen(tuple(replacements), tuple(outcomes.values()))


class _Stored:
    """Whether chosen groups read of each other only what the kernels of these store.

    Groups look through what is free, such as views and the operators that make their rows. One
    that looks into another one would have its products computed again, by others than its kernel.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: Kernels by what they compute and do not store, and by what they read.
        self._inside: dict[Any, str] = {}
        self._read: dict[Any, str] = {}

    def take(self, candidate: Candidate, planned: PlannedGroup, name: str) -> None:
        """Note a group that the kernel of this name computes."""
        self._inside |= dict.fromkeys(self._hidden(candidate, planned), name)
        self._read |= dict.fromkeys(planned.given, name)

    def fault(self, candidate: Candidate, planned: PlannedGroup) -> str:
        """Why a group cannot be chosen beside those before; empty if it can."""
        for each in planned.given:
            if each in self._inside:
                return f"it reads more of {self._inside[each]} than its result"
        for each in self._hidden(candidate, planned):
            if each in self._read:
                return f"{self._read[each]} reads more of it than its result"
        return ""

    def _hidden(self, candidate: Candidate, planned: PlannedGroup) -> Iterator[Any]:
        """What is made of the products of a group, and none of its results."""
        made = set(candidate.parts)
        for output in planned.outputs if made else ():
            for each in self._graph.reach(output, planned.given)[0]:
                if any(one in made for one in self._graph.arguments(each)):
                    made.add(each)
        yield from made.difference(planned.outputs)


def _together(groups: Sequence[tuple[frozenset[Any], float]]) -> frozenset[int]:
    """Places of the groups without common parts that save most in all.

    Three layers behind one another are two pairs, of which one is taken, or all three; of four
    layers the first and the last pair may save more than the one between them does. Groups that
    share parts are neighbours in a graph, so what is left after each choice is nearly always what
    comes after it.
    """
    known: dict[tuple[int, ...], tuple[float, frozenset[int]]] = {}

    def best(left: tuple[int, ...]) -> tuple[float, frozenset[int]]:
        if left not in known:
            if len(known) > _STEPS:
                return 0.0, frozenset()
            one, rest = left[0], left[1:]
            free = tuple(each for each in rest if not groups[each][0] & groups[one][0])
            saved, among = best(free)
            fused = (saved + groups[one][1], among | {one})
            known[left] = max(fused, best(rest), key=lambda found: found[0])
        return known[left]

    saving = tuple(each for each, (_, gain) in enumerate(groups) if gain > 0)
    found: frozenset[int] = frozenset()
    for part in _apart(groups, saving):
        known = {(): (0.0, frozenset())}
        among = best(part)[1]
        found |= among if len(known) <= _STEPS else frozenset()
    return found


def _apart(
    groups: Sequence[tuple[frozenset[Any], float]], places: Sequence[int]
) -> list[tuple[int, ...]]:
    """Divide places of groups so that no part is in two of them."""
    found: list[tuple[frozenset[Any], tuple[int, ...]]] = []
    for each in places:
        joined: tuple[frozenset[Any], tuple[int, ...]] = (groups[each][0], (each,))
        for other in [one for one in found if one[0] & joined[0]]:
            found.remove(other)
            joined = (joined[0] | other[0], (*other[1], *joined[1]))
        found.append(joined)
    return [tuple(sorted(places)) for _, places in found]


def _judged(planned: PlannedGroup, other: str, blank: ChainOutcome, always: bool) -> ChainOutcome:
    """The outcome of a planned group; `text` is empty if it is to be fused.

    `other` is a kernel that has a part of the group already.
    """
    ours, eager = planned.times
    judged = replace(
        blank,
        family=planned.family,
        microseconds=ours,
        eager_microseconds=eager,
        measured=planned.words,
    )
    if other:
        return replace(judged, text=f"a product of it is in {other}, and more is saved so")
    text = planned.left(always)
    return replace(judged, family=EAGER, text=text) if text else judged


# Times a group's kernels on the GPU, beside what computes the group without them.


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
