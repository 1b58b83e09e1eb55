"""How the project's passes are made, and how their refusals cross TVM's FFI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError

_raised = threading.local()


def prim_func_pass(name: str, transform: Callable[[Any], Any]) -> Any:
    """Make a TVM pass of a function from PrimFunc to PrimFunc.

    Parameters
    ----------
    name : str
        Name of the pass after ``crossfuse.``.
    transform : Callable
        Returns the function itself where there is nothing to do.

    Returns
    -------
    tvm.ir.transform.Pass
        The pass.
    """

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        try:
            return transform(func)
        except RefusedError as error:
            _raised.last = error
            raise

    return ir.tirx.transform.prim_func_pass(run, opt_level=0, name=f"crossfuse.{name}")


@contextmanager
def refusals() -> Iterator[None]:
    """Raise a refusal of one of our passes as itself.

    TVM's FFI rebuilds an exception that passes through it as a RuntimeError of the same text.
    """
    _raised.last = None
    try:
        yield
    except RuntimeError as error:
        last = getattr(_raised, "last", None)
        if last is not None and str(last) in str(error):
            raise last from None
        raise
