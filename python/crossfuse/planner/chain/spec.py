"""What a chain of matrix products computes, as a value.

```
C[m,n] = act(sum over k of A[m,k] * B[n,k])        dims m, n, k, l
E[m,l] =     sum over n of C[m,n] * D[l,n]
```

Every product multiplies what the one before made. Of activations and epilogues, only what they
read, biases, residuals and scales, and how long their functions take is part of this.

A reduction that is no product (the maximum and the sum of a softmax) is listed where it stands.
Such a chain can be read and shown, but not yet analysed: see `refuse_reductions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from crossfuse.errors import PlanRefused, Rule

refused = Rule(PlanRefused, "chain")


@dataclass(frozen=True)
class Dim:
    """A loop of a chain."""

    name: str
    #: Iterations.
    extent: int


@dataclass(frozen=True)
class Tensor:
    """A matrix, or a batch of them."""

    #: Such as ``"B_gate"``.
    name: str
    #: Names of the dims that index it.
    dims: tuple[str, ...]
    #: Bytes of an element as stored.
    item: int
    #: ``"input"``, ``"intermediate"`` or ``"output"``.
    role: str
    #: Times that each stored element stands in the tensor: the windows of a convolution repeat
    #: every pixel k * k times. Memory has elements / repeats of them.
    repeats: int = 1


@dataclass(frozen=True)
class Product:
    """One contraction."""

    #: The tensor it makes, after its activation or the combination of gate and up.
    output: str
    #: The operand that comes down the chain.
    left: str
    #: Weights. Two of them each multiply `left`, and their results are combined element by element.
    rights: tuple[str, ...]
    #: The dim that is summed.
    reduction: str
    #: Inputs that are read besides, by the epilogue or with an operand. Those that the summed dim
    #: indexes are read with the operands, others once for each element of a result.
    further: tuple[str, ...] = ()
    #: Cycles in which a scheduler issues the functions of a warp's elements of the result: an
    #: exponential, say. See `crossfuse.workload.expression.CYCLES`.
    functions: int = 0


@dataclass(frozen=True)
class Reduction:
    """A reduction of a tensor that is no product."""

    #: Of the block that makes it.
    name: str
    #: The tensor that it reads, after whatever is done to its elements.
    tensor: str
    #: ``"sum"``, ``"product"``, ``"max"`` or ``"min"``.
    combine: str
    #: Dims of the tensor that are reduced.
    dims: tuple[str, ...]


# Checks of what the analysis of chains takes for granted.

#: What a cluster calls the weights of the first product, beside the dims of the chain.
TERMS = "terms"
#: Extents that a plan goes through in steps.
_LARGEST = 2**25


def check_chain(chain: Chain) -> None:
    """Refuse what is not a chain of products, naming the first fault.

    These are names used twice or unknown, extents and sizes below 1, dims and tensors that nothing
    uses, a left operand that the product before did not make, a sum over a dim that an operand
    lacks or the output has, outputs with other dims than the operands leave, further inputs with
    dims that their product lacks, and reductions of unknown tensors.
    """
    if not chain.products:
        raise refused("products", "none", "at least one product", "add the products in order")
    _check_names(chain)
    _check_sizes(chain)
    for index in range(len(chain.products)):
        _check_links(chain, index)
        _check_dims(chain, chain.products[index])
        _check_further(chain, index)
    _check_use(chain)
    _check_reductions(chain)


def refuse_reductions(chain: Chain) -> None:
    """Refuse a chain with a reduction that is no product: nothing says what it moves."""
    if chain.reductions:
        first = chain.reductions[0]
        raise refused(
            f"reduction '{first.name}'",
            f"the {first.combine} of {first.tensor} over {', '.join(first.dims)}",
            "products and element-wise functions between them, which is what volumes are known of",
            "plan the products on either side as chains of their own",
        )


def _check_names(chain: Chain) -> None:
    names = {"dims": [each.name for each in chain.dims]}
    names["tensors"] = [each.name for each in chain.tensors]
    for what, present in names.items():
        twice = _twice(present)
        if twice:
            found, limit = f"{twice!r} twice", "one of each name"
            raise refused(what, found, limit, "rename one of them")
    if TERMS in names["dims"]:
        limit = "other names; clusters call the weights of the first product so"
        raise refused("dims", repr(TERMS), limit, "rename the dim")
    for tensor in chain.tensors:
        unknown = [each for each in tensor.dims if each not in names["dims"]]
        if unknown:
            found, limit = repr(unknown[0]), "the dims " + ", ".join(names["dims"])
            raise refused(f"tensor {tensor.name}", found, limit, "add the dim, with its extent")
        twice = _twice(tensor.dims)
        if twice:
            found, limit = (
                f"{twice!r} twice",
                "each dim once; a diagonal is no operand",
            )
            raise refused(f"tensor {tensor.name}", found, limit, "rename one of them")
    for product in chain.products:
        for name in (product.left, *product.rights, product.output, *product.further):
            if name not in names["tensors"]:
                found, limit = repr(name), "the tensors " + ", ".join(names["tensors"])
                raise refused(f"product of {product.output}", found, limit, "add the tensor")


def _check_sizes(chain: Chain) -> None:
    sizes: list[tuple[str, object]] = [(f"dim {each.name}", each.extent) for each in chain.dims]
    sizes += [(f"item of {each.name}", each.item) for each in chain.tensors]
    sizes += [(f"repeats of {each.name}", each.repeats) for each in chain.tensors]
    for where, value in sizes:
        if type(value) is not int or value < 1:
            raise refused(where, value, "a positive integer", "write 1, say")
        if value > _LARGEST:
            raise refused(where, value, f"at most {_LARGEST}", "compute it in slices")


def _check_links(chain: Chain, index: int) -> None:
    """Check each product's left operand and the roles of its tensors."""
    product, where = chain.products[index], f"product of {chain.products[index].output}"
    if index and product.left != chain.products[index - 1].output:
        limit = f"{chain.products[index - 1].output}, which the product before makes"
        raise refused(where, f"left operand {product.left}", limit, "order the products")
    if not product.rights or len(product.rights) > 2:
        limit = "one right operand, or two that are combined element by element"
        raise refused(where, f"{len(product.rights)} right operands", limit, "join the weights")
    last = index == len(chain.products) - 1
    roles = {product.output: "output" if last else "intermediate"}
    inputs = product.rights if index else (product.left, *product.rights)
    roles |= dict.fromkeys((*inputs, *product.further), "input")
    for name, role in roles.items():
        if chain.tensor(name).role != role:
            found = f"{name} as {chain.tensor(name).role}"
            raise refused(where, found, f"{role}, from its place in the chain", f"write {role}")


