"""Cascades with matrix products: attention, routing, normed and quantised products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.refusal import one_of, refused

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
    def operands(self) -> tuple[Operand, ...]:
        """Queries, keys and values."""
        q = (self.batch, self.heads, self.q_len, self.head_dim)
        kv = (self.batch, self.kv_heads, self.kv_len, self.head_dim)
        return tuple(Operand(n, s, self.dtype) for n, s in (("q", q), ("k", kv), ("v", kv)))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """A vector for each query."""
        return (Operand("out", self.operands[0].shape, self.out),)

    def __str__(self) -> str:
        """See `CascadeSpec`; `kv_heads` is left out if it equals `heads`."""
        return super().__str__().replace(f",kv_heads={self.heads}", "")


@dataclass(frozen=True, kw_only=True)
class DecodeAttention(Attention):
    """`Attention` of few queries over many keys, whose heads share keys and values."""

    kind: ClassVar[str] = "decode_attention"


@dataclass(frozen=True, kw_only=True)
class MlaDecode(CascadeSpec):
    """Attention of one query over a cache of latent vectors, which are the values too.

    ``softmax(q @ cache.T / sqrt(latent_dim + rope_dim)) @ cache[:, :latent_dim]``.
    """

    kind: ClassVar[str] = "mla_decode"

    batch: int
    q_heads: int
    kv_len: int
    latent_dim: int
    rope_dim: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Queries and the cache."""
        width = self.latent_dim + self.rope_dim
        queries = Operand("q", (self.batch, self.q_heads, width), self.dtype)
        return (queries, Operand("cache", (self.batch, self.kv_len, width), self.dtype))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """A latent vector for each query."""
        return (Operand("out", (self.batch, self.q_heads, self.latent_dim), self.out),)


@dataclass(frozen=True, kw_only=True)
class MoeRouting(CascadeSpec):
    """The `top_k` largest of ``softmax(hidden @ router.T)`` of each token, and their experts."""

    kind: ClassVar[str] = "moe_routing"

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
    def operands(self) -> tuple[Operand, ...]:
        """Tokens and the router's weight."""
        tokens = Operand("x", (self.tokens, self.hidden), self.dtype)
        return (tokens, Operand("router", (self.experts, self.hidden), self.dtype))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Probabilities in descending order, and their experts."""
        shape = (self.tokens, self.top_k)
        return (Operand("gates", shape, "float32"), Operand("chosen", shape, "int32"))


@dataclass(frozen=True, kw_only=True)
class QuantGemm(CascadeSpec):
    """``(x @ weight.T) * weight_scale`` with each row of x quantised by its largest magnitude."""

    kind: ClassVar[str] = "quant_gemm"

    tokens: int
    K: int
    N: int
    quant: str = QUANTISATIONS[0]

    def __post_init__(self) -> None:
        one_of(f"{self.kind}:quant", self.quant, QUANTISATIONS)
        super().__post_init__()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tokens, the quantised weight, and a scale for each of its rows."""
        weight = Operand("weight", (self.N, self.K), QUANTISED)
        scale = Operand("weight_scale", (self.N,), "float32")
        return (Operand("x", (self.tokens, self.K), self.dtype), weight, scale)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The product."""
        return (Operand("out", (self.tokens, self.N), self.out),)


@dataclass(frozen=True, kw_only=True)
class RmsNormGemm(CascadeSpec):
    """``(x / sqrt(mean x**2 + 1e-5) * gamma) @ weight.T``, the left operand rounded to `dtype`."""

    kind: ClassVar[str] = "rmsnorm_gemm"

    tokens: int
    K: int
    N: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tokens, the factors of their columns, and the weight."""
        shapes = {"x": (self.tokens, self.K), "gamma": (self.K,), "weight": (self.N, self.K)}
        return tuple(Operand(name, shape, self.dtype) for name, shape in shapes.items())

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The product."""
        return (Operand("out", (self.tokens, self.N), self.out),)
