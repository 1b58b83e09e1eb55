"""What lowering hands on: CUDA text, its launches and its buffers, as plain values.

Emulators and the runtime read a `KernelImage`; neither needs the compiler that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossfuse.schema import Count, Extent

Dim3 = tuple[Extent, Extent, Extent]

#: Name of the parameter, a 32-bit integer, that tells a kernel how many rows there are.
ROW_COUNT = "crossfuse_rows"


@dataclass(frozen=True)
class BufferSpec:
    """One argument of the compiled function.

    Attributes
    ----------
    name : str
        Name of the parameter.
    shape : tuple[int, ...]
        Extents, row-major.
    dtype : str
        Element type as TVM and ml_dtypes spell it, such as ``"bfloat16"``.
    output : bool
        Whether the function writes it.
    rows : bool
        Whether its first extent counts rows, of which there may be fewer: as many in all such
        buffers of a call.
    """

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    output: bool
    rows: bool = False

    def with_rows(self, count: int) -> BufferSpec:
        """The same buffer with another number of rows, if it has any."""
        return replace(self, shape=(count, *self.shape[1:])) if self.rows else self


@dataclass(frozen=True)
class PixelBox:
    """Where copies of pixels begin, as the im2col mode of TMA has it.

    Copies walk through a box of pixels of each image, row by row and image by image; each pixel is
    loaded at an offset from there, which a copy gives, as zeros if that lies beyond the image.

    Attributes
    ----------
    lower : tuple[int, ...]
        First pixel of the box, counted from the first of the image: column, then row.
    upper : tuple[int, ...]
        Last pixel of the box, counted from the last of the image.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor that a kernel takes by value: how a box of a buffer is copied.

    Attributes
    ----------
    name : str
        Name of the kernel's parameter.
    buffer : str
        Name of the `BufferSpec` in global memory.
    extents : tuple[int, ...]
        Of the buffer, innermost dimension first, in elements.
    strides : tuple[int, ...]
        Of every dimension but the innermost, in bytes; multiples of 16.
    box : tuple[int, ...]
        Extents of what one copy moves, innermost first, at most 256 each. With `pixels`: how many
        channels of how many pixels.
    swizzle : int
        Bytes that one swizzle pattern spans in shared memory: 0, 32, 64 or 128.
    fetch : int
        Bytes that L2 fetches at least from memory: 128, or 256 where what follows in a row is
        wanted soon.
    pixels : PixelBox | None
        Whether copies are of pixels of images [batch, row, column, channel].
    """

    name: str
    buffer: str
    extents: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    box: tuple[Extent, ...]
    swizzle: int
    fetch: int = 128
    pixels: PixelBox | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `grid` counts CTAs (not clusters), as CUDA does.

    Attributes
    ----------
    symbol : str
        Name of the ``__global__`` function.
    grid, block, cluster : Dim3
        CTAs in the grid, threads in a CTA, CTAs in a cluster, each as (x, y, z).
    dynamic_shared_bytes : int
        Dynamic shared memory of one CTA, in bytes.
    arguments : tuple[str, ...]
        Names of the `BufferSpec` or `TensorMap` in the order of the kernel's parameters, or
        `ROW_COUNT`.
    tensor_maps : tuple[TensorMap, ...]
        Descriptors among the arguments.
    early : bool
        Whether it may start before the launch before it is over (programmatic dependent launch);
        the kernel itself waits where it depends on that launch.
    cooperative : bool
        Whether all CTAs of the grid run at the same time: they wait for each other through global
        memory. The driver refuses a launch of more than fit.
    helps : bool
        Whether a CTA that has waited for others for long does their part itself: then clusters may
        run at the same time, or some after others are over.
    """

    symbol: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_shared_bytes: Count
    arguments: tuple[str, ...]
    tensor_maps: tuple[TensorMap, ...] = ()
    early: bool = False
    cooperative: bool = False
    helps: bool = False

    @property
    def cluster_size(self) -> int:
        """CTAs in one cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass(frozen=True)
class KernelImage:
    """A lowered function: generated CUDA and how to launch it.

    Attributes
    ----------
    name : str
        Name of the function it was lowered from.
    cuda : str
        Generated CUDA C++, all kernels of the function in one text.
    buffers : tuple[BufferSpec, ...]
        Arguments in the order of the function's parameters.
    launches : tuple[Launch, ...]
        Launches in program order.
    workspaces : tuple[BufferSpec, ...]
        Intermediates between the launches, which the runtime allocates for each call.
    state : tuple[BufferSpec, ...]
        What is zero before the first launch and kept from one to the next, such as flags. Launches
        that may run at the same time have memory of their own for it.
    unordered : bool
        Whether it adds floating point numbers in the order in which they come: results may differ
        in the last bits from run to run.
    """

    name: str
    cuda: str
    buffers: tuple[BufferSpec, ...]
    launches: tuple[Launch, ...]
    workspaces: tuple[BufferSpec, ...] = ()
    state: tuple[BufferSpec, ...] = ()
    unordered: bool = False

    @property
    def memory(self) -> tuple[BufferSpec, ...]:
        """Everything in global memory: arguments, then workspaces, then state."""
        return (*self.buffers, *self.workspaces, *self.state)

    @property
    def rows(self) -> int | None:
        """Rows of a call at most; None if each call has all rows."""
        return next((each.shape[0] for each in self.buffers if each.rows), None)

    def with_rows(self, count: int) -> KernelImage:
        """The same kernels on fewer rows, as one call of them sees it.

        Descriptors of buffers with rows end where the rows do; workspaces keep all of theirs.

        Parameters
        ----------
        count : int
            Rows of the call: 1 to `rows`.

        Returns
        -------
        KernelImage
            With the shapes of that call.
        """
        with_rows = {each.name for each in self.buffers if each.rows}

        def cut(map_: TensorMap) -> TensorMap:
            if map_.buffer not in with_rows:
                return map_
            return replace(map_, extents=(*map_.extents[:-1], count))

        launches = tuple(
            replace(each, tensor_maps=tuple(map(cut, each.tensor_maps))) for each in self.launches
        )
        buffers = tuple(each.with_rows(count) for each in self.buffers)
        return replace(self, buffers=buffers, launches=launches)
