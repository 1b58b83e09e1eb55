"""Importer of modules of ``tvm.relax.frontend.nn`` as Relax modules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossfuse.workload.refusal import refused

if TYPE_CHECKING:
    from crossfuse.relax.torch_import import Imported

_RULE = "nn-import"


def import_nn(module: Any, example_inputs: Sequence[Any]) -> Imported:
    """Export the method ``forward`` of a ``tvm.relax.frontend.nn`` module with its weights.

    Parameters must carry values, as ``load_state_dict`` leaves them; else, or with another number
    of inputs than ``forward`` takes, `WorkloadRefused` is raised. Of `example_inputs` only shapes
    and types count.
    """
    from tvm.relax.frontend.nn import spec

    from crossfuse.relax.torch_import import Imported

    names = list(inspect.signature(module.forward).parameters)
    if len(names) != len(example_inputs):
        raise refused(
            _RULE,
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
            raise refused(_RULE, name, "a parameter without a value", limit, advice)
    weights = {name: each.data.numpy() for name, each in parameters}
    return Imported(_with_main(mod), tuple(names), weights)


def is_nn(model: object) -> bool:
    """Whether a model is a module of ``tvm.relax.frontend.nn``, without importing it."""
    return any(each.__module__ == "tvm.relax.frontend.nn.core" for each in type(model).__mro__)


def _with_main(mod: Any) -> Any:
    """The module with ``forward`` renamed to ``main``; weights follow the inputs, as before."""
    import tvm

    functions = {name.name_hint: func for name, func in mod.functions_items()}
    main = functions.pop("forward").with_attr("global_symbol", "main")
    return tvm.IRModule({"main": main, **functions}, attrs=mod.attrs)
