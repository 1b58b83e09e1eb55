"""Kernels on padded copies of their inputs: rows of the copies begin on multiples of 16 bytes.

TMA copies no others. One launch before the kernels copies inputs into workspaces, with zeros at the
end of each row. Outputs are stored without TMA where their rows begin elsewhere.
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
_WORDS = {1: "unsigned char", 2: "unsigned short"}


def with_padding(image: KernelImage, shapes: Sequence[tuple[int, ...]]) -> KernelImage:
    """The same function of inputs without padding.

    Parameters
    ----------
    image : KernelImage
        Of padded inputs.
    shapes : Sequence[tuple[int, ...]]
        Those of the inputs as callers pass them.

    Returns
    -------
    KernelImage
        With a workspace for each input of another shape, and a launch that fills them.
    """
    names = {each.name for each in image.memory}
    copies = [
        _Copy(replace(buffer, shape=shape), _workspace(buffer, names))
        for buffer, shape in zip(image.buffers, shapes, strict=False)
        if buffer.shape != shape
    ]
    shorter = {each.short.name: each.short for each in copies}
    moved = {each.short.name: each.wide.name for each in copies}
    return replace(
        image,
        cuda=f"{image.cuda}\n{_text(image, copies)}",
        buffers=tuple(shorter.get(each.name, each) for each in image.buffers),
        launches=(_launch(image, copies), *(_on_copies(each, moved) for each in image.launches)),
        workspaces=(*image.workspaces, *(each.wide for each in copies)),
    )


@dataclass(frozen=True)
class _Copy:
    """An input, and the workspace with padded rows that stands for it."""

    short: BufferSpec
    wide: BufferSpec

    def statement(self, number: int) -> str:
        """A loop of the grid through the elements of the workspace."""
        (rows, columns), width = _matrix(self.short), _matrix(self.wide)[1]
        return (
            f"  for (unsigned i = blockIdx.x * {_THREADS}u + threadIdx.x; "
            f"i < {math.prod(self.wide.shape)}u; i += gridDim.x * {_THREADS}u) {{\n"
            f"    const unsigned row = i / {width}u, column = i % {width}u;\n"
            f"    const bool inside = row < {rows}u && column < {columns}u;\n"
            f"    to{number}[i] = inside ? from{number}[row * {columns}u + column] : 0;\n"
            "  }\n"
        )


def _matrix(buffer: BufferSpec) -> tuple[int, int]:
    """Rows of the last extent, and that."""
    return math.prod(buffer.shape[:-1]), buffer.shape[-1]


def _workspace(buffer: BufferSpec, names: set[str]) -> BufferSpec:
    name = f"{buffer.name}_padded"
    while name in names:
        name += "_"
    return replace(buffer, name=name, output=True)


def _on_copies(launch: Launch, moved: dict[str, str]) -> Launch:
    """A launch that reads copies. What it loads early is no kernel's to write, but for copies."""
    maps = tuple(
        replace(each, buffer=moved.get(each.buffer, each.buffer)) for each in launch.tensor_maps
    )
    arguments = tuple(moved.get(each, each) for each in launch.arguments)
    return replace(launch, arguments=arguments, tensor_maps=maps, early=False)


def _launch(image: KernelImage, copies: Sequence[_Copy]) -> Launch:
    elements = max(math.prod(each.wide.shape) for each in copies)
    ctas = min(_CTAS, math.ceil(elements / _THREADS))
    arguments = tuple(name for each in copies for name in (each.short.name, each.wide.name))
    alone = (1, 1, 1)
    return Launch(f"{image.name}_pad", (ctas, 1, 1), (_THREADS, 1, 1), alone, 0, arguments)


def _text(image: KernelImage, copies: Sequence[_Copy]) -> str:
    words = [_WORDS[float_type(each.short.dtype).numpy.itemsize] for each in copies]
    parameters = ", ".join(
        f"const {word}* __restrict__ from{i}, {word}* __restrict__ to{i}"
        for i, word in enumerate(words)
    )
    head = f'extern "C" __global__ void __launch_bounds__({_THREADS}) {image.name}_pad'
    body = "".join(each.statement(i) for i, each in enumerate(copies))
    return f"{head}({parameters}) {{\n{body}}}\n"
