"""The floating-point types of workloads: names, rounding unit and range."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from crossfuse.errors import WorkloadRefused, refuse

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class FloatType:
    """A floating-point format."""

    #: The name that TVM, numpy and ml_dtypes share, such as ``"bfloat16"``.
    name: str
    #: Bytes of an element.
    size: int
    #: Largest relative error of rounding to nearest: half the spacing of values just above 1.
    unit: float
    #: Largest finite value.
    largest: float
    #: Smallest positive value, a denormal.
    smallest: float
    #: Other spellings that a spec may use.
    aliases: tuple[str, ...]

    @property
    def numpy(self) -> np.dtype:
        """The numpy type."""
        return numpy_type(self.name)

    def holds(self, other: FloatType) -> bool:
        """Whether a cast from another type loses neither digits nor range."""
        return self.unit <= other.unit and self.largest >= other.largest


_TYPES = (
    FloatType("float16", 2, 2.0**-11, 65504.0, 2.0**-24, ("f16", "fp16", "half")),
    FloatType("bfloat16", 2, 2.0**-8, (2 - 2.0**-7) * 2.0**127, 2.0**-133, ("bf16",)),
    FloatType("float32", 4, 2.0**-24, (2 - 2.0**-23) * 2.0**127, 2.0**-149, ("f32", "fp32")),
    FloatType("float8_e4m3fn", 1, 2.0**-4, 448.0, 2.0**-9, ("e4m3", "e4m3fn", "float8_e4m3")),
    FloatType("float8_e5m2", 1, 2.0**-3, 57344.0, 2.0**-16, ("e5m2",)),
)


def numpy_type(name: str) -> np.dtype:
    """The numpy type of TVM's name of a type; those that numpy itself lacks come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


FLOAT_TYPES = {kind.name: kind for kind in _TYPES}


def loses(dtype: str, own: Iterable[str]) -> bool:
    """Whether a cast to a type loses digits or range that a model of some types of its own keeps.

    A model of one type may be computed in more digits, and is the better for it: casts between are
    left out. What goes through a type of less than any of its own was quantised or saturated on
    purpose.
    """
    kinds = [FLOAT_TYPES[each] for each in own if each in FLOAT_TYPES]
    if dtype not in FLOAT_TYPES or not kinds:
        return False
    return not any(FLOAT_TYPES[dtype].holds(each) for each in kinds)


_BY_SPELLING = {spelling: kind for kind in _TYPES for spelling in (kind.name, *kind.aliases)}


def float_type(spelling: str, where: str = "dtype") -> FloatType:
    """The format of a name or an alias, such as ``"bf16"``.

    Integers, float64 and unknown names raise `WorkloadRefused`, whose message has `where`.
    """
    if spelling in _BY_SPELLING:
        return _BY_SPELLING[spelling]
    raise refuse(
        WorkloadRefused,
        "workload-dtype",
        where,
        found=repr(spelling),
        limit="one of " + ", ".join(FLOAT_TYPES),
        instead=closest(spelling, _BY_SPELLING, "choose one of these"),
    )


def is_float(dtype: str) -> bool:
    """Whether TVM's name of a type is that of a floating-point type."""
    return dtype.startswith(("float", "bfloat"))


def closest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Advice to write the known word closest to `word`, whatever its case; else `otherwise`.

    It is a clause for `crossfuse.errors.Refusal.instead`.
    """
    folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), folded, n=1)
    return f"write {folded[matches[0]]!r}" if matches else otherwise


# Operands of a workload, as values.


@dataclass(frozen=True)
class Operand:
    """An input or output of a function, stored row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * (4 if self.dtype == "int32" else float_type(self.dtype).size)

    @property
    def numpy(self) -> np.dtype:
        """The numpy type of an element."""
        return numpy_type(self.dtype)


def stored(operands: Sequence[Operand], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Round values by name to the types of operands, in their order and row-major."""
    import numpy as np

    return {e.name: np.ascontiguousarray(values[e.name]).astype(e.numpy) for e in operands}


def zeros_behind(shape: Sequence[int], elements: int) -> int:
    """How many zeros behind each row make a tensor of so many elements one of these extents.

    Examples
    --------
    >>> zeros_behind((131, 72), 131 * 65)  # [131, 65] becomes [131, 72]
    7
    >>> zeros_behind((), 1)  # a number
    0
    """
    if not shape:
        return 0
    *outer, inner = shape
    return inner - elements // prod(outer)
