"""Named terms of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crossfuse.planner.kernels.arrays import Share

#: Term of what was learned from measured kernels, see `crossfuse.planner.cost.estimate`.
LEARNED = "learned"
#: Names of terms, in the order in which they are shown.
TERMS = (
    "start",
    "hbm",
    "l2",
    "ingest",
    "tensor",
    "waves",
    "epilogue",
    "imbalance",
    "flag",
    "relaunch",
    "gather",
    "exchange",
    "barrier",
    "sums",
    "spills",
    "store",
    "kernels",
    LEARNED,
)
_ROWS = "rows"
#: Names of terms of cascades, in the order in which they are shown; those of chains are features of
#: what was learned, and stay as they are.
CASCADE_TERMS = (
    "start",
    _ROWS,
    "hbm",
    "ingest",
    "tensor",
    "exponentials",
    "issue",
    "launches",
    "steps",
    "masks",
    "waves",
    "waiting",
    "fill",
    "drain",
    "merge",
    "flag",
    "relaunch",
    "product",
    "exchange",
    "clusters",
    "barrier",
    "shared",
    "store",
    "kernels",
)


def told(terms: Mapping[str, Share]) -> list[str]:
    """Names of terms in the order in which they are shown; a user's own come last."""
    order = dict.fromkeys((*CASCADE_TERMS, *TERMS))
    own = [each for each in terms if each not in order]
    # A product may have rows made before it.
    of_product = (TERMS[0], _ROWS, *TERMS[1:])
    chain = terms.keys() <= {*of_product, *own}
    return [each for each in (of_product if chain else order) if each in terms] + own


def added(one: Mapping[str, Share], other: Mapping[str, Share]) -> dict[str, float]:
    """Add up times of one candidate by name."""
    return {
        name: float(one.get(name, 0.0)) + float(other.get(name, 0.0)) for name in {**one, **other}
    }


@dataclass(frozen=True)
class Estimate:
    """Time of one candidate, or of many."""

    #: Microseconds by name, of those in `TERMS`, or in `CASCADE_TERMS`, that there are. What a
    #: stream of a loop takes beyond those shown before it counts as its own.
    terms: Mapping[str, Share]
    #: Microseconds that each stream would take alone.
    busy: Mapping[str, Share] = field(default_factory=dict)

    @property
    def microseconds(self) -> Share:
        """Sum of all terms."""
        return sum(self.terms.values())

    @property
    def bound(self) -> str:
        """The longest stream of one candidate; ``"latency"`` if all take less than half."""
        name = max(self.busy, key=lambda each: float(self.busy[each]))
        return name if float(self.busy[name]) > float(self.microseconds) / 2 else "latency"
