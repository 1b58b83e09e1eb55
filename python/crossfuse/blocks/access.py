"""Which elements an index reaches: quasi-affine maps of integer variables.

A map is made of variables, constants, sums, products by constants, and quotients and remainders by
constants. TVM's iterator maps (``detect_iter_map``) say whether one is a bijection and invert it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir

#: Iterations of variables, all from 0.
Domain = Mapping[Any, int]
_BIJECTIVE = 3
_PASSES = 4
#: Indices whose simplest form is remembered.
_KEPT_FORMS = 8192


def is_affine(expression: Any) -> bool:
    """Whether an index is a quasi-affine expression of variables.

    It walks the expression itself because a callback of TVM's walk cannot stop early.
    """
    if ir.constant(expression) is not None or isinstance(expression, ir.Var):
        return not ir.is_buffer_var(expression)
    if isinstance(expression, ir.tirx.Cast):
        return "int" in str(expression.ty) and is_affine(expression.value)
    if isinstance(expression, ir.tirx.Add | ir.tirx.Sub):
        return is_affine(expression.a) and is_affine(expression.b)
    if isinstance(expression, ir.tirx.Mul):
        numbers = (ir.constant(expression.a), ir.constant(expression.b))
        return numbers != (None, None) and is_affine(expression.a) and is_affine(expression.b)
    quotients = ir.tirx.FloorDiv | ir.tirx.FloorMod | ir.tirx.Div | ir.tirx.Mod
    if isinstance(expression, quotients):
        return (ir.constant(expression.b) or 0) > 0 and is_affine(expression.a)
    return False


def analyzer(domain: Domain) -> Any:
    """An analyzer that knows the ranges of variables."""
    known = ir.sym.Analyzer()
    for var, extent in domain.items():
        known.bind(var, ir.tvm.ir.Range(0, extent))
    return known


def simplified(indices: Iterable[Any], domain: Domain) -> tuple[Any, ...]:
    """Indices in their simplest form; variables of one iteration become 0."""
    return tuple(_simplest(each, domain) for each in indices)


def _simplest(index: Any, domain: Domain) -> Any:
    """An index in its simplest form, computed once for all that are equal but for their variables.

    Functions made of the same calls have the same indices in other variables.
    """
    if _is_settled(index, domain):
        return index
    used = tuple(dict.fromkeys(ir.variables(index)))
    form = _Form(index, used, tuple(domain.get(var) for var in used))
    names, found = _settled_once(form)
    if names is used:
        return found
    own = dict(zip(names, used, strict=True))
    return ir.substitute(found, own)


def _is_settled(index: Any, domain: Domain) -> bool:
    """Whether an index cannot become simpler, as is true of most."""
    if isinstance(index, ir.Var):
        return domain.get(index, 0) != 1
    return isinstance(index, ir.tirx.IntImm)


@dataclass(frozen=True, eq=False)
class _Form:
    """An index with its variables in order of use and their extents, None where unknown.

    Forms are equal that differ in nothing but the variables.
    """

    index: Any
    variables: tuple[Any, ...]
    extents: tuple[int | None, ...]

    def __hash__(self) -> int:
        return hash((self.extents, ir.tvm_ffi.structural_hash(self.index, map_free_vars=True)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Form)
            and self.extents == other.extents
            and ir.tvm_ffi.structural_equal(self.index, other.index, map_free_vars=True)
        )


@functools.lru_cache(maxsize=_KEPT_FORMS)
def _settled_once(form: _Form) -> tuple[tuple[Any, ...], Any]:
    """The variables of a form and its simplest index, cached across forms that are equal."""
    return form.variables, _settled(form)


def _settled(form: _Form) -> Any:
    """An index simplified until nothing changes: one pass leaves some quotients as they are."""
    each = zip(form.variables, form.extents, strict=True)
    known, index = analyzer({var: extent for var, extent in each if extent is not None}), form.index
    for _ in range(_PASSES):
        before, index = index, _digit(known, known.simplify(index))
        if ir.tvm_ffi.structural_equal(before, index):
            break
    return index


def _digit(known: Any, index: Any) -> Any:
    """``a % c // d`` as ``a // d % (c // d)``, where the quotient may become simpler by itself."""
    if not isinstance(index, ir.tirx.FloorDiv) or not isinstance(index.a, ir.tirx.FloorMod):
        return index
    whole, part = ir.constant(index.a.b), ir.constant(index.b)
    if whole is None or part is None or whole % part:
        return index
    return known.simplify(known.simplify(index.a.a // index.b) % (whole // part))


def replaced(indices: Iterable[Any], values: Mapping[Any, Any], domain: Domain) -> tuple[Any, ...]:
    """Indices with expressions of other variables substituted for their own."""
    return simplified((ir.substitute(each, values) for each in indices), domain)


def variables(indices: Iterable[Any]) -> frozenset[Any]:
    """Variables that occur in indices."""
    return frozenset(var for each in indices for var in ir.variables(each))


def extent_of(names: Iterable[Any], domain: Domain) -> int:
    """Number of iterations of variables together."""
    return prod(domain[each] for each in names)


def row_major(indices: Sequence[Any], shape: Any) -> Any:
    """Linear position of an index in a row-major buffer of the given shape."""
    offset: Any = ir.tirx.IntImm("int32", 0)
    for index, extent in zip(indices, shape, strict=True):
        offset = offset * extent + index
    return offset


def inverse(
    indices: Sequence[Any], coordinates: Mapping[Any, int], domain: Domain, predicate: Any = None
) -> dict[Any, Any] | None:
    """Invert a map from a whole domain onto all coordinates of a buffer; None if no bijection.

    `indices`, one for each coordinate, are in variables of the domain, of which those of one
    iteration may be absent; the result gives the domain's variables in terms of the coordinates.
    With a `predicate`, the map applies only where that holds.
    """
    every = (extent_of(coordinates, coordinates), extent_of(domain, domain))
    if predicate is None and every[0] != every[1]:
        return None
    plain = _plain(indices, coordinates, domain) if predicate is None else None
    if plain is not None:
        return plain
    ranges = {var: ir.tvm.ir.Range(0, extent) for var, extent in domain.items()}
    condition = ir.tirx.IntImm("bool", 1) if predicate is None else predicate
    level = ir.sym.iter_affine_map.IterMapLevel(_BIJECTIVE)
    found = ir.sym.detect_iter_map(list(indices), ranges, condition, level)
    if not len(found.indices):
        return None
    values = ir.sym.inverse_affine_iter_map(found.indices, list(coordinates))
    zero = {var: ir.tirx.IntImm(str(var.ty), 0) for var in domain}
    return {var: values[var] if var in values else zero[var] for var in domain}


def _plain(
    indices: Sequence[Any], coordinates: Mapping[Any, int], domain: Domain
) -> dict[Any, Any] | None:
    """The inverse of a mere permutation of variables, where dimensions of one may be added."""
    values = {var: ir.tirx.IntImm(str(var.ty), 0) for var in domain}
    used = set()
    for (coordinate, extent), index in zip(coordinates.items(), indices, strict=True):
        if index in domain and domain[index] == extent and index not in used:
            values[index] = coordinate
            used.add(index)
        elif extent != 1 or ir.constant(index) != 0:
            return None
    return values if all(var in used or domain[var] == 1 for var in domain) else None
