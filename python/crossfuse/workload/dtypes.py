"""The floating-point types of workloads: names, rounding unit and range."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfuse.errors import WorkloadRefused, refuse

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class FloatType:
    """A floating-point format.

    Attributes
    ----------
    name : str
        The name that TVM, numpy and ml_dtypes share, such as ``"bfloat16"``.
    size : int
        Bytes per element.
    unit : float
        Largest relative error of rounding to nearest: half the spacing of values just above 1.
    largest : float
        Largest finite value.
    smallest : float
        Smallest positive value, a denormal.
    aliases : tuple[str, ...]
        Other spellings that a spec may use.
    """

    name: str
    size: int
    unit: float
    largest: float
    smallest: float
    aliases: tuple[str, ...]

    @property
    def numpy(self) -> np.dtype:
        """The numpy type; those that numpy itself lacks come from ml_dtypes."""
        import ml_dtypes
        import numpy as np

        return np.dtype(getattr(ml_dtypes, self.name, self.name))


_TYPES = (
    FloatType("float16", 2, 2.0**-11, 65504.0, 2.0**-24, ("f16", "fp16", "half")),
    FloatType("bfloat16", 2, 2.0**-8, (2 - 2.0**-7) * 2.0**127, 2.0**-133, ("bf16",)),
    FloatType("float32", 4, 2.0**-24, (2 - 2.0**-23) * 2.0**127, 2.0**-149, ("f32", "fp32")),
    FloatType("float8_e4m3fn", 1, 2.0**-4, 448.0, 2.0**-9, ("e4m3", "e4m3fn", "float8_e4m3")),
    FloatType("float8_e5m2", 1, 2.0**-3, 57344.0, 2.0**-16, ("e5m2",)),
)
FLOAT_TYPES = {kind.name: kind for kind in _TYPES}
_BY_SPELLING = {spelling: kind for kind in _TYPES for spelling in (kind.name, *kind.aliases)}


def float_type(spelling: str, where: str = "dtype") -> FloatType:
    """Look a format up by its name or an alias.

    Parameters
    ----------
    spelling : str
        Such as ``"bfloat16"`` or ``"bf16"``.
    where : str
        What the type is of, for the message.

    Returns
    -------
    FloatType
        The format.

    Raises
    ------
    WorkloadRefused
        Integers, float64 and unknown names.
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
    """Whether TVM's name of a type is that of floating-point numbers."""
    return dtype.startswith(("float", "bfloat"))


def closest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Advise the known word that resembles `word`, whatever its case.

    Parameters
    ----------
    word : str
        What was written.
    known : Iterable[str]
        What could have been meant.
    otherwise : str
        The advice when nothing is close.

    Returns
    -------
    str
        A clause for `crossfuse.errors.Refusal.instead`.
    """
    folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), folded, n=1)
    return f"write {folded[matches[0]]!r}" if matches else otherwise
