"""Checks of a kernel image, and of the arrays passed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crossfuse.errors import ArtefactRefused, CheckFailed, RefusedError, Rule, refuse
from crossfuse.lower.image import ROW_COUNT, BufferSpec, KernelImage, Launch, TensorMap
from crossfuse.markers import MAX_CLUSTER
from crossfuse.workload.dtypes import numpy_type

_misfit = Rule(
    ArtefactRefused, "emulate-argument", instead="pass the arrays that the image's buffers describe"
)

_MAX_THREADS = 1024
# Of a cooperative launch: what fits into the runtime's address space, above what any device runs.
_MAX_CTAS_AT_ONCE = 4096
_MAX_THREADS_AT_ONCE = 1 << 18
# Of a map of pixels in four dimensions: channels and pixels of a copy, and bits of a corner. CUDA
# driver API, cuTensorMapEncodeIm2col.
_MAX_CHANNELS, _MAX_PIXELS, _CORNER = 256, 1024, 128
# Dimensions of a tensor map. PTX ISA, tensor memory.
_MAX_RANK = 5


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name of TVM and ml_dtypes; unknown names raise `ArtefactRefused`."""
    try:
        return numpy_type(name)
    except TypeError:
        raise _misfit("dtype", name, "a dtype of numpy or ml_dtypes") from None


def check_image(image: KernelImage) -> None:
    """Raise `CheckFailed` for an image whose parts contradict each other.

    These are buffers that share a name, launches with unknown arguments, grids that are not whole
    clusters, CTAs or clusters that are too large, more to be resident at once than the emulator can
    hold, and tensor maps that the driver would not encode.
    """
    names = [buffer.name for buffer in image.memory]
    if len(set(names)) < len(names):
        raise _contradiction(image, f"buffers {', '.join(names)}", "distinct names")
    if not image.launches:
        raise _contradiction(image, "no launch", "at least one launch")
    for launch in image.launches:
        _check_launch(image, launch, names)
        for each in launch.tensor_maps:
            _check_map(image, each)


def _check_launch(image: KernelImage, launch: Launch, names: list[str]) -> None:
    maps = [each.name for each in launch.tensor_maps]
    rows = [] if image.rows is None else [ROW_COUNT]
    unknown = [name for name in launch.arguments if name not in (*names, *maps, *rows)]
    threads = int(np.prod(launch.block))
    where = f"launch of {launch.symbol}"
    if unknown:
        raise _contradiction(image, f"{where} with argument {unknown[0]}", ", ".join(names))
    if min(*launch.grid, *launch.block, *launch.cluster) < 1:
        raise _contradiction(image, f"{where} with an empty extent", "extents of at least 1")
    if any(grid % cluster for grid, cluster in zip(launch.grid, launch.cluster, strict=True)):
        found = f"{where} with grid {launch.grid} and cluster {launch.cluster}"
        raise _contradiction(image, found, "a grid of whole clusters on each axis")
    if threads > _MAX_THREADS:
        raise _contradiction(image, f"{where} with {threads} threads", f"{_MAX_THREADS} in a CTA")
    ctas = int(np.prod(launch.grid))
    at_once = ctas > _MAX_CTAS_AT_ONCE or ctas * threads > _MAX_THREADS_AT_ONCE
    if (launch.cooperative or launch.helps) and at_once:
        limit = f"{_MAX_CTAS_AT_ONCE} CTAs and {_MAX_THREADS_AT_ONCE} threads at the same time"
        raise _contradiction(image, f"{where} with {ctas} CTAs of {threads} threads", limit)
    if launch.cluster_size > MAX_CLUSTER:
        found = f"{where} with {launch.cluster_size} CTAs in a cluster"
        raise _contradiction(image, found, str(MAX_CLUSTER))


