"""Cascades as text and by id.

```
softmax:rows=4096,cols=32768,dtype=bfloat16
log_softmax:rows=4096,cols=32768
cross_entropy:rows=4096,cols=128256
layernorm:rows=8192,cols=8192
rmsnorm:rows=8192,cols=8192,residual=true
variance:rows=1024,cols=1048576
moment_of_inertia:bodies=1024,points=65536
attention:batch=8,heads=32,q_len=2048,kv_len=2048,head_dim=128,causal=true
decode_attention:batch=16,heads=32,q_len=1,kv_len=8192,head_dim=128,kv_heads=8
attention_out:batch=1,heads=32,q_len=128,kv_len=4096,head_dim=64,kv_heads=8,hidden=2048
mla_decode:batch=64,q_heads=128,kv_len=4096,latent_dim=512,rope_dim=64
moe_routing:tokens=4096,hidden=2048,experts=128,top_k=8
quant_gemm:tokens=4096,K=7168,N=2048
rmsnorm_gemm:tokens=256,K=4096,N=12288
rmsnorm_ffn:tokens=16,K=2048,N=8192
layernorm_ffn:tokens=16,K=768,N=3072,gated=false,act=gelu
rmsnorm:rows=4096,cols=16384,grad
```

A flag alone is true. ``grad`` asks for the gradient by the rows, see `RowsGradient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from crossfuse.workload import cascade_spec, suites
from crossfuse.workload.cascade_spec import CascadeSpec, value_text
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.spec import KINDS as CHAINS
from crossfuse.workload.spec import (
    WorkloadSpec,
    check_given,
    one_of,
    read_fields,
    read_flag,
    refused,
)
from crossfuse.workload.suites import pairs

# Gradients of cascades of rows.

#: The key of specs that asks for the gradient.
GRADIENT = "grad"
#: What has a gradient that is a cascade of rows again, with parameters that it does not read: those
#: that are only added.
_DERIVED: Mapping[type[CascadeSpec], tuple[str, ...]] = {
    cascade_spec.Softmax: (),
    cascade_spec.LogSoftmax: (),
    cascade_spec.CrossEntropy: (),
    cascade_spec.LayerNorm: ("bias",),
    cascade_spec.RmsNorm: (),
    cascade_spec.Variance: (),
}


@dataclass(frozen=True, kw_only=True)
class RowsGradient(CascadeSpec):
    """The gradient of a cascade by its rows ``x``, from gradients of its outputs.

    It takes what the cascade takes, but for parameters that are only added, then ``d_`` and the
    name of each output; it gives ``d_x``. That of a residual is the same one. Types are those of
    what they are gradients of.
    """

    kind: ClassVar[str] = "gradient"

    #: What is differentiated.
    of: CascadeSpec

    def __post_init__(self) -> None:
        if type(self.of) not in _DERIVED:
            where, found = f"{self.of.kind}:{GRADIENT}", f"the gradient of {self.of.kind}"
            limit = f"gradients of {', '.join(each.kind for each in _DERIVED)}"
            instead = "differentiate its function by crossfuse.autodiff.gradients, and compile that"
            raise refused("workload-grad", where, found, limit, instead)
        object.__setattr__(self, "dtype", self.of.dtype)
        object.__setattr__(self, "out", self.of.dtype)
        super().__post_init__()

    @property
    def masked(self) -> bool:  # type: ignore[override]
        """Whether rows may have -inf in them."""
        return self.of.masked

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What the cascade takes and its gradient reads, and gradients of outputs."""
        added = _DERIVED[type(self.of)]
        read = (each for each in self.of.operands if each.name not in added)
        given = (Operand(f"d_{each.name}", each.shape, each.dtype) for each in self.of.outputs)
        return (*read, *given)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The gradient of the rows."""
        rows = self.of.operands[0]
        return (Operand(f"d_{rows.name}", rows.shape, rows.dtype),)

    @property
    def count(self) -> int:
        """Rows, which do not depend on each other."""
        return self.of.count

    def with_count(self, count: int) -> RowsGradient:
        """The same gradient of another number of rows."""
        return RowsGradient(of=self.of.with_count(count))

    def __str__(self) -> str:
        """The cascade's text, and that its gradient is meant."""
        return f"{self.of},{GRADIENT}=true"


