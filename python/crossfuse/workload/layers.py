"""Rows of layers of any number as values: ``layers:M=128,widths=768x3072x3072x768``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from crossfuse.calls import checked
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.expression import canonical
from crossfuse.workload.refusal import (
    check_elements,
    check_extent,
    check_given,
    one_of,
    read_extent,
    read_fields,
    refused,
)
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.suites import pairs, resolve

KIND = "layers"
_KEYS = ("M", "widths", "dtype", "act", "bias", "residual", "weights", "out")
_LAYOUTS = ("nk", "kn")


@dataclass(frozen=True)
class LayersSpec:
    """Layers ``x = act(x @ W + b)``, the last of which has no activation.

    Attributes
    ----------
    M : int
        Rows.
    widths : tuple[int, ...]
        Columns of the input, then of what each layer makes; three or more.
    dtype, out : str
        Of all operands and intermediates, and of the output, which is `dtype` if empty.
    act : str
        Expression in x that all layers but the last apply, or the name of one.
    bias : bool
        Whether each layer adds a bias.
    residual : bool
        Whether a matrix is added to the output.
    weights : str
        ``"nk"`` or ``"kn"``, how weights are stored.

    Raises
    ------
    WorkloadRefused
        For extents that are no positive integers, fewer than two layers, and unknown words.

    Examples
    --------
    >>> spec = LayersSpec(128, (768, 3072, 3072, 768))
    >>> str(spec)
    'layers:M=128,widths=768x3072x3072x768,dtype=bfloat16,act=relu,weights=nk'
    """

    M: int
    widths: tuple[int, ...]
    dtype: str = "bfloat16"
    act: str = "relu"
    bias: bool = False
    residual: bool = False
    weights: str = "nk"
    out: str = ""

    def __post_init__(self) -> None:
        check_extent(KIND, "M", self.M, 128)
        if len(self.widths) < 3:
            found = f"{len(self.widths)} widths"
            limit = "the columns of the input and of what two layers or more make"
            raise refused("workload-extent", f"{KIND}:widths", found, limit, "write gemm, say")
        for width in self.widths:
            check_extent(KIND, "widths", width, 768)
        for size in (self.M * max(self.widths), *(n * k for k, n in pairwise(self.widths))):
            check_elements(KIND, "widths", size, "take fewer rows or columns")
        one_of(f"{KIND}:weights", self.weights, _LAYOUTS)
        object.__setattr__(self, "act", canonical(self.act))
        object.__setattr__(self, "dtype", float_type(self.dtype).name)
        object.__setattr__(self, "out", float_type(self.out or self.dtype, "out").name)

    def __str__(self) -> str:
        widths = "x".join(map(str, self.widths))
        text = f"{KIND}:M={self.M},widths={widths},dtype={self.dtype},act={self.act}"
        flags = ("bias", "residual")
        text += "".join(f",{name}=true" for name in flags if getattr(self, name))
        out = f",out={self.out}" if self.out != self.dtype else ""
        return f"{text},weights={self.weights}{out}"


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
    options = pairs(KIND, body, _KEYS)
    check_given(KIND, ("M", "widths"), options, 128)
    values = read_fields(KIND, LayersSpec, options)
    widths = options["widths"].split("x")
    values["widths"] = tuple(read_extent(KIND, "widths", each) for each in widths)
    return LayersSpec(**values)


def names_layers(text: str) -> bool:
    """Whether a text is meant to be a row of layers."""
    return text.partition(":")[0].strip() == KIND


def resolve_chain(text: str) -> WorkloadSpec | LayersSpec:
    """Read a chain of products of any length; see `crossfuse.workload.suites.resolve`."""
    return parse_layers(text) if names_layers(text) else resolve(text)
