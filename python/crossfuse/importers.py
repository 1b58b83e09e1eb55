"""Importers of any framework's models as Relax modules with separate weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.relax.torch_import import (
    Imported,
    end_blocks,
    first_line,
    import_exported,
    import_torch,
)
from crossfuse.workload.spec import refused

# ONNX models; initialisers become weights.

_ONNX = "onnx-import"


def import_onnx(
    model: Any, shapes: Mapping[str, Sequence[int | str]] | None = None, opset: int | None = None
) -> Imported:
    """Translate an ONNX model, or the file of one, to Relax; initialisers become its weights.

    Inputs keep the model's names. `shapes` gives their extents by name, and is needed where the
    model leaves some open; a name in place of a number is a symbolic extent, and equal names are
    one. `opset` overrides the version of the model's operators. A missing ``onnx`` package raises
    `EnvironmentRefused`; missing files, files that are no models, open extents and operators
    unknown to TVM raise `WorkloadRefused`.
    """
    proto = _proto(model)
    initialisers = {each.name for each in proto.graph.initializer}
    inputs = [each for each in proto.graph.input if each.name not in initialisers]
    extents = {each.name: _extents(each, dict(shapes or {})) for each in inputs}
    unknown = sorted(set(shapes or {}) - set(extents))
    if unknown:
        limit = f"inputs of the model: {', '.join(extents)}"
        raise refused(_ONNX, "shapes", unknown[0], limit, "name one of these")
    mod = _translated(proto, extents, opset)
    function = mod["main"]
    weights = [each.numpy() for each in (function.attrs.get("params") or ())]
    names = [str(each.name) for each in function.params]
    count = len(names) - len(weights)
    plain = function.without_attr("params") if weights else function
    mod.update_func(mod.get_global_var("main"), plain)
    return Imported(mod, tuple(names[:count]), dict(zip(names[count:], weights, strict=True)))


def is_onnx(model: object) -> bool:
    """Whether a model is ONNX's, or a path that could be one's."""
    if isinstance(model, (str, Path)):
        return Path(model).suffix == ".onnx"
    return any(each.__module__.startswith("onnx.") for each in type(model).__mro__)


def _proto(model: Any) -> Any:
    try:
        import onnx
    except ImportError:
        raise refuse(
            EnvironmentRefused,
            _ONNX,
            "onnx",
            found="no such package",
            limit="the package onnx, which reads the model",
            instead="run pip install 'crossfuse[onnx]'",
        ) from None
    if not isinstance(model, (str, Path)):
        return model
    try:
        return onnx.load(str(model))
    except Exception as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        raise refused(_ONNX, str(model), found, "an ONNX model", "check the path") from error


def _extents(value: Any, shapes: Mapping[str, Sequence[int | str]]) -> list[int | str]:
    if value.name in shapes:
        return [each if isinstance(each, str) else int(each) for each in shapes[value.name]]
    dims = value.type.tensor_type.shape.dim
    open_ones = [each.dim_param or "?" for each in dims if not each.HasField("dim_value")]
    if open_ones:
        limit = "extents that are numbers, or symbolic and named by the caller"
        advice = f"pass shapes={{'{value.name}': (16, 64)}}, say, or ('rows', 64) for any rows"
        raise refused(_ONNX, value.name, f"extents {', '.join(open_ones)} left open", limit, advice)
    return [each.dim_value for each in dims]


def _translated(proto: Any, extents: Mapping[str, list[int | str]], opset: int | None) -> Any:
    from tvm import relax, tirx
    from tvm.relax.frontend.onnx import from_onnx

    every = [each for extent in extents.values() for each in extent]
    symbols: dict[Any, Any] = {
        each: tirx.Var(each, "int64") for each in every if isinstance(each, str)
    }
    shapes = {name: [symbols.get(each, each) for each in extents[name]] for name in extents}
    try:
        mod = from_onnx(proto, shapes, opset=opset, keep_params_in_input=True)
    except Exception as error:
        end_blocks(error)
        found = f"{type(error).__name__}: {first_line(error)}"
        limit = "operators that TVM's ONNX importer knows"
        advice = "express the operator with others, or build the Relax module by hand"
        raise refused(_ONNX, "graph", found, limit, advice) from error
    return relax.transform.DecomposeOpsForInference()(mod)


# Models of any kind.

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
