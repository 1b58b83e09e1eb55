"""Compiled graphs that torch can write to a file: with the kernels that they call.

``torch.compile(..., fullgraph=True).aot_compile`` wants something that becomes bytes and is made of
bytes again in another process. What inductor made has that from torch; in front of it go the
libraries of our kernels, so that a file needs neither our cache nor a compiler.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)

from crossfuse.cache import Entry, shelf
from crossfuse.cache.keys import package_hash
from crossfuse.cache.shelf import itself
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.runtime.kept import LIBRARIES
from crossfuse.schema import typed
from crossfuse.torch.kernels import offer_kept
from crossfuse.torch.known import Record
from crossfuse.torch.report import keep

#: Releases of torch of which it is known what they do to load a compiled graph.
RELEASES = ("2.11", "2.13")


class SavedProgram(SerializableCallable):
    """A compiled graph, as torch writes it.

    Parameters
    ----------
    compiled : Callable
        What inductor made.
    records : Sequence[Record]
        What became of its graphs of aten operators.
    called : Sequence[str]
        Keys of the kernels that these call.
    """

    def __init__(self, compiled: Any, records: Sequence[Record], called: Sequence[str]) -> None:
        self.compiled = compiled
        self.records = tuple(records)
        self.called = tuple(called)

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        return self.compiled(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedProgram) -> bytes:
        """The bytes of a compiled graph.

        Raises
        ------
        ArtefactRefused
            If it calls kernels that the cache has no library of, or torch cannot write the rest.
        """
        kernels = {each.key: each for record in fn.records for each in record.kernels}
        libraries = {}
        for key in fn.called:
            entry = _library(kernels[key].kept_as) if key in kernels else None
            if entry is None:
                raise _unwritten(f"the kernel '{key}', which this process alone has")
            libraries[kernels[key].kept_as] = (entry.data, dict(entry.about))
        if getattr(fn.compiled, "serialize", None) is None:
            raise _unwritten("a graph that torch's cache of AOTAutograd does not take")
        rest = BundledAOTAutogradSerializableCallable(_Kept(fn.compiled))
        made = BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(rest)
        records = [each.to_dict() for each in fn.records]
        return pickle.dumps((package_hash(), records, libraries, made))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """The compiled graph of its bytes, with its kernels loaded.

        Raises
        ------
        ArtefactRefused
            If another release of this package made it, or a kernel does not fit the GPU.
        """
        release, values, libraries, made = pickle.loads(data)
        if release != package_hash():
            raise refuse(
                ArtefactRefused,
                "torch-artefact",
                "package",
                found=f"files of this package of hash {package_hash()[:16]}",
                limit=f"{release[:16]}, those that compiled it",
                instead="compile the model again, or install the release that did",
            )
        records = typed(tuple[Record, ...], values)
        kernels = tuple(
            dict.fromkeys(
                each for record in records for each in record.kernels if each.kept_as in libraries
            )
        )
        entries = {key: Entry(*each) for key, each in libraries.items()}
        if not offer_kept(kernels, entries):
            raise _unwritten("kernels without a manifest")
        for record in records:
            keep(record.report)
        return BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(made)


def _library(key: str) -> Entry | None:
    return shelf(LIBRARIES.name).read(key, itself)


class _Kept:
    """What inductor made, of which torch writes what `loading_itself` says, where it is known."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def serialize(self) -> Any:
        entry = self._compiled.serialize()
        if ".".join(torch.__version__.split(".")[:2]) not in RELEASES:
            return entry
        from crossfuse.torch.kept_graph import loading_itself

        return loading_itself(entry)


def _unwritten(found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "torch-artefact",
        "graph",
        found=found,
        limit="an inference graph of static shapes, whose kernels are for a GPU and kept",
        instead="compile it so, with a cache, or call it in this process",
    )
