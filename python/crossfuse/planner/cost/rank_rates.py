"""What was measured of the GPUs of a group: how long collectives over them take, and copies.

Records are of a kind of GPU and a number of ranks. ``crossfuse calibrate`` makes one, where
torchrun runs it in a process for each GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from crossfuse.files import read_text, sha256
from crossfuse.hardware import record_path
from crossfuse.planner.cost.rates import DIRECTORY, refuse_record
from crossfuse.schema import Damaged, FileName, parse, typed

VERSION = 1
#: Bytes of each GPU's tensor, microseconds of our kernels, and of NCCL's.
Points = tuple[tuple[int, float, float], ...]
#: Collectives of which a record has points, and those in which a GPU loads slices of tensors.
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SLICED = ("reduce_scatter", "all_to_all")
#: Limits of microseconds, and of bytes that are copied in one of them.
_TIMES, _COPIED = (0.1, 1e7), (1e2, 1e7)


@dataclass(frozen=True)
class CollectiveTimes:
    """Microseconds of a collective, by what was measured of some number of ranks."""

    points: Points
    #: Whether GPUs load only a slice of the others' tensors.
    sliced: bool = False
    ranks: int = 2

    def kernels(self, size: int, ranks: int) -> float:
        """Microseconds of ours for tensors of `size` bytes: each GPU loads from all others."""
        loaded = size * self._loads(ranks) / self._loads(self.ranks)
        return _between([(each, time) for each, time, _ in self.points], loaded)

    def nccl(self, size: int) -> float:
        """Microseconds of NCCL's; over more GPUs at least as many as over those measured."""
        return _between([(each, time) for each, _, time in self.points], size)

    def _loads(self, ranks: int) -> float:
        return (ranks - 1) / (ranks if self.sliced else 1)


def _between(points: Sequence[tuple[int, float]], size: float) -> float:
    """The line through the two points next to a size; fewer bytes than the first take as long."""
    pairs = [*pairwise(points)]
    (low, begin), (high, end) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return begin + max(0, size - low) * (end - begin) / (high - low)


@dataclass(frozen=True)
class RankRates:
    """What GPUs of a kind do together, in CUDA graphs."""

    #: Target name, see `crossfuse.hardware.device`.
    name: Annotated[str, FileName]
    ranks: int
    #: Bytes that copy engines write to another GPU's memory in a microsecond.
    copied: float
    all_reduce: Points
    all_gather: Points
    reduce_scatter: Points
    all_to_all: Points
    #: Provenance: GPUs, versions, date, commit.
    machine: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION
    #: What was measured, where these are another number of ranks.
    measured: int = 0

    def times(self, collective: str) -> CollectiveTimes:
        """Times of a collective, by its name."""
        points = getattr(self, collective)
        return CollectiveTimes(points, collective in _SLICED, self.measured or self.ranks)

    def text(self) -> str:
        """Format as the JSON text of a file, with each point on a line of its own."""
        fields = {key: value for key, value in asdict(self).items() if key != "measured"}
        parts = (f"  {json.dumps(key)}: {_lines(value)}" for key, value in fields.items())
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @property
    def digest(self) -> str:
        """Hash of what estimates depend on."""
        return sha256(self.text().encode())[:12]


def _lines(value: object) -> str:
    if not isinstance(value, tuple):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"


def rank_rates(name: str, ranks: int) -> RankRates:
    """The record of a kind of GPU and a number of ranks: its user's, or that of as many H200.

    Two and four H200 were measured, and stand for other kinds of GPU. Four stand for more: each of
    ours is taken to load as many times as much, and NCCL to be no slower.
    """
    path = rank_record_path(name, ranks)
    if path.exists():
        return load_ranks(path)
    shipped = _shipped(_SHIPPED[0] if ranks <= _SHIPPED[0] else _SHIPPED[1])
    return replace(shipped, ranks=ranks, measured=shipped.ranks)


def rank_record_path(name: str, ranks: int) -> Path:
    """Where ``crossfuse calibrate`` stores what it measured of GPUs together."""
    return record_path(f"{name}-x{ranks}")


#: Ranks of which H200 were measured.
_SHIPPED = (2, 4)


@lru_cache(maxsize=2)
def _shipped(ranks: int) -> RankRates:
    return load_ranks(DIRECTORY / "ranks" / f"nvidia-h200-x{ranks}.json")


def load_ranks(path: Path) -> RankRates:
    """Read a record from a file, and check it."""
    where = str(path)
    try:
        value = parse(read_text(path))
        version = value.get("version") if isinstance(value, Mapping) else None
        if version != VERSION:
            raise refuse_record("stale", where, f"version {version}", f"version {VERSION}")
        found = typed(RankRates, value)
    except Damaged as error:
        raise refuse_record("corrupt", where, error.found, error.limit) from None
    _check("copied", found.copied, _COPIED, where)
    for name in MEASURED:
        points = getattr(found, name)
        sizes = [size for size, *_ in points]
        if len(points) < _FEWEST or sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise refuse_record(
                "corrupt", f"{name} of {where}", f"sizes {sizes[:4]}", "two sizes or more, in order"
            )
        for _, *times in points:
            for each in times:
                _check(name, each, _TIMES, where)
    return found


#: Points of a line.
_FEWEST = 2


def _check(name: str, value: float, limits: tuple[float, float], where: str) -> None:
    least, most = limits
    if not least <= value <= most:
        raise refuse_record("absurd", f"{name} of {where}", value, f"{least:g} to {most:g}")
