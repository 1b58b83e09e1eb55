"""Chains of products as values; `crossfuse.workload.suites` reads them from text.

`crossfuse.workload.conv_chain` adds chains of convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

from crossfuse.calls import checked
from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.workload import expression
from crossfuse.workload.dtypes import Operand, closest, float_type

# Refusals of specs, and values that are read or refused.

_FLAGS = {"true": True, "false": False}
# Linear indices are int32.
_MOST_ELEMENTS = 2**31 - 1


def refused(rule: str, where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a workload; see `crossfuse.errors.Refusal`."""
    return refuse(WorkloadRefused, rule, where, found=found, limit=limit, instead=instead)


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `WorkloadRefused` for a word that is not known, advising the closest one.

    `what` names the kind of word in messages; what follows its last colon names the rule.
    """
    if value not in known:
        raise refused(
            "workload-" + what.rpartition(":")[2],
            what,
            repr(value),
            "one of " + ", ".join(known),
            closest(value, known, "choose one of these"),
        )


def read_extent(kind: str, name: str, text: str) -> int:
    """Read an extent from decimal digits; anything else raises `WorkloadRefused`."""
    # isdecimal alone would take digits of other scripts.
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise refused(
        "workload-extent", f"{kind}:{name}", text, "a positive integer", f"write {name}=128, say"
    )


def check_extent(kind: str, name: str, value: object, example: int) -> None:
    """Refuse an extent that is no positive integer."""
    if type(value) is not int or value < 1:
        where, limit = f"{kind}:{name}", "a positive integer"
        raise refused("workload-extent", where, value, limit, f"write {name}={example}, say")


def check_elements(kind: str, name: str, elements: int, instead: str) -> None:
    """Refuse more elements of a tensor than linear indices count in functions of specs."""
    if elements > _MOST_ELEMENTS:
        found, limit = f"{elements} elements", f"{_MOST_ELEMENTS}, so that int32 can index them"
        raise refused("workload-extent", f"{kind}:{name}", found, limit, instead)


def check_given(
    kind: str,
    needed: Sequence[str],
    options: Container[str],
    example: int,
    otherwise: str = "the extents you mean",
) -> None:
    """Refuse options that leave extents out."""
    missing = [name for name in needed if name not in options]
    if missing:
        found, limit = "no " + ", ".join(missing), "the extents " + ", ".join(needed)
        instead = "add " + ",".join(f"{name}={example}" for name in missing) + f" or {otherwise}"
        raise refused("workload-extent", kind, found, limit, instead)


def read_flag(kind: str, name: str, text: str) -> bool:
    """Read ``true`` or ``false``; anything else raises `WorkloadRefused`."""
    one_of(f"{kind}:{name}", text.lower(), tuple(_FLAGS))
    return _FLAGS[text.lower()]


#: What reads a text, by the type of a field.
_READERS: dict[Any, Callable[[str, str, str], Any]] = {"int": read_extent, "bool": read_flag}


def read_fields(kind: str, made: type, options: Mapping[str, str]) -> dict[str, Any]:
    """Read numbers and flags of a spec of the dataclass `made`; other fields stay texts."""
    readers = {each.name: _READERS.get(each.type) for each in fields(made)}
    return {
        name: text if (reader := readers[name]) is None else reader(kind, name, text)
        for name, text in options.items()
    }


KINDS = ("gated_ffn", "gemm_chain", "gemm", "gated_gemm", "conv_chain")
#: Kinds without a second product.
SINGLE = ("gemm", "gated_gemm")
LAYOUTS = ("kn", "nk")
COMBINERS = ("sum", "prod", "max", "min")
DIMS = ("M", "K", "N", "L")
#: Products that a bias or a scale belongs to, as specs write them.
PRODUCTS = ("first", "last", "first+last")
#: Types of a residual: that of the inputs, or that of the output.
RESIDUALS = ("in", "out")
#: Type of biases where inputs are too narrow for them: what torch has beside 8-bit weights.
_BIAS_OF_8_BITS = "bfloat16"

_DEFAULT_ACT = {
    "gated_ffn": "silu",
    "gemm_chain": "relu",
    "gemm": "identity",
    "gated_gemm": "silu",
    "conv_chain": "relu",
}
_DEFAULT_WEIGHTS = {
    "gated_ffn": "nk",
    "gemm_chain": "kn",
    "gemm": "kn",
    "gated_gemm": "nk",
    "conv_chain": "nk",
}


@checked
@dataclass(frozen=True)
class WorkloadSpec:
    """A chain of matrix products over row-major matrices, accumulated in float32.

    ``gemm``: E[M,N] = act(combine over k of A[M,k] * B[k,N]).
    ``gated_gemm``: E[M,N] = act(A @ B_gate) * (A @ B_up), the first half of a gated FFN.
    ``gemm_chain``: C[M,N] = act(A[M,K] @ B[K,N]); E[M,L] = C[M,N] @ D[N,L].
    ``gated_ffn``: C = act(A @ B_gate) * (A @ B_up); E = C @ D.

    A product P with a scale and a bias is ``P * scale[0] + bias[n]``, gate and up each with their
    own, before the activation. A residual is added to E last of all, after the activation of a
    ``gemm`` and the product of a ``gated_gemm``. All of this is in float32, in which nothing is
    rounded before E.

    Attributes
    ----------
    kind : str
        One of `kinds`.
    M, K, N, L : int
        Extents; L is 0 for ``gemm`` and ``gated_gemm``, which have no second product.
    dtype : str
        Type of the inputs and of the intermediate C, ``"bfloat16"`` unless given.
    act : str
        Activation: a name of `crossfuse.workload.expression.NAMED` or an expression in x;
        ``silu`` for gated kinds, ``relu`` for gemm_chain and ``identity`` for gemm unless given.
    weights : str
        Layout of every weight: ``"kn"`` row-major [K, N], or ``"nk"``, the [N, K] of
        ``torch.nn.Linear``; ``"nk"`` for gated kinds and ``"kn"`` for the others unless given.
    out : str
        Type of the output, `dtype` unless given.
    combine : str
        The reduction of ``gemm``, one of `COMBINERS`.
    bias : str
        Products that a bias is added to: ``"first"`` (of a gated FFN gate and up), ``"last"``,
        ``"first+last"``, or empty; the one product of ``gemm`` is its last, and so are both of
        ``gated_gemm``. Rows of `dtype`, of bfloat16 where `dtype` has 8 bits.
    scale : str
        Products that a float32 number, a tensor of one element, multiplies; as for `bias`.
    residual : str
        Type of the matrix that is added to the output: ``"in"`` for `dtype`, ``"out"`` for `out`,
        or empty for none.

    Raises
    ------
    WorkloadRefused
        A field that is missing, unknown, out of range or without meaning for the kind.

    Examples
    --------
    >>> spec = WorkloadSpec("gemm_chain", M=128, K=768, N=3072, L=768)
    >>> [(each.name, each.shape) for each in spec.operands]
    [('A', (128, 768)), ('B', (768, 3072)), ('D', (3072, 768))]
    """

    #: What `kind` may be.
    kinds: ClassVar[tuple[str, ...]] = KINDS[:4]

    kind: str
    M: int
    K: int
    N: int
    L: int = 0
    dtype: str = "bfloat16"
    act: str = ""
    weights: str = ""
    out: str = ""
    combine: str = "sum"
    bias: str = ""
    scale: str = ""
    residual: str = ""

    def __post_init__(self) -> None:
        one_of("kind", self.kind, self.kinds)
        values = {
            "dtype": float_type(self.dtype).name,
            "act": expression.canonical(self.act or _DEFAULT_ACT[self.kind]),
            "weights": self.weights or _DEFAULT_WEIGHTS[self.kind],
            "out": float_type(self.out or self.dtype, "out").name,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for name in ("bias", "scale"):
            object.__setattr__(self, name, _canonical(self, name))
        object.__setattr__(self, "residual", _residual(self))
        one_of("weights", self.weights, LAYOUTS)
        one_of("combine", self.combine, COMBINERS)
        _check_extents(self)
        if self.kind != "gemm" and self.combine != "sum":
            raise refused(
                "workload-combine",
                f"{self.kind}:combine",
                self.combine,
                "sum, because only gemm has a free choice of reduction",
                "write kind gemm, or leave combine out",
            )

    @property
    def gated(self) -> bool:
        """Whether the first layer is a gate and an up projection."""
        return self.kind in ("gated_ffn", "gated_gemm")

    @property
    def products(self) -> tuple[str, ...]:
        """Names of the products, in order."""
        first = ("gemm0_gate", "gemm0_up") if self.gated else ("gemm0",)
        return (*first, "gemm1") if self.L else first

    @property
    def weight_operands(self) -> tuple[Operand, ...]:
        """The weight of each product, as stored."""
        names = [each.replace("gemm0", "B").replace("gemm1", "D") for each in self.products]
        shapes = [(self.N, self.L) if each == "D" else (self.K, self.N) for each in names]
        stored = [each[::-1] if self.weights == "nk" else each for each in shapes]
        return tuple(Operand(*each, self.dtype) for each in zip(names, stored, strict=True))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """A, the weights, then what the epilogues read: the order of the parameters."""
        a = Operand("A", (self.M, self.K), self.dtype)
        return (a, *self.weight_operands, *further_operands(self))

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name, as stored, in the order of the function's parameters."""
        return {each.name: each.shape for each in self.operands}

    @property
    def output(self) -> tuple[int, int]:
        """Shape of the output."""
        return (self.M, self.L or self.N)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""
        first = 2 * self.M * self.N * self.K
        return first * (2 if self.gated else 1) + 2 * self.M * self.N * self.L

    def __str__(self) -> str:
        """Canonical text; `parse` reads it back to an equal spec."""
        plain: dict[str, str | int] = {
            "weights": _DEFAULT_WEIGHTS[self.kind],
            "out": self.dtype,
            "combine": "sum",
        }
        plain |= dict.fromkeys(("bias", "scale", "residual"), "")
        plain |= {"L": 0} if self.kind in SINGLE else {}
        plain |= {"act": "identity"} if self.kind == "gemm" else {}
        names = [each.name for each in fields(self) if each.name != "kind"]
        pairs = ((name, getattr(self, name)) for name in names)
        body = ",".join(f"{name}={value}" for name, value in pairs if plain.get(name) != value)
        return f"{self.kind}:{body}"


