"""Options of the backend of ``torch.compile``, checked where they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.runtime.bin_rows import BINS

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend

#: Who compiles what is left.
REST = ("inductor", "eager")
#: How inductor may compile it, in the words of ``torch.compile``.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: For models on the CPU: nothing, sequential functions, or kernels that only a GPU can run.
CPU = ("", "llvm", "build")


def check_options(backend: Backend) -> None:
    """Refuse values that options do not have.

    Parameters
    ----------
    backend : Backend
        The options.

    Raises
    ------
    WorkloadRefused
        Naming the option and its values.
    """
    for name, known in (("rest", REST), ("cpu", CPU), ("mode", ("", *MODES))):
        value = getattr(backend, name)
        if value not in known:
            raise _refused(name, repr(value), " or ".join(map(repr, known)))
    if not backend.bins or min(backend.bins) < 1:
        raise _refused("bins", repr(backend.bins), f"positive numbers, such as {BINS}")
    if backend.mode and backend.rest != "inductor":
        raise _refused("mode", repr(backend.mode), "'': nobody compiles the rest")


def with_options(backend: Backend, mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """A backend with what ``torch.compile`` was told besides.

    Parameters
    ----------
    backend : Backend
        Its options stay where nothing else is said.
    mode : str | None
        ``torch.compile(..., mode=...)``.
    options : Mapping[str, Any] | None
        ``torch.compile(..., options=...)``: fields of `Backend`.

    Raises
    ------
    WorkloadRefused
        For options that are none.
    """
    chosen = {**({"mode": mode} if mode else {}), **(options or {})}
    known = [each.name for each in fields(backend)]
    for name in chosen:
        if name not in known:
            raise _refused("options", repr(name), ", ".join(known))
    return replace(backend, **chosen) if chosen else backend


def _refused(where: str, found: str, limit: str) -> RefusedError:
    return refuse(
        WorkloadRefused,
        "torch-backend",
        where,
        found=found,
        limit=limit,
        instead="name one of these",
    )
