"""Record of a compiled model's folder: its contents and how it was made, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, Rule, WorkloadRefused
from crossfuse.files import read_text
from crossfuse.runtime.tensors import is_torch
from crossfuse.schema import Count, Damaged, read

_refused = Rule(WorkloadRefused, "compile-model")
model_refused = Rule(
    ArtefactRefused, "model-artefact", instead="export the model again, or copy the whole folder"
)

# Inputs that a compiled model accepts: their number, element types and shapes.


@dataclass(frozen=True)
class ModelInput:
    """An input of a model."""

    name: str
    dtype: str
    #: Numbers, and names of symbols or expressions of them.
    extents: tuple[Count | str, ...]


@dataclass(frozen=True)
class ModelInputs:
    """All inputs of a model, in order."""

    inputs: tuple[ModelInput, ...]
    #: Upper bounds of symbols, by name; others are unbounded.
    most: Mapping[str, int]

    def check(self, given: Sequence[Any]) -> None:
        """Raise `WorkloadRefused` for arguments of a call that the model was not compiled for.

        That is another number of them, another type or extent, or elements that are not row-major.
        A symbol has one value in all inputs, and at most its bound.
        """
        if len(given) != len(self.inputs):
            limit = f"one for each of {', '.join(each.name for each in self.inputs)}"
            raise _refused("inputs", f"{len(given)} of them", limit, "pass all of them in order")
        known: dict[str, int] = {}
        for due, each in zip(self.inputs, given, strict=True):
            if not hasattr(each, "dtype"):
                found, limit = f"a {type(each).__name__}", "tensors of torch and arrays of numpy"
                raise _refused(due.name, found, limit, "make it one, such as torch.tensor(...)")
            if is_torch(each) and each.is_meta:
                found, limit = "a tensor of the meta device", "tensors that have elements"
                raise _refused(due.name, found, limit, "move it to the CPU or the GPU, with values")
            dtype, before = str(each.dtype).removeprefix("torch."), dict(known)
            if dtype != due.dtype or not self._fits(each.shape, due.extents, known):
                found = f"{dtype}{list(each.shape)}"
                advice = "compile the model for these inputs too, or convert them"
                raise _refused(due.name, found, self._limit(due, before), advice)
            if not _is_row_major(each):
                found = "an array of other strides"
                limit = "row-major elements, since a copy would go unnoticed"
                raise _refused(due.name, found, limit, f"pass {due.name}.contiguous() or the like")

    def _fits(
        self, shape: Sequence[int], extents: Sequence[int | str], known: dict[str, int]
    ) -> bool:
        """Whether a shape has the extents; `known` gathers the values of symbols."""
        if len(shape) != len(extents):
            return False
        for size, extent in zip(shape, extents, strict=True):
            # What is made of several symbols is looked at by TVM's machine.
            if isinstance(extent, str) and not extent.isidentifier():
                continue
            due = known.setdefault(extent, size) if isinstance(extent, str) else extent
            if size != due or size > self.most.get(str(extent), size):
                return False
        return True

    def _limit(self, due: ModelInput, known: Mapping[str, int]) -> str:
        """The type and shape that an input should have, with values and bounds of its symbols."""
        names = [each for each in due.extents if isinstance(each, str)]
        same = (f"{each} = {known[each]}" for each in names if each in known)
        bound = (f"{each} at most {self.most[each]}" for each in names if each in self.most)
        notes = ", ".join([*same, *bound])
        shape = ", ".join(map(str, due.extents))
        return f"{due.dtype}[{shape}]" + (f" with {notes}" if notes else "")


def _is_row_major(value: Any) -> bool:
    return bool(value.is_contiguous() if is_torch(value) else value.flags.c_contiguous)


LIBRARY, MANIFEST, WEIGHTS = "model.so", "model.json", "weights.npz"
"""Files of the folder."""

FORMAT_VERSION = 1
"""Raised whenever a reader of the older format would misread the newer."""


@dataclass(frozen=True)
class ModelArtefact:
    """What lies in the folder.

    Attributes
    ----------
    device, arch : str
        What its kernels were planned for.
    limits : Mapping[str, int]
        Limits of the device that the kernels were checked against.
    versions : Mapping[str, str | None]
        What it was made with.
    runs_on : str
        One of `crossfuse.runtime.model_artefact.RUNS_ON`.
    inputs : tuple[ModelInput, ...]
        What it is called with.
    most : Mapping[str, int]
        What symbolic extents stand for at most, by name.
    weights : tuple[ModelInput, ...]
        The further parameters, in order.
    stored : bool
        Whether they are in ``weights.npz``.
    fused : tuple[str, ...]
        Kernels of ours.
    report : str
        What became of each chain and cascade.
    source_sha256 : str
        Hash of the Relax module that was compiled.
    library_sha256 : str
        Hash of ``model.so``.

    Examples
    --------
    >>> record = ModelArtefact(
    ...     device="h100-sxm",
    ...     arch="sm_90a",
    ...     limits={"shared_memory_per_cta": 232448},
    ...     versions={"tvm": "0.27.0.post1"},
    ...     runs_on="cuda",
    ...     inputs=(ModelInput("x", "float16", ("m", 64)),),
    ...     most={"m": 128},
    ...     weights=(ModelInput("w0", "float16", (64, 64)),),
    ...     stored=True,
    ...     fused=("crossfuse_gemm_chain",),
    ...     report="",
    ...     source_sha256="",
    ...     library_sha256="",
    ... )
    >>> read = ModelArtefact.from_json(record.to_json(), "model.json")
    >>> read == record, read.inputs[0].extents
    (True, ('m', 64))
    """

    device: str
    arch: str
    limits: Mapping[str, int]
    versions: Mapping[str, str | None]
    runs_on: str
    inputs: tuple[ModelInput, ...]
    most: Mapping[str, int]
    weights: tuple[ModelInput, ...]
    stored: bool
    fused: tuple[str, ...]
    report: str
    source_sha256: str
    library_sha256: str

    def to_json(self) -> str:
        """Stable, indented JSON."""
        record = {"format_version": FORMAT_VERSION} | asdict(self)
        return json.dumps(record, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> ModelArtefact:
        """The record that `to_json` wrote.

        Parameters
        ----------
        text : str
            The JSON.
        where : str
            Its path, for what is refused.

        Returns
        -------
        ModelArtefact
            The record.

        Raises
        ------
        ArtefactRefused
            If it is no JSON, of another format version, or incomplete.
        """
        try:
            return read(cls, text, version=FORMAT_VERSION)
        except Damaged as error:
            raise model_refused(where, error.found, error.limit) from None


@checked
def read_model_artefact(folder: str | os.PathLike[str]) -> ModelArtefact:
    """Read what lies in a folder, without loading it.

    Parameters
    ----------
    folder : path
        The folder.

    Returns
    -------
    ModelArtefact
        The record.

    Raises
    ------
    ArtefactRefused
        If there is none, or it cannot be read.

    Examples
    --------
    >>> read_model_artefact("no-such-folder")
    Traceback (most recent call last):
    ...
    crossfuse.errors.ArtefactRefused: ...
    """
    path = Path(folder) / MANIFEST
    try:
        text = read_text(path)
    except Damaged as error:
        raise model_refused(str(path), error.found, "a file of the model") from None
    return ModelArtefact.from_json(text, str(path))
