"""Products of symbolic rows that other operators than products make, such as a norm or a quantiser.

Of static rows `crossfuse.relax.FuseCascades` finds them, after ``LegalizeOps``. Kernels of bins are
picked by functions of Relax, which are made before it; see `crossfuse.relax.chains.rows_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.relax.chains.groups import Group, after_product, views_of_weight
from crossfuse.relax.chains.symbols import is_symbolic
from crossfuse.relax.dataflow import Dataflow
from crossfuse.relax.operators import PRODUCT, TRANSPOSE, is_tensor


def find_made_rows(dataflow: Dataflow) -> Iterator[Group]:
    """Find products of symbolic rows by weights, with what makes these rows and nothing else reads.

    Parameters
    ----------
    dataflow : Dataflow
        A model.

    Yields
    ------
    Group
        With one product. Something before it is more than element-wise; whether it is a cascade of
        each row is not asked here.
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
    """Operators that make a value, and whose results nobody else needs but some users."""
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
