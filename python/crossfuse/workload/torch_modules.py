"""The packaged workloads as torch modules, for demonstrations and tests.

The classes are made inside functions because a class statement needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse.calls import AtLeastOne, Seed, checked
from crossfuse.workload.dtypes import float_type

if TYPE_CHECKING:
    import torch


@checked
def gated_ffn_module(
    hidden: AtLeastOne,
    intermediate: AtLeastOne,
    dtype: str = "bfloat16",
    seed: Seed = 0,
    bias: bool = False,
    residual: bool = False,
) -> torch.nn.Module:
    """Make a Llama-style feed-forward layer: ``down(silu(gate(x)) * up(x))``.

    Parameters
    ----------
    hidden : int
        Width of input and output.
    intermediate : int
        Width between the layers.
    dtype : str
        Type of the weights.
    seed : int
        Equal seeds give equal weights.
    bias : bool
        Whether all three layers add a bias.
    residual : bool
        Whether the input is added to the output.

    Returns
    -------
    torch.nn.Module
        In evaluation mode, on the CPU; weights have the spread of ``torch.nn.Linear``.

    Examples
    --------
    >>> module = gated_ffn_module(64, 128)
    >>> sorted(name for name, _ in module.named_parameters())
    ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
    """
    import torch

    class GatedFFN(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=bias)
            self.up_proj = torch.nn.Linear(hidden, intermediate, bias=bias)
            self.down_proj = torch.nn.Linear(intermediate, hidden, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = torch.nn.functional.silu(self.gate_proj(x))
            y = self.down_proj(gate * self.up_proj(x))
            return x + y if residual else y

    return _seeded(GatedFFN, dtype, seed)


@checked
def chain_module(
    hidden: AtLeastOne,
    intermediate: AtLeastOne,
    dtype: str = "bfloat16",
    seed: Seed = 0,
    act: str = "gelu_tanh",
    bias: bool = True,
    residual: bool = False,
) -> torch.nn.Module:
    """Make a GPT-style feed-forward layer: ``project(act(expand(x)))``.

    Parameters
    ----------
    hidden : int
        Width of input and output.
    intermediate : int
        Width between the layers.
    dtype : str
        Type of weights and biases.
    seed : int
        Equal seeds give equal weights.
    act : str
        A name of `crossfuse.workload.expression.NAMED` or an expression in x.
    bias : bool
        Whether both layers add a bias.
    residual : bool
        Whether the input is added to the output.

    Returns
    -------
    torch.nn.Module
        In evaluation mode, on the CPU.

    Examples
    --------
    >>> module = chain_module(64, 128)
    >>> sorted(name for name, _ in module.named_parameters())
    ['expand.bias', 'expand.weight', 'project.bias', 'project.weight']
    """
    import torch

    function = activation(act)

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand = torch.nn.Linear(hidden, intermediate, bias=bias)
            self.project = torch.nn.Linear(intermediate, hidden, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.project(function(self.expand(x)))
            return x + y if residual else y

    return _seeded(Chain, dtype, seed)


@checked
def conv_module(
    channels: tuple[AtLeastOne, AtLeastOne, AtLeastOne],
    window: AtLeastOne,
    dtype: str = "bfloat16",
    seed: Seed = 0,
    act: str = "relu",
) -> torch.nn.Module:
    """Make two convolutions of a ResNet's block: ``second(act(first(x)))``.

    Parameters
    ----------
    channels : tuple[int, int, int]
        Of the input, between the convolutions, and of the output.
    window : int
        Rows and columns of the first convolution's window, odd; the second one's is one pixel.
    dtype : str
        Type of the weights.
    seed : int
        Equal seeds give equal weights.
    act : str
        A name of `crossfuse.workload.expression.NAMED` or an expression in x.

    Returns
    -------
    torch.nn.Module
        In evaluation mode, on the CPU, without biases; weights in channels_last, so that their
        memory is what a spec with ``weights=nk`` takes.

    Examples
    --------
    >>> module = conv_module((64, 128, 64), 3)
    >>> sorted(name for name, _ in module.named_parameters())
    ['first.weight', 'second.weight']
    """
    import torch

    function = activation(act)

    class ConvChain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner, middle, outer = channels
            rim = window // 2
            self.first = torch.nn.Conv2d(inner, middle, window, padding=rim, bias=False)
            self.second = torch.nn.Conv2d(middle, outer, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(function(self.first(x)))

    return _seeded(ConvChain, dtype, seed).to(memory_format=torch.channels_last)


def activation(act: str) -> Any:
    """An activation by torch's own function if it has one, so that graphs are as in real models."""
    import torch

    from crossfuse.workload.expression import Algebra, canonical, evaluate

    own = {
        "identity": lambda x: x,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    algebra = Algebra(
        constant=lambda value: value,
        functions={
            "exp": torch.exp,
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
            "erf": torch.erf,
            "sqrt": torch.sqrt,
            "abs": torch.abs,
            "max": lambda x, y: _extreme(x, y, "min", torch.maximum),
            "min": lambda x, y: _extreme(x, y, "max", torch.minimum),
        },
    )
    name = canonical(act)
    return own.get(name, lambda x: evaluate(name, x, algebra))


def _extreme(x: Any, y: Any, bound: str, both: Any) -> Any:
    """A maximum or minimum one side of which may be a number."""
    import torch

    if isinstance(y, float):
        return torch.clamp(x, **{bound: y})
    return torch.clamp(y, **{bound: x}) if isinstance(x, float) else both(x, y)


def _seeded(make: Any, dtype: str, seed: int) -> Any:
    import torch

    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
    return module.to(getattr(torch, float_type(dtype).name)).eval()
