"""Archives of arrays (``.npz``) that anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from crossfuse.files import check_file
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    import numpy as np

#: Of the header of an array, which numpy evaluates.
_HEADER_BYTES = 10_000


def read_arrays(
    path: Path, names: Iterable[str], shapes: Mapping[str, tuple[object, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Read arrays of an archive of ``numpy.savez`` by name; `shapes` gives those that are known.

    `Damaged` says that it is no archive, that an array is missing or of another shape, or that a
    part was cut off.
    """
    check_file(path)
    found = {}
    name = ""
    try:
        with ZipFile(path) as archive:
            for name in names:
                found[name] = _member(archive, f"{name}.npy", (shapes or {}).get(name))
    except Damaged:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise whatever they come across
        what = f"{name}: " if name else ""
        raise Damaged(f"{what}{type(error).__name__}: {error}", "arrays as numpy.savez") from None
    return found


def _member(archive: ZipFile, name: str, shape: tuple[object, ...] | None) -> Any:
    """Read one array, once its header is known to claim no more than is stored.

    A false header would otherwise have numpy allocate what it asks for.
    """
    from numpy.lib import format as npy

    info = archive.getinfo(name)
    with archive.open(info) as file:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        there, _, dtype = readers[npy.read_magic(file)](file, _HEADER_BYTES)
        if shape is not None and there != shape:
            raise Damaged(f"{name} of shape {list(there)}", f"{list(shape)}")
        size = math.prod(there) * dtype.itemsize
        if min(there, default=0) < 0 or size != info.file_size - file.tell():
            raise Damaged(f"{name} of {size} bytes", f"{info.file_size - file.tell()}, as stored")
    with archive.open(info) as file:
        return npy.read_array(file, allow_pickle=False, max_header_size=_HEADER_BYTES)
