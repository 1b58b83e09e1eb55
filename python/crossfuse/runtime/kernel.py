"""Calling a loaded kernel with torch tensors or numpy arrays."""

from __future__ import annotations

import ctypes
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from crossfuse.errors import ArtefactRefused, EnvironmentRefused, RefusedError, Rule, refuse
from crossfuse.lower.image import BufferSpec
from crossfuse.runtime.launcher import DTYPES
from crossfuse.runtime.manifest import Manifest
from crossfuse.runtime.tensors import is_torch
from crossfuse.workload.dtypes import numpy_type

_refused = Rule(ArtefactRefused, "argument-kind")

# Calls that allocate their outputs, with the inputs' row count and in the inputs' place.


class Runnable(ABC):
    """A kernel or a dispatch, called with inputs and outputs in the order of its buffers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in messages."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Arguments in order."""

    @abstractmethod
    def __call__(self, *arguments: Any, device: int = 0) -> None:
        """Write the outputs."""

    def run(self, *inputs: Any, device: int = 0) -> Any:
        """Allocate the outputs as the first input is, run, and return them.

        Parameters
        ----------
        *inputs : tensor
            The arguments that are no outputs, in order: torch tensors or numpy arrays. Outputs
            have as many rows as the first of them that has any.
        device : int
            See `__call__`.

        Returns
        -------
        tensor or tuple of tensor
            The output, or all of them where there are several.

        Raises
        ------
        ArtefactRefused, EnvironmentRefused
            As `__call__`.
        """
        wanted = [each for each in self.buffers if not each.output]
        if len(inputs) != len(wanted) or not inputs:
            raise refuse(
                ArtefactRefused,
                "argument-count",
                f"run of {self.name}",
                found=f"{len(inputs)} inputs",
                limit=f"{len(wanted)} ({', '.join(each.name for each in wanted)})",
                instead="pass the inputs alone, or call the kernel itself with its outputs",
            )
        rest = iter(inputs)
        arguments = [
            _empty_like(each, inputs[0], self.name) if each.output else next(rest)
            for each in _buffers_of_call(self.buffers, inputs)
        ]
        self(*arguments, device=device)
        pairs = zip(self.buffers, arguments, strict=True)
        outputs = tuple(argument for buffer, argument in pairs if buffer.output)
        return outputs[0] if len(outputs) == 1 else outputs


