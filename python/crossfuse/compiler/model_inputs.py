"""What a compiled model is called with: as many inputs, of its types, and of its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse.errors import WorkloadRefused, refuse


def check_inputs(function: Any, names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Refuse inputs that a model was not compiled for.

    Parameters
    ----------
    function : relax.Function
        The model's; the inputs are its first parameters.
    names : Sequence[str]
        Of the inputs.
    inputs : Sequence[torch.Tensor | numpy.ndarray]
        Of a call.

    Raises
    ------
    WorkloadRefused
        For another number of inputs, other types and strides, and other extents; one that is
        symbolic has one value in all inputs, and at most that of TVM's ``tir_var_upper_bound``.
    """
    if len(inputs) != len(names):
        limit = f"one for each of {', '.join(names)}"
        raise _refused("inputs", f"{len(inputs)} of them", limit, "pass all of them in order")
    bounds = (function.attrs or {}).get("tir_var_upper_bound") or {}
    most = {str(name): int(bound) for name, bound in bounds.items()}
    known: dict[str, int] = {}
    for name, each, parameter in zip(names, inputs, function.params, strict=False):
        kind = parameter.ty
        extents = [_extent(extent) for extent in kind.shape.values]
        dtype, before = str(each.dtype).removeprefix("torch."), dict(known)
        if dtype != str(kind.dtype) or not _fits(each.shape, extents, known, most):
            found = f"{dtype}{list(each.shape)}"
            advice = "compile the model for these inputs too, or convert them"
            raise _refused(name, found, _limit(kind.dtype, extents, before, most), advice)
        if not _is_row_major(each):
            found = "an array of other strides"
            limit = "row-major elements, since a copy would go unnoticed"
            raise _refused(name, found, limit, f"pass {name}.contiguous() or the like")


def _extent(extent: Any) -> int | str:
    """A number, or the text of what is symbolic."""
    try:
        return int(extent)
    except TypeError:
        return str(extent)


def _fits(
    shape: Sequence[int],
    extents: Sequence[int | str],
    known: dict[str, int],
    most: Mapping[str, int],
) -> bool:
    """Whether a shape has the extents; `known` gets what symbols stand for."""
    if len(shape) != len(extents):
        return False
    for size, extent in zip(shape, extents, strict=True):
        # What is made of several symbols is looked at by TVM's machine.
        if isinstance(extent, str) and not extent.isidentifier():
            continue
        due = known.setdefault(extent, size) if isinstance(extent, str) else extent
        if size != due or size > most.get(str(extent), size):
            return False
    return True


def _limit(
    dtype: Any, extents: Sequence[int | str], known: Mapping[str, int], most: Mapping[str, int]
) -> str:
    """The type and the shape that an input is to have, and what its symbols stand for."""
    shape = ", ".join(map(str, extents))
    same = (
        f"{each} = {known[each]}" for each in extents if isinstance(each, str) and each in known
    )
    bound = (f"{each} at most {most[str(each)]}" for each in extents if str(each) in most)
    notes = ", ".join([*same, *bound])
    return f"{dtype}[{shape}]" + (f" with {notes}" if notes else "")


def _is_row_major(value: Any) -> bool:
    torch = type(value).__module__.startswith("torch")
    return bool(value.is_contiguous() if torch else value.flags.c_contiguous)


def _refused(where: str, found: str, limit: str, instead: str) -> Exception:
    return refuse(
        WorkloadRefused, "compile-model", where, found=found, limit=limit, instead=instead
    )
