"""`replace_mlp`: the MLPs of a model call kernels of ours, without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature as signature_of
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from crossfuse.calls import checked
from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.torch.backend import Backend
from crossfuse.torch.fuse_graph import fuse_graph
from crossfuse.workload.dtypes import FLOAT_TYPES

_RULE = "replace-mlp"
INSTEAD = "leave it as it is, or use torch.compile(model, backend='crossfuse')"
#: Rows of the example that a module is traced with; calls may have any number.
_ROWS = 16
#: What may stand beside the kernel: views of what it reads and makes.
_BESIDE = frozenset({"run_rows.default", "reshape.default", "view.default", "sym_size.int"})


@dataclass(frozen=True)
class Forward:
    """What an MLP calls instead of its own ``forward``: the kernel of its two layers."""

    #: Takes the weights, then the rows of the input.
    run: fx.GraphModule
    #: Submodule and name of each weight, in the order of `run`.
    weights: tuple[tuple[str, str], ...]
    #: Shape and type of each.
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    #: Of the input, as is `dtype`.
    width: int
    dtype: torch.dtype
    #: Of all tensors.
    device: torch.device
    #: Name of the input, by which callers may pass it.
    given: str

    @classmethod
    def of(cls, part: nn.Module, options: Backend) -> Forward:
        """Trace a module and build its kernels; refused if it is no MLP, or none of them pays."""
        weight = next(each for each in part.parameters() if each.ndim == 2)
        if str(weight.dtype).removeprefix("torch.") not in FLOAT_TYPES:
            known = ", ".join(FLOAT_TYPES)
            raise refused(type(part).__name__, str(weight.dtype), known, "convert the model")
        exported = _exported(part, weight)
        run, signature = exported.graph_module, exported.graph_signature
        (given,) = (run_input for run_input in signature.user_inputs)
        example = next(each for each in run.graph.nodes if each.name == given)
        target, sequential = options.device_of(weight.device), options.sequential(weight.device)
        record, _ = fuse_graph(run, options, target, sequential)
        _check_alone(part, run, record.report.outcomes)
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        order = [each.name for each in run.graph.nodes if each.op == "placeholder"]
        _check_named(part, [each for each in order if each not in (*named, given)])
        weights = tuple(_split(named[each]) for each in order if each in named)
        value, name = example.meta["val"], next(iter(signature_of(part.forward).parameters))
        forms = tuple(_form(_tensor(part, each)) for each in weights)
        return cls(run, weights, forms, value.shape[-1], value.dtype, weight.device, name)

    def __call__(self, part: nn.Module, *inputs: Any, **named: Any) -> torch.Tensor:
        """Compute the MLP of an input with any leading extents, so of any number of rows."""
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
        types = (self.dtype, *(dtype for _, dtype in self.forms))
        for each, dtype in zip((x, *weights), types, strict=True):
            if each.dtype != dtype or each.device != self.device:
                found = f"a tensor of {each.dtype} on {each.device}"
                raise refused(where, found, f"{dtype} on {self.device}", again)
        for (_, name), each, (due, _) in zip(self.weights, weights, self.forms, strict=True):
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


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _exported(part: nn.Module, weight: torch.Tensor) -> Any:
    """Trace a module for any number of rows, of the first width that it takes."""
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
    """Refuse tensors that calls could not read anew."""
    if others:
        raise refused(
            type(part).__name__,
            f"{', '.join(others)}: a tensor that is the module's own",
            "parameters and buffers, which calls read anew",
            "give it to register_buffer",
        )


def _tensor(part: nn.Module, at: tuple[str, str]) -> torch.Tensor:
    """The weight that stands at a place of the module now."""
    where, name = at
    found: torch.Tensor = getattr(part.get_submodule(where), name)
    return found


def _split(name: str) -> tuple[str, str]:
    where, _, last = name.rpartition(".")
    return where, last


def refused(where: str, found: str, limit: str, instead: str) -> RefusedError:
    """The error for a module, or a call of one, that no kernel is for."""
    return refuse(WorkloadRefused, _RULE, where, found=found, limit=limit, instead=instead)


#: Weights of an MLP of two layers, plain or gated; one of more layers may have as many as the last.
_WEIGHTS, _MOST_WEIGHTS = (2, 3), 8


@dataclass(frozen=True)
class Replaced:
    """What `replace_mlp` did.

    Attributes
    ----------
    parts : Mapping[str, torch.nn.Module]
        Modules that call a kernel now, by their names in the model.
    left : Mapping[str, str]
        Modules with as many weights as an MLP that were left as they are, and why.

    Examples
    --------
    >>> import torch
    >>> mlp, other = nn.Linear(8, 8), "a convolution beside two layers of matrix products"
    >>> done = Replaced({"layers.0.mlp": mlp}, {"head": other})
    >>> mlp.forward = lambda x: x  # what `replace_mlp` does, with a kernel
    >>> done.restore()
    >>> tuple(mlp(torch.zeros(2, 8)).shape), "forward" in vars(mlp)
    ((2, 8), False)
    """

    parts: Mapping[str, nn.Module]
    left: Mapping[str, str]

    def restore(self) -> None:
        """Let all modules compute as their classes say again."""
        for part in self.parts.values():
            part.__dict__.pop("forward", None)


@checked
def replace_mlp(
    module: nn.Module,
    *,
    always: bool = False,
    target: str = "",
    cpu: str = "",
    bins: tuple[int, ...] = BINS,
) -> Replaced:
    """Let the MLPs of a model call kernels of ours.

    An MLP is a module that takes one tensor, and whose result is two or more layers of matrix
    products of its rows: plain or gated, with any element-wise operators between and behind. It is
    found by what `torch.export` traces, never by names. The module keeps its class, parameters and
    ``state_dict``; its ``forward`` is replaced until `Replaced.restore`. Weights are read at each
    call, so they may be loaded afterwards.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode.
    always, target, cpu, bins
        See `crossfuse.torch.Backend`.

    Returns
    -------
    Replaced
        What was replaced, and how to undo it.

    Raises
    ------
    WorkloadRefused
        If a module is in training mode, if there is no GPU that kernels run on, or if no module
        was replaced; with all reasons.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.workload import chain_module
    >>> model = nn.Sequential(nn.LayerNorm(32, dtype=torch.bfloat16), chain_module(32, 64)).eval()
    >>> replaced = replace_mlp(model, always=True, cpu="llvm", bins=(16,))
    >>> list(replaced.parts)
    ['1']
    >>> with torch.inference_mode():
    ...     tuple(model(torch.zeros(3, 5, 32, dtype=torch.bfloat16)).shape)  # [..., K] to [..., L]
    (3, 5, 32)
    >>> replaced.restore()
    """
    options = Backend("eager", always, target, cpu, cascades=False, bins=tuple(bins))
    _check(module, options)
    parts: dict[str, nn.Module] = {}
    left: dict[str, RefusedError] = {}
    for name, part in _candidates(module):
        if any(name.startswith(f"{each}." if each else "") for each in parts):
            continue
        try:
            forward = Forward.of(part, options)
        except RefusedError as error:
            left[name] = error
            continue
        part.forward = MethodType(forward, part)
        parts[name] = part
    if not parts:
        raise _none(module, left)
    return Replaced(parts, {name: str(error) for name, error in left.items()})


def _none(module: nn.Module, left: Mapping[str, RefusedError]) -> RefusedError:
    if len(left) == 1:
        return next(iter(left.values()))
    found = "; ".join(f"{name or 'the module'}: {error}" for name, error in left.items())
    return refused(
        type(module).__name__,
        found or "no module with the two or three weights of an MLP",
        "modules that are two layers of matrix products",
        INSTEAD,
    )


def _check(module: nn.Module, options: Backend) -> None:
    """Refuse modules in training mode, and parameters where no kernel runs."""
    where = type(module).__name__
    training = [name or "the module" for name, part in module.named_modules() if part.training]
    if training:
        found = f"{training[0]} in training mode"
        raise refused(where, found, "modules in evaluation mode", "call eval() first")
    places = dict.fromkeys(each.device for each in module.parameters())
    for place in places:
        if not options.runs_on(place):
            found = f"parameters on {place}"
            raise refused(where, found, "a Hopper GPU", "move the model to the GPU first")


def _candidates(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with as many weights as an MLP has, outer ones first.

    One with more than those of two layers has no other module with as many as these in it: it is a
    layer of a transformer then, whose MLP is a part.
    """
    sizes = {name: _weights(part) for name, part in module.named_modules()}
    for name, part in module.named_modules():
        inside = (
            size for each, size in sizes.items() if each.startswith(f"{name}." if name else "")
        )
        alone = not any(size in _WEIGHTS for size in inside)
        if sizes[name] in _WEIGHTS or (alone and max(_WEIGHTS) < sizes[name] <= _MOST_WEIGHTS):
            yield name, part


def _weights(part: nn.Module) -> int:
    """Matrices among a module's parameters; 0 where one has more dimensions."""
    dims = [each.ndim for each in part.parameters()]
    return dims.count(2) if max(dims, default=0) == 2 else 0