def is_numpy(value: Any) -> bool:
    """Whether a value is a numpy array; numpy is not imported for this."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _buffers_of_call(buffers: tuple[BufferSpec, ...], inputs: Sequence[Any]) -> list[BufferSpec]:
    """Buffers with the row count of the inputs; unchanged if none has rows to count."""
    wanted = [each for each in buffers if not each.output]
    given = [x for each, x in zip(wanted, inputs, strict=True) if each.rows]
    counts = (len(x) for x in given if getattr(x, "ndim", None))
    count = next(counts, None)
    return [each if count is None else each.with_rows(count) for each in buffers]


def _empty_like(buffer: BufferSpec, like: Any, name: str) -> Any:
    """Allocate an output of the kernel `name` in the framework of an input, where that lies."""
    if is_numpy(like):
        import numpy as np

        return np.empty(buffer.shape, numpy_type(buffer.dtype))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        dtype = getattr(torch, buffer.dtype)
        return torch.empty(buffer.shape, dtype=dtype, device=like.device)
    raise _refused(
        f"run of {name}",
        found=f"a first input of type {type(like).__name__}",
        limit="a torch tensor or a numpy array",
        instead="allocate the outputs and call the kernel itself",
    )


_REFUSAL = re.compile(
    r"(?P<rule>[\w-]+): (?P<where>.*?): found (?P<found>.*?); limit: (?P<limit>.*?)\. "
    r"Instead: (?P<instead>.*)\.",
    re.DOTALL,
)


class DLTensor(ctypes.Structure):
    """The C layout of a tensor in dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """The C layout of a tensor that somebody owns, in dlpack.h."""

    _fields_ = (
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def capsule_of(managed: DLManagedTensor) -> Any:
    """What a framework takes for a tensor; `managed` has to outlive it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), b"dltensor", None)


#: Behind the name of a kernel: the same as the first of a chain, see `LoadedKernel.as_first`.
FIRST = "_first"


def entries(manifest: Manifest) -> tuple[str, ...]:
    """Names by which a kernel is called: its own, and if it starts early, that as a first one."""
    early = manifest.launches[0].early
    return (manifest.name, f"{manifest.name}{FIRST}") if early else (manifest.name,)


class LoadedKernel(Runnable):
    """A function of a loaded library, called with its buffers in order.

    ``kernel(*inputs, *outputs)`` writes into the outputs that it is given; `run` makes them. CUDA
    tensors (torch, or anything that speaks DLPack) are used where they are, on the current stream
    of their framework, and the call does not wait; no gradient is recorded. numpy arrays are copied
    to the GPU and back.

    Parameters
    ----------
    module : tvm_ffi.Module
        The loaded library, which may be linked into others.
    manifest : Manifest
        What it holds.
    first : bool
        See `as_first`.

    Examples
    --------
    >>> import crossfuse
    >>> made = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> kernel = crossfuse.load(made.artefact.shared_object, check_device=False)
    >>> [each.name for each in kernel.buffers]
    ['A', 'B_gate', 'B_up', 'D', 'out']
    >>> kernel(A, B_gate, B_up, D, out)  # on a GPU  # doctest: +SKIP
    """

    def __init__(self, module: Any, manifest: Manifest, *, first: bool = False) -> None:
        self.module = module
        self._launch = module[f"{manifest.name}{FIRST}" if first else manifest.name]
        self.manifest = manifest

    def as_first(self) -> LoadedKernel:
        """The same kernel as the first of a chain of kernels that start early.

        It starts when all that lies before on its stream is over. Who starts early behind it may
        read what was written there before it waits, weights above all.

        Returns
        -------
        LoadedKernel
            Of the same library.
        """
        return LoadedKernel(self.module, self.manifest, first=True)

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.manifest.name

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Arguments in order."""
        return self.manifest.buffers

    def __call__(self, *arguments: Any, device: int = 0) -> None:
        """Run the kernels on `arguments`, one for each buffer.

        Parameters
        ----------
        *arguments : tensor
            All CUDA tensors of one device, or all numpy arrays; contiguous, of the recorded shapes
            and element types. Of a kernel that takes fewer rows, buffers with rows may have fewer,
            all of them as many.
        device : int
            Index of the GPU that numpy arrays are copied to.

        Raises
        ------
        ArtefactRefused
            If an argument, or the GPU, does not fit.
        EnvironmentRefused
            If there is no GPU or driver, or CUDA reports a fault.
        """
        arrays = [is_numpy(argument) for argument in arguments]
        if any(arrays) and not all(arrays):
            raise self._mixed(arguments)
        if not any(arrays):
            call_library(self._launch, *arguments)
            return
        self._check_arrays(arguments)
        views = [_dl_tensor(argument) for argument in arguments]
        pointers = [ctypes.c_void_p(ctypes.addressof(view)) for view in views]
        call_library(self.module[f"{self.name}_host"], device, *pointers)

    def check_device(self, device: int = 0) -> bool:
        """Refuse a GPU of another architecture; False if there is no GPU.

        Parameters
        ----------
        device : int
            Index of the GPU.

        Returns
        -------
        bool
            Whether there is one.

        Raises
        ------
        ArtefactRefused
            If the GPU does not fit.
        """
        return bool(call_library(self.module[f"{self.name}_check_device"], device))

    def max_active_clusters(self, launch: int = 0, device: int = 0) -> int:
        """Clusters of one launch (CTAs, where it has none) that the GPU holds at once.

        Parameters
        ----------
        launch : int
            Index in ``manifest.launches``.
        device : int
            Index of the GPU.

        Returns
        -------
        int
            What the driver answers for this kernel's registers and shared memory.

        Raises
        ------
        ArtefactRefused, EnvironmentRefused
            If the GPU does not fit, or there is none.
        """
        return int(call_library(self.module[f"{self.name}_max_active_clusters"], device, launch))

    def _check_arrays(self, arguments: tuple[Any, ...]) -> None:
        """Refuse what only numpy knows; all else is checked by the library."""
        for position, (buffer, array) in enumerate(zip(self.buffers, arguments, strict=False)):
            where = f"argument {position} {buffer.name!r} of {self.name}"
            if array.dtype.name not in DTYPES or not array.dtype.isnative:
                raise refuse(
                    ArtefactRefused,
                    "argument-dtype",
                    where,
                    found=array.dtype.name if array.dtype.isnative else repr(array.dtype),
                    limit=buffer.dtype,
                    instead="convert the array, or compile the kernel for its element type",
                )
            if buffer.output and not array.flags.writeable:
                raise refuse(
                    ArtefactRefused,
                    "argument-layout",
                    where,
                    found="a read-only array",
                    limit="a writeable array for an output",
                    instead="pass a copy of it",
                )

    def _mixed(self, arguments: tuple[Any, ...]) -> RefusedError:
        return _refused(
            self.name,
            found=", ".join(type(argument).__name__ for argument in arguments),
            limit="numpy arrays alone, or no numpy array",
            instead="convert the arguments to one framework",
        )


def call_library(function: Any, *arguments: Any) -> Any:
    """Call into the library; refusals in its errors' text become refusals of ours again."""
    try:
        return function(*arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        match = _REFUSAL.fullmatch(str(error))
        if match is None:
            _check_dense(arguments)
            raise
        environment = match["rule"].startswith("cuda-")
        family = EnvironmentRefused if environment else ArtefactRefused
        refusal: RefusedError = refuse(family, **match.groupdict())
    raise refusal


def _check_dense(arguments: Sequence[Any]) -> None:
    """Refuse tensors of torch that are no rows of elements in memory; asked once a call has failed.

    DLPack, by which all tensors come in, has words of its own for each kind, with torch's stack.
    """
    for place, each in enumerate(arguments):
        if not is_torch(each):
            continue
        kinds = {"meta": each.is_meta, "quantized": each.is_quantized}
        kinds[str(each.layout).removeprefix("torch.")] = str(each.layout) != "torch.strided"
        found = [kind for kind, is_one in kinds.items() if is_one]
        if found:
            raise _refused(
                f"argument {place}",
                found=f"a {found[0]} tensor",
                limit="tensors whose elements lie in memory as they are",
                instead="pass a copy that has them, such as tensor.to_dense()",
            )


def _dl_tensor(array: Any) -> DLTensor:
    """Describe a numpy array, of bfloat16 and fp8 too, which numpy's own DLPack export refuses."""
    code, bits = DTYPES[array.dtype.name]
    extents = ctypes.c_int64 * array.ndim
    strides = (stride // array.itemsize for stride in array.strides)
    return DLTensor(
        data=array.ctypes.data,
        device_type=1,
        ndim=array.ndim,
        code=code,
        bits=bits,
        lanes=1,
        shape=extents(*array.shape),
        strides=extents(*strides),
    )
