"""Images whose launches a stub driver writes down, each with one thing to ask of the driver."""

from __future__ import annotations

from dataclasses import replace

from cpu.runtime.images import vector_add
from crossfuse.lower.image import ROW_COUNT, BufferSpec, KernelImage, PixelBox, TensorMap


def tiled(add: KernelImage) -> KernelImage:
    """A second launch that starts early, on a workspace and a tensor map of the output."""
    box = TensorMap("C_map", "C", (128, 4), (512,), (32, 4), 128)
    early = replace(add.launches[0], arguments=("W", "C_map"), tensor_maps=(box,), early=True)
    space = BufferSpec("W", (4, 128), "float32", True)
    return replace(add, name="tiled", launches=(*add.launches, early), workspaces=(space,))


def early(add: KernelImage) -> KernelImage:
    """Two launches that both start early."""
    launches = (replace(add.launches[0], early=True),) * 2
    return replace(add, name="early", launches=launches)


def fewer_rows(add: KernelImage) -> KernelImage:
    """Two launches on the rows that there are: of an input, a workspace, and a number for each row.

    B is read as a whole, so it has all of its rows in each call.
    """
    maps = [
        TensorMap(f"{name}_map", name, (128, 4), (512,), (32, 4), 128) for name in ("A", "B", "W")
    ]
    out = TensorMap("C_map", "C", (128, 4), (512,), (32, 4), 128)
    first = replace(
        add.launches[0],
        arguments=("A_map", "B_map", "W_map"),
        tensor_maps=tuple(maps),
    )
    second = replace(add.launches[0], arguments=("S", ROW_COUNT, "C_map"), tensor_maps=(out,))
    by_row = [replace(each, rows=each.name != "B") for each in add.buffers]
    return replace(
        add,
        name="fewer_rows",
        buffers=(*by_row, BufferSpec("S", (4,), "float32", False, rows=True)),
        launches=(first, second),
        workspaces=(BufferSpec("W", (4, 128), "float32", True),),
    )


def without_workspace(image: KernelImage) -> KernelImage:
    """Its last launch alone: nobody allocates on the stub's device."""
    return replace(image, name="rows_alone", launches=image.launches[1:], workspaces=())


def binned(rows: int) -> KernelImage:
    """At most so many rows of A, a CTA for each; B is no part of them."""
    add = vector_add(rows)
    out = TensorMap("C_map", "C", (128, rows), (512,), (32, 4), 128)
    launch = replace(add.launches[0], arguments=("A", ROW_COUNT, "C_map"), tensor_maps=(out,))
    a, b, c = add.buffers
    buffers = (replace(a, rows=True), replace(b, shape=(4, 128)), replace(c, rows=True))
    return replace(add, name=f"bin_{rows}", buffers=buffers, launches=(launch,))


def convolved(add: KernelImage) -> KernelImage:
    """The output as two images of 4 x 8 pixels of 8 channels."""
    box = PixelBox((-1, -2), (-3, -4))
    pixels = TensorMap("C_map", "C", (8, 8, 4, 2), (32, 256, 1024), (8, 16), 32, pixels=box)
    launch = replace(add.launches[0], arguments=("A", "B", "C_map"), tensor_maps=(pixels,))
    return replace(add, name="convolved", launches=(launch,))


def whole_grid(add: KernelImage) -> KernelImage:
    """A launch whose CTAs wait for each other, with flags that are kept."""
    launch = replace(add.launches[0], arguments=("A", "flags", "C"), cooperative=True)
    flags = BufferSpec("flags", (100,), "uint32", True)
    return replace(add, name="whole_grid", launches=(launch,), state=(flags,))
