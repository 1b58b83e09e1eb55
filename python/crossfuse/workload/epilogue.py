"""Operations on the products' sums besides the activation: scales, biases, a residual."""

from __future__ import annotations

from typing import Protocol

from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.refusal import one_of, refused

#: Products that a bias or a scale belongs to, as specs write them.
PRODUCTS = ("first", "last", "first+last")
#: Types of a residual: that of the inputs, or that of the output.
RESIDUALS = ("in", "out")
#: Type of biases where inputs are too narrow for them: what torch has beside 8-bit weights.
_BIAS_OF_8_BITS = "bfloat16"


class Described(Protocol):
    """The part of a spec that the epilogue depends on: see `WorkloadSpec`."""

    @property
    def kind(self) -> str:
        """Kind of the workload."""

    @property
    def N(self) -> int:
        """Columns of the first products."""

    @property
    def dtype(self) -> str:
        """Type of the inputs."""

    @property
    def out(self) -> str:
        """Type of the output."""

    @property
    def residual(self) -> str:
        """Type of the residual as written; empty for none."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names of the products, in order."""

    @property
    def output(self) -> tuple[int, int]:
        """Shape of the output."""


def canonical(spec: Described, name: str) -> str:
    """The canonical spelling of which products have a bias or scale (`name`); empty for none.

    It is one of `PRODUCTS`, ``"last"`` for the only product of a gemm; others raise
    `WorkloadRefused`.
    """
    value = str(getattr(spec, name))
    if not value:
        return value
    value = {"last+first": "first+last"}.get(value, value)
    one_of(name, value, PRODUCTS)
    if spec.kind != "gemm":
        return value
    if value == "first+last":
        raise refused(
            f"workload-{name}",
            f"gemm:{name}",
            value,
            "last, because gemm has one product",
            f"write {name}=last, or kind gemm_chain",
        )
    return "last"


def residual(spec: Described) -> str:
    """The canonical spelling of a residual's type, of `RESIDUALS`; empty for none.

    Anything else raises `WorkloadRefused`.
    """
    if not spec.residual:
        return ""
    one_of("residual", spec.residual, RESIDUALS)
    return "out" if spec.dtype == spec.out else spec.residual


def affine(spec: Described, product: str) -> tuple[str, str]:
    """Names of the scale and the bias of a product; each is empty where there is none.

    Of ``"gemm0_gate"`` they are ``("scale0_gate", "bias0_gate")``.
    """
    place = "last" if product == spec.products[-1] else "first"
    scale, bias = (
        product.replace("gemm", name) if place in getattr(spec, name).split("+") else ""
        for name in ("scale", "bias")
    )
    return scale, bias


def further_operands(spec: Described) -> tuple[Operand, ...]:
    """Inputs besides A and the weights, in the order of the function's parameters.

    They are each product's scale, [1] of float32, and its bias, a row; then the residual.
    """
    found: list[Operand] = []
    wide = float_type(spec.dtype).size > 1
    for product in spec.products:
        scale, bias = affine(spec, product)
        columns = spec.output[1] if product == spec.products[-1] else spec.N
        if scale:
            found.append(Operand(scale, (1,), "float32"))
        if bias:
            found.append(Operand(bias, (columns,), spec.dtype if wide else _BIAS_OF_8_BITS))
    if spec.residual:
        dtype = spec.out if spec.residual == "out" else spec.dtype
        found.append(Operand("residual", spec.output, dtype))
    return tuple(found)