def _check_dims(chain: Chain, product: Product) -> None:
    where, reduction = f"product of {product.output}", product.reduction
    left, output = chain.tensor(product.left), chain.tensor(product.output)
    rights = [chain.tensor(each) for each in product.rights]
    for operand in (left, *rights):
        if reduction not in operand.dims:
            found = f"a sum over {reduction!r}, which does not index {operand.name}"
            shared = [each for each in left.dims if each in rights[0].dims]
            limit = "a dim that indexes both operands: " + (", ".join(shared) or "there is none")
            raise refused(where, found, limit, "sum over the dim that they share")
    if reduction in output.dims:
        found = f"{output.name}[{', '.join(output.dims)}], which the summed {reduction!r} indexes"
        raise refused(where, found, "outputs without it", f"take {reduction!r} out of its dims")
    if any(set(each.dims) != set(rights[0].dims) for each in rights):
        found = " and ".join(f"{each.name}[{', '.join(each.dims)}]" for each in rights)
        raise refused(where, found, "the same dims, as results are combined", "make them alike")
    columns = [each for each in rights[0].dims if each not in left.dims]
    if len(columns) != 1:
        found = f"{len(columns)} dims of {rights[0].name} that {left.name} lacks"
        raise refused(where, found, "one, the columns of the output", "flatten them into one dim")
    made = {*left.dims, *rights[0].dims} - {reduction}
    if set(output.dims) != made:
        found = f"{output.name}[{', '.join(output.dims)}]"
        limit = "all dims of the operands but the summed one: " + ", ".join(sorted(made))
        raise refused(where, found, limit, "index the output by these")


