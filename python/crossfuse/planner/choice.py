"""Chosen kernel of a chain with the reasons for it, as values that travel as text.

What reads them, such as `crossfuse.planner.explain`, needs nothing else of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.families import EAGER
from crossfuse.planner.kernels.kernel import Resources
from crossfuse.schema import Damaged, read

if TYPE_CHECKING:
    from crossfuse.hardware import Device
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.explain.explanation import Explanation

#: Version of the JSON form.
VERSION = 1


@dataclass(frozen=True)
class Runner:
    """A plan that was not chosen."""

    #: As in `Plan`.
    family: str
    tiles: Mapping[str, Any]
    #: Estimated.
    microseconds: float
    #: Microseconds by term that it takes more than the chosen plan, the largest first.
    loses: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """How a chain is computed, and why so.

    Attributes
    ----------
    chain : Chain
        What is computed.
    k_major : bool
        Whether weights are stored as [n, k].
    device : str
        Target name.
    family : str
        One of `crossfuse.planner.families.registry.FAMILIES`, or `EAGER`: not ours, a library's
        kernels one after another.
    tiles : Mapping[str, Any]
        Fields of the rule's tiles, see `crossfuse.planner.families.registry.read_kernel`.
    microseconds : float
        Estimated time from the end of the kernel before.
    terms : Mapping[str, float]
        What it is made of; they add up to it.
    bound : str
        The stream that takes longest (``hbm``, ``l2``, ``ingest``, ``tensor``), or ``latency``
        where none takes half of the time.
    bytes : Mapping[str, int]
        Moved by level: ``hbm`` (each tensor once), ``l2`` (what CTAs and clusters read and write),
        ``dsm`` (between the CTAs of clusters).
    kernels : tuple[Resources, ...]
        What each kernel takes.
    runners : tuple[Runner, ...]
        The best plan of each other family, and not fusing, the fastest first.

    Examples
    --------
    >>> import crossfuse
    >>> best = crossfuse.plan("G1")
    >>> 1 < best.microseconds == sum(best.terms.values()) < 10
    True
    >>> Plan.from_json(best.to_json()) == best
    True
    """

    chain: Chain
    k_major: bool
    device: str
    family: str
    tiles: Mapping[str, Any]
    microseconds: float
    terms: Mapping[str, float]
    bound: str
    bytes: Mapping[str, int]
    kernels: tuple[Resources, ...] = ()
    runners: tuple[Runner, ...] = ()

    def to_json(self) -> str:
        """The values as text that `from_json` reads."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
            JSON of a plan of a chain.

        Returns
        -------
        Plan
            The plan.

        Raises
        ------
        PlanRefused
            If the text is no plan of this version.
        """
        try:
            return read(cls, text, version=VERSION, key="version")
        except Damaged as error:
            raise no_plan(error.found, error.limit) from None

    def explain(self, target: str | Device | None = None) -> Explanation:
        """Say why this is the plan.

        Parameters
        ----------
        target : str | Device | None
            See `crossfuse.planner.explain.explanation.explain`.

        Returns
        -------
        Explanation
            Values, with ``text`` and ``svg``.
        """
        from crossfuse.planner.explain.explanation import explain

        return explain(self, target=target)


def plain_numbers(terms: Mapping[str, Any]) -> dict[str, float]:
    """Convert times by term to plain numbers; what takes no time is left out."""
    return {name: float(each) for name, each in terms.items() if float(each)}


def runner_of(other: Plan | CascadePlan, best: Plan | CascadePlan) -> Runner:
    """Compare a plan with the chosen one: by which terms it takes longer."""
    names = dict.fromkeys((*other.terms, *best.terms))
    more = {name: other.terms.get(name, 0.0) - best.terms.get(name, 0.0) for name in names}
    worst = sorted((name for name in more if more[name] > 0), key=lambda each: -more[each])
    loses = {name: round(more[name], 3) for name in worst}
    return Runner(other.family, other.tiles, other.microseconds, loses)


def check_families(wanted: Sequence[str], known: Sequence[str], of: str = "") -> None:
    """Refuse names of families that are not known; `of` is said behind these."""
    odd = [each for each in wanted if each not in known]
    if odd:
        raise refuse(
            PlanRefused,
            "plan",
            "only",
            found=repr(odd[0]),
            limit=", ".join(known) + of,
            instead="name some of these families",
        )


def no_plan(found: str, limit: str, version: int = VERSION) -> PlanRefused:
    """Build the refusal of a text that is no plan."""
    return refuse(
        PlanRefused,
        "plan-json",
        "text",
        found=found,
        limit=f"{limit}, in a plan of version {version} as Plan.to_json writes it",
        instead="plan the workload again",
    )


# Plans as a built kernel records them.


def noted(plan: Plan | CascadePlan, eager: float | None) -> dict[str, Any]:
    """Summarise a plan for JSON; `eager` is the time of `not_fusing`."""
    return {
        "family": plan.family,
        "tiles": dict(plan.tiles),
        "microseconds": plan.microseconds,
        "eager_microseconds": eager,
        "eager_is_faster": None if eager is None else eager < plan.microseconds,
    }


def not_fusing(plans: Sequence[Plan | CascadePlan]) -> float | None:
    """Estimated microseconds of a library's kernels, None where they were not planned.

    Plans come with the fastest first, which has the others as runners.
    """
    every = [(each.family, each.microseconds) for each in plans]
    every += [(each.family, each.microseconds) for each in plans[0].runners]
    return next((time for family, time in every if family == EAGER), None)
