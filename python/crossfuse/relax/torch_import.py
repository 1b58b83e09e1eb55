"""Torch modules as Relax modules, weights kept apart as inputs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.runtime.tensors import to_numpy
from crossfuse.workload.spec import refused

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

RULE = "torch-import"


@dataclass(frozen=True)
class Imported:
    """A torch module as Relax.

    Attributes
    ----------
    mod : tvm.IRModule
        With one Relax function, ``main``.
    inputs : tuple[str, ...]
        Names of the parameters of ``main`` that are the module's inputs; they come first.
    params : Mapping[str, numpy.ndarray]
        The remaining parameters of ``main`` in order, with the module's weights. The arrays share
        memory with a module on the CPU.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.relax import import_torch
    >>> imported = import_torch(torch.nn.Linear(8, 4).eval(), (torch.zeros(2, 8),))
    >>> sorted((name, each.shape) for name, each in imported.params.items())
    [('p_bias', (4,)), ('p_weight', (4, 8))]
    """

    mod: tvm.IRModule
    inputs: tuple[str, ...]
    params: Mapping[str, np.ndarray]


@checked
def import_torch(module: torch.nn.Module, example_inputs: Sequence[Any]) -> Imported:
    """Trace a module with `torch.export` and translate it to Relax.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode.
    example_inputs : Sequence[Any]
        Positional inputs, all of them tensors; their shapes and types become those of the Relax
        function.

    Returns
    -------
    Imported
        The Relax module and the weights.

    Raises
    ------
    EnvironmentRefused
        Without torch.
    WorkloadRefused
        For modules in training mode, inputs that are not tensors, products of several types, and
        modules that torch cannot export or TVM cannot translate.

    Examples
    --------
    >>> import torch
    >>> imported = import_torch(torch.nn.Linear(8, 4).eval(), (torch.zeros(2, 8),))
    >>> [each.name_hint for each in imported.mod.get_global_vars()]
    ['main']
    """
    _check(module, example_inputs)
    exported = _export(module, _distinct(example_inputs))
    return import_exported(exported)


def import_exported(exported: torch.export.ExportedProgram) -> Imported:
    """Translate a program that `torch.export.export` made to Relax.

    The module was in evaluation mode, the inputs have static shapes. Operators that TVM cannot
    translate are refused.
    """
    _check_products(exported)
    exported = _functional(exported)
    mod = _translate(exported)
    parameters = [v.name for v in mod["main"].params]
    count = int(mod["main"].attrs["num_input"])
    mod.update_func(mod.get_global_var("main"), mod["main"].without_attr("params"))
    weights = _weights(exported)
    params = {name: to_numpy(weights[name]) for name in parameters[count:]}
    return Imported(mod, tuple(parameters[:count]), params)


def _check(module: torch.nn.Module, inputs: Sequence[Any]) -> None:
    try:
        import torch
    except ImportError:
        raise refuse(
            EnvironmentRefused,
            RULE,
            "torch",
            found="no torch",
            limit="torch 2.8 or later",
            instead="install torch, or import the model from ONNX or Relax",
        ) from None
    training = [name or "the module" for name, part in module.named_modules() if part.training]
    if training:
        where = type(module).__name__
        found = f"{training[0]} in training mode"
        raise refused(RULE, where, found, "modules in evaluation mode", "call module.eval() first")
    for position, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            limit = "tensors only, because other values become constants of the graph"
            advice = "close over it in a wrapper module, or pass it as a tensor"
            raise refused(RULE, f"input {position}", f"a {type(value).__name__}", limit, advice)


#: Operators whose operands have one type, which ``torch.export`` does not see to.
_PRODUCTS = frozenset(
    f"aten::{each}"
    for each in (
        *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution"),
        *(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)),
    )
)


def _check_products(exported: Any) -> None:
    """Refuse products of operands of several types, as torch does when it runs them."""
    for node in exported.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name not in _PRODUCTS:
            continue
        kinds = {each.name: str(each.meta["val"].dtype) for each in node.all_input_nodes}
        if len(set(kinds.values())) > 1:
            found = ", ".join(f"{e} {kind.removeprefix('torch.')}" for e, kind in kinds.items())
            limit = "one type for all operands of a product, as where torch runs it"
            advice = "convert the example inputs or the model, so that they have one type"
            operator = name.removeprefix("aten::")
            raise refused(RULE, node.name, f"{operator} of {found}", limit, advice)


def _distinct(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy an input that is given twice: the traced graph would use only the last of them."""
    seen: set[int] = set()
    tensors = []
    for tensor in inputs:
        tensors.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(tensors)


def draws(node: Any) -> bool:
    """Whether a call of an operator draws random numbers, which have to stay those of torch."""
    import torch

    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    names = [each.name for each in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    # Those of evaluation: dropout(x, p, train=False), attention(..., dropout_p=0.0).
    idle = given.get("train") is False or given.get("training") is False
    return not idle and given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0) != 0


def _check_draws(exported: Any, converters: Mapping[str, Any]) -> None:
    """Refuse random numbers that TVM would leave out; those that it does not know are torch's."""
    for node in exported.graph.nodes:
        if draws(node) and _name(node.target) in converters:
            raise refused(
                RULE,
                node.name,
                f"{node.target}, which draws random numbers",
                "operators without them",
                "call the module as it is in evaluation, without dropout",
            )


