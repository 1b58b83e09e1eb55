"""Weights with rows padded once, outside of the model, instead of in each call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tvm import relax

from crossfuse.relax.graph import Node, clean, emit_copies, read_graph, with_bindings, with_body
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
    moved = _moved(mod[_MAIN], weights) if weights else []
    copies = [each.var for each in moved if each.operator == _PAD]
    if not copies:
        return mod
    made = clean(_with_main(mod, _taking(mod[_MAIN], copies)))
    main = made[_MAIN]
    graph = read_graph(main)
    inputs = len(main.params) - len(weights) - len(copies)
    pairs = zip(main.params[inputs:], (*weights, *copies), strict=True)
    kept = {
        given: source for given, source in pairs if given in graph.readers or given in graph.results
    }
    made = _with_main(made, with_body(main, main.body, [*main.params[:inputs], *kept]))
    made[PAD_WEIGHTS] = _alone(weights, moved, [*kept.values()])
    return made


def weights_of(mod: Any, names: Collection[str]) -> tuple[Any, ...]:
    """Parameters of ``main`` of the given names, in order."""
    return tuple(each for each in mod[_MAIN].params if str(each.name) in names) if names else ()


def _moved(function: Any, weights: Collection[Any]) -> list[Node]:
    known, found = set(weights), []
    for node in read_graph(function).nodes:
        if node.operator in _MAKERS and node.value.args[0] in known:
            found.append(node)
            known.add(node.var)
    return found


def _taking(function: Any, copies: Sequence[Any]) -> Any:
    """A function that takes copies as parameters instead of making them."""
    given = {each: relax.Var(str(each.name), each.ty) for each in copies}
    return with_bindings(
        function,
        lambda block: [
            relax.VarBinding(each.var, given[each.var]) if each.var in given else each
            for each in block.bindings
        ],
        [*function.params, *given.values()],
    )


def _alone(weights: Sequence[Any], moved: Sequence[Node], results: Sequence[Any]) -> Any:
    """The function ``pad_weights``, which makes the copies."""
    image: dict[Any, Any] = {each: relax.Var(str(each.name), each.ty) for each in weights}
    builder = relax.BlockBuilder()
    with builder.function(PAD_WEIGHTS, [*image.values()]):
        with builder.dataflow():
            emit_copies(builder, moved, image)
            made = builder.emit_output(relax.Tuple([image[each] for each in results]))
        builder.emit_func_output(made)
    return builder.get()[PAD_WEIGHTS]


def _with_main(mod: Any, function: Any) -> Any:
    made = mod.clone()
    made.update_func(made.get_global_var(_MAIN), function)
    return made
