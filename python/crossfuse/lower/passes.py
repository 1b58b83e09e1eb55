"""Helpers that make the project's TVM passes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import resources
from typing import Any

from crossfuse import _tvm as ir

#: Function attribute that tells the later passes that this one ran.
LOWERED = "crossfuse.lowered"


def was_lowered(func: Any) -> bool:
    """Whether `lower_cluster` rewrote a function."""
    return func.attrs is not None and LOWERED in func.attrs


def unused(name: str, taken: Collection[str], suffixes: tuple[str, ...] = ("",)) -> str:
    """A name, with a number behind it if need be, that is not taken with any of `suffixes`."""
    candidate, count = name, 0
    while any(candidate + each in taken for each in suffixes):
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def prim_func_pass(name: str, transform: Callable[[Any], Any]) -> Any:
    """Make a TVM pass, called ``crossfuse.<name>``, of a function from PrimFunc to PrimFunc.

    `transform` returns the function itself where there is nothing to do.
    """

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        return transform(func)

    return ir.tirx.transform.prim_func_pass(run, opt_level=0, name=f"crossfuse.{name}")


def body_pass(name: str, mark: str, change: Callable[[Any], Any]) -> Any:
    """Make a TVM pass, called ``crossfuse.<name>``, of a function from body to body.

    Only functions with the attribute `mark` are changed.
    """

    def transform(func: Any) -> Any:
        if func.attrs is None or mark not in func.attrs:
            return func
        body = change(func.body)
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return prim_func_pass(name, transform)


@cache
def device_text(name: str) -> str:
    """CUDA text of device helpers, a file of the folder ``device``."""
    return resources.files("crossfuse.lower").joinpath(f"device/{name}").read_text("utf-8")
