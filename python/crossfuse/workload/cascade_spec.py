"""Cascades of reductions as values: the computation and its operands.

`crossfuse.workload.cascades` reads all of them from text.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.expression import canonical
from crossfuse.workload.spec import check_elements, check_extent, one_of, refused

#: What normalisations add under the root.
EPSILON = 1e-5


@dataclass(frozen=True)
class Shaped:
    """An operand by names: what its extents are in the fields or properties of a spec."""

    name: str
    extents: tuple[str, ...]
    #: The field of a spec that has its type, or a type.
    dtype: str = "dtype"


@dataclass(frozen=True, kw_only=True)
class CascadeSpec:
    """Base of all cascades, which checks extents and types and refuses with `WorkloadRefused`."""

    kind: ClassVar[str] = ""
    #: The extent that counts rows, which do not depend on each other.
    counted: ClassVar[str] = "rows"
    #: Whether rows may have -inf in them, as masks write it.
    masked: ClassVar[bool] = False
    #: Inputs, in the order of the function's parameters, and outputs, which follow them.
    takes: ClassVar[tuple[Shaped, ...]] = ()
    gives: ClassVar[tuple[Shaped, ...]] = ()

    #: Type of the inputs.
    dtype: str = "bfloat16"
    #: Type of outputs as large as a row or a column; `dtype` unless given. An output of one number
    #: for each row is float32.
    out: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", float_type(self.dtype).name)
        object.__setattr__(self, "out", float_type(self.out or self.dtype, "out").name)
        for each in fields(self):
            if each.type == "int":
                check_extent(self.kind, each.name, getattr(self, each.name), 16)
        for operand in (*self.operands, *self.outputs):
            check_elements(self.kind, operand.name, operand.elements, "compute it in slices")

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, in the order of the function's parameters."""
        return tuple(map(self._operand, self.takes))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Outputs, which follow the inputs."""
        return tuple(map(self._operand, self.gives))

    def _operand(self, each: Shaped) -> Operand:
        shape = tuple(getattr(self, extent) for extent in each.extents)
        return Operand(each.name, shape, getattr(self, each.dtype, each.dtype))

    @property
    def count(self) -> int:
        """Rows, which do not depend on each other."""
        return int(getattr(self, self.counted))

    def with_count(self, count: int) -> CascadeSpec:
        """The same cascade of another number of rows."""
        changed: dict[str, Any] = {self.counted: count}
        return replace(self, **changed)

    @property
    def bytes(self) -> int:
        """Bytes of all inputs and outputs: the least that a kernel moves."""
        return sum(each.bytes for each in (*self.operands, *self.outputs))

    @property
    def flops(self) -> int:
        """Multiplications and additions of its matrix products, each counted apart."""
        return 0

    def __str__(self) -> str:
        """Canonical text; `crossfuse.workload.cascades.parse` reads it back to an equal spec."""
        plain = {each.name: each.default for each in fields(self)} | {"out": self.dtype}
        extents = [each.name for each in fields(self) if each.name not in ("dtype", "out")]
        pairs = ((name, getattr(self, name)) for name in (*extents, "dtype", "out"))
        kept = (f"{key}={value_text(value)}" for key, value in pairs if plain[key] != value)
        return f"{self.kind}:" + ",".join(kept)


@dataclass(frozen=True, kw_only=True)
class Matrix(CascadeSpec):
    """Reductions over the rows of one matrix."""

    takes: ClassVar[tuple[Shaped, ...]] = (Shaped("x", ("rows", "cols")),)

    rows: int
    cols: int


@dataclass(frozen=True, kw_only=True)
class Softmax(Matrix):
    """``y[i,l] = exp(x[i,l] - max x[i]) / sum exp(x[i] - max x[i])``."""

    kind: ClassVar[str] = "softmax"
    masked: ClassVar[bool] = True
    gives = (Shaped("y", ("rows", "cols"), "out"),)


@dataclass(frozen=True, kw_only=True)
class LogSoftmax(Softmax):
    """``y[i,l] = x[i,l] - max x[i] - log sum exp(x[i] - max x[i])``."""

    kind: ClassVar[str] = "log_softmax"


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Matrix):
    """``loss[i] = log sum exp(x[i]) - x[i, labels[i]]``."""

    kind: ClassVar[str] = "cross_entropy"
    masked: ClassVar[bool] = True
    takes = (*Matrix.takes, Shaped("labels", ("rows",), "int32"))
    gives = (Shaped("loss", ("rows",), "float32"),)


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
class Variance(Matrix):
    """``variance[i] = sum (x[i] - mean x[i])**2 / cols``."""

    kind: ClassVar[str] = "variance"
    gives = (Shaped("variance", ("rows",), "float32"),)

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class MomentOfInertia(CascadeSpec):
    """``inertia[i] = sum m * |r - c|**2`` about the centre of mass ``c = sum m * r / sum m``.

    No mass is negative.
    """

    kind: ClassVar[str] = "moment_of_inertia"
    counted: ClassVar[str] = "bodies"
    takes = tuple(Shaped(name, ("bodies", "points")) for name in ("mass", "x", "y", "z"))
    gives = (Shaped("inertia", ("bodies",), "float32"),)

    bodies: int
    points: int
    dtype: str = "float32"


# Cascades with matrix products: attention, routing, normed and quantised products.

#: Type of the weights of a quantised product, and the largest value that it holds.
QUANTISED = "float8_e4m3fn"
LARGEST_QUANTISED = 448.0
#: How a quantised product may be quantised.
QUANTISATIONS = ("per-token fp8 e4m3",)
#: Least magnitude of a row that is quantised, so that rows of zeros have a scale.
LEAST_MAGNITUDE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Attention(CascadeSpec):
    """``softmax(q @ k.T / sqrt(head_dim)) @ v``, the softmax rounded to `dtype`.

    q is [batch, heads, q_len, head_dim], k and v are [batch, kv_heads, kv_len, head_dim].
    """

    kind: ClassVar[str] = "attention"
    takes = (
        Shaped("q", ("batch", "heads", "q_len", "head_dim")),
        Shaped("k", ("batch", "kv_heads", "kv_len", "head_dim")),
        Shaped("v", ("batch", "kv_heads", "kv_len", "head_dim")),
    )
    gives = (Shaped("out", ("batch", "heads", "q_len", "head_dim"), "out"),)

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    #: Heads of keys and values, each shared by as many heads of queries; `heads` unless given.
    kv_heads: int = 0
    #: Whether query i sees the keys up to ``i + kv_len - q_len`` only.
    causal: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        super().__post_init__()
        if self.heads % self.kv_heads:
            found, limit = f"{self.kv_heads} for {self.heads}", "a divisor of the heads of queries"
            raise refused("workload-extent", f"{self.kind}:kv_heads", found, limit, "change it")

    @property
    def flops(self) -> int:
        """Of both products; under a causal mask those of scores that are visible."""
        pairs = self.q_len * self.kv_len
        if self.causal:
            seeing = min(self.q_len, self.kv_len)
            pairs = seeing * self.kv_len - seeing * (seeing - 1) // 2
        return 4 * self.batch * self.heads * pairs * self.head_dim

    def __str__(self) -> str:
        """See `CascadeSpec`; `kv_heads` is left out if it equals `heads`."""
        return super().__str__().replace(f",kv_heads={self.heads}", "")


@dataclass(frozen=True, kw_only=True)
class DecodeAttention(Attention):
    """`Attention` of few queries over many keys, whose heads share keys and values."""

    kind: ClassVar[str] = "decode_attention"


@dataclass(frozen=True, kw_only=True)
class AttentionOut(Attention):
    """`Attention`, then the product of each token's heads and a weight, and what is added to it.

    ``attention(q, k, v) -> [tokens, heads * head_dim]``, in `dtype`; then
    ``@ weight.T + bias + residual``, weight [hidden, heads * head_dim].
    """

    kind: ClassVar[str] = "attention_out"
    gives = (Shaped("out", ("tokens", "hidden"), "out"),)

    #: Columns of the product.
    hidden: int
    #: Whether a vector, and a matrix as large as the output, are added to the product.
    bias: bool = False
    residual: bool = True

    @property
    def tokens(self) -> int:
        """Rows of the product: queries of all sequences."""
        return self.batch * self.q_len

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Queries, keys, values, the weight, and what is added."""
        width = self.heads * self.head_dim
        added = {
            "bias": ((self.hidden,), self.bias),
            "residual": ((self.tokens, self.hidden), self.residual),
        }
        return (
            *super().operands,
            Operand("weight", (self.hidden, width), self.dtype),
            *(Operand(name, shape, self.dtype) for name, (shape, has) in added.items() if has),
        )

    @property
    def flops(self) -> int:
        """Of all three products."""
        return super().flops + 2 * self.tokens * self.heads * self.head_dim * self.hidden


