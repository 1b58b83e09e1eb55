"""What a cascade becomes: a state, and how it is begun, updated, merged and finished.

The state is a tuple of slots. Expressions of a slot use

``m``      the slot m of the state so far,
``m'``     the slot m after this step (of slots that come earlier in the order; `new`),
``m_a``, ``m_b``   the slots of the two states that are merged (`left`, `right`),

beside the cascade's elements and invariants. One step takes in a tile of any number of elements::

    for slot in slots:    # in order
        slot' = carry  (+)  reduce over the tile of contribution

and two states merge as ``slot' = merge``. Every segment of the axis may be reduced on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from crossfuse.cascade.spec import Cascade, Monoid


@dataclass(frozen=True)
class Slot:
    """One number of the state (of ``topk``: k numbers and their indices).

    Attributes
    ----------
    name : str
        Such as ``"m"``.
    monoid : Monoid
        What carry and contributions are combined with.
    contribution : sympy.Expr
        What one element brings, over elements, invariants, new values of earlier slots and values
        so far.
    carry : sympy.Expr
        The value so far as seen from the new values of earlier slots: ``s*exp(m - m')``. The
        slot's own symbol alone where nothing is to be corrected.
    merge : sympy.Expr | None
        The merged value, over `left`, `right` and new values of earlier slots; None for
        ``argmax``, ``argmin`` and ``topk``, whose states merge as their elements do.
    init : sympy.Expr
        The value of no elements.
    guard : sympy.Expr | None
        What other slots, results and rows use in place of the slot's new value, over `new` of the
        slot: 0 where a maximum is -oo, 1 where a largest magnitude is 0. None: the value itself.
        Expressions name it `guarded`.
    """

    name: str
    monoid: Monoid
    contribution: sympy.Expr
    carry: sympy.Expr
    merge: sympy.Expr | None
    init: sympy.Expr
    guard: sympy.Expr | None = None

    @property
    def symbol(self) -> sympy.Symbol:
        """The value so far."""
        return value(self.name)

    @property
    def corrected(self) -> bool:
        """Whether a step changes what is there before it adds."""
        return self.carry != self.symbol


@dataclass(frozen=True)
class Factor:
    """One term ``G(x) * H(d)`` of a stage's term.

    Attributes
    ----------
    element : sympy.Expr
        G, over elements and invariants.
    context : sympy.Expr
        H, over results of earlier stages and invariants.
    slot : str
        The slot that reduces G, in whatever gauge it keeps.
    """

    element: sympy.Expr
    context: sympy.Expr
    slot: str


@dataclass(frozen=True)
class Step:
    """How one stage was derived.

    Attributes
    ----------
    stage : str
        Its name.
    pair : str
        The distributive pair, as text: ``"sum, *"``; empty for a stage of no earlier results.
    factors : tuple[Factor, ...]
        One for a separable term, several for a sum that was split.
    gauge : tuple[str, ...]
        Earlier results that correct the state while it streams.
    hoisted : tuple[str, ...]
        Earlier results that are applied once, to the finished state.
    correction : sympy.Expr | None
        The factor (or addend) of the carry, over `value` and `new`; None without one.
    proof : str
        How the separation was shown, in words.
    notes : tuple[str, ...]
        What else a reader should know: guards, identities, stable forms.
    """

    stage: str
    pair: str
    factors: tuple[Factor, ...]
    gauge: tuple[str, ...]
    hoisted: tuple[str, ...]
    correction: sympy.Expr | None
    proof: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derivation:
    """A cascade that streams.

    Attributes
    ----------
    cascade : Cascade
        What it was derived from.
    slots : tuple[Slot, ...]
        The state, in the order of updates.
    stages : Mapping[str, sympy.Expr]
        The result of each stage, over slots (`value`, `guarded`) and invariants.
    results : Mapping[str, sympy.Expr]
        As `Cascade.results`, over slots and invariants, defined for masked and zero rows too.
    rows : Mapping[str, sympy.Expr]
        As `Cascade.rows`, over elements, slots and invariants.
    steps : tuple[Step, ...]
        How, a stage each.
    exact : bool
        Whether real arithmetic gives what the two-pass definition gives. False where a type inside
        rounds (`reason`).
    reason : str
        Why not exact; empty if it is.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> found = derive(detect(func)[0].cascade)
    >>> [each.name for each in found.slots]
    ['m', 's']
    """

    cascade: Cascade
    slots: tuple[Slot, ...]
    stages: Mapping[str, sympy.Expr]
    results: Mapping[str, sympy.Expr] = field(default_factory=dict)
    rows: Mapping[str, sympy.Expr] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    exact: bool = True
    reason: str = ""

    def slot(self, name: str) -> Slot:
        """The slot of a name.

        Parameters
        ----------
        name : str
            Such as that of a reduction.

        Returns
        -------
        Slot
            The first of that name.
        """
        return next(each for each in self.slots if each.name == name)


def value(name: str) -> sympy.Symbol:
    """The slot in the state so far, or in the finished state."""
    return sympy.Symbol(name, real=True)


def new(name: str) -> sympy.Symbol:
    """The slot after the step that is being made."""
    return sympy.Symbol(f"{name}'", real=True)


def guarded(name: str) -> sympy.Symbol:
    """The new value, or what stands in for it where it has no inverse."""
    return sympy.Symbol(f"{name}~", real=True)


def left(name: str) -> sympy.Symbol:
    """The slot of the first of two states."""
    return sympy.Symbol(f"{name}_a", real=True)


def right(name: str) -> sympy.Symbol:
    """The slot of the second of two states."""
    return sympy.Symbol(f"{name}_b", real=True)
