"""What is to be computed, as a value and as text.

```
gated_ffn:M=128,K=4096,N=11008,L=4096,dtype=bfloat16,act=silu
gemm_chain:M=128,K=768,N=3072,L=768,dtype=float16,act=relu
gemm:M=256,K=1024,N=512,dtype=float32,combine=max
```

`crossfuse.workload.conv_chain` adds chains of convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.workload import expression
from crossfuse.workload.dtypes import closest, float_type

KINDS = ("gated_ffn", "gemm_chain", "gemm", "conv_chain")
LAYOUTS = ("kn", "nk")
COMBINERS = ("sum", "prod", "max", "min")
DIMS = ("M", "K", "N", "L")

_DEFAULT_ACT = {
    "gated_ffn": "silu",
    "gemm_chain": "relu",
    "gemm": "identity",
    "conv_chain": "relu",
}
_DEFAULT_WEIGHTS = {"gated_ffn": "nk", "gemm_chain": "kn", "gemm": "kn", "conv_chain": "nk"}
# Linear indices into one matrix are int32 in the functions that are built from a spec.
_MOST_ELEMENTS = 2**31 - 1
_SLICE = "compute the matrix in slices"


@dataclass(frozen=True)
class WorkloadSpec:
    """A chain of matrix products over row-major matrices, accumulated in float32.

    ``gemm``: E[M,N] = act(combine over k of A[M,k] * B[k,N]).
    ``gemm_chain``: C[M,N] = act(A[M,K] @ B[K,N]); E[M,L] = C[M,N] @ D[N,L].
    ``gated_ffn``: C = act(A @ B_gate) * (A @ B_up); E = C @ D.

    Attributes
    ----------
    kind : str
        One of `kinds`.
    M, K, N, L : int
        Extents; L is 0 for ``gemm``, which has no second product.
    dtype : str
        Type of the inputs and of the intermediate C, ``"bfloat16"`` unless given.
    act : str
        Activation: a name of `crossfuse.workload.expression.NAMED` or an expression in x;
        ``silu`` for gated_ffn, ``relu`` for gemm_chain and ``identity`` for gemm unless given.
    weights : str
        Layout of every weight: ``"kn"`` row-major [K, N], or ``"nk"``, the [N, K] of
        ``torch.nn.Linear``; ``"nk"`` for gated_ffn and ``"kn"`` for the others unless given.
    out : str
        Type of the output, `dtype` unless given.
    combine : str
        The reduction of ``gemm``, one of `COMBINERS`.

    Raises
    ------
    WorkloadRefused
        A field that is missing, unknown, out of range or without meaning for the kind.
    """

    #: What `kind` may be.
    kinds: ClassVar[tuple[str, ...]] = KINDS[:3]

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

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, self.kinds)
        values = {
            "dtype": float_type(self.dtype).name,
            "act": expression.canonical(self.act or _DEFAULT_ACT[self.kind]),
            "weights": self.weights or _DEFAULT_WEIGHTS[self.kind],
            "out": float_type(self.out or self.dtype, "out").name,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _one_of("weights", self.weights, LAYOUTS)
        _one_of("combine", self.combine, COMBINERS)
        _check_extents(self)
        if self.kind != "gemm" and self.combine != "sum":
            raise _refused(
                "workload-combine",
                f"{self.kind}:combine",
                self.combine,
                "sum, because only gemm has a free choice of reduction",
                "write kind gemm, or leave combine out",
            )

    @property
    def gated(self) -> bool:
        """Whether the first layer is a gate and an up projection."""
        return self.kind == "gated_ffn"

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name, as stored, in the order of the function's parameters."""
        first = (self.N, self.K) if self.weights == "nk" else (self.K, self.N)
        shapes: dict[str, tuple[int, ...]] = {"A": (self.M, self.K)}
        shapes |= {"B_gate": first, "B_up": first} if self.gated else {"B": first}
        if self.L:
            shapes["D"] = (self.L, self.N) if self.weights == "nk" else (self.N, self.L)
        return shapes

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
        plain = {
            "weights": _DEFAULT_WEIGHTS[self.kind],
            "out": self.dtype,
            "combine": "sum",
        } | ({"act": "identity", "L": 0} if self.kind == "gemm" else {})
        names = (*DIMS, "dtype", "act", "weights", "out", "combine")
        pairs = ((name, getattr(self, name)) for name in names)
        body = ",".join(f"{name}={value}" for name, value in pairs if plain.get(name) != value)
        return f"{self.kind}:{body}"


_KEYS = tuple(field.name for field in fields(WorkloadSpec) if field.name != "kind")


