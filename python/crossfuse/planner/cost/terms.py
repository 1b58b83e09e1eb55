"""Named terms of an estimate, and what trees learned beyond them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from crossfuse import schema
from crossfuse.errors import EnvironmentRefused, PlanRefused, Rule, refuse
from crossfuse.hardware import Device
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import Memory, resident
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Shape, Share, count
from crossfuse.schema import Between, Count, Damaged

if TYPE_CHECKING:
    from crossfuse.hardware import Device

_refuse = Rule(
    EnvironmentRefused, "learned-trees", instead="learn them again: python scripts/fit_costs.py"
)

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


# Trees that were learned from measured kernels, as arrays.
#
# They are grown by xgboost (``scripts/study/grow.py``), and only read here: a plan must not depend
# on whether xgboost is installed.

# Features of kernels that corrections are learned from: terms, tiles, and bytes by level.

_SHAPE = ("m", "n", "k", "l", "products", "item", "k_major", "functions")
_FIELDS = (
    "rows",
    "columns",
    "steps",
    "tiles",
    "split",
    "copies",
    "readers",
    "sums",
    "left",
    "right",
    "left_sharers",
    "right_sharers",
    "received",
)
_PHASE = (*_FIELDS, "ctas", "turns", "l2", "dsm")
_TERMS = tuple(each for each in TERMS if each != LEARNED)
_KERNEL = ("cluster", "waves", "left_stages", "right_stages", "shared")
#: Families that kernels were measured of. One that came later has none of these columns, until
#: trees are learned that know it.
_FAMILIES = ("gemm", "registers", "dsm", "l2", "global")
#: Names of the columns of `features`, in their order.
NAMES = (
    "estimate",
    *(f"term {each}" for each in _TERMS),
    *(f"share {each}" for each in _TERMS),
    *(f"family {each}" for each in _FAMILIES),
    *(f"shape {each}" for each in _SHAPE),
    *(f"kernel {each}" for each in _KERNEL),
    *(f"first {each}" for each in _PHASE),
    *(f"second {each}" for each in _PHASE),
)


def features(
    kernel: TileKernel, shape: Shape, device: Device, estimate: Estimate, room: Memory
) -> np.ndarray:
    """Describe kernels by numbers: float32 of [candidate, name], named by `NAMES`.

    Shares of the estimate and families are from 0 to 1; everything else is log2 of one more, times
    in microseconds. The estimate must be uncorrected, `room` is the shared memory of the last
    kernel.
    """
    total = np.maximum(np.asarray(estimate.microseconds, np.float64), 1e-9)
    clusters = kernel.clusters(shape, device)[-1]
    phases = kernel.phases(shape)
    raw: dict[str, Any] = {
        "estimate": total,
        **{f"term {name}": value for name, value in estimate.terms.items()},
        **{f"shape {name}": getattr(shape, name) for name in _SHAPE},
        "kernel cluster": kernel.cluster,
        "kernel waves": phases[0].tiles / np.minimum(clusters, resident(device, kernel.cluster)),
        "kernel left_stages": room.left,
        "kernel right_stages": room.right,
        "kernel shared": room.size,
    }
    for name, phase in zip(("first", "second"), phases, strict=False):
        told = _phase(phase, kernel, shape, device)
        raw |= {f"{name} {each}": value for each, value in told.items()}
    found = np.zeros((count(kernel), len(NAMES)), np.float32)
    for name, value in raw.items():
        found[:, NAMES.index(name)] = np.log2(1 + np.maximum(value, 0))
    for name, value in estimate.terms.items():
        found[:, NAMES.index(f"share {name}")] = value / total
    if kernel.family in _FAMILIES:
        found[:, NAMES.index(f"family {kernel.family}")] = 1
    return found


def _phase(phase: Phase, kernel: TileKernel, shape: Shape, device: Device) -> dict[str, Any]:
    ctas = phase.tiles * kernel.cluster
    right = phase.right / phase.right_sharers
    slices = (kernel.cluster - 1) * phase.rows * phase.columns * shape.item
    sent = phase.received * (phase.split - 1) / phase.split
    return {
        **{each: getattr(phase, each) for each in _FIELDS},
        "ctas": ctas,
        "turns": np.ceil(phase.tiles / resident(device, kernel.cluster)),
        "l2": ctas * phase.steps * (phase.left / phase.left_sharers + right),
        "dsm": ctas * (sent + (slices if phase.gathers else 0)),
    }


VERSION = 1
DIRECTORY = Path(__file__).parent / "learned"
_Column = Annotated[int, Between(0, len(NAMES) - 1)]
#: Rows whose places in all trees are in a core's cache.
_AT_ONCE = 64
#: Logarithm of a ratio of times.
_Leaf = Annotated[float, Between(-50, 50)]


@dataclass(frozen=True)
class _Stored:
    """Content of a file of trees: of each tree its features, thresholds and leaves."""

    device: str
    kernels: Count
    features: tuple[str, ...]
    trees: tuple[tuple[tuple[_Column, ...], tuple[float, ...], tuple[_Leaf, ...]], ...]


@dataclass(frozen=True, eq=False)
class Trees:
    """Complete binary trees of one depth, whose leaves add up."""

    #: Target name of the device that the kernels were measured on.
    device: str
    #: Number of measured kernels that were learned from.
    kernels: int
    #: int64 of [tree, node]: the column of `features` that a node asks for. The nodes below node i
    #: are 2 i + 1 (less than the threshold) and 2 i + 2.
    feature: np.ndarray
    #: float32 of [tree, node].
    threshold: np.ndarray
    #: float32 of [tree, leaf], from left to right.
    leaf: np.ndarray

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Add up the leaves that rows of features end in: float32 of [candidate, feature].

        The sums, float64 of [candidate], are logarithms of measured over estimated time.
        """
        parts = [self._sum(rows[at : at + _AT_ONCE]) for at in range(0, len(rows), _AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _sum(self, rows: np.ndarray) -> np.ndarray:
        """Add up the leaves of a few rows, in all trees at once: most plans are estimated alone."""
        trees, nodes = self.feature.shape
        tree = np.arange(trees)[:, None]
        first, row = tree * nodes, np.arange(len(rows)) * rows.shape[1]
        at = np.zeros((trees, len(rows)), np.int64)
        for _ in range(nodes.bit_length()):
            # Places in whole arrays, which are found in a third of the time that pairs take.
            node = first + at
            less = rows.take(self.feature.take(node) + row) < self.threshold.take(node)
            at = 2 * at + 2 - less
        leaves = self.leaf.take(tree * (nodes + 1) + at - nodes).astype(np.float64)
        # In the order of the trees, however many rows there are. numpy sums by pairs along the
        # fastest axis alone, which of one row is that of the trees.
        return leaves.sum(axis=0) if len(rows) > 1 else np.add.accumulate(leaves)[-1]

    def text(self) -> str:
        """Format as JSON, with a tree on each line."""
        head = {
            "version": VERSION,
            "device": self.device,
            "kernels": self.kernels,
            "features": list(NAMES),
        }
        lines = [
            json.dumps([row.tolist() for row in tree], separators=(",", ":"))
            for tree in zip(self.feature, _short(self.threshold), _short(self.leaf), strict=True)
        ]
        fields = ",\n".join(f" {json.dumps(key)}: {json.dumps(each)}" for key, each in head.items())
        return "{\n" + fields + ',\n "trees": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def _short(values: np.ndarray) -> np.ndarray:
    """Round float32 to float64 whose text has only the digits that tell float32 apart."""
    return np.array([[float(f"{each:.9g}") for each in row] for row in values])


def read(text: str, where: str) -> Trees:
    """Read what `Trees.text` wrote; refuses trees that were learned from other features.

    `where` is the file or name in refusals.
    """
    try:
        found = schema.read(_Stored, text, version=VERSION, key="version")
    except Damaged as error:
        raise _refuse(where, error.found, error.limit) from error
    if found.features != NAMES:
        raise _refuse(where, f"{len(found.features)} other features", "those of this package")
    nodes = len(found.trees[0][0]) if found.trees else 0
    sizes = {tuple(map(len, each)) for each in found.trees}
    if nodes & (nodes + 1) or sizes != {(nodes, nodes, nodes + 1)}:
        raise _refuse(where, f"trees of {sorted(sizes)} nodes and leaves", "complete trees")
    parts = list(zip(*found.trees, strict=True))
    feature = np.array(parts[0], np.int64).reshape(-1, nodes)
    threshold, leaf = (np.array(each, np.float32) for each in parts[1:])
    return Trees(found.device, found.kernels, feature, threshold, leaf)


def trees_of(name: str) -> Trees | None:
    """Load the packaged trees of a device, such as ``"nvidia-h100"``; None if none were learned."""
    path = DIRECTORY / f"{name}.json"
    return _packaged(path) if path.exists() else None


@lru_cache(maxsize=8)
def _packaged(path: Path) -> Trees:
    return read(path.read_text(encoding="utf-8"), str(path))


# Terms that users add to the estimate, for what their own use of kernels costs.


@dataclass(frozen=True)
class OwnTerm:
    """A term that is added to the time of every kernel of a chain or cascade, and of not fusing.

    What was learned from measured kernels knows nothing of it: it says what measurements did not
    have, such as gaps between launches.

    Parameters
    ----------
    name : str
        As explanations show it; none of the estimate's own.
    time : Callable
        Microseconds of (kernel, shape, device): a number, or an array with an entry for each of
        many kernels, whose fields are arrays then. The kernel is None for separate kernels of a
        library, see `crossfuse.planner.families.EAGER`. Of a cascade kernel and shape are
        `crossfuse.planner.families.family.CascadeKernel` and
        `crossfuse.planner.cascade.shape.CascadeShape`. Whichever it is, ``kernel.family`` is its
        family, ``len(kernel.kernels(shape))`` its launches, and ``shape.separate`` those of
        separate kernels.

    Raises
    ------
    PlanRefused
        If the estimate has a term of that name.

    Examples
    --------
    >>> from dataclasses import replace
    >>> import crossfuse
    >>> from crossfuse.hardware import device
    >>> from crossfuse.planner.cost.rates import rates_of
    >>> def gap(kernel, shape, device):
    ...     return 3.0 * (shape.separate if kernel is None else len(kernel.kernels(shape)))
    >>> rates = replace(rates_of(device("nvidia-h100")), own=(OwnTerm("gap", gap),))
    >>> crossfuse.plan("G1", rates=rates).terms["gap"]
    3.0
    >>> crossfuse.plan("R7", rates=rates).terms["gap"]
    3.0
    """

    name: str
    time: Callable[[Any, Any, Device], Share]

    def __post_init__(self) -> None:
        if self.name in (*TERMS, *CASCADE_TERMS):
            raise refuse(
                PlanRefused,
                "own-term",
                f"term '{self.name}'",
                found="the name of a term of the estimate",
                limit="a name of its own, since both are added",
                instead="take another name; to change the estimate's own term, change its rates",
            )
