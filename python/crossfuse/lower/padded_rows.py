"""Kernels on padded copies of their inputs: rows of the copies begin on multiples of 16 bytes.

TMA copies no others. One launch before the kernels copies inputs into workspaces, with zeros at the
end of each row. Inputs that only have fewer rows are not copied: their descriptors end sooner.
Outputs are stored without TMA where their rows begin elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossfuse.lower.image import BufferSpec, KernelImage, Launch
from crossfuse.workload.dtypes import float_type

_THREADS = 256
#: CTAs of a launch at most: eight for each SM of an H100, which hide the latency of their loads.
_CTAS = 1056
#: Unsigned types by their bytes: copies look at no number.
_WORDS = {1: "unsigned char", 2: "unsigned short"}
#: Bytes of a store. Reads are of one element each, since rows begin anywhere.
_PIECE = 16


def with_padding(image: KernelImage, shapes: Sequence[tuple[int, ...]]) -> KernelImage:
    """The function that takes inputs without padding, from the one that takes them padded.

    `shapes` are those of the inputs as callers pass them. Each input with longer rows in the
    kernels gets a workspace, and one launch fills them all.
    """
    names = {each.name for each in image.memory}
    read = {name for each in image.launches for name in each.arguments}
    wide = {each.name: each for each in image.buffers}
    shorter = {
        buffer.name: replace(buffer, shape=shape)
        for buffer, shape in zip(image.buffers, shapes, strict=False)
        if buffer.shape != shape
    }
    ended, copies = [], []
    for name, short in shorter.items():
        if _ends(short, wide[name]) and name not in read:
            ended.append(short)
        else:
            copies.append(_Copy(short, _workspace(wide[name], names)))
    found = replace(
        image,
        buffers=tuple(shorter.get(each.name, each) for each in image.buffers),
        launches=tuple(_ended(each, ended) for each in image.launches),
    )
    return _with_copies(found, copies) if copies else found


def _ends(short: BufferSpec, wide: BufferSpec) -> bool:
    """Whether a buffer has fewer rows of the same length: TMA loads zeros behind the last."""
    return len(short.shape) == 2 and short.shape[1] == wide.shape[1]


def _ended(launch: Launch, ended: Sequence[BufferSpec]) -> Launch:
    """A launch whose descriptors end where these inputs do."""
    rows = {each.name: each.shape[0] for each in ended}
    maps = tuple(
        replace(each, extents=(*each.extents[:-1], rows[each.buffer]))
        if each.buffer in rows
        else each
        for each in launch.tensor_maps
    )
    return replace(launch, tensor_maps=maps)


def _with_copies(image: KernelImage, copies: Sequence[_Copy]) -> KernelImage:
    moved = {each.short.name: each.wide.name for each in copies}
    return replace(
        image,
        cuda=f"{image.cuda}\n{_text(image, copies)}",
        launches=(_launch(image, copies), *(_on_copies(each, moved) for each in image.launches)),
        workspaces=(*image.workspaces, *(each.wide for each in copies)),
    )


@dataclass(frozen=True)
class _Copy:
    """An input, and the workspace with padded rows that replaces it."""

    short: BufferSpec
    wide: BufferSpec

    def statement(self, number: int) -> str:
        """A grid-stride loop over the workspace, 16 bytes at a time."""
        (rows, columns), width = _matrix(self.short), _matrix(self.wide)[1]
        size = float_type(self.short.dtype).numpy.itemsize
        word, piece = _WORDS[size], _PIECE // size
        return (
            f"  for (unsigned i = blockIdx.x * {_THREADS}u + threadIdx.x; "
            f"i < {self.pieces}u; i += gridDim.x * {_THREADS}u) {{\n"
            f"    const unsigned row = i / {width // piece}u;\n"
            f"    const unsigned column = i % {width // piece}u * {piece}u;\n"
            f"    const {word}* source = from{number} + (size_t)row * {columns}u + column;\n"
            f"    alignas({_PIECE}) {word} words[{piece}];\n"
            "    #pragma unroll\n"
            f"    for (unsigned j = 0; j < {piece}u; ++j)\n"
            f"      words[j] = row < {rows}u && column + j < {columns}u ? source[j] : 0;\n"
            f"    reinterpret_cast<uint4*>(to{number})[i] = *reinterpret_cast<uint4*>(words);\n"
            "  }\n"
        )

    @property
    def pieces(self) -> int:
        """Number of 16-byte stores: rows of the workspace are multiples of them."""
        size = float_type(self.short.dtype).numpy.itemsize
        return math.prod(self.wide.shape) * size // _PIECE


def _matrix(buffer: BufferSpec) -> tuple[int, int]:
    """A buffer as a matrix: (rows, length of the last extent)."""
    return math.prod(buffer.shape[:-1]), buffer.shape[-1]


def _workspace(buffer: BufferSpec, names: set[str]) -> BufferSpec:
    name = f"{buffer.name}_padded"
    while name in names:
        name += "_"
    return replace(buffer, name=name, output=True)


def _on_copies(launch: Launch, moved: dict[str, str]) -> Launch:
    """A launch that reads the copies instead of the inputs.

    It must not start early: what a kernel loads early was written by no kernel, but the copies
    were.
    """
    maps = tuple(
        replace(each, buffer=moved.get(each.buffer, each.buffer)) for each in launch.tensor_maps
    )
    arguments = tuple(moved.get(each, each) for each in launch.arguments)
    return replace(launch, arguments=arguments, tensor_maps=maps, early=False)


def _launch(image: KernelImage, copies: Sequence[_Copy]) -> Launch:
    pieces = max(each.pieces for each in copies)
    ctas = min(_CTAS, math.ceil(pieces / _THREADS))
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
