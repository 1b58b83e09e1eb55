"""The importer that takes any kind of model and gives a Relax module with separate weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossfuse.importers import from_onnx, frontend_nn, relay
from crossfuse.workload.refusal import refused

if TYPE_CHECKING:
    from crossfuse.relax.torch_import import Imported

_RULE = "model-import"


def read_model(
    model: Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    opset: int | None = None,
) -> Imported:
    """Import a model of any supported framework as a Relax module.

    `model` is a ``torch.nn.Module`` or ``tvm.relax.frontend.nn`` module with `example_inputs`
    (positional, for their shapes and types), a ``torch.export.ExportedProgram``, an
    ``onnx.ModelProto`` or the path of an ``.onnx`` file (`shapes` and `opset` are for these alone),
    or a Relax module with a function ``main`` whose parameters are all inputs. Anything else is a
    `WorkloadRefused`; a missing package is an `EnvironmentRefused`.
    """
    if relay.is_relay(model):
        raise relay.refused(type(model).__name__)
    if from_onnx.is_onnx(model):
        return from_onnx.import_onnx(model, shapes, opset)
    if shapes is not None or opset is not None:
        name = "shapes" if shapes is not None else "opset"
        found = f"it for a {type(model).__name__}"
        raise refused(_RULE, name, found, "ONNX models", "leave it out")
    if _is(model, "torch.export.exported_program", "ExportedProgram"):
        from crossfuse.relax.torch_import import import_exported

        return import_exported(model)
    torch_module = _is(model, "torch.nn.modules.module", "Module")
    if torch_module or frontend_nn.is_nn(model):
        if not example_inputs:
            limit = "one tensor for each input of the module"
            advice = "pass example_inputs=(x,), whose shape and type are compiled for"
            raise refused(_RULE, type(model).__name__, "no example inputs", limit, advice)
        if not torch_module:
            return frontend_nn.import_nn(model, example_inputs)
        from crossfuse.relax.torch_import import import_torch

        return import_torch(model, example_inputs)
    return _relax(model)


def _relax(model: Any) -> Imported:
    from crossfuse import _tvm as ir
    from crossfuse.relax.torch_import import Imported

    if not isinstance(model, ir.IRModule):
        raise refused(
            _RULE,
            "model",
            f"a {type(model).__name__}",
            "a torch module or exported program, an ONNX model or the path of an .onnx file, a "
            "module of tvm.relax.frontend.nn, or a Relax module",
            "pass one of these; crossfuse.compile takes single workloads",
        )
    names = [each.name_hint for each in model.get_global_vars()]
    if "main" not in names:
        raise refused(
            _RULE, "module", f"functions {', '.join(names)}", "one that is called main", "rename it"
        )
    return Imported(model, tuple(str(each.name) for each in model["main"].params), {})


def _is(model: object, module: str, name: str) -> bool:
    """Whether a model is of a class, without importing where it is from."""
    return any((c.__module__, c.__name__) == (module, name) for c in type(model).__mro__)
