"""Cascades of reductions over rows as values: the computation and its operands.

`crossfuse.workload.cascade_products` has those with matrix products, and
`crossfuse.workload.cascades` reads all of them from text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar

from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.refusal import refused

#: What normalisations add under the root.
EPSILON = 1e-5

# Linear indices are int32 in the functions that are built from a spec.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class CascadeSpec(ABC):
    """Base of all cascades, which checks extents and types and refuses with `WorkloadRefused`."""

    kind: ClassVar[str] = ""

    #: Type of the inputs.
    dtype: str = "bfloat16"
    #: Type of outputs as large as a row or a column; `dtype` unless given. An output of one number
    #: for each row is float32.
    out: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", float_type(self.dtype).name)
        object.__setattr__(self, "out", float_type(self.out or self.dtype, "out").name)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and (type(value) is not int or value < 1):
                where, limit = f"{self.kind}:{each.name}", "a positive integer"
                raise refused("workload-extent", where, value, limit, f"write {each.name}=16, say")
        for operand in (*self.operands, *self.outputs):
            if operand.elements > _MOST_ELEMENTS:
                found = f"{operand.elements} elements"
                limit = f"{_MOST_ELEMENTS}, so that int32 can index them"
                where = f"{self.kind}:{operand.name}"
                raise refused("workload-extent", where, found, limit, "compute it in slices")

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, in the order of the function's parameters."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[Operand, ...]:
        """Outputs, which follow the inputs."""

    @property
    def bytes(self) -> int:
        """Bytes of all inputs and outputs: the least that a kernel moves."""
        return sum(_bytes(each) for each in (*self.operands, *self.outputs))

    def __str__(self) -> str:
        """Canonical text; `crossfuse.workload.cascades.parse` reads it back to an equal spec."""
        plain = {each.name: each.default for each in fields(self)} | {"out": self.dtype}
        extents = [each.name for each in fields(self) if each.name not in ("dtype", "out")]
        pairs = ((name, getattr(self, name)) for name in (*extents, "dtype", "out"))
        kept = (f"{key}={value_text(value)}" for key, value in pairs if plain[key] != value)
        return f"{self.kind}:" + ",".join(kept)


@dataclass(frozen=True, kw_only=True)
class Softmax(CascadeSpec):
    """``y[i,l] = exp(x[i,l] - max x[i]) / sum exp(x[i] - max x[i])``."""

    kind: ClassVar[str] = "softmax"

    rows: int
    cols: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """One matrix."""
        return (Operand("x", (self.rows, self.cols), self.dtype),)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """One of the same shape."""
        return (Operand("y", (self.rows, self.cols), self.out),)


@dataclass(frozen=True, kw_only=True)
class LogSoftmax(Softmax):
    """``y[i,l] = x[i,l] - max x[i] - log sum exp(x[i] - max x[i])``."""

    kind: ClassVar[str] = "log_softmax"


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(CascadeSpec):
    """``loss[i] = log sum exp(x[i]) - x[i, labels[i]]``."""

    kind: ClassVar[str] = "cross_entropy"

    rows: int
    cols: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Logits and labels."""
        logits = Operand("x", (self.rows, self.cols), self.dtype)
        return (logits, Operand("labels", (self.rows,), "int32"))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """A number for each row."""
        return (Operand("loss", (self.rows,), "float32"),)


@dataclass(frozen=True, kw_only=True)
class Norm(CascadeSpec):
    """Rows that are normalised and scaled; with a residual, of ``h = x + residual``."""

    #: What rows are scaled by and moved to.
    parameters: ClassVar[tuple[str, ...]] = ()

    rows: int
    cols: int
    #: Whether a second matrix is added first. The sum is an output too: the next layer adds to it.
    #: It is rounded where it is stored; what is normalised is not.
    residual: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Rows, the residual if any, and the parameters."""
        added = ("residual",) * self.residual
        rows = (Operand(name, (self.rows, self.cols), self.dtype) for name in ("x", *added))
        return (*rows, *(Operand(name, (self.cols,), self.dtype) for name in self.parameters))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The sum if there is a residual, and the normalised rows."""
        summed = (Operand("h", (self.rows, self.cols), self.dtype),) * self.residual
        return (*summed, Operand("y", (self.rows, self.cols), self.out))


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm):
    """``y = (x - mean) / sqrt(variance + 1e-5) * weight + bias`` of each row."""

    kind: ClassVar[str] = "layernorm"
    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Norm):
    """``y = x / sqrt(mean(x**2) + 1e-5) * weight`` of each row."""

    kind: ClassVar[str] = "rmsnorm"
    parameters: ClassVar[tuple[str, ...]] = ("weight",)


@dataclass(frozen=True, kw_only=True)
class Variance(CascadeSpec):
    """``variance[i] = sum (x[i] - mean x[i])**2 / cols``."""

    kind: ClassVar[str] = "variance"

    rows: int
    cols: int
    dtype: str = "float32"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """One matrix."""
        return (Operand("x", (self.rows, self.cols), self.dtype),)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """A number for each row."""
        return (Operand("variance", (self.rows,), "float32"),)


@dataclass(frozen=True, kw_only=True)
class MomentOfInertia(CascadeSpec):
    """``inertia[i] = sum m * |r - c|**2`` about the centre of mass ``c = sum m * r / sum m``.

    No mass is negative.
    """

    kind: ClassVar[str] = "moment_of_inertia"

    bodies: int
    points: int
    dtype: str = "float32"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Masses and coordinates of the points of each body."""
        shape = (self.bodies, self.points)
        return tuple(Operand(name, shape, self.dtype) for name in ("mass", "x", "y", "z"))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """A number for each body."""
        return (Operand("inertia", (self.bodies,), "float32"),)


def _bytes(operand: Operand) -> int:
    size = 4 if operand.dtype == "int32" else float_type(operand.dtype).size
    return prod(operand.shape) * size


def value_text(value: object) -> str:
    """A value as specs spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
