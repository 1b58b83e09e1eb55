"""Workloads as text, and the packaged ones by id: ``S3`` is the gated FFN of Llama-2-7B.

```
gated_ffn:M=128,K=4096,N=11008,L=4096,dtype=bfloat16,act=silu
gemm_chain:M=128,K=768,N=3072,L=768,dtype=float16,act=relu,bias=first+last,residual=in
gemm:M=256,K=1024,N=512,dtype=float32,combine=max
gemm:M=256,K=1024,N=512,dtype=float8_e4m3fn,out=bfloat16,scale=last,bias=last
S3:M=128
layers:M=128,widths=768x3072x3072x768
```

`crossfuse.workload.conv_chain` has those of convolutions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from crossfuse.calls import checked
from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.files import packaged_text
from crossfuse.workload import conv_chain
from crossfuse.workload.dtypes import closest
from crossfuse.workload.spec import (
    DIMS,
    KINDS,
    LAYERS,
    LayersSpec,
    WorkloadSpec,
    check_given,
    dims_of,
    one_of,
    read_extent,
    read_fields,
    refused,
)

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
        kind is ``gemm``, ``gated_gemm``, ``gemm_chain``, ``gated_ffn`` or ``conv_chain``; extents
        count elements, and other keys are fields of `WorkloadSpec`. Commas inside parentheses
        belong to the activation.

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

    Values are not read, and keep their order. Keys are those of `kind`, by default of the head,
    which has to be a kind then if there is a body. Pairs without ``=``, unknown kinds and keys, and
    duplicate keys raise `WorkloadRefused`.
    """
    head, _, body = text.strip().partition(":")
    if body and not kind:
        one_of("kind", head.strip(), KINDS)
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
    check_given(kind, dims_of(kind), options, 128)
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


# The packaged workloads by id.

_EXTENTS = {"conv_chain": (*conv_chain.EXTENTS, "k2")}


@dataclass(frozen=True)
class Entry:
    """One packaged workload."""

    #: Such as ``"S3"``.
    id: str
    #: ``"gemm_chain"``, ``"gated_ffn"``, ``"conv_chain"`` or ``"cascade"``.
    kind: str
    #: The model it comes from, or the kind of cascade.
    title: str
    #: Extents and flags.
    values: Mapping[str, Any]

    @property
    def is_chain(self) -> bool:
        """Whether `lookup` makes a spec of it."""
        return self.kind in KINDS


@checked
def ids(kind: str | None = None) -> tuple[str, ...]:
    """List the packaged ids.

    Parameters
    ----------
    kind : str, optional
        Only those of this kind.

    Returns
    -------
    tuple[str, ...]
        In the order of the suites.

    Examples
    --------
    >>> ids("gated_ffn")
    ('S1', 'S2', 'S3', 'S4', 'S5', 'S6', 'S7', 'S8')
    """
    return tuple(e.id for e in _entries().values() if kind is None or e.kind == kind)


def entry(name: str) -> Entry:
    """The packaged workload of an id, a chain or a cascade.

    Unknown ids raise `WorkloadRefused`, with the closest known one.
    """
    if name in _entries():
        return _entries()[name]
    raise refuse(
        WorkloadRefused,
        "workload-id",
        "suites",
        found=repr(name),
        limit="G1 to G10, S1 to S8, C1 to C8, R1 to R14",
        instead=closest(
            name, _entries(), "choose one of these, or write a spec such as gemm:M=8,K=8,N=8"
        ),
    )


def sweep() -> tuple[int, ...]:
    """Row counts at which every chain is measured.

    Returns
    -------
    tuple[int, ...]
        Values for M.

    Examples
    --------
    >>> sweep()
    (1, 16, 64, 128, 256, 512, 1024, 4096)
    """
    return tuple(_document()["sweep"]["M"])


@checked
def lookup(name: str, M: int | None = None, dtype: str = "bfloat16") -> WorkloadSpec:
    """Make the spec of a packaged chain.

    Parameters
    ----------
    name : str
        Id of a gemm_chain, gated_ffn or conv_chain.
    M : int, optional
        Rows, instead of those of the suite; a conv_chain has one for each pixel.
    dtype : str
        Type of inputs and output.

    Returns
    -------
    WorkloadSpec
        The spec.

    Raises
    ------
    WorkloadRefused
        Unknown ids, and the cascades, see `crossfuse.workload.cascades`; rows of a conv_chain.

    Examples
    --------
    >>> spec = lookup("S3", M=16)
    >>> spec.M, spec.K, spec.N, spec.L
    (16, 4096, 11008, 4096)
    """
    rows = "" if M is None else f",M={M}"
    return resolve(f"{entry(name).id}:dtype={dtype}{rows}")