# Cascades as text.

_CLASSES: tuple[type[CascadeSpec], ...] = (
    cascade_spec.Attention,
    cascade_spec.DecodeAttention,
    cascade_spec.AttentionOut,
    cascade_spec.MlaDecode,
    cascade_spec.MoeRouting,
    cascade_spec.QuantGemm,
    cascade_spec.Softmax,
    cascade_spec.LogSoftmax,
    cascade_spec.CrossEntropy,
    cascade_spec.RmsNormGemm,
    cascade_spec.RmsNormFfn,
    cascade_spec.LayerNormFfn,
    cascade_spec.LayerNorm,
    cascade_spec.RmsNorm,
    cascade_spec.Variance,
    cascade_spec.MomentOfInertia,
)
#: Every kind of cascade.
KINDS = tuple(each.kind for each in _CLASSES)
_OF_KIND = {each.kind: each for each in _CLASSES}
#: Other words of the suites for the same extents.
_SPELLINGS = {"decode_attention": {"q_heads": "heads"}}


def parse(text: str) -> CascadeSpec:
    """Read a spec from ``kind:key=value,...``, so that ``parse(str(spec)) == spec``.

    `WorkloadRefused` names unknown kinds and keys (with the closest known one), duplicate keys,
    missing or wrong extents, and unsupported types.
    """
    head, _, body = text.strip().partition(":")
    kind = head.strip()
    one_of("kind", kind, KINDS)
    return _from_options(kind, _options(kind, body))


def names_one(text: str) -> bool:
    """Whether a text is meant to be a cascade: it begins with the id or the kind of one."""
    head = text.partition(":")[0].strip()
    return head in KINDS or head in suites.ids("cascade")


def resolve_any(text: str, others: tuple[str, ...] = ()) -> WorkloadSpec | CascadeSpec:
    """Read a workload as command lines write it: a chain of products, or a cascade.

    See `resolve` and `crossfuse.workload.suites.resolve`. `others` are kinds that the caller reads
    itself, for the refusal of an unknown one.
    """
    if names_one(text):
        return resolve(text)
    head, colon, _ = text.partition(":")
    if colon and head.strip() not in suites.ids():
        one_of("kind", head.strip(), (*CHAINS, *KINDS, *others))
    return suites.resolve(text)


def resolve(text: str) -> CascadeSpec:
    """Read a cascade as command lines write it.

    That is an id (``R7``), an id with changes (``R7:rows=16,dtype=float16``), or the text of a
    spec, see `parse`. Unknown ids, and those of chains of products, raise `WorkloadRefused`.
    """
    head, colon, body = text.strip().partition(":")
    if colon and head.strip() not in suites.ids():
        return parse(text)
    entry = suites.entry(head.strip())
    if entry.kind != "cascade":
        limit, instead = "a cascade, R1 to R14", "read it by crossfuse.workload.resolve"
        raise refused("workload-kind", entry.id, f"{entry.kind} ({entry.title})", limit, instead)
    values = {key: value_text(value) for key, value in entry.values.items() if key != "kind"}
    spelt = _SPELLINGS.get(entry.title, {})
    packaged = {spelt.get(key, key): value for key, value in values.items()}
    return _from_options(entry.title, packaged | _options(entry.title, body))


def _options(kind: str, body: str) -> dict[str, str]:
    spelt, known = _SPELLINGS.get(kind, {}), fields(_OF_KIND[kind])
    keys = (*(each.name for each in known), *spelt, GRADIENT)
    flags = (*(each.name for each in known if each.type == "bool"), GRADIENT)
    found = pairs(kind, body, keys, flags)
    return {spelt.get(key, key): value for key, value in found.items()}


def _from_options(kind: str, options: Mapping[str, str]) -> CascadeSpec:
    made = _OF_KIND[kind]
    needed = [each.name for each in fields(made) if each.default is MISSING]
    check_given(kind, needed, options, 16)
    own = {name: text for name, text in options.items() if name != GRADIENT}
    spec = made(**read_fields(kind, made, own))
    asked = options.get(GRADIENT, "false")
    if not read_flag(kind, GRADIENT, asked):
        return spec
    return RowsGradient(of=spec)
