"""Record of a compiled model's folder: its contents and how it was made, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_text
from crossfuse.runtime.model_inputs import ModelInput
from crossfuse.schema import Damaged, read

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
        One of `crossfuse.runtime.running_model.RUNS_ON`.
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


def model_refused(where: str, found: str, limit: str) -> RefusedError:
    """Build the refusal of a folder that holds no model, or no complete one."""
    instead = "export the model again, or copy the whole folder"
    return refuse(
        ArtefactRefused, "model-artefact", where, found=found, limit=limit, instead=instead
    )
