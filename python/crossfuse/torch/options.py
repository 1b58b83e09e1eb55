"""Options of the backend of ``torch.compile``, checked where they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.hardware import device
from crossfuse.runtime.dispatch_table import BINS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Who compiles what is left.
REST = ("inductor", "eager")
#: How inductor may compile it, in the words of ``torch.compile``.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: For models on the CPU: nothing, sequential functions, or kernels that only a GPU can run.
CPU = ("", "llvm", "build")

Options = TypeVar("Options", bound="DataclassInstance")


class Given(Protocol):
    """Options of `crossfuse.torch.Backend`."""

    @property
    def always(self) -> bool:
        """Whether chains are fused that are estimated to be slower than not to fuse them."""

    @property
    def cascades(self) -> bool:
        """Whether cascades are fused."""

    @property
    def rest(self) -> str:
        """One of `REST`."""

    @property
    def cpu(self) -> str:
        """One of `CPU`."""

    @property
    def target(self) -> str:
        """Name of a device, or empty."""

    @property
    def mode(self) -> str:
        """One of `MODES`, or empty."""

    @property
    def bins(self) -> tuple[int, ...]:
        """At least one positive number."""


def check_options(given: Given) -> None:
    """Refuse values that options do not have, by the name of the option.

    The refusal is `EnvironmentRefused` for a device that is not known, else `WorkloadRefused`.
    """
    for name, known in (("rest", REST), ("cpu", CPU), ("mode", ("", *MODES))):
        value = getattr(given, name)
        if value not in known:
            raise _refused(name, repr(value), " or ".join(map(repr, known)))
    if not given.bins or min(given.bins) < 1:
        raise _refused("bins", repr(given.bins), f"positive numbers, such as {BINS}")
    if given.target:
        device(given.target)
    if given.mode and given.rest != "inductor":
        raise _refused("mode", repr(given.mode), "'': nobody compiles the rest")


def with_options(options: Options, mode: str | None, further: Mapping[str, Any] | None) -> Options:
    """Add to options what ``torch.compile`` was given besides; unknown names are refused.

    `mode` and `further` are its arguments ``mode`` and ``options``, the latter by the names of
    fields. A field that neither gives stays as it is.
    """
    chosen = {**({"mode": mode} if mode else {}), **(further or {})}
    known = [each.name for each in fields(options)]
    for name in chosen:
        if name not in known:
            raise _refused("options", repr(name), ", ".join(known))
    return replace(options, **chosen) if chosen else options


def _refused(where: str, found: str, limit: str) -> RefusedError:
    return refuse(
        WorkloadRefused,
        "torch-backend",
        where,
        found=found,
        limit=limit,
        instead="name one of these",
    )
