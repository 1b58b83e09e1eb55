"""The pass that builds the kernels of a module, and calls them as external functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar

from crossfuse import _tvm as ir
from crossfuse.hardware import Device, device
from crossfuse.lower.extract import lower
from crossfuse.relax.dataflow import clean
from crossfuse.relax.kernel_mark import is_kernel
from crossfuse.runtime.artefact import Artefact, build_library
from crossfuse.runtime.load import load

_EXTERNAL = "external_mods"
_CALL = "relax.call_tir"


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.BuildKernels")
class BuildKernels:
    """Build what `FuseChains` and `FuseCascades` scheduled, and take it out of the module.

    Each function becomes a library of its own (see `crossfuse.runtime.build_library`), and calls of
    it become ``call_dps_packed`` of the name that it had. The libraries are among the module's
    ``external_mods``, which ``relax.build`` links: the virtual machine runs them on torch's or
    TVM's current stream. Passes after this one, such as ``FuseOps`` and dlight's schedules, do not
    see them any more.

    Parameters
    ----------
    target : str | Device
        What to build for.
    directory : str | Path | None
        Where libraries and manifests go; None makes a temporary directory, which the process needs
        as long as it runs the module.
    jobs : int
        Kernels that are built at the same time; 0 takes as many as there are processors.

    Attributes
    ----------
    artefacts : tuple[Artefact, ...]
        The libraries of the last module, in its order.

    Raises
    ------
    LoweringRefused
        If a function has no kernel, with the reason.
    EnvironmentRefused
        If nvcc or a C++ compiler is missing.

    Examples
    --------
    >>> passes = [FuseChains(), relax.transform.LegalizeOps(), FuseCascades(), BuildKernels()]
    ...                                              # doctest: +SKIP
    >>> executable = relax.build(tvm.ir.transform.Sequential(passes)(mod), "cuda")
    ...                                              # doctest: +SKIP
    """

    def __init__(
        self,
        target: str | Device = "nvidia-h100",
        *,
        directory: str | Path | None = None,
        jobs: int = 0,
    ) -> None:
        self.target = device(target)
        self.directory = directory
        self.jobs = jobs
        self.artefacts: tuple[Artefact, ...] = ()

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        """See `BuildKernels`."""
        kernels = {name: func for name, func in mod.functions_items() if is_kernel(func)}
        named = {str(name.name_hint): func for name, func in kernels.items()}
        self.artefacts = build_functions(named, self.target, self.directory, self.jobs)
        if not kernels:
            return mod
        made = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                made.update_func(name, _calling(function, kernels))
        for name in kernels:
            del made[name]
        modules = [load(each.shared_object).module for each in self.artefacts]
        before = list((mod.attrs or {}).get(_EXTERNAL, []))
        return clean(made.with_attr(_EXTERNAL, [*before, *modules]))


def build_functions(
    functions: Mapping[str, Any],
    target: Device,
    directory: str | Path | None = None,
    jobs: int = 0,
) -> tuple[Artefact, ...]:
    """Libraries of scheduled functions, each named as the function.

    Parameters
    ----------
    functions : Mapping[str, tvm.tirx.PrimFunc]
        By name.
    target : Device
        What to build for.
    directory : str | Path | None
        Where they go; None makes a temporary directory.
    jobs : int
        Kernels that are built at the same time; 0 takes as many as there are processors.

    Returns
    -------
    tuple[Artefact, ...]
        In the order of the functions.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        See `crossfuse.runtime.build_library`.
    """
    images = [lower(func, target, name=name).image for name, func in functions.items()]
    if not images:
        return ()
    folder = directory if directory is not None else mkdtemp(prefix="crossfuse-")
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        return tuple(pool.map(lambda each: build_library(each, folder, device=target), images))


def _calling(function: Any, kernels: Mapping[GlobalVar, Any]) -> Any:
    """A function that calls libraries instead of functions of TensorIR."""
    blocks = []
    for block in function.body.blocks:
        bindings = [
            relax.VarBinding(each.var, _external(each.value))
            if _calls(each.value, kernels)
            else each
            for each in block.bindings
        ]
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def _calls(value: Any, kernels: Mapping[GlobalVar, Any]) -> bool:
    return (
        isinstance(value, Call)
        and getattr(value.op, "name", "") == _CALL
        and any(value.args[0].same_as(each) for each in kernels)
    )


def _external(call: Any) -> Any:
    """The call of a library of the name that the function has."""
    name, arguments = call.args[0], call.args[1]
    return relax.call_dps_packed(str(name.name_hint), arguments, out_ty=list(call.ty_args))
