"""Groups of a model's operators that may become one kernel of matrix products."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import CAST, PRODUCT, RESHAPES, TRANSPOSE, is_tensor, refused
from crossfuse.relax.symbols import is_symbolic

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec

#: Operators that may lie between a stored weight and its product.
_OF_WEIGHTS = frozenset({TRANSPOSE, CAST, *RESHAPES})


#: Layers of a group, at most: all parts of a long chain are groups, each of which is planned.
LONGEST = 8


@dataclass(frozen=True)
class Group:
    """Layers of products, or one of made rows, with what is computed between and after."""

    #: Products of each layer, in order; the last one has one, but for gate and up alone, and is the
    #: only layer where the rows are made otherwise.
    layers: tuple[tuple[Var, ...], ...]
    #: Bindings up to the result of the layers, `views` among them, in order.
    before: tuple[Var, ...]
    #: Transpositions, casts and reshapes of weights, reshapes of the input, and what makes rows of
    #: it: kernels do them on loading, so that others may read these values too.
    views: frozenset[Var]
    #: Element-wise bindings of its result, one after the other; each but the last has one user.
    after: tuple[Var, ...]

    @property
    def products(self) -> tuple[Var, ...]:
        """All products, layer by layer."""
        return tuple(product for layer in self.layers for product in layer)

    @property
    def result(self) -> Var:
        """What its layers make, which `after` follows."""
        return self.products[-1]

    def outputs(self, graph: Graph) -> Iterator[tuple[Var, tuple[Var, ...]]]:
        """Results that the group could have, and the bindings that make each, the last one first.

        One that ends in a reshape is left out: it moves nothing, and a group that reads it looks
        through it, at what would not be there.
        """
        for count in range(len(self.after), -1, -1):
            output = (self.result, *self.after[:count])[-1]
            if graph.operator(output) not in RESHAPES:
                yield output, self.after[:count]


def find_chains(graph: Graph) -> Iterator[Group]:
    """Find layers, each of which reads the one before it through element-wise operators.

    In the order of their last products, pairs before longer ones. Groups may share products:
    whoever fuses one leaves out those that overlap it. Whether a group is a chain that rules know
    is not asked here.
    """
    for variable in graph.makers:
        if graph.operator(variable) != PRODUCT:
            continue
        layers: tuple[tuple[Var, ...], ...] = ((variable,),)
        first = _first(graph, variable)
        while first and len(layers) < LONGEST:
            layers = (first, *layers)
            views = frozenset(_views(graph, layers))
            before = tuple(_before(graph, layers, views))
            after = tuple(after_product(graph, variable, before))
            yield Group(layers, before, views, after)
            left = graph.arguments(first[0])[0]
            alike = all(left.same_as(graph.arguments(each)[0]) for each in first)
            first = _first(graph, first[0]) if alike else ()


def _first(graph: Graph, second: Var) -> tuple[Var, ...]:
    """Products that the left operand of another one is made of, element by element.

    A value that is read elsewhere too must be stored anyway, hence is an operand like any other,
    and is not looked behind; unless no product is left then.
    """
    left = graph.arguments(second)[0]
    cone = set(_cone(graph, left, frozenset()))
    inside = {*cone, second}
    stored = frozenset(each for each in cone if graph.is_read_by_others(each, inside))
    found = _products(graph, _cone(graph, left, stored))
    return found or _products(graph, iter(cone))


def _cone(graph: Graph, left: Any, stored: frozenset[Any]) -> Iterator[Var]:
    """Values that a value is made of, element by element, up to products and stored ones."""
    pending, seen = [left], set()
    while pending:
        value = pending.pop()
        if value in seen or value in stored:
            continue
        seen.add(value)
        if graph.operator(value) == PRODUCT:
            yield value
        elif graph.is_elementwise(value):
            yield value
            pending += graph.arguments(value)


def _products(graph: Graph, values: Iterator[Var]) -> tuple[Var, ...]:
    """Products among values, in the order of binding."""
    found = {each for each in values if graph.operator(each) == PRODUCT}
    return tuple(each for each in graph.makers if each in found)


def _before(graph: Graph, layers: Sequence[tuple[Var, ...]], views: frozenset[Var]) -> list[Var]:
    """Bindings of a group up to its last product: those that depend on the first, and views.

    Those that do not, such as another branch of a residual, are computed outside.
    """
    later = [each for layer in layers[1:] for each in layer]
    depends: dict[Any, bool] = {each: True for each in (*layers[0], *later)}

    def needs_first(value: Any) -> bool:
        if value not in depends:
            depends[value] = graph.is_elementwise(value) and any(
                [needs_first(each) for each in graph.arguments(value)]
            )
        return depends[value]

    for each in later:
        needs_first(graph.arguments(each)[0])
    return [each for each in graph.makers if each in views or depends.get(each, False)]


def _views(graph: Graph, layers: Sequence[tuple[Var, ...]]) -> Iterator[Var]:
    """Operators between stored tensors and the products that read them."""
    for number, layer in enumerate(layers):
        for product in layer:
            left, right = graph.arguments(product)
            yield from views_of_weight(graph, right)
            if not number:
                yield from _way(graph, left, RESHAPES)


def views_of_weight(graph: Graph, right: Any) -> Iterator[Var]:
    """Operators between a stored weight and its product, the last operator first.

    A cast that rounds makes a tensor of its own, as ``torch.autocast`` does of a wider weight.
    """
    views = _way(graph, right, _OF_WEIGHTS)
    return takewhile(lambda each: graph.operator(each) != CAST or graph.is_exact_cast(each), views)


def _way(graph: Graph, value: Any, names: frozenset[str]) -> Iterator[Var]:
    """The chain of operators of the given names that makes a value, the last operator first."""
    while graph.operator(value) in names:
        yield value
        (value, *_) = graph.arguments(value)


def after_product(graph: Graph, second: Var, before: tuple[Var, ...]) -> Iterator[Var]:
    """The element-wise operators behind a product, one after the other, while each has one user.

    It ends at an operator that reads a value in `before` other than the product.
    """
    value = second
    while value not in graph.results and len(graph.readers[value]) == 1:
        (node,) = graph.readers[value]
        others = (each for each in node.reads if not each.same_as(second))
        if not node.is_elementwise or any(each in before for each in others):
            return
        value = node.var
        yield value


def with_own_operators(graph: Graph, group: Group, last: Mapping[Any, int]) -> Group:
    """A group that ends in front of an operator for which it would wait for another group.

    `last` are the `last_products` of all groups. An operator of the results of two of them belongs
    to the later one, which reads what the other one makes; else each would read it of the other.
    """
    place = graph.makers[group.products[-1]].place
    own = takewhile(lambda each: last[each] <= place, group.after)
    return replace(group, after=tuple(own))


def last_products(graph: Graph, ends: Container[Var]) -> dict[Any, int]:
    """Place of the last of some products that each value is made of; -1 without any."""
    found: dict[Any, int] = {}
    for node in graph.nodes:
        own = node.place if node.var in ends else -1
        found[node.var] = max((own, *(found.get(each, -1) for each in node.reads)))
    return found


def is_left_operand(graph: Graph, value: Var) -> bool:
    """Whether a product multiplies a value, as it is or reshaped, by weights."""
    for node in graph.readers.get(value, ()):
        if node.operator == PRODUCT and graph.arguments(node.var)[0].same_as(value):
            return True
        if node.operator in RESHAPES and is_left_operand(graph, node.var):
            return True
    return False


# Conditions of replacing a group by a kernel, whether or not it is a chain.


def check_used_inside(graph: Graph, inner: list[Var], output: Var, group: Group) -> None:
    """Refuse a group if other code reads a value of it, other than its result or a view."""
    for value in inner:
        if value.same_as(output) or value in group.views:
            continue
        users = [each for each in graph.readers[value] if each.var not in inner]
        if users or value in graph.results:
            node = users[0] if users else None
            what = "the model's results"
            if node is not None and not isinstance(node.value, relax.Tuple):
                what = node.operator or "a call of another function"
            raise refused(
                f"{graph.operator(value)} ({value.name})",
                f"an intermediate that {what} reads too",
                "one that nothing else reads",
                "leave the model unfused, or keep that use out of it",
            )


def with_whole_operators(
    graph: Graph, inner: Sequence[Var], known: Container[Any] | None
) -> list[Var]:
    """Bindings, and those that make what they read, up to values in `known`; None has all.

    An operator of the caller may combine what products make with what they do not, as the gradient
    of an activation does: all of it is computed inside. A reshape that ends an operator of which
    the rest is not, as that of an embedding does, is left to it.
    """
    found, pending = set(inner), list(inner)
    while pending and known is not None:
        for each in graph.arguments(pending.pop()):
            if graph.is_elementwise(each) and each not in found and each not in known:
                found.add(each)
                pending.append(each)

    def ends_operator(value: Any) -> bool:
        if known is None or graph.operator(value) not in RESHAPES or value not in known:
            return False
        source = graph.arguments(value)[0]
        return source not in known and source not in found

    return [each for each in graph.makers if each in found and not ends_operator(each)]


def check_known(values: list[Var], known: Container[Any] | None) -> None:
    """Refuse a group that begins or ends inside of what its caller takes for one operator."""
    for value in values:
        if known is not None and value not in known:
            raise refused(
                str(value.name),
                "a part of an operator",
                "values that operators of the model make",
                "decompose the operator before",
            )


def check_kernel(buffers: Sequence[BufferSpec], values: Sequence[Any]) -> None:
    """Refuse a kernel of fewer rows unless its inputs with rows are those of symbolic extents.

    The buffers are those of the kernel, its inputs first; the values are these inputs.
    """
    for buffer, value in zip(buffers, values, strict=False):
        if buffer.rows != is_symbolic(value) and not (buffer.rows and buffer.shape[0] == 1):
            has = "symbolic" if is_symbolic(value) else "static"
            raise refused(
                buffer.name,
                f"{has} extents of an operand {'with' if buffer.rows else 'without'} rows",
                "symbolic extents of the operands with rows, and of no others",
                "export the model with the extents it is to run at",
            )


# Products whose symbolic rows are made by other operators, such as a norm or a quantiser.
#
# Of static rows `crossfuse.relax.FuseCascades` finds them, after ``LegalizeOps``. Kernels of bins
# are picked by functions of Relax, which are made before it; see
# `crossfuse.relax.fuse_chains`.


def find_made_rows(graph: Graph) -> Iterator[Group]:
    """Find products of symbolic rows by weights, with the prologue that only they read.

    Each group has one product. Something before it is more than element-wise; whether it is a
    cascade of each row is not asked here.
    """
    for variable in graph.makers:
        if graph.operator(variable) != PRODUCT or not _by_weights(graph, variable):
            continue
        left, right = graph.arguments(variable)
        views = frozenset(views_of_weight(graph, right))
        # What makes the rows may be needed behind the product too, such as scales.
        after = tuple(after_product(graph, variable, ()))
        makes = _making(graph, left, {variable, *after})
        if any(_reduces(graph, each) for each in makes):
            inside = {*makes, *views, variable}
            before = tuple(each for each in graph.makers if each in inside)
            yield Group(((variable,),), before, views, after)


def find_made_chains(graph: Graph) -> Iterator[Group]:
    """Find pairs of layers with the prologue of the first one, which nothing else reads.

    Something of the prologue is more than element-wise, such as a norm; whether it is a cascade of
    each row is not asked here. Products of a matrix for each sequence, as attention has them, are
    no layers.
    """
    for group in find_chains(graph):
        first, *inner, _ = group.layers
        lefts = {_source(graph, each) for each in first}
        if inner or len(lefts) != 1 or not all(_by_matrix(graph, p) for p in group.products):
            continue
        makes = _making(graph, lefts.pop(), {*first, *group.views})
        if any(_reduces(graph, each) for each in makes):
            inside = {*makes, *group.before}
            before = tuple(each for each in graph.makers if each in inside)
            yield replace(group, before=before)


def _source(graph: Graph, product: Var) -> Any:
    """What the left operand of a product is a reshape of."""
    left = graph.arguments(product)[0]
    *_, last = (None, *_way(graph, left, RESHAPES))
    return left if last is None else graph.arguments(last)[0]


def _by_weights(graph: Graph, product: Var) -> bool:
    left, right = graph.arguments(product)
    try:
        return is_symbolic(left) and not is_symbolic(right) and _by_matrix(graph, product)
    except RefusedError:
        return False


def _by_matrix(graph: Graph, product: Var) -> bool:
    _, right = graph.arguments(product)
    return right.ty.shape is not None and len(right.ty.shape.values) == 2


def _making(graph: Graph, left: Any, users: set[Var]) -> set[Var]:
    """Operators that make a value, and whose results are needed only by each other and `users`."""
    wanted: set[Any] = {left}
    found: set[Var] = set()
    for value in reversed(list(graph.makers)):
        known = graph.operator(value) not in ("", PRODUCT) and is_tensor(value)
        if value in wanted and known and not graph.is_read_by_others(value, found | users):
            found.add(value)
            wanted |= set(graph.arguments(value))
    return found


def _reduces(graph: Graph, value: Var) -> bool:
    return graph.operator(value) != TRANSPOSE and not graph.is_elementwise(value)
