"""Inductor compiles what we leave, after we took our chains out of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from crossfuse.torch.report import warn_of_training


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], fuse: Callable[[fx.GraphModule], None]
) -> Callable[..., Any]:
    """Compile a captured graph by inductor, with our chains taken out of it before.

    Of all of inductor's hooks only the compiler of inner graphs has been told in every release
    whether it is given an inference graph, so we stand before that one.

    Parameters
    ----------
    module : torch.fx.GraphModule
        What torch captured.
    inputs : Sequence[Any]
        Its example inputs.
    fuse : Callable
        Replaces chains in a graph of aten operators, in place.

    Returns
    -------
    Callable
        What torch calls instead of the graph.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: fx.GraphModule, given: Sequence[Any], **known: Any) -> Any:
        if known.get("is_inference"):
            fuse(graph)
        elif not known.get("is_backward"):
            warn_of_training()
        return compile_fx_inner(graph, given, **known)

    # Inductor's cache would keep graphs that call kernels of this process.
    compiled: Callable[..., Any] = compile_fx(
        module, inputs, inner_compile=inner, config_patches={"fx_graph_cache": False}
    )
    return compiled
