"""Specs as text.

```
gated_ffn:M=128,K=4096,N=11008,L=4096,dtype=bfloat16,act=silu
gemm_chain:M=128,K=768,N=3072,L=768,dtype=float16,act=relu,bias=first+last,residual=in
gemm:M=256,K=1024,N=512,dtype=float32,combine=max
gemm:M=256,K=1024,N=512,dtype=float8_e4m3fn,out=bfloat16,scale=last,bias=last
```

`crossfuse.workload.conv_chain` has those of convolutions.
"""

from __future__ import annotations

from dataclasses import fields

from crossfuse.calls import checked
from crossfuse.workload import conv_chain
from crossfuse.workload.refusal import check_given, one_of, read_fields, refused
from crossfuse.workload.spec import DIMS, KINDS, WorkloadSpec

#: What may stand before an equals sign.
KEYS = tuple(field.name for field in fields(WorkloadSpec) if field.name != "kind")
_KEYS_OF_KIND = {conv_chain.KIND: conv_chain.KEYS}


@checked
def parse(text: str) -> WorkloadSpec:
    """Read a spec from ``kind:key=value,...``.

    Parameters
    ----------
    text : str
        Such as ``"gemm_chain:M=128,K=768,N=3072,L=768,dtype=float16,act=relu,bias=first"``. The
        kind is ``gemm``, ``gemm_chain``, ``gated_ffn`` or ``conv_chain``; extents count elements,
        and other keys are fields of `WorkloadSpec`. Commas inside parentheses belong to the
        activation.

    Returns
    -------
    WorkloadSpec
        The value; ``parse(str(spec)) == spec``.

    Raises
    ------
    WorkloadRefused
        Unknown kinds and keys (with the closest known one), duplicated keys, missing or wrong
        extents, unsupported types, activations that are not expressions in x.

    Examples
    --------
    >>> spec = parse("gated_ffn:M=16,K=64,N=128,L=64,act=gelu_tanh")
    >>> spec.N, spec.dtype
    (128, 'bfloat16')
    """
    kind, options = split(text)
    one_of("kind", kind, KINDS)
    return from_options(kind, options)


def split(text: str, kind: str = "") -> tuple[str, dict[str, str]]:
    """Split ``head:key=value,...``, whose colon and body may be missing, into head and options.

    Values are not read, and keep their order. Keys are those of `kind`, by default of the head.
    Pairs without ``=``, unknown keys and duplicate keys raise `WorkloadRefused`.
    """
    head, _, body = text.strip().partition(":")
    keys = _KEYS_OF_KIND.get(kind or head.strip(), KEYS)
    return head.strip(), pairs(head, body, keys)


def pairs(
    head: str, body: str, keys: tuple[str, ...], flags: tuple[str, ...] = ()
) -> dict[str, str]:
    """Split ``key=value,...`` into pairs in the order written, without reading the values.

    Commas inside parentheses belong to a value. A key of `flags` may stand alone, and is true.
    `head` is for messages. Refuses as `split`.
    """
    options: dict[str, str] = {}
    for item in _items(body):
        alone = item.strip() in flags
        key, equals, value = (part.strip() for part in f"{item}{'=true' * alone}".partition("="))
        if not equals or not value:
            limit = "key=value pairs separated by commas"
            raise refused("workload-spec", head, repr(item), limit, "write key=value")
        one_of(f"{head}:key", key, keys)
        if key in options:
            found = f"{options[key]} and {value}"
            raise refused("workload-key", f"{head}:{key}", found, "one value", "keep one of them")
        options[key] = value
    return options


def from_options(kind: str, options: dict[str, str]) -> WorkloadSpec:
    """Make a spec of a kind from text values by key, as in ``{"M": "128"}``; refuses as `parse`."""
    if kind == conv_chain.KIND:
        return conv_chain.from_options(options)
    needed = DIMS if kind != "gemm" else DIMS[:3]
    check_given(kind, needed, options, 128)
    return WorkloadSpec(kind, **read_fields(kind, WorkloadSpec, options))


def _items(body: str) -> list[str]:
    """Split at commas outside parentheses; nothing for an empty body."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            items.append(body[start:position])
            start = position + 1
    return [*items, body[start:]] if body.strip() else []