@checked
def resolve(text: str) -> WorkloadSpec:
    """Read what a command line calls a workload.

    Parameters
    ----------
    text : str
        An id (``S3``), an id with changes (``S3:M=16,dtype=float16``), or the text of a spec.

    Returns
    -------
    WorkloadSpec
        The spec.

    Raises
    ------
    WorkloadRefused
        See `lookup` and `crossfuse.workload.suites.parse`.

    Examples
    --------
    >>> resolve("S3:M=16") == lookup("S3", M=16)
    True
    """
    head, options = take_apart(text)
    if head in _entries():
        return _with_options(_entries()[head], options)
    return parse(text) if ":" in text else lookup(head)


@checked
def parse_layers(text: str) -> LayersSpec:
    """Read a spec from ``layers:key=value,...``.

    Parameters
    ----------
    text : str
        With fields of `LayersSpec` as keys; widths have ``x`` between them.

    Returns
    -------
    LayersSpec
        The value; ``parse_layers(str(spec)) == spec``.

    Raises
    ------
    WorkloadRefused
        For unknown keys, and what `LayersSpec` refuses.

    Examples
    --------
    >>> parse_layers("layers:M=16,widths=64x128x128x64,bias=true").widths
    (64, 128, 128, 64)
    """
    _, _, body = text.strip().partition(":")
    options = pairs(LAYERS, body, tuple(each.name for each in fields(LayersSpec)))
    check_given(LAYERS, ("M", "widths"), options, 128)
    values = read_fields(LAYERS, LayersSpec, options)
    widths = options["widths"].split("x")
    values["widths"] = tuple(read_extent(LAYERS, "widths", each) for each in widths)
    return LayersSpec(**values)


def names_layers(text: str) -> bool:
    """Whether a text is meant to be a row of layers."""
    return text.partition(":")[0].strip() == LAYERS


def resolve_chain(workload: Any) -> Any:
    """Read a chain of products of any length as `resolve` does; a spec is given back."""
    if not isinstance(workload, str):
        return workload
    return parse_layers(workload) if names_layers(workload) else resolve(workload)


def name_of(spec: WorkloadSpec) -> str:
    """The shortest text that `resolve` reads as this chain, such as ``S3:M=128``.

    It is the text of the spec where that is no packaged one.
    """
    for name in ids(spec.kind):
        text = f"{name}:M={spec.M}"
        if resolve(text) == spec:
            return text
    return str(spec)


def take_apart(text: str) -> tuple[str, dict[str, str]]:
    """Split a workload, as command lines write it, into id or kind and options.

    Values are not read; see `crossfuse.workload.suites.split`, which also refuses.
    """
    found = _entries().get(text.partition(":")[0].strip())
    return split(text, found.kind if found else "")


def _with_options(found: Entry, options: dict[str, str]) -> WorkloadSpec:
    if not found.is_chain:
        raise refuse(
            WorkloadRefused,
            "workload-kind",
            found.id,
            found=f"{found.kind} ({found.title})",
            limit="a gemm_chain, gated_ffn or conv_chain",
            instead="take one of G1 to G10, S1 to S8 or C1 to C8, or read the cascade by "
            "crossfuse.workload.cascades.resolve",
        )
    names = _EXTENTS.get(found.kind, DIMS)
    extents = {name: str(found.values[name]) for name in names}
    return from_options(found.kind, extents | options)


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(packaged_text("crossfuse.workload", "suites.toml"))


@lru_cache(maxsize=1)
def _entries() -> Mapping[str, Entry]:
    found = {}
    for kind in ("gemm_chain", "gated_ffn", "conv_chain", "cascade"):
        for table in _document()[kind]:
            values = {key: value for key, value in table.items() if key not in ("id", "model")}
            title = table.get("model") or table.get("kind") or "ResNet"
            found[table["id"]] = Entry(table["id"], kind, title, MappingProxyType(values))
    return MappingProxyType(found)
