"""What chains are made of: dims, tensors, products, and which has which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Dim:
    """A loop of a chain.

    Attributes
    ----------
    name : str
        Such as ``"m"``.
    extent : int
        Iterations.
    """

    name: str
    extent: int


@dataclass(frozen=True)
class Tensor:
    """A matrix, or a batch of them.

    Attributes
    ----------
    name : str
        Such as ``"B_gate"``.
    dims : tuple[str, ...]
        Names of the dims that index it.
    item : int
        Bytes of an element as stored.
    role : str
        ``"input"``, ``"intermediate"`` or ``"output"``.
    repeats : int
        Times that each stored element stands in the tensor: the windows of a convolution repeat
        every pixel k * k times. Memory has elements / repeats of them.
    """

    name: str
    dims: tuple[str, ...]
    item: int
    role: str
    repeats: int = 1


@dataclass(frozen=True)
class Product:
    """One contraction.

    Attributes
    ----------
    output : str
        The tensor it makes, after its activation or the combination of gate and up.
    left : str
        The operand that comes down the chain.
    rights : tuple[str, ...]
        Weights. Two of them each multiply `left`, and what they make is combined element by
        element.
    reduction : str
        The dim that is summed.
    further : tuple[str, ...]
        Inputs that are read besides, by the epilogue or with an operand. Those that the summed dim
        indexes are read with the operands, others once for each element of a result.
    """

    output: str
    left: str
    rights: tuple[str, ...]
    reduction: str
    further: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """A reduction of a tensor that is no product.

    Attributes
    ----------
    name : str
        Of the block that makes it.
    tensor : str
        The tensor that it reads, after whatever is done to its elements.
    combine : str
        ``"sum"``, ``"product"``, ``"max"`` or ``"min"``.
    dims : tuple[str, ...]
        Dims of the tensor that are reduced.
    """

    name: str
    tensor: str
    combine: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """All parts of a chain, checked or not; see `crossfuse.planner.chain.spec.Chain`."""

    dims: tuple[Dim, ...]
    tensors: tuple[Tensor, ...]
    products: tuple[Product, ...]
    reductions: tuple[Reduction, ...] = ()

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {each.name: each for each in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name."""
        return self._tensors[name]

    def loops(self, index: int) -> tuple[str, ...]:
        """Dims that a product runs over: of its output, then the one that it sums."""
        product = self.products[index]
        return (*self.tensor(product.output).dims, product.reduction)
