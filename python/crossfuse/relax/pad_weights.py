"""Weights with rows padded once, outside of the model, instead of in each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.ir import Call

from crossfuse.relax.dataflow import Dataflow, clean, read_dataflow
from crossfuse.runtime.running_model import PAD_WEIGHTS

_MAIN = "main"
_PAD = "relax.nn.pad"
#: Operators that make padded copies of weights.
_MAKERS = (_PAD, "relax.reshape")


def padding_once(mod: Any, weights: Sequence[Any]) -> Any:
    """Move the padding of weights to a function of its own, ``pad_weights``.

    The weights are the last parameters of ``main``. Called with all of them, ``pad_weights`` makes
    what ``main`` then takes in their place: those that it reads itself, then the copies. A module
    without copies is returned as it is.
    """
    moved = _moved(read_dataflow(mod[_MAIN]), weights) if weights else {}
    copies = [each for each, call in moved.items() if call.op.name == _PAD]
    if not copies:
        return mod
    made = clean(_with_main(mod, _taking(mod[_MAIN], copies)))
    main = made[_MAIN]
    read = read_dataflow(main).users
    inputs = len(main.params) - len(weights) - len(copies)
    pairs = zip(main.params[inputs:], (*weights, *copies), strict=True)
    kept = {given: source for given, source in pairs if given in read}
    made = _with_main(made, _function(main, [*main.params[:inputs], *kept], main.body))
    made[PAD_WEIGHTS] = _alone(weights, moved, [*kept.values()])
    return made


def weights_of(mod: Any, names: Collection[str]) -> tuple[Any, ...]:
    """Parameters of ``main`` of the given names, in order."""
    return tuple(each for each in mod[_MAIN].params if str(each.name) in names) if names else ()


def _moved(dataflow: Dataflow, weights: Collection[Any]) -> Mapping[Any, Any]:
    """Calls that make copies of weights, in order, by the variables that they bind."""
    known, found = frozenset(weights), {}
    for variable, value in dataflow.values.items():
        if isinstance(value, Call) and getattr(value.op, "name", "") in _MAKERS:
            given = value.args[0]
            if given in known or given in found:
                found[variable] = value
    return found


def _taking(function: Any, copies: Sequence[Any]) -> Any:
    """A function that takes copies as parameters instead of making them."""
    given = {each: relax.Var(str(each.name), each.ty) for each in copies}
    blocks = []
    for block in function.body.blocks:
        made = [
            relax.VarBinding(each.var, given[each.var]) if each.var in given else each
            for each in block.bindings
        ]
        blocks.append(type(block)(made))
    body = relax.SeqExpr(blocks, function.body.body)
    return _function(function, [*function.params, *given.values()], body)


def _alone(weights: Sequence[Any], moved: Mapping[Any, Any], results: Sequence[Any]) -> Any:
    """The function ``pad_weights``, which makes the copies."""
    image: dict[Any, Any] = {each: relax.Var(str(each.name), each.ty) for each in weights}
    builder = relax.BlockBuilder()
    with builder.function(PAD_WEIGHTS, [*image.values()]):
        with builder.dataflow():
            for variable, call in moved.items():
                args = [image.get(each, each) for each in call.args]
                image[variable] = builder.emit(Call(call.op, args, call.attrs, call.ty_args))
            made = builder.emit_output(relax.Tuple([image[each] for each in results]))
        builder.emit_func_output(made)
    return builder.get()[PAD_WEIGHTS]


def _with_main(mod: Any, function: Any) -> Any:
    made = mod.clone()
    made.update_func(made.get_global_var(_MAIN), function)
    return made


def _function(like: Any, params: Sequence[Any], body: Any) -> Any:
    """A function like another one, but for its parameters and its body."""
    return relax.Function(list(params), body, like.ret_ty, like.is_pure, like.attrs, like.span)
