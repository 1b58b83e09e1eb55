"""The packaged workloads by id: ``S3`` is the gated FFN of Llama-2-7B."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.workload.dtypes import closest
from crossfuse.workload.spec import DIMS, KINDS, WorkloadSpec
from crossfuse.workload.spec_text import from_options, parse, split

_NOT_LOWERED = {
    "conv_chain": (
        "a gemm_chain or gated_ffn, because implicit GEMM chains are not yet lowered",
        "take one of G1 to G10, or write the 1x1 convolutions as a gemm_chain with M = H*W",
    ),
    "cascade": (
        "a gemm_chain or gated_ffn, because cascades of reductions are not yet lowered",
        "take one of G1 to G10 or S1 to S8",
    ),
}


@dataclass(frozen=True)
class Entry:
    """One packaged workload.

    Attributes
    ----------
    id : str
        Such as ``"S3"``.
    kind : str
        ``"gemm_chain"``, ``"gated_ffn"``, ``"conv_chain"`` or ``"cascade"``.
    title : str
        The model it comes from, or the kind of cascade.
    values : Mapping[str, Any]
        Its extents and flags.
    """

    id: str
    kind: str
    title: str
    values: Mapping[str, Any]

    @property
    def lowered(self) -> bool:
        """Whether `lookup` makes a spec of it."""
        return self.kind in KINDS


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
    """
    return tuple(e.id for e in _entries().values() if kind is None or e.kind == kind)


def entry(name: str) -> Entry:
    """Find a packaged workload, lowered or not.

    Parameters
    ----------
    name : str
        Its id.

    Returns
    -------
    Entry
        The workload.

    Raises
    ------
    WorkloadRefused
        For unknown ids, with the closest known one.
    """
    if name in _entries():
        return _entries()[name]
    raise refuse(
        WorkloadRefused,
        "workload-id",
        "suites",
        found=repr(name),
        limit="G1 to G10, S1 to S8, C1 to C8, R1 to R12",
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
    """
    return tuple(_document()["sweep"]["M"])


def lookup(name: str, M: int | None = None, dtype: str = "bfloat16") -> WorkloadSpec:
    """Make the spec of a packaged chain.

    Parameters
    ----------
    name : str
        Id of a gemm_chain or gated_ffn.
    M : int, optional
        Rows, instead of those of the suite.
    dtype : str
        Type of inputs and output.

    Returns
    -------
    WorkloadSpec
        The spec.

    Raises
    ------
    WorkloadRefused
        Unknown ids, and the convolution chains and cascades, which no kernel is made for.
    """
    options = {"dtype": dtype} | ({} if M is None else {"M": str(M)})
    return _with_options(entry(name), options)


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
        See `lookup` and `crossfuse.workload.spec_text.parse`.
    """
    head, options = split(text)
    if head in _entries():
        return _with_options(_entries()[head], options)
    return parse(text) if ":" in text else lookup(head)


def _with_options(found: Entry, options: dict[str, str]) -> WorkloadSpec:
    if not found.lowered:
        limit, instead = _NOT_LOWERED[found.kind]
        raise refuse(
            WorkloadRefused,
            "workload-kind",
            found.id,
            found=f"{found.kind} ({found.title})",
            limit=limit,
            instead=instead,
        )
    extents = {name: str(found.values[name]) for name in DIMS}
    return from_options(found.kind, extents | options)


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = resources.files("crossfuse.workload").joinpath("suites.toml").read_text("utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=1)
def _entries() -> Mapping[str, Entry]:
    found = {}
    for kind in ("gemm_chain", "gated_ffn", "conv_chain", "cascade"):
        for table in _document()[kind]:
            values = {key: value for key, value in table.items() if key not in ("id", "model")}
            title = table.get("model") or table.get("kind") or "ResNet"
            found[table["id"]] = Entry(table["id"], kind, title, MappingProxyType(values))
    return MappingProxyType(found)