def _check_map(image: KernelImage, each: TensorMap) -> None:
    """Check a tensor map, of a matrix or of pixels (im2col), as the driver does."""
    rank = len(each.extents)
    tiled = each.pixels is None
    if not (2 <= rank <= _MAX_RANK if tiled else rank == 4) or len(each.strides) != rank - 1:
        found = f"tensor map {each.name} of {rank} dimensions, {len(each.strides)} strides"
        due = f"2 to {_MAX_RANK}" if tiled else "4"
        raise _contradiction(image, found, f"{due} dimensions, a stride for each but the first")
    if len(each.box) != (rank if tiled else 2) or any(extent != 1 for extent in each.box[3:]):
        found = f"tensor map {each.name} with boxes {each.box}"
        raise _contradiction(image, found, "boxes of matrices of one dimension, an extent for each")
    if any(stride % 16 for stride in each.strides):
        raise _contradiction(
            image, f"tensor map {each.name} with strides {each.strides}", "multiples of 16 bytes"
        )
    if each.pixels is None:
        return
    channels, pixels = each.box
    if not (1 <= channels <= _MAX_CHANNELS and 1 <= pixels <= _MAX_PIXELS):
        found = f"tensor map {each.name} of {pixels} pixels of {channels} channels"
        raise _contradiction(image, found, f"{_MAX_PIXELS} pixels of {_MAX_CHANNELS} channels")
    corners = (*each.pixels.lower, *each.pixels.upper)
    if len(corners) != 4 or not all(-_CORNER <= corner < _CORNER for corner in corners):
        found = f"tensor map {each.name} with corners {corners}"
        raise _contradiction(image, found, f"two corners from {-_CORNER} to {_CORNER - 1}")
    sides = zip(each.extents[1:3], each.pixels.lower, each.pixels.upper, strict=True)
    if any(extent + upper - lower < 1 for extent, lower, upper in sides):
        found = f"tensor map {each.name} with corners {corners} of images {each.extents[1:3]}"
        raise _contradiction(image, found, "a box of at least one pixel")


def image_of_call(
    image: KernelImage, arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray]
) -> KernelImage:
    """The image with its buffers cut to the rows of a call: those of the first input with rows.

    It is the image itself unless it accepts fewer rows and the call has fewer.
    """
    given = arguments if isinstance(arguments, Mapping) else _by_position(image, arguments)
    counts = (
        given[each.name].shape[0]
        for each in image.buffers
        if each.rows and each.name in given and given[each.name].ndim
    )
    count = next(counts, None)
    if image.rows is None or count is None or not 1 <= count < image.rows:
        return image
    return image.with_rows(count)


def inputs_by_name(
    image: KernelImage, arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Match arrays, by name or in buffer order, with an image's inputs, and make them contiguous.

    A sequence has the inputs, or all buffers. An array that is missing, unknown, or of another
    shape or dtype raises `ArtefactRefused`.
    """
    inputs = [buffer for buffer in image.buffers if not buffer.output]
    given = arguments if isinstance(arguments, Mapping) else _by_position(image, arguments)
    known = {buffer.name: buffer for buffer in image.buffers}
    for name, array in given.items():
        if name not in known:
            raise _misfit("argument", name, f"one of {', '.join(known)}")
        _check_array(known[name], array)
    for buffer in inputs:
        if buffer.name not in given:
            raise _misfit("argument", f"no array for {buffer.name}", "an array for every input")
    return {buffer.name: np.ascontiguousarray(given[buffer.name]) for buffer in inputs}


def _by_position(image: KernelImage, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    inputs = [buffer.name for buffer in image.buffers if not buffer.output]
    every = [buffer.name for buffer in image.buffers]
    for names in (inputs, every):
        if len(arrays) == len(names):
            return dict(zip(names, arrays, strict=True))
    limit = f"{len(inputs)} inputs, or all {len(every)} buffers"
    raise _misfit("argument", f"{len(arrays)} arrays", limit)


def _check_array(buffer: BufferSpec, array: np.ndarray) -> None:
    expected = numpy_dtype(buffer.dtype)
    if tuple(array.shape) != tuple(buffer.shape) or array.dtype != expected:
        found = f"shape {tuple(array.shape)} of {array.dtype}"
        raise _misfit(buffer.name, found, f"shape {tuple(buffer.shape)} of {buffer.dtype}")


def _contradiction(image: KernelImage, found: str, limit: str) -> RefusedError:
    return refuse(
        CheckFailed,
        "emulate-image",
        image.name,
        found=found,
        limit=limit,
        instead="correct the lowering that made the image",
    )