def _check_further(chain: Chain, index: int) -> None:
    """Check that further inputs are indexed by dims of their product."""
    product, loops = chain.products[index], chain.loops(index)
    for name in product.further:
        odd = [each for each in chain.tensor(name).dims if each not in loops]
        if odd:
            where, found = f"product of {product.output}", f"{odd[0]!r} in further input {name}"
            limit = "dims that the product runs over: " + ", ".join(loops)
            raise refused(where, found, limit, "read it where a product has that dim")


def _check_reductions(chain: Chain) -> None:
    names = [each.name for each in chain.tensors]
    for each in chain.reductions:
        where = f"reduction '{each.name}'"
        if each.tensor not in names:
            limit = "the tensors " + ", ".join(names)
            raise refused(where, repr(each.tensor), limit, "name one of these")
        dims = chain.tensor(each.tensor).dims
        odd = [dim for dim in each.dims if dim not in dims]
        if odd or not each.dims:
            found, limit = repr(odd[0]) if odd else "no dims", ", ".join(dims)
            raise refused(where, found, f"dims of {each.tensor}: {limit}", "name one of these")


def _check_use(chain: Chain) -> None:
    """Check for dims and tensors without a use, and for tensors that are made twice."""
    indexed = {dim for tensor in chain.tensors for dim in tensor.dims}
    for dim in chain.dims:
        if dim.name not in indexed:
            limit = "dims that index a tensor"
            raise refused(f"dim {dim.name}", "no tensor with it", limit, "leave the dim out")
    names = [chain.products[0].left]
    for each in chain.products:
        names += [*each.rights, each.output, *each.further]
    twice = _twice(names)
    if twice:
        found, limit = f"{twice} in two places", "one place in the chain for each tensor"
        raise refused("tensors", found, limit, "rename the second one")
    unused = [each.name for each in chain.tensors if each.name not in names]
    if unused:
        found, limit = f"{unused[0]}, which no product has", "what products read and make"
        raise refused("tensors", found, limit, "leave it out")


def _twice(names: Iterable[str]) -> str:
    """Find a name that stands twice; empty if there is none."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


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
        See `crossfuse.planner.chain.spec`.

    Examples
    --------
    >>> from crossfuse.planner.chain.build import matrix_chain
    >>> chain = matrix_chain(128, [768, 3072, 768])
    >>> [each.name for each in chain.tensors], chain.output.name
    (['A', 'B', 'C', 'D', 'E'], 'E')
    """

    dims: tuple[Dim, ...]
    tensors: tuple[Tensor, ...]
    products: tuple[Product, ...]
    reductions: tuple[Reduction, ...] = ()

    def __post_init__(self) -> None:
        check_chain(self)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {each.name: each for each in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """Look up a tensor.

        Parameters
        ----------
        name : str
            Of the tensor.

        Returns
        -------
        Tensor
            Operand or result.
        """
        return self._tensors[name]

    def loops(self, index: int) -> tuple[str, ...]:
        """Dims that a product runs over: those of its output, then the one that it sums.

        Parameters
        ----------
        index : int
            Of the product, in order.

        Returns
        -------
        tuple[str, ...]
            Names of dims.
        """
        product = self.products[index]
        return (*self.tensor(product.output).dims, product.reduction)

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

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in memory, where repeated elements are stored once.

        Parameters
        ----------
        name : str
            Of the tensor.

        Returns
        -------
        int
            Whole bytes.
        """
        tensor = self.tensor(name)
        return self.elements(name) * tensor.item // tensor.repeats

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        return sum(
            2 * len(each.rights) * prod(self.extents[dim] for dim in self.loops(index))
            for index, each in enumerate(self.products)
        )
