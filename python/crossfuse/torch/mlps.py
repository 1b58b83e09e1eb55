"""`replace_mlp`: the MLPs of a model call kernels of ours, without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType

from torch import nn

from crossfuse.calls import checked
from crossfuse.errors import RefusedError
from crossfuse.runtime.bin_rows import BINS
from crossfuse.torch.backend import Backend
from crossfuse.torch.mlp_forward import INSTEAD, Forward, refused

#: Weights of a plain MLP and of a gated one.
_WEIGHTS = (2, 3)


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

    An MLP is a module that takes one tensor, and whose result is two layers of matrix products of
    its rows: plain or gated, with any element-wise operators between and behind. It is found by
    what `torch.export` traces, never by names. The module keeps its class, parameters and
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
    options = Backend(rest="eager", always=always, target=target, cpu=cpu, bins=tuple(bins))
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
    """The refusal of a model of which no module was replaced."""
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
    """Refuse what no kernel runs for."""
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
    """Modules with as many weights as an MLP has, outer ones first."""
    for name, part in module.named_modules():
        dims = [each.ndim for each in part.parameters()]
        if dims.count(2) in _WEIGHTS and max(dims) == 2:
            yield name, part
