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
from crossfuse.planner.chain.parts import Dim, Links, Product, Reduction, Tensor

__all__ = ["Chain", "Dim", "Product", "Reduction", "Tensor"]


@dataclass(frozen=True)
class Chain(Links):
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

    Examples
    --------
    >>> from crossfuse.planner.chain.build import matrix_chain
    >>> chain = matrix_chain(128, [768, 3072, 768])
    >>> [each.name for each in chain.tensors], chain.output.name
    (['A', 'B', 'C', 'D', 'E'], 'E')
    """

    def __post_init__(self) -> None:
        check_chain(self)

    @cached_property
    def extents(self) -> dict[str, int]:
        """Iterations of each dim."""
        return {each.name: each.extent for each in self.dims}

    @cached_property
    def intermediates(self) -> tuple[Tensor, ...]:
        """What products but the last make, in order."""
        return tuple(self.tensor(each.output) for each in self.products[:-1])

    @property
    def output(self) -> Tensor:
        """What the last product makes."""
        return self.tensor(self.products[-1].output)

    def further_loops(self, index: int, name: str) -> tuple[str, ...]:
        """Dims that a product runs over each time that it reads one of its further inputs.

        The epilogue runs when a sum is whole, so that the loop over the reduction repeats nothing
        that it reads.

        Parameters
        ----------
        index : int
            Of the product, in order.
        name : str
            Of the input.

        Returns
        -------
        tuple[str, ...]
            Names of dims.
        """
        product = self.products[index]
        with_operands = product.reduction in self.tensor(name).dims
        return self.loops(index) if with_operands else self.tensor(product.output).dims

    def column(self, index: int) -> str:
        """The dim that only the weights of a product bring in.

        Parameters
        ----------
        index : int
            Of the product, in order.

        Returns
        -------
        str
            Name of the dim.
        """
        product = self.products[index]
        left, right = self.tensor(product.left).dims, self.tensor(product.rights[0]).dims
        return next(each for each in right if each not in left)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Dims of every intermediate and of the output: rows, and the batch if there is one."""
        first = self.products[0]
        return tuple(each for each in self.tensor(first.left).dims if each != first.reduction)

    def elements(self, name: str) -> int:
        """Elements of a tensor.

        Parameters
        ----------
        name : str
            Of the tensor.

        Returns
        -------
        int
            The product of the extents of its dims.
        """
        return prod(self.extents[each] for each in self.tensor(name).dims)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return sum(
            2 * len(each.rights) * prod(self.extents[dim] for dim in self.loops(index))
            for index, each in enumerate(self.products)
        )
