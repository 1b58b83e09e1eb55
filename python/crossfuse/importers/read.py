"""The importer that takes any kind of model and gives a Relax module with separate weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse.importers.from_onnx import import_onnx, is_onnx
from crossfuse.relax.torch_import import Imported, import_exported, import_torch
from crossfuse.workload.refusal import refused

_RULE = "model-import"
#: Why there is no way to import Relay, TVM's graph IR before Relax, and what there is.
GONE = (
    "Relay was removed from TVM; crossfuse takes Relax. Import the original model instead: "
    "crossfuse.compile_model takes torch modules, torch.export programs, ONNX models, "
    "tvm.relax.frontend.nn modules and Relax modules"
)
#: How a module of Relay begins as text: with its version, or with a function.
_RELAY = ("#[version", "def @")


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
    `WorkloadRefused`, and so are `example_inputs` beside it; a missing package is an
    `EnvironmentRefused`.
    """
    if _is_relay(model):
        why, _, instead = GONE.partition(". ")
        advice = instead[0].lower() + instead[1:]
        raise refused(_RULE, type(model).__name__, "a module of Relay", f"Relax; {why}", advice)
    if is_onnx(model):
        return _alone(import_onnx(model, shapes, opset), model, example_inputs)
    if shapes is not None or opset is not None:
        name = "shapes" if shapes is not None else "opset"
        found = f"it for a {type(model).__name__}"
        raise refused(_RULE, name, found, "ONNX models", "leave it out")
    if _is(model, "torch.export.exported_program", "ExportedProgram"):
        return _alone(import_exported(model), model, example_inputs)
    torch_module = _is(model, "torch.nn.modules.module", "Module")
    if torch_module or _is_nn(model):
        if not example_inputs:
            limit = "one tensor for each input of the module"
            advice = "pass example_inputs=(x,), whose shape and type are compiled for"
            raise refused(_RULE, type(model).__name__, "no example inputs", limit, advice)
        if not torch_module:
            return import_nn(model, example_inputs)
        return import_torch(model, example_inputs)
    return _alone(_relax(model), model, example_inputs)


def _alone(imported: Imported, model: Any, example_inputs: Sequence[Any] | None) -> Imported:
    """What was imported; refuses example inputs, which would be ignored."""
    if not example_inputs:
        return imported
    found = f"{len(example_inputs)} of them for a {type(model).__name__}"
    limit = "those of a module of torch or of tvm.relax.frontend.nn: all else has shapes and types "
    raise refused(_RULE, "example_inputs", found, f"{limit}of its own", "leave them out")


def _relax(model: Any) -> Imported:
    from crossfuse import _tvm as ir

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


def _is_relay(model: object) -> bool:
    """Whether a model is Relay's: an object of an older TVM, or its text."""
    if isinstance(model, str):
        return model.lstrip().startswith(_RELAY)
    return any(each.__module__.startswith("tvm.relay") for each in type(model).__mro__)


def _is(model: object, module: str, name: str) -> bool:
    """Whether a model is of a class, without importing where it is from."""
    return any((c.__module__, c.__name__) == (module, name) for c in type(model).__mro__)


# Modules of ``tvm.relax.frontend.nn``.

_NN_RULE = "nn-import"


def import_nn(module: Any, example_inputs: Sequence[Any]) -> Imported:
    """Export the method ``forward`` of a ``tvm.relax.frontend.nn`` module with its weights.

    Parameters must carry values, as ``load_state_dict`` leaves them; else, or with another number
    of inputs than ``forward`` takes, `WorkloadRefused` is raised. Of `example_inputs` only shapes
    and types count.
    """
    from tvm.relax.frontend.nn import spec

    names = list(inspect.signature(module.forward).parameters)
    if len(names) != len(example_inputs):
        raise refused(
            _NN_RULE,
            "example_inputs",
            f"{len(example_inputs)} of them",
            f"one for each argument of forward: {', '.join(names)}",
            "pass an array for each",
        )
    given = {
        name: spec.Tensor(list(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in zip(names, example_inputs, strict=True)
    }
    mod, parameters = module.export_tvm({"forward": given})
    for name, each in parameters:
        if each.data is None:
            limit = "parameters with values, which become the model's weights"
            advice = "call load_state_dict, or set its data"
            raise refused(_NN_RULE, name, "a parameter without a value", limit, advice)
    weights = {name: each.data.numpy() for name, each in parameters}
    return Imported(_with_main(mod), tuple(names), weights)


def _is_nn(model: object) -> bool:
    return any(each.__module__ == "tvm.relax.frontend.nn.core" for each in type(model).__mro__)


def _with_main(mod: Any) -> Any:
    """The module with ``forward`` renamed to ``main``; weights follow the inputs, as before."""
    import tvm

    functions = {name.name_hint: func for name, func in mod.functions_items()}
    main = functions.pop("forward").with_attr("global_symbol", "main")
    return tvm.IRModule({"main": main, **functions}, attrs=mod.attrs)