def dims_of(kind: str) -> tuple[str, ...]:
    """Extents that a spec of a kind must have."""
    return DIMS[:3] if kind in SINGLE else DIMS


def _check_extents(spec: WorkloadSpec) -> None:
    if spec.kind in SINGLE and spec.L:
        raise refused(
            "workload-extent",
            f"{spec.kind}:L",
            str(spec.L),
            f"M, K and N, because {spec.kind} has no second product",
            f"leave L out, or write kind {'gated_ffn' if spec.gated else 'gemm_chain'}",
        )
    for name in dims_of(spec.kind):
        check_extent(spec.kind, name, getattr(spec, name), 128)
    products = {"MxN": spec.M * spec.N, "MxL": spec.M * spec.L, "MxK": spec.M * spec.K}
    products |= {"KxN": spec.K * spec.N, "NxL": spec.N * spec.L}
    for name, size in products.items():
        check_elements(spec.kind, name, size, "compute the matrix in slices")


# Operations on the products' sums besides the activation: scales, biases, a residual.


def _canonical(spec: WorkloadSpec, name: str) -> str:
    """The canonical spelling of which products have a bias or scale (`name`); empty for none.

    It is one of `PRODUCTS`, ``"last"`` for all products of one operand alone; others raise
    `WorkloadRefused`.
    """
    value = str(getattr(spec, name))
    if not value:
        return value
    value = {"last+first": "first+last"}.get(value, value)
    one_of(name, value, PRODUCTS)
    if spec.kind not in SINGLE:
        return value
    if value == "first+last":
        has = "products of one operand" if spec.gated else "one product"
        raise refused(
            f"workload-{name}",
            f"{spec.kind}:{name}",
            value,
            f"last, because {spec.kind} has {has}",
            f"write {name}=last, or kind {'gated_ffn' if spec.gated else 'gemm_chain'}",
        )
    return "last"


