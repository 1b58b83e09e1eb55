"""Sums that were split into several, tried on rows whose parts might cancel.

``sum (x - s)`` is ``sum x - n s`` in real arithmetic; in float32 the two may leave nothing of a
small difference of large numbers. Distances avoid that where ``s`` is a mean or an extreme of x.
For what is left no identity says how large the parts are beside their sum, so the derivation is
run on rows far from zero, and refused if two passes are more exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from crossfuse.cascade.algebra.refusal import refused
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.spec import Cascade, Stage

#: Where numbers lie, and how far apart: together with zero, what a row may be about.
_PLACES = ((0.0, 1.0), (1.0, 1e-3), (100.0, 1.0), (1e4, 1.0), (1e4, 1e-2), (-1e3, 1.0))
#: What one element of a row is besides, in rows with an outlier.
_OUTLIER = 1e6
#: Rows of each kind, and elements of a row.
_ROWS, _LENGTH = 3, 96
#: How elements come: three threads, 16 at a time.
_SEGMENTS, _TILE = (32, 32, 32), 16
#: How many times the error of separate passes is taken for cancellation: that costs digits, where
#: other differences of rounding, of three rows, are within this.
_FACTOR = 3
#: Units of rounding that sums of these many elements may differ by when only their order does.
_UNITS = 4


def check(derivation: Derivation, split: Sequence[str]) -> None:
    """Refuse a derivation that loses digits which two passes keep.

    Parameters
    ----------
    derivation : Derivation
        What is tried.
    split : Sequence[str]
        Stages that were split.

    Raises
    ------
    CascadeRefused
        Naming the first of them that loses digits.
    """
    if not split:
        return
    import numpy as np

    from crossfuse.cascade.run import merge_tree, two_pass

    cascade = derivation.cascade
    kinds, single, double = _data(cascade)
    with np.errstate(all="ignore"):
        exact = two_pass(cascade, double)
        apart = two_pass(cascade, single)
        streamed = merge_tree(derivation, single, _SEGMENTS, _TILE)
        for name in split:
            known = np.isfinite(exact[name]) & np.isfinite(apart[name])
            size = np.abs(exact[name]) + two_pass(_magnitudes(cascade, name), double)[name]
            unfused, fused = (
                _worst(np.where(known, np.abs(each[name] - exact[name]), 0))
                for each in (apart, streamed)
            )
            rounding = _UNITS * np.finfo(np.float32).eps * _worst(np.where(known, size, 0))
            allowed = _FACTOR * unfused + rounding
            lost = ~(fused <= allowed)
            if lost.any():
                which = int(np.argmax(lost))
                raise _refusal(name, kinds[which], float(fused[which]), float(allowed[which]))


def _worst(rows: Any) -> Any:
    """The largest number of the rows of each kind."""
    return rows.reshape(-1, _ROWS).max(axis=1)


def _refusal(name: str, where: str, error: float, allowed: float) -> Exception:
    return refused(
        "cascade-cancels",
        name,
        found=f"a sum split into parts that cancel: of {where} it is {error:.2g} off in float32",
        limit=f"{_FACTOR} times the error of separate passes, {allowed:.2g} there",
        instead="take distances from a mean or an extreme of the same elements, or cut the cascade "
        "before this stage",
    )


def _magnitudes(cascade: Cascade, name: str) -> Cascade:
    """The cascade in which one stage sums magnitudes."""

    def changed(stage: Stage) -> Stage:
        return replace(stage, term=sympy.Abs(stage.term)) if stage.name == name else stage

    end = 1 + [each.name for each in cascade.stages].index(name)
    stages = tuple(map(changed, cascade.stages[:end]))
    return replace(cascade, stages=stages, results={}, rows={})


@dataclass(frozen=True)
class _Kind:
    """Rows of one kind: where some elements lie, how far apart, whether nearly equal to others."""

    about: float
    spread: float
    moved: tuple[sympy.Symbol, ...]
    alike: bool = False
    outlier: bool = False

    @property
    def text(self) -> str:
        names = ", ".join(str(each.name) for each in self.moved)
        nearly = " nearly equal" if self.alike else ""
        but = f", but one of {_OUTLIER:g}" if self.outlier else ""
        return f"rows of{nearly} {names} about {self.about:g}, {self.spread:g} apart{but}"


def _kinds(cascade: Cascade) -> list[_Kind]:
    free = [each for each in cascade.elements if each != cascade.index and not each.is_integer]
    found = [_Kind(*place, tuple(free)) for place in _PLACES]
    found += [_Kind(0.0, 1.0, (each,), outlier=True) for each in free]
    if len(free) > 1:
        found += [_Kind(*place, tuple(free), alike=True) for place in _PLACES]
        found += [_Kind(*place, (each,)) for each in free for place in _PLACES[3:]]
    return found


def _data(cascade: Cascade) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Rows of all kinds: what they are, in float32, and the same numbers in float64."""
    import numpy as np

    rng = np.random.default_rng(7)
    kinds = _kinds(cascade)
    shape = (len(kinds), _ROWS, _LENGTH)
    common = rng.standard_normal(shape)
    single: dict[str, Any] = {}
    for symbol in (*cascade.elements, *cascade.invariants):
        if symbol in (cascade.index, cascade.length):
            continue
        if symbol.is_integer:
            found = rng.integers(0, _LENGTH, shape).astype(np.float64)
        else:
            found = rng.standard_normal(shape)
            for number, kind in enumerate(kinds):
                if kind.alike:
                    found[number] = common[number] + 1e-3 * found[number]
                if symbol in kind.moved:
                    found[number] = kind.about + kind.spread * found[number]
                if symbol in kind.moved and kind.outlier:
                    found[number, :, _LENGTH // 2] = _OUTLIER
            found = np.abs(found) if symbol.is_nonnegative else found
        rows = found.reshape(-1, _LENGTH)
        rows = rows if symbol in cascade.elements else rows[:, 0]
        single[str(symbol.name)] = rows.astype(np.float32)
    double = {name: each.astype(np.float64) for name, each in single.items()}
    return [each.text for each in kinds], single, double
