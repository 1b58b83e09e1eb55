"""Nobody compiles what we leave: torch runs it operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from crossfuse.torch.report import warn_of_training


def compile_eager(
    module: fx.GraphModule, inputs: Sequence[Any], fuse: Callable[[fx.GraphModule], Any]
) -> Callable[..., Any]:
    """Take our chains out of a captured graph, and leave the rest as it is.

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
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.compilers import nop

    def inference(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        fuse(graph)
        return make_boxed_func(graph.forward)

    def training(graph: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        warn_of_training()
        return nop(graph, given)

    compiled = aot_autograd(fw_compiler=training, bw_compiler=nop, inference_compiler=inference)
    return compiled(module, inputs)