def _residual(spec: WorkloadSpec) -> str:
    """The canonical spelling of a residual's type, of `RESIDUALS`; empty for none.

    Anything else raises `WorkloadRefused`.
    """
    if not spec.residual:
        return ""
    one_of("residual", spec.residual, RESIDUALS)
    return "out" if spec.dtype == spec.out else spec.residual


def affine(spec: WorkloadSpec, product: str) -> tuple[str, str]:
    """Names of the scale and the bias of a product; each is empty where there is none.

    Of ``"gemm0_gate"`` they are ``("scale0_gate", "bias0_gate")``.
    """
    place = "first" if spec.L and product != spec.products[-1] else "last"
    scale, bias = (
        product.replace("gemm", name) if place in getattr(spec, name).split("+") else ""
        for name in ("scale", "bias")
    )
    return scale, bias


def further_operands(spec: WorkloadSpec) -> tuple[Operand, ...]:
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


#: What texts of rows of layers begin with.
LAYERS = "layers"


@dataclass(frozen=True)
class LayersSpec:
    """Layers ``x = act(x @ W + b)``, the last of which has no activation.

    Attributes
    ----------
    M : int
        Rows.
    widths : tuple[int, ...]
        Columns of the input, then of what each layer makes; three or more.
    dtype, out : str
        Of all operands and intermediates, and of the output, which is `dtype` if empty.
    act : str
        Expression in x that all layers but the last apply, or the name of one.
    bias : bool
        Whether each layer adds a bias.
    residual : bool
        Whether a matrix is added to the output.
    weights : str
        ``"nk"`` or ``"kn"``, how weights are stored.

    Raises
    ------
    WorkloadRefused
        For extents that are no positive integers, fewer than two layers, and unknown words.

    Examples
    --------
    >>> spec = LayersSpec(128, (768, 3072, 3072, 768))
    >>> str(spec)
    'layers:M=128,widths=768x3072x3072x768,dtype=bfloat16,act=relu,weights=nk'
    """

    M: int
    widths: tuple[int, ...]
    dtype: str = "bfloat16"
    act: str = "relu"
    bias: bool = False
    residual: bool = False
    weights: str = "nk"
    out: str = ""

    def __post_init__(self) -> None:
        check_extent(LAYERS, "M", self.M, 128)
        if len(self.widths) < 3:
            found = f"{len(self.widths)} widths"
            limit = "the columns of the input and of what two layers or more make"
            raise refused("workload-extent", f"{LAYERS}:widths", found, limit, "write gemm, say")
        for width in self.widths:
            check_extent(LAYERS, "widths", width, 768)
        for size in (self.M * max(self.widths), *(n * k for k, n in pairwise(self.widths))):
            check_elements(LAYERS, "widths", size, "take fewer rows or columns")
        one_of(f"{LAYERS}:weights", self.weights, ("nk", "kn"))
        object.__setattr__(self, "act", expression.canonical(self.act))
        object.__setattr__(self, "dtype", float_type(self.dtype).name)
        object.__setattr__(self, "out", float_type(self.out or self.dtype, "out").name)

    def __str__(self) -> str:
        widths = "x".join(map(str, self.widths))
        text = f"{LAYERS}:M={self.M},widths={widths},dtype={self.dtype},act={self.act}"
        flags = ("bias", "residual")
        text += "".join(f",{name}=true" for name in flags if getattr(self, name))
        out = f",out={self.out}" if self.out != self.dtype else ""
        return f"{text},weights={self.weights}{out}"
