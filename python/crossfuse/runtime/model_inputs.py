"""Inputs that a compiled model accepts: their number, element types and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.runtime.tensors import is_torch
from crossfuse.schema import Count


@dataclass(frozen=True)
class ModelInput:
    """An input of a model."""

    name: str
    dtype: str
    #: Numbers, and names of symbols or expressions of them.
    extents: tuple[Count | str, ...]


@dataclass(frozen=True)
class ModelInputs:
    """All inputs of a model, in order."""

    inputs: tuple[ModelInput, ...]
    #: Upper bounds of symbols, by name; others are unbounded.
    most: Mapping[str, int]

    def check(self, given: Sequence[Any]) -> None:
        """Raise `WorkloadRefused` for arguments of a call that the model was not compiled for.

        That is another number of them, another type or extent, or elements that are not row-major.
        A symbol has one value in all inputs, and at most its bound.
        """
        if len(given) != len(self.inputs):
            limit = f"one for each of {', '.join(each.name for each in self.inputs)}"
            raise _refused("inputs", f"{len(given)} of them", limit, "pass all of them in order")
        known: dict[str, int] = {}
        for due, each in zip(self.inputs, given, strict=True):
            if not hasattr(each, "dtype"):
                found, limit = f"a {type(each).__name__}", "tensors of torch and arrays of numpy"
                raise _refused(due.name, found, limit, "make it one, such as torch.tensor(...)")
            dtype, before = str(each.dtype).removeprefix("torch."), dict(known)
            if dtype != due.dtype or not self._fits(each.shape, due.extents, known):
                found = f"{dtype}{list(each.shape)}"
                advice = "compile the model for these inputs too, or convert them"
                raise _refused(due.name, found, self._limit(due, before), advice)
            if not _is_row_major(each):
                found = "an array of other strides"
                limit = "row-major elements, since a copy would go unnoticed"
                raise _refused(due.name, found, limit, f"pass {due.name}.contiguous() or the like")

    def _fits(
        self, shape: Sequence[int], extents: Sequence[int | str], known: dict[str, int]
    ) -> bool:
        """Whether a shape has the extents; `known` gathers the values of symbols."""
        if len(shape) != len(extents):
            return False
        for size, extent in zip(shape, extents, strict=True):
            # What is made of several symbols is looked at by TVM's machine.
            if isinstance(extent, str) and not extent.isidentifier():
                continue
            due = known.setdefault(extent, size) if isinstance(extent, str) else extent
            if size != due or size > self.most.get(str(extent), size):
                return False
        return True

    def _limit(self, due: ModelInput, known: Mapping[str, int]) -> str:
        """The type and shape that an input should have, with values and bounds of its symbols."""
        names = [each for each in due.extents if isinstance(each, str)]
        same = (f"{each} = {known[each]}" for each in names if each in known)
        bound = (f"{each} at most {self.most[each]}" for each in names if each in self.most)
        notes = ", ".join([*same, *bound])
        shape = ", ".join(map(str, due.extents))
        return f"{due.dtype}[{shape}]" + (f" with {notes}" if notes else "")


def _is_row_major(value: Any) -> bool:
    return bool(value.is_contiguous() if is_torch(value) else value.flags.c_contiguous)


def _refused(where: str, found: str, limit: str, instead: str) -> Exception:
    return refuse(
        WorkloadRefused, "compile-model", where, found=found, limit=limit, instead=instead
    )
