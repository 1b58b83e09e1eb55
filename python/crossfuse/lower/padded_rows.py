"""Kernels on padded copies of their arguments: rows of the copies begin on multiples of 16 bytes.

TMA copies no others. One launch before the kernels copies arguments into workspaces, with zeros at
the end of each row; one behind them copies the output back, without what lies beyond its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossfuse.lower.image import BufferSpec, KernelImage, Launch
from crossfuse.workload.dtypes import float_type

_THREADS = 256
#: CTAs of a launch at most: four for each SM of an H100, which hide the latency of their loads.
_CTAS = 528
#: Unsigned types by their bytes: copies look at no number.
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}


def with_padding(image: KernelImage, shapes: Sequence[tuple[int, ...]]) -> KernelImage:
    """The same function of arguments without padding.

    Parameters
    ----------
    image : KernelImage
        Of padded arguments.
    shapes : Sequence[tuple[int, ...]]
        Those of the arguments as callers pass them; further outputs, such as a timeline, stay.

    Returns
    -------
    KernelImage
        With a workspace for each argument of another shape, and launches that fill and empty them.
    """
    names = {each.name for each in image.memory}
    copies = []
    for buffer, shape in zip(image.buffers, shapes, strict=False):
        if buffer.shape != shape:
            copies.append(_Copy(replace(buffer, shape=shape), _padded(buffer, names)))
    given = [each for each in copies if not each.short.output]
    made = [each for each in copies if each.short.output]
    moved = {each.short.name: each.wide.name for each in copies}
    shorter = {each.short.name: each.short for each in copies}
    before, after = _launch(image, "pad", given), _launch(image, "unpad", made)
    kernels = tuple(_on_copies(each, moved) for each in image.launches)
    if before:
        # What they load before they wait was no kernel's to write; now it is a copy.
        kernels = tuple(replace(each, early=False) for each in kernels)
    return replace(
        image,
        cuda="\n".join([image.cuda, *_text(image, "pad", given), *_text(image, "unpad", made)]),
        buffers=tuple(shorter.get(each.name, each) for each in image.buffers),
        launches=(*before, *kernels, *after),
        workspaces=(*image.workspaces, *(each.wide for each in copies)),
    )


@dataclass(frozen=True)
class _Copy:
    """An argument, and the workspace with padded rows that stands for it."""

    short: BufferSpec
    wide: BufferSpec

    @property
    def ends(self) -> tuple[BufferSpec, BufferSpec]:
        """What is read, and what is written."""
        return (self.wide, self.short) if self.short.output else (self.short, self.wide)

    def statement(self, number: int) -> str:
        """A loop of the grid through the elements that are written."""
        source, target = (_Matrix(each.shape) for each in self.ends)
        inside = "true"
        if not self.short.output:
            inside = f"row < {source.rows}u && column < {source.columns}u"
        return (
            f"  for (unsigned i = blockIdx.x * {_THREADS}u + threadIdx.x; "
            f"i < {target.rows * target.columns}u; i += gridDim.x * {_THREADS}u) {{\n"
            f"    const unsigned row = i / {target.columns}u, column = i % {target.columns}u;\n"
            f"    to{number}[i] = {inside} ? from{number}[row * {source.columns}u + column] : 0;\n"
            "  }\n"
        )


@dataclass(frozen=True)
class _Matrix:
    """A buffer as rows of its last extent."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]


def _padded(buffer: BufferSpec, names: set[str]) -> BufferSpec:
    name = f"{buffer.name}_padded"
    while name in names:
        name += "_"
    return replace(buffer, name=name, output=True)


def _on_copies(launch: Launch, moved: dict[str, str]) -> Launch:
    maps = tuple(
        replace(each, buffer=moved.get(each.buffer, each.buffer)) for each in launch.tensor_maps
    )
    arguments = tuple(moved.get(each, each) for each in launch.arguments)
    return replace(launch, arguments=arguments, tensor_maps=maps)


def _launch(image: KernelImage, what: str, copies: Sequence[_Copy]) -> tuple[Launch, ...]:
    if not copies:
        return ()
    elements = max(math.prod(each.ends[1].shape) for each in copies)
    ctas = min(_CTAS, math.ceil(elements / _THREADS))
    arguments = tuple(end.name for each in copies for end in each.ends)
    return (
        Launch(f"{image.name}_{what}", (ctas, 1, 1), (_THREADS, 1, 1), (1, 1, 1), 0, arguments),
    )


def _text(image: KernelImage, what: str, copies: Sequence[_Copy]) -> list[str]:
    if not copies:
        return []
    words = [_WORDS[float_type(each.short.dtype).numpy.itemsize] for each in copies]
    parameters = ", ".join(
        f"const {word}* __restrict__ from{i}, {word}* __restrict__ to{i}"
        for i, word in enumerate(words)
    )
    head = f'extern "C" __global__ void __launch_bounds__({_THREADS}) {image.name}_{what}'
    body = "".join(each.statement(i) for i, each in enumerate(copies))
    return [f"{head}({parameters}) {{\n{body}}}\n"]
