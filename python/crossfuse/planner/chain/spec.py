"""What a chain of matrix products computes, as a value.

```
C[m,n] = act(sum over k of A[m,k] * B[n,k])        dims m, n, k, l
E[m,l] =     sum over n of C[m,n] * D[l,n]
```

Every product multiplies what the one before made. Activations and epilogues move nothing between
CTAs and memories, so that they are no part of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from crossfuse.planner.chain.check import check_chain

ROLES = ("input", "intermediate", "output")


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
        One of `ROLES`.
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
    """

    output: str
    left: str
    rights: tuple[str, ...]
    reduction: str


@dataclass(frozen=True)
class Chain:
    """Products in order; the left operand of each, but of the first, is what the one before made.

    Attributes
    ----------
    dims : tuple[Dim, ...]
        All loops.
    tensors : tuple[Tensor, ...]
        All operands and results.
    products : tuple[Product, ...]
        At least one.

    Raises
    ------
    PlanRefused
        See `crossfuse.planner.chain.check`.
    """

    dims: tuple[Dim, ...]
    tensors: tuple[Tensor, ...]
    products: tuple[Product, ...]

    def __post_init__(self) -> None:
        check_chain(self)

    @cached_property
    def extents(self) -> dict[str, int]:
        """Iterations of each dim."""
        return {each.name: each.extent for each in self.dims}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {each.name: each for each in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name."""
        return self._tensors[name]

    @cached_property
    def intermediates(self) -> tuple[Tensor, ...]:
        """What products but the last make, in order."""
        return tuple(self.tensor(each.output) for each in self.products[:-1])

    @property
    def output(self) -> Tensor:
        """What the last product makes."""
        return self.tensor(self.products[-1].output)

    def loops(self, index: int) -> tuple[str, ...]:
        """Dims that a product runs over: of its output, then the one that it sums."""
        product = self.products[index]
        return (*self.tensor(product.output).dims, product.reduction)

    def column(self, index: int) -> str:
        """The dim that only the weights of a product bring in."""
        product = self.products[index]
        left, right = self.tensor(product.left).dims, self.tensor(product.rights[0]).dims
        return next(each for each in right if each not in left)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Dims of every intermediate and of the output: rows, and the batch if there is one."""
        first = self.products[0]
        return tuple(each for each in self.tensor(first.left).dims if each != first.reduction)

    def elements(self, name: str) -> int:
        """Elements of a tensor."""
        return prod(self.extents[each] for each in self.tensor(name).dims)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return sum(
            2 * len(each.rights) * prod(self.extents[dim] for dim in self.loops(index))
            for index, each in enumerate(self.products)
        )
