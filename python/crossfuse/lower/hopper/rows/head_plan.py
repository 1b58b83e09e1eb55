"""Whether a product begins with raw rows, while a warpgroup of its own makes the others.

Until the rows of its tile have come, a CTA that waits for them has its tensor cores idle, and soon
its memory too: the ring of weights is full. Where rows are raw elements times a factor (see
`scaled`), the first steps multiply what needs no row to be known. They are as many as left stages
but one: those have all come when weights have, and the one left takes the first tile of rows::

    load          | w w w w  w w w w w ...           | x x x x | made made made ...
    make rows     | rows of this CTA, their factors, flags
    multiply      |   gains, x 4 | x w x w x w x w | times factors | made w made w ...

On an H100 a norm before 256 x 4096 by 12288 takes 41.8 us so, and 42.6 if its first step waits; the
product alone takes 39.4 (docs/hopper-measured.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crossfuse.lower.hopper.plan.operand import item_bytes
from crossfuse.lower.image import BufferSpec, TensorMap

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.phase import PhasePlan
    from crossfuse.lower.hopper.rows.program import RowProgram

#: Name, before the kernel's number, of the factors of all rows.
FACTORS = "crossfuse_factors"
#: Stages of right tiles on their way at first, until twice as many as the head has steps are asked
#: for: rows, flags and raw tiles wait behind them. On an H100 that norm is as fast with one or
#: three, others are slower with one; with all six at once it takes 0.8 us more.
ON_THEIR_WAY = 2
#: Sums of a thread that leave room in the 128 registers of four warpgroups.
_MOST_SUMS = 96
#: Warpgroups that multiply, and rows that one more makes side by side at most.
_MULTIPLYING, _AT_ONCE = 2, 2
#: Words that one of its threads holds of all that these rows are made of: 60 are spilled.
_MOST_WORDS = 56


@dataclass(frozen=True)
class HeadPlan:
    """The first steps of a product, and who makes rows meanwhile.

    Attributes
    ----------
    steps : int
        Steps of raw rows.
    raw : TensorMap
        Descriptor of copies of their left tiles.
    at_once : int
        Rows that the warpgroup of rows makes side by side: all that the CTA makes.
    factors : BufferSpec
        Of all rows, in global memory.
    """

    steps: int
    raw: TensorMap
    at_once: int
    factors: BufferSpec


def plan_head(phase: PhasePlan, ctas: int, stages: int, number: int) -> HeadPlan | None:
    """Plan a head, if a product has rows and tiles that allow it.

    Parameters
    ----------
    phase : PhasePlan
        The product.
    ctas : int
        Of the kernel, which share all rows.
    stages : int
        Of left tiles.
    number : int
        Of the kernel in its function.

    Returns
    -------
    HeadPlan | None
        None if rows are no raw elements times a factor, their type has fewer exponents than the
        factor needs, or registers are few.
    """
    rows, left = phase.program.rows, phase.left
    if rows is None or rows.scaled is None or left is None:
        return None
    source = rows.scaled.source
    loaded = {str(each.ty.dtype) for each in (source, *rows.scaled.vectors)}
    if {left.tile.dtype, *loaded} != {"bfloat16"}:
        return None
    if list(map(int, source.ty.shape)) != list(map(int, rows.buffer.ty.shape)):
        return None
    at_once, steps = -(-rows.rows // ctas), stages - 1
    fits = phase.blocks == 1 and phase.sums <= _MOST_SUMS and phase.consumers == _MULTIPLYING
    fits = fits and at_once <= _AT_ONCE and _words(rows, at_once) <= _MOST_WORDS
    if not fits or steps >= phase.program.contraction.steps:
        return None
    raw = replace(left.map, name=f"{source.name}_raw_map", buffer=str(source.name))
    factors = BufferSpec(f"{FACTORS}_{number}", (rows.rows,), "float32", True)
    return HeadPlan(steps, raw, at_once, factors)


def _words(rows: RowProgram, at_once: int) -> int:
    """Registers of a thread that makes rows side by side: what they share, it has once."""
    copies = [at_once if len(each.ty.shape) > 1 else 1 for each in rows.read]
    sizes = [item_bytes(str(each.ty.dtype)) for each in rows.read]
    size = sum(n * size for n, size in zip(copies, sizes, strict=True))
    return rows.columns * size // (4 * rows.threads)
