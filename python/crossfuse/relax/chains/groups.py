"""Groups of a model's operators that may become one kernel of matrix products."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.relax.chains.symbols import is_symbolic
from crossfuse.relax.dataflow import Dataflow
from crossfuse.relax.operators import CAST, PRODUCT, RESHAPES, TRANSPOSE, is_tensor, refused

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec

#: Operators that may lie between a stored weight and its product.
_OF_WEIGHTS = frozenset({TRANSPOSE, CAST, *RESHAPES})


@dataclass(frozen=True)
class Group:
    """Two layers of products, or one of made rows, with what is computed between and after."""

    #: Products whose results the second one needs; none where the rows are made otherwise.
    first: tuple[Var, ...]
    #: The last product.
    second: Var
    #: Bindings up to `second`, `views` among them, in order.
    before: tuple[Var, ...]
    #: Transpositions, casts and reshapes of weights, reshapes of the input: kernels do them on
    #: loading, so that others may read these values too.
    views: frozenset[Var]
    #: Element-wise bindings of its result, one after the other; each but the last has one user.
    after: tuple[Var, ...]

    def outputs(self) -> Iterator[tuple[Var, tuple[Var, ...]]]:
        """Results that the group could have, and the bindings that make each, the last one first.

        One that ends in a reshape is left out: it moves nothing, and its users take it as it is.
        """
        for count in range(len(self.after), -1, -1):
            yield (self.after[count - 1] if count else self.second), self.after[:count]


def find_groups(dataflow: Dataflow) -> Iterator[Group]:
    """Find pairs of layers, the second of which reads the first through element-wise operators.

    In the order of their second products. Groups may share products: whoever fuses one leaves out
    those that overlap it. Whether a group is a chain that rules know is not asked here.
    """
    for variable in dataflow.values:
        if dataflow.operator(variable) != PRODUCT:
            continue
        first = _first(dataflow, variable)
        if first:
            views = frozenset(_views(dataflow, first, variable))
            before = tuple(_before(dataflow, first, variable, views))
            after = tuple(after_product(dataflow, variable, before))
            yield Group(first, variable, before, views, after)


def _first(dataflow: Dataflow, second: Var) -> tuple[Var, ...]:
    """Products that the left operand of another one is made of, element by element.

    A value that is read elsewhere too must be stored anyway, hence is an operand like any other,
    and is not looked behind; unless no product is left then.
    """
    left = dataflow.arguments(second)[0]
    cone = set(_cone(dataflow, left, frozenset()))
    inside = {*cone, second}
    stored = frozenset(
        each for each in cone if any(user not in inside for user in dataflow.users[each])
    )
    found = _products(dataflow, _cone(dataflow, left, stored))
    return found or _products(dataflow, iter(cone))


def _cone(dataflow: Dataflow, left: Any, stored: frozenset[Any]) -> Iterator[Var]:
    """Values that a value is made of, element by element, up to products and stored ones."""
    pending, seen = [left], set()
    while pending:
        value = pending.pop()
        if value in seen or value in stored:
            continue
        seen.add(value)
        if dataflow.operator(value) == PRODUCT:
            yield value
        elif dataflow.is_elementwise(value):
            yield value
            pending += dataflow.arguments(value)


def _products(dataflow: Dataflow, values: Iterator[Var]) -> tuple[Var, ...]:
    """Products among values, in the order of binding."""
    found = {each for each in values if dataflow.operator(each) == PRODUCT}
    return tuple(each for each in dataflow.values if each in found)


def _before(
    dataflow: Dataflow, first: tuple[Var, ...], second: Var, views: frozenset[Var]
) -> list[Var]:
    """Bindings of a group up to its second product: those that depend on the first, and views.

    Those that do not, such as another branch of a residual, are computed outside.
    """
    depends: dict[Any, bool] = {each: True for each in (*first, second)}

    def needs_first(value: Any) -> bool:
        if value not in depends:
            depends[value] = dataflow.is_elementwise(value) and any(
                [needs_first(each) for each in dataflow.arguments(value)]
            )
        return depends[value]

    needs_first(dataflow.arguments(second)[0])
    return [each for each in dataflow.values if each in views or depends.get(each, False)]


def _views(dataflow: Dataflow, first: tuple[Var, ...], second: Var) -> Iterator[Var]:
    """Operators between stored tensors and the products that read them."""
    for product in (*first, second):
        left, right = dataflow.arguments(product)
        yield from views_of_weight(dataflow, right)
        if product is not second:
            yield from _way(dataflow, left, RESHAPES)


def views_of_weight(dataflow: Dataflow, right: Any) -> Iterator[Var]:
    """Operators between a stored weight and its product, the last operator first."""
    return _way(dataflow, right, _OF_WEIGHTS)


def _way(dataflow: Dataflow, value: Any, names: frozenset[str]) -> Iterator[Var]:
    """The chain of operators of the given names that makes a value, the last operator first."""
    while dataflow.operator(value) in names:
        yield value
        (value, *_) = dataflow.arguments(value)


def after_product(dataflow: Dataflow, second: Var, before: tuple[Var, ...]) -> Iterator[Var]:
    """The element-wise operators behind a product, one after the other, while each has one user.

    It ends at an operator that reads a value in `before` other than the product.
    """
    value = second
    while True:
        users = dataflow.users.get(value, [])
        if len(users) != 1 or users[0] is None or not dataflow.is_elementwise(users[0]):
            return
        (value,) = users
        if any(each in before for each in dataflow.arguments(value) if not each.same_as(second)):
            return
        yield value


# Conditions of replacing a group by a kernel, whether or not it is a chain.


def check_used_inside(dataflow: Dataflow, inner: list[Var], output: Var, group: Group) -> None:
    """Refuse a group if other code reads a value of it, other than its result or a view."""
    for value in inner:
        for user in dataflow.users.get(value, []):
            if value.same_as(output) or value in group.views or user in inner:
                continue
            where = f"{dataflow.operator(value)} ({value.name})"
            what = "the model's results"
            if user is not None and not isinstance(dataflow.values[user], relax.Tuple):
                what = dataflow.operator(user) or "a call of another function"
            raise refused(
                where,
                f"an intermediate that {what} reads too",
                "one that nothing else reads",
                "leave the model unfused, or keep that use out of it",
            )


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


def find_made_rows(dataflow: Dataflow) -> Iterator[Group]:
    """Find products of symbolic rows by weights, with the prologue that only they read.

    Each group has one product. Something before it is more than element-wise; whether it is a
    cascade of each row is not asked here.
    """
    for variable in dataflow.values:
        if dataflow.operator(variable) != PRODUCT or not _by_weights(dataflow, variable):
            continue
        left, right = dataflow.arguments(variable)
        views = frozenset(views_of_weight(dataflow, right))
        # What makes the rows may be needed behind the product too, such as scales.
        after = tuple(after_product(dataflow, variable, ()))
        makes = _making(dataflow, left, {variable, *after})
        if any(_reduces(dataflow, each) for each in makes):
            inside = {*makes, *views, variable}
            before = tuple(each for each in dataflow.values if each in inside)
            yield Group((), variable, before, views, after)


def _by_weights(dataflow: Dataflow, product: Var) -> bool:
    left, right = dataflow.arguments(product)
    try:
        return is_symbolic(left) and not is_symbolic(right) and len(right.ty.shape.values) == 2
    except RefusedError:
        return False


def _making(dataflow: Dataflow, left: Any, users: set[Var]) -> set[Var]:
    """Operators that make a value, and whose results are needed only by each other and `users`."""
    wanted: set[Any] = {left}
    found: set[Var] = set()
    for value in reversed(list(dataflow.values)):
        known = dataflow.operator(value) not in ("", PRODUCT) and is_tensor(value)
        if value in wanted and known and set(dataflow.users[value]) <= found | users:
            found.add(value)
            wanted |= set(dataflow.arguments(value))
    return found


def _reduces(dataflow: Dataflow, value: Var) -> bool:
    return dataflow.operator(value) != TRANSPOSE and not dataflow.is_elementwise(value)
