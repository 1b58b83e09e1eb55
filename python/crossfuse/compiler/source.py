"""What can be compiled: specs, torch modules, Relax modules, functions, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from crossfuse.relax.outline import Outlined
    from crossfuse.relax.torch_import import Imported


@dataclass(frozen=True)
class Source:
    """A workload as one function, and where it came from.

    Attributes
    ----------
    func : Any
        The unscheduled ``tvm.tirx.PrimFunc``; None if `schedule` is given.
    summary : str
        One line that says what it computes.
    spec : WorkloadSpec | None
        If it came from the spec of a chain.
    cascade : CascadeSpec | None
        If it came from the spec of a cascade of reductions.
    module, imported, outlined : Any
        If it came from a torch module: the module, its Relax form and its outlined function.
    schedule : Any
        If the caller scheduled it: the ``tvm.s_tir.Schedule``.

    Examples
    --------
    >>> from crossfuse.compiler import read_source
    >>> read_source("gemm:M=16,K=64,N=16").spec.M
    16
    """

    func: Any
    summary: str
    spec: WorkloadSpec | None = None
    cascade: CascadeSpec | None = None
    module: Any = None
    imported: Imported | None = None
    outlined: Outlined | None = None
    schedule: Any = None


@checked
def read_source(source: Any, example_inputs: Sequence[Any] | None = None) -> Source:
    """Turn anything that can be compiled into one function.

    Parameters
    ----------
    source : str | WorkloadSpec | CascadeSpec | torch.nn.Module | IRModule | PrimFunc | Schedule
        A packaged id (``"S8"``) or spec text, a torch module with `example_inputs`, a Relax
        module, an unscheduled function (a chain in canonical form, or a cascade), or a finished
        schedule.
    example_inputs : Sequence[torch.Tensor] | None
        Inputs of a torch module; their shapes and types are compiled for.

    Returns
    -------
    Source
        The function and its origin.

    Raises
    ------
    WorkloadRefused
        If it is none of these, or a model is not one chain of matrix products.

    Examples
    --------
    >>> read_source("softmax:rows=4,cols=64").summary
    'softmax:rows=4,cols=64'
    """
    if isinstance(source, (str, WorkloadSpec, CascadeSpec)):
        return _from_spec(source)
    if _is_torch_module(source):
        return _from_module(source, example_inputs)
    from crossfuse import _tvm as ir

    if isinstance(source, ir.Schedule):
        return Source(None, "a given schedule", schedule=source)
    if isinstance(source, ir.PrimFunc):
        return Source(source, "a given function")
    if isinstance(source, ir.IRModule):
        from crossfuse.relax.outline import outline

        outlined = outline(source)
        return Source(outlined.func, outlined.summary, outlined=outlined)
    raise refuse(
        WorkloadRefused,
        "compile",
        "source",
        found=f"a {type(source).__name__}",
        limit="a workload id or spec, a torch module, a Relax module, a PrimFunc or a schedule",
        instead="pass one of these, such as 'S8' or 'gated_ffn:M=16,K=256,N=512,L=256'",
    )


def _from_spec(source: str | WorkloadSpec | CascadeSpec) -> Source:
    from crossfuse.workload import build, cascade_build, cascades

    if isinstance(source, str):
        source = cascades.resolve_any(source)
    if isinstance(source, CascadeSpec):
        return Source(cascade_build.prim_func(source), str(source), cascade=source)
    return Source(build.prim_func(source), str(source), spec=source)


def _is_torch_module(source: Any) -> bool:
    """Whether `source` is a torch module, without importing torch for anything else."""
    return any(each.__module__ == "torch.nn.modules.module" for each in type(source).__mro__)


def _from_module(module: Any, example_inputs: Sequence[Any] | None) -> Source:
    if not example_inputs:
        raise refuse(
            WorkloadRefused,
            "compile",
            type(module).__name__,
            found="no example inputs",
            limit="one tensor for each input of the module",
            instead="pass example_inputs=(x,), whose shape and type are compiled for",
        )
    from crossfuse.relax.outline import outline
    from crossfuse.relax.torch_import import import_torch

    imported = import_torch(module, example_inputs)
    outlined = outline(imported.mod)
    summary = f"{type(module).__name__}: {outlined.summary}"
    return Source(outlined.func, summary, module=module, imported=imported, outlined=outlined)
