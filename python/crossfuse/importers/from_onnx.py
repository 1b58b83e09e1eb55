"""Importer of ONNX models as Relax modules; initialisers become weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.relax.torch_import import Imported, end_blocks, first_line
from crossfuse.workload.refusal import refused

_RULE = "onnx-import"


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
        raise refused(_RULE, "shapes", unknown[0], limit, "name one of these")
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
            _RULE,
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
        raise refused(_RULE, str(model), found, "an ONNX model", "check the path") from error


def _extents(value: Any, shapes: Mapping[str, Sequence[int | str]]) -> list[int | str]:
    if value.name in shapes:
        return [each if isinstance(each, str) else int(each) for each in shapes[value.name]]
    dims = value.type.tensor_type.shape.dim
    open_ones = [each.dim_param or "?" for each in dims if not each.HasField("dim_value")]
    if open_ones:
        limit = "extents that are numbers, or symbolic and named by the caller"
        advice = f"pass shapes={{'{value.name}': (16, 64)}}, say, or ('rows', 64) for any rows"
        raise refused(_RULE, value.name, f"extents {', '.join(open_ones)} left open", limit, advice)
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
        raise refused(_RULE, "graph", found, limit, advice) from error
    return relax.transform.DecomposeOpsForInference()(mod)