@dataclass(frozen=True, kw_only=True)
class MlaDecode(CascadeSpec):
    """Attention of one query over a cache of latent vectors, which are the values too.

    ``softmax(q @ cache.T / sqrt(latent_dim + rope_dim)) @ cache[:, :latent_dim]``.
    """

    kind: ClassVar[str] = "mla_decode"
    counted: ClassVar[str] = "batch"
    takes = (
        Shaped("q", ("batch", "q_heads", "width")),
        Shaped("cache", ("batch", "kv_len", "width")),
    )
    gives = (Shaped("out", ("batch", "q_heads", "latent_dim"), "out"),)

    batch: int
    q_heads: int
    kv_len: int
    latent_dim: int
    rope_dim: int

    @property
    def width(self) -> int:
        """Elements of a query, and of a latent vector with its positions."""
        return self.latent_dim + self.rope_dim

    @property
    def flops(self) -> int:
        """Of both products."""
        return 2 * self.batch * self.q_heads * self.kv_len * (self.latent_dim + self.width)


@dataclass(frozen=True, kw_only=True)
class MoeRouting(CascadeSpec):
    """The `top_k` largest of ``softmax(hidden @ router.T)`` of each token, and their experts."""

    kind: ClassVar[str] = "moe_routing"
    counted: ClassVar[str] = "tokens"
    takes = (
        Shaped("x", ("tokens", "hidden")),
        Shaped("router", ("experts", "hidden")),
    )
    #: Probabilities in descending order, and their experts.
    gives = (
        Shaped("gates", ("tokens", "top_k"), "float32"),
        Shaped("chosen", ("tokens", "top_k"), "int32"),
    )

    tokens: int
    hidden: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            where, limit = f"{self.kind}:top_k", f"at most the experts, {self.experts}"
            raise refused("workload-extent", where, self.top_k, limit, "lower it")

    @property
    def flops(self) -> int:
        """Of the logits."""
        return 2 * self.tokens * self.hidden * self.experts


