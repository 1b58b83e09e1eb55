"""A plan of a chain with all reasons for it: see `explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.hardware import Device, device
from crossfuse.planner.chain.spec import refuse_reductions
from crossfuse.planner.choice import Choice, Runner, no_plan, runner_of
from crossfuse.planner.cost.estimate import alone, eager, turns_of
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.explain.levels import Level, Place, Share, layout, levels, places
from crossfuse.planner.explain.picture import picture
from crossfuse.planner.explain.tables import printed, render
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import families, read_kernel
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import resident, uses
from crossfuse.planner.kernels.shape import Shape, Step, least, shape_of
from crossfuse.schema import parse

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Version of the JSON form.
VERSION = 1


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel beyond `crossfuse.planner.kernels.kernel.Resources`."""

    #: Bytes of a CTA's shared memory by use; they add up to all of it.
    shared: Mapping[str, int]
    #: Launched in all.
    clusters: int
    #: Clusters of this size that the device runs at once, one CTA an SM.
    resident: int
    #: Tiles that the busiest cluster makes, phase by phase.
    waves: tuple[int, ...]
    #: SMs without work.
    idle_sms: int


@dataclass(frozen=True)
class Explanation:
    """Why a plan is the plan, as values.

    Attributes
    ----------
    plan : Choice
        What is explained.
    levels : tuple[Level, ...]
        What the plan moves and multiplies.
    places : tuple[Place, ...]
        Where each tensor lives.
    usage : tuple[Usage, ...]
        Of each of its kernels, in the order of `Plan.kernels`; empty for a library's.
    layout : tuple[Share, ...]
        Shares of the CTAs of the first cluster.
    best : tuple[Runner, ...]
        The next best plans of any family, the fastest first, if they were asked for.
    pruned : Mapping[str, tuple[Step, ...]]
        Tiles that each rule leaves, by family.
    provisional : bool
        Whether the device's rates are not all measured.

    Examples
    --------
    >>> import crossfuse
    >>> print(crossfuse.plan("G1").explain().text().splitlines()[0])
    chain of 2 products, m = 128, k = 32, n = 512, l = 256, on nvidia-h100
    """

    plan: Choice
    levels: tuple[Level, ...]
    places: tuple[Place, ...]
    usage: tuple[Usage, ...]
    layout: tuple[Share, ...]
    best: tuple[Runner, ...]
    pruned: Mapping[str, tuple[Step, ...]]
    provisional: bool

    def to_json(self) -> dict[str, Any]:
        """Convert to a value that `json` can write.

        ``plan`` is what `Plan.from_json` reads as text; the other fields by name are lists or
        objects of the fields of what they hold.
        """
        fields = asdict(self)
        fields["plan"] = parse(self.plan.to_json())
        return {"version": VERSION, **fields}

    def render(self) -> list[RenderableType]:
        """As tables of rich, in reading order."""
        return render(self)

    def text(self, width: int = 100) -> str:
        """As tables of plain text.

        Parameters
        ----------
        width : int
            Columns of a line at most.

        Returns
        -------
        str
            Lines of at most `width` columns.
        """
        return printed(self.render(), width)

    def svg(self) -> str:
        """As a picture: time by level and by term, and the layout of a cluster."""
        return picture(self)


def explain(
    plan: Choice,
    *,
    target: str | Device | None = None,
    rates: Rates | None = None,
    best: Sequence[Choice] = (),
) -> Explanation:
    """Explain a plan of a chain, beside the next `best` ones as `ranked` gives them.

    `target` is the device that it was made for, if its limits were not those of the name in the
    plan. `rates` are those that it was made with; None takes the device's record. A plan whose
    tiles are not those of its family is refused.
    """
    spec = device(target or plan.device)
    known = rates or rates_of(spec)
    chain, shape = plan.chain, shape_of(plan.chain, k_major=plan.k_major)
    refuse_reductions(chain)
    kernel = None if plan.family == EAGER else read_kernel(plan.family, plan.tiles)
    if kernel is None:
        found = dict(eager(shape, known, spec.sms).busy)
    else:
        found = alone(kernel, shape, spec, known)
    _check_whole(plan, kernel.kernels(shape) if kernel else ())
    times = {name: float(each) for name, each in found.items()}
    ctas = max((each.busy for each in plan.kernels), default=1)
    rooms = kernel.memories(shape, spec) if kernel else ()
    return Explanation(
        plan,
        levels(chain, kernel, shape, plan.bytes, times, known, ctas),
        places(chain, kernel, shape, rooms, spec),
        _usage(plan, kernel, shape, spec) if kernel else (),
        layout(kernel, shape) if kernel else (),
        tuple(runner_of(each, plan) for each in best),
        {each.name: each.pruned(shape, spec) for each in families(shape)},
        known.measured.provisional,
    )


def _check_whole(plan: Choice, kernels: Sequence[object]) -> None:
    """Refuse a plan, as a file may hold one, whose parts do not belong together."""
    if kernels and len(plan.kernels) != len(kernels):
        raise no_plan(f"{len(plan.kernels)} kernels of family {plan.family}", f"{len(kernels)}")
    needed = ("hbm", "l2", "dsm") if kernels else ("hbm",)
    if missing := [each for each in needed if each not in plan.bytes]:
        raise no_plan(f"bytes without {missing[0]}", ", ".join(needed))


def _usage(plan: Choice, kernel: TileKernel, shape: Shape, spec: Device) -> tuple[Usage, ...]:
    room = int(resident(spec, kernel.cluster))
    launched = kernel.clusters(shape, spec)
    active = max(int(each) for each in launched)
    found = []
    parts = zip(
        plan.kernels, kernel.kernels(shape), kernel.memories(shape, spec), launched, strict=True
    )
    for taken, phases, memory, clusters in parts:
        waves = tuple(int(turns_of(each, least(active, room))) for each in phases)
        shared = uses(phases, memory)
        found.append(Usage(shared, int(clusters), room, waves, spec.sms - taken.busy))
    return tuple(found)
