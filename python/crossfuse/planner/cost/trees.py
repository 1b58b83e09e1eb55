"""Trees that were learned from measured kernels, as arrays.

They are grown by xgboost (`crossfuse.planner.cost.grow`), and only read here: a plan must not
depend on whether xgboost is installed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np

from crossfuse import schema
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.planner.cost.features import NAMES
from crossfuse.schema import Between, Count, Damaged

VERSION = 1
DIRECTORY = Path(__file__).parent / "learned"
_Column = Annotated[int, Between(0, len(NAMES) - 1)]
#: Rows whose places in all trees are in a core's cache.
_AT_ONCE = 64
#: Logarithm of a ratio of times.
_Leaf = Annotated[float, Between(-50, 50)]


@dataclass(frozen=True)
class _Stored:
    """What a file of them says: of each tree its features, thresholds and leaves."""

    device: str
    kernels: Count
    features: tuple[str, ...]
    trees: tuple[tuple[tuple[_Column, ...], tuple[float, ...], tuple[_Leaf, ...]], ...]


@dataclass(frozen=True, eq=False)
class Trees:
    """Complete binary trees of one depth, whose leaves add up.

    Attributes
    ----------
    device : str
        Target name of the device that the kernels were measured on.
    kernels : int
        How many of them there were.
    feature : np.ndarray
        int64 of [tree, node]: the column of `crossfuse.planner.cost.features` that a node asks for.
        The nodes below node i are 2 i + 1 (less than the threshold) and 2 i + 2.
    threshold : np.ndarray
        float32 of [tree, node].
    leaf : np.ndarray
        float32 of [tree, leaf], from left to right.
    """

    device: str
    kernels: int
    feature: np.ndarray
    threshold: np.ndarray
    leaf: np.ndarray

    def sum(self, rows: np.ndarray) -> np.ndarray:
        """Add up the leaves that rows of features end in.

        Parameters
        ----------
        rows : np.ndarray
            float32 of [candidate, feature].

        Returns
        -------
        np.ndarray
            float64 of [candidate]: the logarithm of measured over estimated time.
        """
        parts = [self._sum(rows[at : at + _AT_ONCE]) for at in range(0, len(rows), _AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _sum(self, rows: np.ndarray) -> np.ndarray:
        """Of some rows, in all trees at once: most plans are priced one by one."""
        trees, nodes = self.feature.shape
        tree = np.arange(trees)[:, None]
        first, row = tree * nodes, np.arange(len(rows)) * rows.shape[1]
        at = np.zeros((trees, len(rows)), np.int64)
        for _ in range(nodes.bit_length()):
            # Places in whole arrays, which are found in a third of the time that pairs take.
            node = first + at
            less = rows.take(self.feature.take(node) + row) < self.threshold.take(node)
            at = 2 * at + 2 - less
        leaves = self.leaf.take(tree * (nodes + 1) + at - nodes)
        # In the order of the trees, however many rows there are: a sum would take pairs of one row.
        return np.add.accumulate(leaves, axis=0, dtype=np.float64)[-1]

    def text(self) -> str:
        """As JSON, a tree a line."""
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
    """As float64 whose text has the digits that a float32 tells apart."""
    return np.array([[float(f"{each:.9g}") for each in row] for row in values])


def read(text: str, where: str) -> Trees:
    """Read what `Trees.text` wrote.

    Parameters
    ----------
    text : str
        JSON.
    where : str
        File or name that refusals show.

    Raises
    ------
    EnvironmentRefused
        If it is damaged, or was learned from other features than there are now.
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
    """The trees that come with the package, of one device; None if none were learned.

    Parameters
    ----------
    name : str
        Target name, such as ``"nvidia-h100"``.
    """
    path = DIRECTORY / f"{name}.json"
    return _packaged(path) if path.exists() else None


@lru_cache(maxsize=8)
def _packaged(path: Path) -> Trees:
    return read(path.read_text(encoding="utf-8"), str(path))


def _refuse(where: str, found: str, limit: str) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        "learned-trees",
        where,
        found=found,
        limit=limit,
        instead="learn them again: python scripts/fit_costs.py",
    )
