"""Kernels behind the operators of ours that torch's graphs call: built here, or from the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import torch
from torch import library as registry

from crossfuse.cache import Entry, package_hash, shelf
from crossfuse.errors import ArtefactRefused, WorkloadRefused, refuse
from crossfuse.files import scratch
from crossfuse.hardware import Device
from crossfuse.markers import starts_early
from crossfuse.runtime.kernel import FIRST
from crossfuse.schema import Extent, FileName

if TYPE_CHECKING:
    from tvm.ir import GlobalVar

    from crossfuse.relax.replace import Replacement
    from crossfuse.runtime.artefact import Artefact

# The operators ``crossfuse::run``, ``run_several`` and ``run_rows``: kernels of ours in a graph of
# torch.
#
# Kernels are known by a key, so that one operator stands for all of them: graphs, and the caches of
# those who compile them, hold the key alone. ``run_several`` is for kernels of several outputs,
# ``run_rows`` has a kernel for each bin of rows.

_Kernel = TypeVar("_Kernel")


@dataclass(frozen=True)
class Result:
    """A tensor that a kernel makes."""

    shape: tuple[Extent, ...]
    dtype: str

    def empty_like(self, given: torch.Tensor) -> torch.Tensor:
        """A tensor like it on the device of another one."""
        return given.new_empty(self.shape, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class KeptKernel:
    """A kernel of static shapes, which ``crossfuse::run`` finds by its key; the cache has it."""

    #: Name and hash of the function.
    key: str
    #: Cache key of its library; empty for functions on the CPU, which are not cached.
    kept_as: str
    #: Of the function.
    name: Annotated[str, FileName]
    results: tuple[Result, ...]
    #: Whether calls of it begin a chain of kernels that start early.
    first: bool = False

    def as_first(self) -> KeptKernel:
        """The same kernel as the first of a chain, see `LoadedKernel.as_first`."""
        return replace(self, key=f"{self.key}{FIRST}", first=True)

    def run_of(self, made: Made) -> Callable[..., Any]:
        """What makes the output of the inputs, or a tuple of several."""
        return made.as_first().run if self.first else made.run


class Made(Protocol):
    """A kernel that can be run; a `crossfuse.runtime.LoadedKernel` is one."""

    def run(self, *inputs: Any) -> Any:
        """Make the output of the inputs, or a tuple of several."""

    def as_first(self) -> Made:
        """The same kernel as the first of a chain of kernels that start early."""


@dataclass(frozen=True)
class Sequential:
    """A function of numpy arrays in the place of a kernel."""

    function: Callable[..., dict[str, Any]]

    def run(self, *inputs: torch.Tensor) -> Any:
        """Make the output of tensors on the CPU, or a tuple of several."""
        from crossfuse.runtime.tensors import to_numpy, to_torch

        made = self.function([to_numpy(each) for each in inputs]).values()
        results = tuple(map(to_torch, made))
        return results if len(results) > 1 else results[0]

    def as_first(self) -> Sequential:
        """Itself: nothing starts before what is called before it is over."""
        return self


@dataclass(frozen=True)
class BinnedKernel:
    """Kernels of one function for any number of rows; ``crossfuse::run_rows`` finds it by key."""

    #: Name and hash of the functions.
    key: str
    #: Elements in a row of the first input.
    columns: int
    #: Elements in a row of the output, which has as many rows as the first input.
    width: int
    dtype: torch.dtype
    #: Extents with which kernels take the inputs; -1 stands for the rows.
    shapes: tuple[tuple[int, ...], ...]
    #: The most rows of each bin, ascending, and its kernel; None where fusing does not pay.
    bins: tuple[tuple[int, Callable[..., torch.Tensor] | None], ...]
    #: What torch computes of the inputs as the graph has them and the sizes: in bins without a
    #: kernel, and for more rows than the last bin holds.
    eager: Callable[..., torch.Tensor]

    def rows(self, first: torch.Tensor) -> Any:
        """Number of rows of a call, by the leading extents of its first input.

        The graph may hold a row in several axes: the last ones, which multiply to `columns`.
        """
        columns, leading = 1, list(first.shape)
        while leading and columns != self.columns:
            columns *= leading.pop()
        return prod(leading)

    def run(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """Compute the output, [rows, width], with the kernel of the smallest bin that is enough."""
        rows = self.rows(inputs[0])
        kernel = next((run for most, run in self.bins if rows <= most), None)
        if kernel is None or not rows:
            return self.eager(*inputs, *sizes).reshape(rows, self.width).contiguous()
        pairs = zip(inputs, self.shapes, strict=True)
        return kernel(*(each.reshape(shape) for each, shape in pairs))


#: Kernels by their keys, and what runs those of static shapes.
_KEPT: dict[str, tuple[KeptKernel, Callable[..., Any]]] = {}
#: Of those that are still being built, what waits for that and offers them.
_BUILDING: dict[str, Callable[[], None]] = {}
_BINNED: dict[str, BinnedKernel] = {}
_DEFINING = Lock()


def offer(kernel: KeptKernel, run: Callable[..., Any]) -> None:
    """Make a kernel known to ``crossfuse::run`` and ``run_several``.

    One of the same key computes the same.
    """
    define()
    _KEPT[kernel.key] = kernel, run
    _BUILDING.pop(kernel.key, None)


def _announce(kernel: KeptKernel, finish: Callable[[], None]) -> None:
    """Make a kernel known that is being built: a call of it waits until `finish` offers it."""

    def run(*inputs: Any) -> Any:
        finish()
        return _KEPT[kernel.key][1](*inputs)

    define()
    _KEPT.setdefault(kernel.key, (kernel, run))
    _BUILDING[kernel.key] = finish


def wait_for(keys: Iterable[str]) -> None:
    """Wait for kernels that are being built; their refusals are those of `offer_kernels`."""
    for key in keys:
        if finish := _BUILDING.pop(key, None):
            finish()


def offer_binned(kernel: BinnedKernel) -> None:
    """Make kernels of bins known to ``crossfuse::run_rows``."""
    define()
    _BINNED[kernel.key] = kernel


@torch.compiler.assume_constant_result  # a lock would end the graph of a model that calls it
def define() -> registry.Library:
    """Define the operators once in a process; they exist as long as the returned library."""
    with _DEFINING:  # programs may be loaded by several threads
        return _defined()


@lru_cache(maxsize=1)
def _defined() -> registry.Library:
    from crossfuse.torch import rank_products as products
    from crossfuse.torch.collectives import COLLECTIVES, fake, run

    made = registry.Library("crossfuse", "DEF")
    made.define("run(Tensor[] inputs, str kernel) -> Tensor")
    made.define("run_several(Tensor[] inputs, str kernel) -> Tensor[]")
    made.define("run_rows(Tensor[] inputs, SymInt[] sizes, str kernel) -> Tensor")
    for each in COLLECTIVES:
        made.define(f"{each.name}(Tensor input, str group) -> Tensor")
    made.define("all_gather_matmul(Tensor input, Tensor[] weights, str group) -> Tensor[]")
    made.define("matmul_reduce_scatter(Tensor input, Tensor weight, str group) -> Tensor")
    for device in ("CUDA", "CPU"):
        made.impl("run", _run, device)
        made.impl("run_several", _run_several, device)
        made.impl("run_rows", _run_rows, device)
        for each in COLLECTIVES:
            made.impl(each.name, partial(run, each), device)
        made.impl("all_gather_matmul", products.run_gathered, device)
        made.impl("matmul_reduce_scatter", products.run_scattered, device)
    registry.register_fake("crossfuse::run", _fake, lib=made)
    registry.register_fake("crossfuse::run_several", _fake_several, lib=made)
    registry.register_fake("crossfuse::run_rows", _fake_rows, lib=made)
    for each in COLLECTIVES:
        registry.register_fake(f"crossfuse::{each.name}", partial(fake, each), lib=made)
    registry.register_fake("crossfuse::all_gather_matmul", products.fake_gathered, lib=made)
    registry.register_fake("crossfuse::matmul_reduce_scatter", products.fake_scattered, lib=made)
    return made


def _run(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    check_gradients(inputs)
    made: torch.Tensor = _known(key, _KEPT)[1](*inputs)
    return made


def _fake(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    (result,) = _known(key, _KEPT)[0].results
    return result.empty_like(inputs[0])


def _run_several(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    check_gradients(inputs)
    return list(_known(key, _KEPT)[1](*inputs))


def _fake_several(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    return [each.empty_like(inputs[0]) for each in _known(key, _KEPT)[0].results]


def _run_rows(inputs: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> torch.Tensor:
    check_gradients(inputs)
    return _known(key, _BINNED).run(inputs, sizes)


def _fake_rows(inputs: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> torch.Tensor:
    kernel = _known(key, _BINNED)
    return inputs[0].new_empty((kernel.rows(inputs[0]), kernel.width), dtype=kernel.dtype)


def check_gradients(inputs: Sequence[torch.Tensor], name: str = "run") -> None:
    """Refuse a call whose gradients autograd would lose: graphs of training steps record none.

    `name` is that of the operator.
    """
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        raise refuse(
            WorkloadRefused,
            "torch-operator",
            f"crossfuse::{name}",
            found="a call that records gradients",
            limit="kernels, which compute values alone",
            instead="call what torch.compile returned, whose backward pass is a graph of its own, "
            "or call it under torch.no_grad()",
        )


def _known(key: str, kernels: Mapping[str, _Kernel]) -> _Kernel:
    if key in kernels:
        return kernels[key]
    raise refuse(
        ArtefactRefused,
        "torch-operator",
        "crossfuse::run",
        found=f"the key '{key}'",
        limit="kernels that this process compiled or loaded",
        instead="compile the model again in this process",
    )


def offer_kernels(
    replacements: Sequence[Replacement], mod: Mapping[Any, Any], target: Device, cpu: bool
) -> dict[GlobalVar, KeptKernel]:
    """Begin to build the functions that a graph calls, and make them known to ``crossfuse::run``.

    Whoever calls them before `wait_for` waits. Those that start early are known as the first of a
    chain too. `cpu` runs the scheduled functions on the CPU instead, one thread after the other.
    Refusals are those of `crossfuse.runtime.build_library`.
    """
    from crossfuse.relax.build_kernels import build_key
    from crossfuse.runtime.artefact import LIBRARIES

    calls = {each.function: each for each in replacements}
    functions = {name: mod[name] for name in calls}
    named = {str(each.name_hint): func for each, func in functions.items()}
    wait = _building(named, target, cpu)
    found, offered = {}, []
    for name, call in calls.items():
        hint = str(name.name_hint)
        # Inductor keeps graphs with this key: another release of ours must never find them.
        text = package_hash() + str(mod[name].script())
        key = f"{hint}-{'cpu' if cpu else target.name}-{sha256(text.encode()).hexdigest()[:16]}"
        library = "" if cpu else build_key(LIBRARIES, mod[name], target, hint)
        results = tuple(map(_result, call.results))
        kernel = found[name] = KeptKernel(key, library, hint, results)
        offered += [kernel, kernel.as_first()] if starts_early(mod[name]) else [kernel]

    def finish() -> None:
        made = wait()
        for each in offered:
            offer(each, each.run_of(made[each.name]))

    for each in offered:
        _announce(each, finish)
    return found


def _result(kind: Any) -> Result:
    return Result(tuple(int(each) for each in kind.shape.values), str(kind.dtype))


def offer_kept(kernels: tuple[KeptKernel, ...], entries: Mapping[str, Entry] | None = None) -> bool:
    """Make kernels known to ``crossfuse::run`` from their libraries, without TVM.

    False if a library is missing: none is offered then. `entries` are libraries by key; None takes
    those of the cache. `ArtefactRefused` is raised where one does not fit the GPU.
    """
    from crossfuse.runtime import load
    from crossfuse.runtime.artefact import LIBRARIES, written

    define()

    def kept(key: str, path: Path) -> Artefact | None:
        if entries is None:
            return shelf(LIBRARIES.name).read(key, partial(written, LIBRARIES, path))
        return written(LIBRARIES, path, entries[key]) if key in entries else None

    wait_for(each.key for each in kernels)  # those that this process is building
    runs = []
    with scratch() as folder:
        for each in kernels:
            found = kept(each.kept_as, folder / f"{each.name}.so")
            if found is None:
                return False
            runs.append(each.run_of(load(found.shared_object)))
    for each, run in zip(kernels, runs, strict=True):
        offer(each, run)
    return True


def kernels_of(functions: Mapping[str, Any], target: Device, cpu: bool) -> dict[str, Made]:
    """Build functions as `offer_kernels` does, by name."""
    return _building(functions, target, cpu)()


def _building(
    functions: Mapping[str, Any], target: Device, cpu: bool
) -> Callable[[], dict[str, Made]]:
    """Begin to build functions; what is returned waits for the kernels."""
    if cpu:
        from crossfuse.emulate.llvm import SequentialFunction
        from crossfuse.emulate.serialise import serialise

        made: dict[str, Made] = {
            name: Sequential(SequentialFunction(serialise(func), func))
            for name, func in functions.items()
        }
        return lambda: made
    from crossfuse.relax.build_kernels import building
    from crossfuse.runtime import load
    from crossfuse.runtime.artefact import LIBRARIES

    wait = building(LIBRARIES, functions, target)

    def loaded() -> dict[str, Made]:
        return {
            name: load(each.shared_object) for name, each in zip(functions, wait(), strict=True)
        }

    return loaded