def parse(text: str) -> WorkloadSpec:
    """Read a spec from ``kind:key=value,...``.

    Parameters
    ----------
    text : str
        See the module's examples. Commas inside parentheses belong to the activation.

    Returns
    -------
    WorkloadSpec
        The value; ``parse(str(spec)) == spec``.

    Raises
    ------
    WorkloadRefused
        Unknown kinds and keys (with the closest known one), duplicated keys, missing or wrong
        extents, unsupported types, activations that are not expressions in x.
    """
    kind, options = split(text)
    _one_of("kind", kind, KINDS)
    return from_options(kind, options)


def split(text: str, kind: str = "") -> tuple[str, dict[str, str]]:
    """Take ``head:key=value,...`` apart without reading the values.

    Parameters
    ----------
    text : str
        Text of a spec; the colon and what follows may be absent.
    kind : str
        Whose keys it has; what stands before the colon unless given.

    Returns
    -------
    head : str
        What stands before the colon.
    options : dict[str, str]
        The pairs in the order written.

    Raises
    ------
    WorkloadRefused
        Pairs without ``=``, unknown keys, duplicated keys.
    """
    head, _, body = text.strip().partition(":")
    keys = _keys(kind or head.strip())
    options: dict[str, str] = {}
    for item in _items(body):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            limit = "key=value pairs separated by commas"
            raise _refused("workload-spec", head, repr(item), limit, "write key=value")
        _one_of(f"{head}:key", key, keys)
        if key in options:
            found = f"{options[key]} and {value}"
            raise _refused("workload-key", f"{head}:{key}", found, "one value", "keep one of them")
        options[key] = value
    return head.strip(), options


def from_options(kind: str, options: dict[str, str]) -> WorkloadSpec:
    """Make a spec of a kind from textual options.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    options : dict[str, str]
        Values by key, such as ``{"M": "128"}``.

    Returns
    -------
    WorkloadSpec
        The value.

    Raises
    ------
    WorkloadRefused
        See `parse`.
    """
    if kind == "conv_chain":
        from crossfuse.workload import conv_chain

        return conv_chain.from_options(options)
    needed = DIMS if kind != "gemm" else DIMS[:3]
    missing = [name for name in needed if name not in options]
    if missing:
        raise _refused(
            "workload-extent",
            kind,
            "no " + ", ".join(missing),
            "the extents " + ", ".join(needed),
            "add " + ",".join(f"{name}=128" for name in missing) + " or the extents you mean",
        )
    values: dict[str, Any] = dict(options)
    values |= {name: read_extent(kind, name, options[name]) for name in DIMS if name in options}
    return WorkloadSpec(kind, **values)


def _items(body: str) -> list[str]:
    """Split at commas outside parentheses; nothing for an empty body."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            items.append(body[start:position])
            start = position + 1
    return [*items, body[start:]] if body.strip() else []


def _keys(kind: str) -> tuple[str, ...]:
    """Keys of a kind; those of matrices for what is no kind."""
    if kind != "conv_chain":
        return _KEYS
    from crossfuse.workload.conv_chain import KEYS

    return KEYS


def read_extent(kind: str, name: str, text: str) -> int:
    """Read a number of elements.

    Raises
    ------
    WorkloadRefused
        If the text is no such number.
    """
    # isdecimal alone would take digits of other scripts.
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    raise _refused(
        "workload-extent", f"{kind}:{name}", text, "a positive integer", f"write {name}=128, say"
    )


def _check_extents(spec: WorkloadSpec) -> None:
    if spec.kind == "gemm" and spec.L:
        raise _refused(
            "workload-extent",
            "gemm:L",
            str(spec.L),
            "M, K and N, because gemm has no second product",
            "leave L out, or write kind gemm_chain",
        )
    for name in DIMS if spec.kind != "gemm" else DIMS[:3]:
        value = getattr(spec, name)
        if type(value) is not int or value < 1:
            where, limit = f"{spec.kind}:{name}", "a positive integer"
            raise _refused("workload-extent", where, value, limit, f"write {name}=128, say")
    products = {"MxN": spec.M * spec.N, "MxL": spec.M * spec.L, "MxK": spec.M * spec.K}
    products |= {"KxN": spec.K * spec.N, "NxL": spec.N * spec.L}
    for name, size in products.items():
        if size > _MOST_ELEMENTS:
            found, limit = f"{size} elements", f"{_MOST_ELEMENTS}, so that int32 can index them"
            raise _refused("workload-extent", f"{spec.kind}:{name}", found, limit, _SLICE)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _refused(
            "workload-" + what.rpartition(":")[2],
            what,
            repr(value),
            "one of " + ", ".join(known),
            closest(value, known, "choose one of these"),
        )


def _refused(rule: str, where: str, found: object, limit: str, instead: str) -> RefusedError:
    return refuse(WorkloadRefused, rule, where, found=found, limit=limit, instead=instead)
