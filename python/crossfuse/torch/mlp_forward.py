"""What an MLP of a model calls instead of its own ``forward``: the kernel of its two layers."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature as signature_of
from typing import Any

import torch
from torch import fx, nn

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.torch.backend import Backend
from crossfuse.torch.fuse_rows import fuse_rows
from crossfuse.workload.dtypes import FLOAT_TYPES

_RULE = "replace-mlp"
INSTEAD = "leave it as it is, or use torch.compile(model, backend='crossfuse')"
#: Rows of the example that a module is traced with; calls may have any number.
_ROWS = 16
#: What may stand beside the kernel: views of what it reads and makes.
_BESIDE = frozenset({"run_rows.default", "reshape.default", "view.default", "sym_size.int"})


@dataclass(frozen=True)
class Forward:
    """The ``forward`` of an MLP with a kernel.

    Attributes
    ----------
    run : torch.fx.GraphModule
        Of the weights, then the rows of the input.
    weights : tuple[tuple[str, str], ...]
        Submodules and names of the weights, in order.
    shapes : tuple[tuple[int, ...], ...]
        Of the weights.
    width : int
        Of the input.
    dtype : torch.dtype
        Of the input.
    device : torch.device
        Of all tensors.
    given : str
        The input's name, by which callers may pass it.
    """

    run: fx.GraphModule
    weights: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[int, ...], ...]
    width: int
    dtype: torch.dtype
    device: torch.device
    given: str

    @classmethod
    def of(cls, part: nn.Module, options: Backend) -> Forward:
        """Build the kernels of a module.

        Raises
        ------
        WorkloadRefused
            If it is no MLP, or no kernel of it pays.
        """
        weight = next(each for each in part.parameters() if each.ndim == 2)
        if str(weight.dtype).removeprefix("torch.") not in FLOAT_TYPES:
            known = ", ".join(FLOAT_TYPES)
            raise refused(type(part).__name__, str(weight.dtype), known, "convert the model")
        exported = _exported(part, weight)
        run, signature = exported.graph_module, exported.graph_signature
        (given,) = (run_input for run_input in signature.user_inputs)
        example = next(each for each in run.graph.nodes if each.name == given)
        outcomes = fuse_rows(
            run,
            options.device_of(weight.device),
            options.always,
            options.sequential(weight.device),
            options.bins,
        )
        _check_alone(part, run, outcomes)
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        order = [each.name for each in run.graph.nodes if each.op == "placeholder"]
        _check_named(part, [each for each in order if each not in (*named, given)])
        weights = tuple(_split(named[each]) for each in order if each in named)
        value, name = example.meta["val"], next(iter(signature_of(part.forward).parameters))
        shapes = tuple(tuple(_tensor(part, each).shape) for each in weights)
        return cls(run, weights, shapes, value.shape[-1], value.dtype, weight.device, name)

    def __call__(self, part: nn.Module, *inputs: Any, **named: Any) -> torch.Tensor:
        """The output of the MLP for rows of any number in any shape."""
        if len(inputs) + len(named) != 1 or not named.keys() <= {self.given}:
            found = f"{len(inputs)} inputs and {', '.join(named) or 'none'} by name"
            limit = f"{self.given} alone"
            raise refused(type(part).__name__, found, limit, "restore() this module")
        (x,) = (*inputs, *named.values())
        weights = [_tensor(part, each) for each in self.weights]
        self._check(part, x, weights)
        (output,) = self.run(*weights, x.reshape(-1, self.width))
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def _check(self, part: nn.Module, x: torch.Tensor, weights: list[torch.Tensor]) -> None:
        where = type(part).__name__
        again = "call replace_mlp again after the change, or restore() before"
        if part.training:
            found = "a module in training mode"
            raise refused(where, found, "evaluation mode", "call eval(), or restore() before")
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights)):
            raise refused(
                where,
                "a call that records gradients",
                "kernels without gradients",
                "call the model under torch.no_grad() or torch.inference_mode()",
            )
        for each in (x, *weights):
            if each.dtype != self.dtype or each.device != self.device:
                found = f"a tensor of {each.dtype} on {each.device}"
                raise refused(where, found, f"{self.dtype} on {self.device}", again)
        for (_, name), each, due in zip(self.weights, weights, self.shapes, strict=True):
            if tuple(each.shape) != due:
                found = f"a {name} of shape {list(each.shape)}"
                raise refused(where, found, f"{list(due)}, as it was", again)
        if x.shape[-1] != self.width:
            found = f"an input of shape {list(x.shape)}"
            raise refused(where, found, f"rows of {self.width} elements", again)
        if not x.is_contiguous():
            found = f"an input of strides {list(x.stride())}"
            limit = "row-major elements, since a copy would go unnoticed"
            raise refused(where, found, limit, "pass x.contiguous(), or restore() this module")


def _exported(part: nn.Module, weight: torch.Tensor) -> Any:
    """A module traced with rows of the first width that it takes, of any number."""
    matrices = [each for each in part.parameters() if each.ndim == 2]
    reason = ""
    for width in dict.fromkeys(n for each in matrices for n in reversed(each.shape)):
        example = torch.zeros(_ROWS, width, dtype=weight.dtype, device=weight.device)
        try:
            with torch.no_grad():
                shapes = ({0: torch.export.Dim("rows", min=2)},)
                return torch.export.export(part, (example,), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # tracing raises whatever the module does
            reason = reason or f"{type(error).__name__}: {error}".partition("\n")[0]
    raise refused(type(part).__name__, reason, "modules that take one tensor of rows", INSTEAD)


def _check_alone(part: nn.Module, run: fx.GraphModule, outcomes: Any) -> None:
    """Refuse a module that is more than one kernel: what else it does may not be row by row."""
    rest = [
        each.name
        for each in run.graph.nodes
        if each.op not in ("placeholder", "output")
        and getattr(each.target, "__name__", "") not in _BESIDE
    ]
    if not rest:
        return
    reasons = "; ".join(each.text for each in outcomes if each.text and not each.name)
    found = reasons or f"{', '.join(rest[:3])} beside two layers of matrix products"
    raise refused(type(part).__name__, found, "two layers that a kernel computes", INSTEAD)


def _check_named(part: nn.Module, others: list[str]) -> None:
    """Refuse tensors that a call could not read anew."""
    if others:
        raise refused(
            type(part).__name__,
            f"{', '.join(others)}: a tensor that is the module's own",
            "parameters and buffers, which calls read anew",
            "give it to register_buffer",
        )


def _tensor(part: nn.Module, at: tuple[str, str]) -> torch.Tensor:
    """The weight that a module has at a place now."""
    where, name = at
    found: torch.Tensor = getattr(part.get_submodule(where), name)
    return found


def _split(name: str) -> tuple[str, str]:
    where, _, last = name.rpartition(".")
    return where, last


def refused(where: str, found: str, limit: str, instead: str) -> RefusedError:
    """The error of a module, or of a call of it, that no kernel is for."""
    return refuse(WorkloadRefused, _RULE, where, found=found, limit=limit, instead=instead)