@dataclass(frozen=True, kw_only=True)
class RowsGemm(CascadeSpec):
    """A product whose left operand is made of whole rows of tokens first."""

    counted: ClassVar[str] = "tokens"
    gives = (Shaped("out", ("tokens", "N"), "out"),)

    tokens: int
    K: int
    N: int

    @property
    def flops(self) -> int:
        """Of the product."""
        return 2 * self.tokens * self.K * self.N


@dataclass(frozen=True, kw_only=True)
class QuantGemm(RowsGemm):
    """``(x @ weight.T) * weight_scale`` with each row of x quantised by its largest magnitude."""

    kind: ClassVar[str] = "quant_gemm"
    #: A scale for each row of the weight.
    takes = (
        Shaped("x", ("tokens", "K")),
        Shaped("weight", ("N", "K"), QUANTISED),
        Shaped("weight_scale", ("N",), "float32"),
    )

    quant: str = QUANTISATIONS[0]

    def __post_init__(self) -> None:
        one_of(f"{self.kind}:quant", self.quant, QUANTISATIONS)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RmsNormGemm(RowsGemm):
    """``(x / sqrt(mean x**2 + 1e-5) * gamma) @ weight.T``, the left operand rounded to `dtype`."""

    kind: ClassVar[str] = "rmsnorm_gemm"
    takes = (
        Shaped("x", ("tokens", "K")),
        Shaped("gamma", ("K",)),
        Shaped("weight", ("N", "K")),
    )


@dataclass(frozen=True, kw_only=True)
class NormFfn(CascadeSpec):
    """``hidden = act(y @ gate.T) * (y @ up.T); out = hidden @ down.T + x`` of normalised rows y.

    The rows and `hidden` are rounded to `dtype`. Without a gate ``hidden = act(y @ up.T)``.
    """

    counted: ClassVar[str] = "tokens"
    gives = (Shaped("out", ("tokens", "L"), "out"),)
    #: What rows are scaled by and moved to.
    parameters: ClassVar[tuple[str, ...]] = ()

    tokens: int
    K: int
    N: int
    #: Columns of the output; `K` unless given.
    L: int = 0
    gated: bool = True
    #: Whether x is added to the output, which has as many columns then.
    residual: bool = True
    act: str = "silu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "L", self.L or self.K)
        object.__setattr__(self, "act", canonical(self.act))
        super().__post_init__()
        if self.residual and self.L != self.K:
            where, limit = f"{self.kind}:L", f"{self.K}, as the residual x has (K)"
            raise refused("workload-extent", where, self.L, limit, "write residual=false, or L=K")

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tokens, parameters of the norm, and the weights: gate if any, up, down."""
        shapes: dict[str, tuple[int, ...]] = {"x": (self.tokens, self.K)}
        shapes |= {name: (self.K,) for name in self.parameters}
        shapes |= {"gate": (self.N, self.K)} if self.gated else {}
        shapes |= {"up": (self.N, self.K), "down": (self.L, self.N)}
        return tuple(Operand(name, shape, self.dtype) for name, shape in shapes.items())

    @property
    def flops(self) -> int:
        """Of all products."""
        return 2 * self.tokens * self.N * ((1 + self.gated) * self.K + self.L)

    def __str__(self) -> str:
        """See `CascadeSpec`; `L` is left out if it equals `K`."""
        text = super().__str__()
        return text.replace(f",L={self.L}", "") if self.L == self.K else text


@dataclass(frozen=True, kw_only=True)
class RmsNormFfn(NormFfn):
    """`NormFfn` of rows ``x / sqrt(mean x**2 + 1e-5) * gamma``."""

    kind: ClassVar[str] = "rmsnorm_ffn"
    parameters: ClassVar[tuple[str, ...]] = ("gamma",)


@dataclass(frozen=True, kw_only=True)
class LayerNormFfn(NormFfn):
    """`NormFfn` of rows ``(x - mean) / sqrt(variance + 1e-5) * gamma + beta``."""

    kind: ClassVar[str] = "layernorm_ffn"
    parameters: ClassVar[tuple[str, ...]] = ("gamma", "beta")


def value_text(value: object) -> str:
    """A value as specs spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