def _export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    import torch

    try:
        with torch.no_grad():
            return torch.export.export(module, inputs)
    except Exception as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        limit = "modules that torch.export.export takes"
        advice = "remove control flow that depends on values, and check the example inputs"
        raise refused(RULE, type(module).__name__, found, limit, advice) from error


def _translate(exported: Any) -> Any:
    """Translate to Relax; an operator that TVM lacks is decomposed, or left to torch.

    Operators are decomposed only where they must be: one silu or attention says more than its
    parts.
    """
    from tvm.relax.frontend.torch import from_exported_program
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    from crossfuse.relax.converters import CONVERTERS
    from crossfuse.relax.converters.by_torch import by_torch, checked

    failed: dict[Any, Exception] = {}
    converters = checked(ExportedProgramImporter().convert_map, CONVERTERS, failed)
    _check_draws(exported, converters)
    tried: set[Any] = set()
    while True:
        calls = [each.target for each in exported.graph.nodes if each.op == "call_function"]
        left = {each for each in calls if each in failed or _name(each) not in converters}
        if parts := _decompositions(left - tried):
            tried |= left
            exported = _decomposed(exported, parts)
            continue
        theirs = {_name(each): by_torch for each in left if hasattr(each, "overloadpacket")}
        known = len(failed)
        try:
            return from_exported_program(
                exported,
                keep_params_as_input=True,
                unwrap_unit_return_tuple=True,
                run_ep_decomposition=False,
                custom_convert_map={**converters, **theirs},
            )
        except Exception as error:
            end_blocks(error)
            # Of an operator that a converter refuses the next round makes something else.
            if len(failed) > known:
                continue
            limit = "operators that TVM's torch importer knows, or of shapes that are known"
            advice = "express the operator with others, or build the Relax module by hand"
            raise refused(RULE, "graph", first_line(error), limit, advice) from error


def _functional(exported: Any) -> Any:
    """The program without in-place operators.

    A write to a view, such as ``h[1:] = 0``, becomes a new value of the viewed tensor: TVM's
    importer takes ``mul_`` for ``mul``, so that all else in the same memory would keep its old
    value. Writes to inputs, buffers and parameters are refused.
    """
    if not _writes(exported):
        return exported
    try:
        exported = exported.run_decompositions({})
    except Exception as error:
        raise _left_writing(first_line(error)) from error
    if left := _writes(exported):
        raise _left_writing(f"{left[0]}, which stays one that writes")
    kinds = {each.kind.name for each in exported.graph_signature.output_specs}
    if kinds & {"USER_INPUT_MUTATION", "BUFFER_MUTATION", "PARAMETER_MUTATION"}:
        raise refused(
            RULE,
            "graph",
            "a write to an input, a buffer or a parameter of the module",
            "writes to what the module makes itself",
            "write to a clone, and return what shall be kept",
        )
    return exported


def _writes(exported: Any) -> list[Any]:
    calls = [each.target for each in exported.graph.nodes if each.op == "call_function"]
    return [e for e in calls if hasattr(e, "_schema") and e._schema.is_mutable]


def _left_writing(found: str) -> RefusedError:
    limit = "in-place operators that torch's run_decompositions makes others of"
    return refused(RULE, "graph", found, limit, "write the model without them")


def _decomposed(exported: Any, parts: dict[Any, Any]) -> Any:
    """The program with some operators decomposed.

    Unchanged if the parts have effects, such as checks, or write: then they are left to torch.
    """
    from torch.export.graph_signature import InputKind

    try:
        found = exported.run_decompositions(parts)
    except Exception:  # that of a scatter into a diagonal writes, which torch asserts not to be
        return exported
    effects = any(each.kind is InputKind.TOKEN for each in found.graph_signature.input_specs)
    return exported if effects else found


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _decompositions(operators: set[Any]) -> dict[Any, Any]:
    """Torch's decompositions of operators, as far as there are any."""
    import torch
    from torch._decomp import get_decompositions

    table = torch.export.default_decompositions()
    core = {each: table[each] for each in operators if each in table}
    others = [each for each in operators - set(core) if hasattr(each, "overloadpacket")]
    # What is defined by other operators alone, such as ``numpy_T``, stands in no table.
    composite = {each: each.decompose for each in others if each._can_decompose()}
    return {**core, **composite, **get_decompositions(others)}


def _weights(exported: Any) -> dict[str, torch.Tensor]:
    from torch.export.graph_signature import InputKind

    tensors = exported.state_dict
    specs = exported.graph_signature.input_specs
    return {s.arg.name: tensors[s.target] for s in specs if s.kind is InputKind.PARAMETER}


def first_line(error: BaseException) -> str:
    """The first line of a message that says something, for refusals."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def end_blocks(error: BaseException) -> None:
    """End the blocks that were begun where an exception came from.

    A builder that is destroyed with open blocks says so on standard error. Those of TVM's importers
    can be reached only through the frames that the exception left. Call it outside of the builder's
    own scopes.
    """
    from tvm.relax import BlockBuilder

    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        held = [getattr(owner, name, None) for name in ("block_builder", "bb")]
        for each in (*frame.f_locals.values(), *held):
            if isinstance(each, BlockBuilder):
                _end(each)


def _end(builder: Any) -> None:
    with suppress(Exception):  # TVM's, that there is no block any more
        while True:
            builder._end_block()
