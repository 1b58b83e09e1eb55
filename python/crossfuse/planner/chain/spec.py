"""What a chain of matrix products computes, as a value.

```
C[m,n] = act(sum over k of A[m,k] * B[n,k])        dims m, n, k, l
E[m,l] =     sum over n of C[m,n] * D[l,n]
```

Every product multiplies what the one before made. Of activations and epilogues, only what they
read is part of this: biases, residuals and scales come from memory.

A reduction that is no product (the maximum and the sum of a softmax) is listed where it stands.
Such a chain can be read and shown, but not yet analysed: see `refuse_reductions`.
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
    reductions : tuple[Reduction, ...]
        Reductions of the tensors that are no products, as in a softmax.

    Raises
    ------
    PlanRefused
        See `crossfuse.planner.chain.check`.
    """

    dims: tuple[Dim, ...]
    tensors: tuple[Tensor, ...]
    products: tuple[Product, ...]
    reductions: tuple[Reduction, ...] = ()

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

    def further_loops(self, index: int, name: str) -> tuple[str, ...]:
        """Dims that a product runs over each time that it reads one of its further inputs.

        The epilogue runs when a sum is whole, so that the loop over the reduction repeats nothing
        that it reads.
        """
        product = self.products[index]
        with_operands = product.reduction in self.tensor(name).dims
        return self.loops(index) if with_operands else self.tensor(product.output).dims

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
