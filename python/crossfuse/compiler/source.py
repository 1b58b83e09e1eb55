"""Sources that can be compiled: specs, torch modules, Relax modules, functions, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import LAYERS, LayersSpec, WorkloadSpec
from crossfuse.workload.suites import names_layers, parse_layers

if TYPE_CHECKING:
    from crossfuse.relax.outline import Outlined
    from crossfuse.relax.torch_import import Imported

_refused = Rule(WorkloadRefused, "compile")


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
    layers : LayersSpec | None
        If it came from the spec of a row of layers.
    module, imported, outlined : Any
        If it came from a torch module: the module, its Relax form and its outlined function.
    schedule : Any
        If the caller scheduled it: the ``tvm.s_tir.Schedule``.
    constant_weights : bool
        Whether its weights are known not to be written while it runs: they are parameters of a
        model, or those of a workload that is named.

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
    constant_weights: bool = False
    layers: LayersSpec | None = None

    @cached_property
    def padded(self) -> Source | None:
        """The same of padded arguments, where TMA does not copy its rows; None if it does."""
        from crossfuse.workload.build import aligned, form_of

        func = None
        spec = self.spec or self.layers
        if spec is not None:
            func = aligned(form_of(spec))
        elif self.outlined is not None:
            func = self.outlined.form and aligned(self.outlined.form)
        # The copies are made by a kernel that runs just before.
        return func and replace(self, func=func, spec=None, layers=None, constant_weights=False)


@checked
def read_source(source: Any, example_inputs: Sequence[Any] | None = None) -> Source:
    """Turn anything that can be compiled into one function.

    Parameters
    ----------
    source : Any
        A packaged id (``"S8"``) or spec text, a torch module with `example_inputs` or exported by
        ``torch.export.export``, a Relax module, an unscheduled function (a chain in canonical form,
        or a cascade), or a finished schedule.
    example_inputs : Sequence[torch.Tensor] | None
        Inputs of a torch module; their shapes and types are compiled for.

    Returns
    -------
    Source
        The function and its origin.

    Raises
    ------
    WorkloadRefused
        If it is none of these, a model is not one chain of matrix products, or `example_inputs`
        would be ignored.

    Examples
    --------
    >>> read_source("softmax:rows=4,cols=64").summary
    'softmax:rows=4,cols=64'
    """
    if _is(source, "torch.nn.modules.module"):
        return _from_module(source, example_inputs)
    read = _from_others(source)
    if example_inputs:
        raise _refused(
            "example_inputs",
            found=f"{len(example_inputs)} of them for {read.summary}",
            limit="those of a torch module: all else has extents and types of its own",
            instead="leave them out, and compile what has the extents that you mean",
        )
    return read


def _from_others(source: Any) -> Source:
    """What is no torch module, and needs no example inputs."""
    if isinstance(source, (str, WorkloadSpec, CascadeSpec, LayersSpec)):
        return _from_spec(source)
    if _is(source, "torch.export.exported_program"):
        return _from_exported(source)
    from crossfuse import _tvm as ir

    if isinstance(source, ir.Schedule):
        return Source(None, "a given schedule", schedule=source)
    if isinstance(source, ir.PrimFunc):
        from crossfuse.blocks.read import in_output_order

        _check_extents(source)
        return Source(in_output_order(source), "a given function")
    if isinstance(source, ir.IRModule):
        from crossfuse.relax.outline import outline

        outlined = outline(source)
        attributes = source["main"].attrs or {}
        inputs = int(attributes.get("num_input", len(source["main"].params)))
        return Source(
            outlined.func,
            outlined.summary,
            outlined=outlined,
            constant_weights=_stored(outlined, inputs),
        )
    raise _refused(
        "source",
        found=f"a {type(source).__name__}",
        limit="a workload id or spec, a torch module, a Relax module, a PrimFunc or a schedule",
        instead="pass one of these, such as 'S8' or 'gated_ffn:M=16,K=256,N=512,L=256'",
    )


def _check_extents(func: Any) -> None:
    """Refuse a function of symbolic extents, or of none: kernels are written for their sizes."""
    from crossfuse import _tvm as ir

    for parameter in func.params:
        if not ir.is_buffer_var(parameter):
            continue  # The lowering says so of what is scheduled.
        sizes = [ir.constant(each) for each in parameter.ty.shape]
        if not all(sizes):
            extents = ", ".join(map(str, parameter.ty.shape))
            raise _refused(
                f"parameter '{parameter.name}'",
                found=f"{parameter.ty.dtype}[{extents}]",
                limit="extents that are numbers, each at least 1",
                instead="write the function for one shape; fewer_rows=True takes fewer rows of a "
                "chain, and crossfuse.compile_model models of any number of rows",
            )


def _from_spec(source: str | WorkloadSpec | CascadeSpec | LayersSpec) -> Source:
    from crossfuse.planner.cascade.shape import function_of
    from crossfuse.workload import build, cascades

    if isinstance(source, str):
        if names_layers(source):
            source = parse_layers(source)
        else:
            source = cascades.resolve_any(source, (LAYERS,))
    if isinstance(source, CascadeSpec):
        func = function_of(source)
        return Source(func, str(source), cascade=source, constant_weights=True)
    func = build.prim_func(source)
    if isinstance(source, LayersSpec):
        return Source(func, str(source), layers=source, constant_weights=True)
    return Source(func, str(source), spec=source, constant_weights=True)


def _is(source: Any, module: str) -> bool:
    """Whether `source` is of a class of a module, without importing that module."""
    return any(each.__module__ == module for each in type(source).__mro__)


def _stored(outlined: Outlined, inputs: int) -> bool:
    """Whether all weights follow the model's inputs, or are constants of its graph."""
    products = outlined.form.products if outlined.form else ()
    weights = outlined.arguments[1 : 1 + len(products)]
    return all(each.value is not None or each.position >= inputs for each in weights)


def _from_module(module: Any, example_inputs: Sequence[Any] | None) -> Source:
    if not example_inputs:
        raise _refused(
            type(module).__name__,
            found="no example inputs",
            limit="one tensor for each input of the module",
            instead="pass example_inputs=(x,), whose shape and type are compiled for",
        )
    from crossfuse.relax.torch_import import import_torch

    return _from_imported(import_torch(module, example_inputs), type(module).__name__, module)


def _from_exported(program: Any) -> Source:
    from crossfuse.relax.torch_import import import_exported

    return _from_imported(import_exported(program), type(program).__name__)


def _from_imported(imported: Imported, name: str, module: Any = None) -> Source:
    from crossfuse.relax.outline import outline

    outlined = outline(imported.mod)
    return Source(
        outlined.func,
        f"{name}: {outlined.summary}",
        module=module,
        imported=imported,
        outlined=outlined,
        constant_weights=_stored(outlined, len(imported.inputs)),
    )
