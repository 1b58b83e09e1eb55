"""The pass that builds the kernels of a module, and calls them as external functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse import _tvm as ir
from crossfuse.cache import content_key
from crossfuse.calls import Whole, checked
from crossfuse.files import scratch_folder
from crossfuse.hardware import Device, device
from crossfuse.lower.extract import lower
from crossfuse.relax.calls import calls_of, is_kernel, kernel_of, recorded, with_early_starts
from crossfuse.relax.graph import clean, with_bindings
from crossfuse.runtime.artefact import (
    LIBRARIES,
    OBJECTS,
    Artefact,
    Built,
    KernelObject,
    Kind,
    built_once,
    kept,
)
from crossfuse.runtime.kernel import FIRST, entries
from crossfuse.runtime.kernel_table import write_kernels
from crossfuse.runtime.nvcc import find_nvcc

_EXTERNAL = "external_mods"


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.BuildKernels")
@checked
class BuildKernels:
    """Build what `FuseChains` and `FuseCascades` scheduled, and take it out of the module.

    Each function becomes an object file (see `crossfuse.runtime.build_object`), and calls of it
    become ``call_dps_packed`` of the name that it had. The objects are static libraries among the
    module's ``external_mods``, which ``relax.build`` links: ``export_library`` writes them into the
    model's one file, and the virtual machine runs them on TVM's current stream. Passes after this
    one, such as ``FuseOps`` and dlight's schedules, do not see them any more.

    Parameters
    ----------
    target : str | Device | None
        What to build for.
    directory : str | Path | None
        Where what is built goes; None makes a directory that goes with the process. Nothing needs
        objects after the pass; libraries get a table there that `crossfuse.load_kernels` reads.
    jobs : int
        Kernels that are built at the same time; 0 takes as many as there are processors.
    link : bool
        Whether the kernels are linked into the executable. If not, they are libraries with a table
        beside it, and whoever loads it calls ``crossfuse.load_kernels(directory).register()``
        before; several models may share them.
    early : bool
        Whether a kernel that needs what another one makes in the same function starts while what
        lies before it runs, and loads weights before it waits: parameters and constants that
        nothing in the function writes.

    Attributes
    ----------
    kernels : tuple[KernelObject | Artefact, ...]
        What was built of the last module, in its order: objects, or libraries without `link`.

    Raises
    ------
    LoweringRefused
        If a function has no kernel, with the reason.
    EnvironmentRefused
        If nvcc or a C++ compiler is missing.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.relax import FuseCascades, import_torch
    >>> mod = import_torch(torch.nn.Softmax(-1).eval(), (torch.zeros(64, 1024),)).mod
    >>> build = BuildKernels("nvidia-h100")
    >>> passes = [relax.transform.LegalizeOps(), FuseCascades("nvidia-h100"), build]
    >>> mod = tvm.ir.transform.Sequential(passes)(mod)  # then `relax.build`
    >>> [each.manifest.name for each in build.kernels]
    ['softmax']
    """

    def __init__(
        self,
        target: str | Device | None = None,
        *,
        directory: str | Path | None = None,
        jobs: Whole = 0,
        link: bool = True,
        early: bool = True,
    ) -> None:
        self.target = device(target)
        self.directory = directory
        self.jobs = jobs
        self.link = link
        self.early = early
        self.kernels: tuple[KernelObject | Artefact, ...] = ()

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        """See `BuildKernels`.

        Parameters
        ----------
        mod : tvm.IRModule
            The module; it stays as it is.

        Returns
        -------
        tvm.IRModule
            With calls of external functions.
        """
        kernels = {name: func for name, func in mod.functions_items() if is_kernel(func)}
        calls = calls_of(mod) if self.early else {}
        functions = with_early_starts(kernels, calls.values())
        named = {str(name.name_hint): func for name, func in functions.items()}
        modules = self._modules(named)
        if not kernels:
            return mod
        firsts = {var for var, each in calls.items() if each.is_first(functions)}
        made = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                made.update_func(name, _calling(function, kernels, firsts))
        for name in kernels:
            del made[name]
        if not self.link:
            return clean(made)
        before = list((mod.attrs or {}).get(_EXTERNAL, []))
        return clean(made.with_attr(_EXTERNAL, [*before, *modules]))

    def _modules(self, functions: Mapping[str, Any]) -> list[Any]:
        """Build functions; the static libraries for TVM to link, none without `link`."""
        if self.link:
            objects = built(OBJECTS, functions, self.target, self.directory, self.jobs)
            self.kernels = objects
            load = tvm.runtime.load_static_library
            return [load(str(each.path), list(entries(each.manifest))) for each in objects]
        libraries = built(LIBRARIES, functions, self.target, self.directory, self.jobs)
        self.kernels = libraries
        if self.directory is not None:
            write_kernels(self.directory, libraries)
        return []


def built(
    kind: Kind[Built],
    functions: Mapping[str, Any],
    target: Device,
    directory: str | Path | None = None,
    jobs: int = 0,
) -> tuple[Built, ...]:
    """Kernels of scheduled functions by name, known ones from the cache, in the given order.

    Without a directory, they go to one that is removed with the process; `jobs` of 0 builds as many
    at a time as there are processors. Refusals are those of `crossfuse.runtime.build_library`.
    """
    return building(kind, functions, target, directory, jobs)()


def building(
    kind: Kind[Built],
    functions: Mapping[str, Any],
    target: Device,
    directory: str | Path | None = None,
    jobs: int = 0,
) -> Callable[[], tuple[Built, ...]]:
    """Begin what `built` does, which what is returned waits for; compilers run by themselves."""
    if not functions:
        return tuple
    folder = Path(directory if directory is not None else scratch_folder())
    paths = {name: folder / f"{name}{kind.suffix}" for name in functions}
    keys = {name: build_key(kind, func, target, name) for name, func in functions.items()}
    known = {name: kept(kind, keys[name], paths[name]) for name in functions}
    new = [name for name, found in known.items() if found is None]
    # Lowered in this thread: TVM's contexts are those of a thread.
    images = {name: lower(functions[name], target, name=name).image for name in new}
    plans = {name: recorded(functions[name]) for name in new}

    def build(name: str) -> Built:
        return built_once(
            kind,
            keys[name],
            paths[name],
            lambda: kind.build(images[name], folder, device=target, metadata=plans[name]),
        )

    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    begun = {name: pool.submit(build, name) for name in new}
    pool.shutdown(wait=False)

    def wait() -> tuple[Built, ...]:
        made = known | {name: each.result() for name, each in begun.items()}
        return tuple(each for each in made.values() if each is not None)

    return wait


def build_key(kind: Kind[Any], func: Any, target: Device, name: str) -> str:
    """The cache key of everything that the build of a scheduled function depends on."""
    config = tvm.ir.transform.PassContext.current().config
    parts = [find_nvcc().version, name, str(config), tvm.ir.save_json(func)]
    return content_key(target, kind.name, *parts)


def _calling(function: Any, kernels: Collection[GlobalVar], firsts: Collection[Var]) -> Any:
    """A function that calls kernels by their names; the `firsts` are those of chains."""
    return with_bindings(
        function,
        lambda block: [
            relax.VarBinding(each.var, _external(each.value, each.var in firsts))
            if kernel_of(each.value, kernels) is not None
            else each
            for each in block.bindings
        ],
    )


def _external(call: Any, first: bool) -> Any:
    name, arguments = str(call.args[0].name_hint), call.args[1]
    (result,) = call.ty_args
    results = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    return relax.call_dps_packed(f"{name}{FIRST}" if first else name, arguments, out_ty=results)
