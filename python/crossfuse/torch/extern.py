"""What inductor's code calls beside its own kernels, without the compiler that declares it."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getsource, isfunction
from operator import attrgetter
from types import CodeType
from typing import Any

#: Operators that are there without inductor's lowerings, which define some in Python.
OPERATORS = frozenset({"_quantized", "aten", "crossfuse", "inductor"})

_CONSTANT = (bool, int, float, str, type(None))


class Extern:
    """The names of ``torch._inductor.select_algorithm.extern_kernels``.

    Code that inductor wrote imports that module, and with it all of inductor's lowerings, to call
    ``torch.mm``. Code that is kept has this instead. A name that it was not given is asked for
    there.

    Parameters
    ----------
    **known : Callable
        What names stand for.

    Examples
    --------
    >>> extern_kernels = Extern(mm=torch.mm)
    >>> extern_kernels.mm is torch.mm, extern_kernels.addmm is torch.addmm  # the second is imported
    (True, True)
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        vars(self)[name] = found = getattr(extern_kernels, name)
        return found


def written_extern(names: Iterable[str]) -> tuple[str, str]:
    """Code that makes an `Extern` of the name ``extern_kernels``, where torch is imported.

    Parameters
    ----------
    names : Iterable[str]
        What is called of it.

    Returns
    -------
    tuple[str, str]
        A line, and lines that may come anywhere behind it: inductor's own functions, as they are
        written there. What is neither one of these nor a function of torch is left out.
    """
    from torch._inductor.select_algorithm import extern_kernels

    calls, functions = [], []
    for name in sorted(set(names)):
        value: Any = getattr(extern_kernels, name, None)
        path = _path(value)
        if path:
            calls.append(f"{name}={path}")
        elif _stands_alone(value):
            functions += ["", getsource(value), f"extern_kernels.{name} = {value.__name__}\n"]
    made = f"extern_kernels = Extern({', '.join(calls)})"
    return f"from crossfuse.torch.extern import Extern; {made}", "\n".join(functions)


def _path(value: Any) -> str:
    """Where who imported torch alone finds a function; empty if nowhere."""
    import torch

    name = str(getattr(value, "__name__", ""))
    paths = [name, f"ops.{value}"] if str(value).split(".")[0] in OPERATORS else [name]
    for path in paths:
        try:
            if attrgetter(path)(torch) is value:
                return f"torch.{path}"
        except AttributeError:
            continue
    return ""


def _stands_alone(value: Any) -> bool:
    """Whether a function of inductor is what its text says where torch is imported."""
    if not isfunction(value) or not value.__module__.startswith("torch."):
        return False
    code = value.__code__
    if value.__closure__ or any(isinstance(each, CodeType) for each in code.co_consts):
        return False
    given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if value.__annotations__ or not all(isinstance(each, _CONSTANT) for each in given):
        return False
    if not {each for each in code.co_names if each in value.__globals__} <= {"torch"}:
        return False
    try:
        return getsource(value).startswith(f"def {value.__name__}(")
    except OSError:  # there is no text
        return False
