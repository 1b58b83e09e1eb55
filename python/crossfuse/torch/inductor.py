"""Inductor compiles what we leave, after we took our chains out of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

from crossfuse.torch.report import warn_of_training


class _Pass(CustomInferenceAwareGraphPass):
    """Our pass before inductor's own on graphs of aten operators."""

    def __init__(self, fuse: Callable[[fx.GraphModule], None]) -> None:
        self._fuse = fuse

    def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
        if is_inference:
            self._fuse(graph.owning_module)
        else:
            warn_of_training()

    def uuid(self) -> None:
        """None: inductor does not cache these graphs, which call kernels of this process."""
        return


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], fuse: Callable[[fx.GraphModule], None]
) -> Callable[..., Any]:
    """Compile a captured graph by inductor, with our pass.

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
    from torch._inductor.compile_fx import compile_fx

    patches = {"post_grad_custom_pre_pass": _Pass(fuse), "fx_graph_cache": False}
    compiled: Callable[..., Any] = compile_fx(module, inputs, config_patches=patches)
    return compiled
