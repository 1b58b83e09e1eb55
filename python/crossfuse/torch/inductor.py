"""Inductor compiles what we leave, after we took our chains out of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.torch.known import Record
from crossfuse.torch.products import APART, WHOLE, kept_whole, take_apart
from crossfuse.torch.programs import (
    Program,
    program,
    program_key,
    to_file,
    torch_caches,
    with_records,
    write_program,
)
from crossfuse.torch.report import keep, warn_of_training


class Fuser(Protocol):
    """What takes chains out of graphs: `crossfuse.torch.Backend`."""

    @property
    def mode(self) -> str:
        """How inductor compiles the rest, as ``torch.compile`` names it; empty is its default."""

    @property
    def choices(self) -> tuple[Any, ...]:
        """Options that decide what becomes of a graph."""

    def fuse(self, module: fx.GraphModule) -> Record | None:
        """Replace chains in a graph of aten operators, in place."""

    def runs_on(self, place: torch.device) -> bool:
        """Whether kernels run where tensors are."""

    def sequential(self, place: torch.device) -> bool:
        """Whether scheduled functions run in the place of kernels."""

    def device_of(self, place: torch.device) -> Device:
        """What to compile for, for tensors at a place."""


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], backend: Fuser
) -> Callable[..., Any]:
    """Compile a captured graph by inductor, with our chains taken out of it before.

    Of all of inductor's hooks only the compiler of inner graphs has been told in every release
    whether it is given an inference graph, so we stand before that one.

    Parameters
    ----------
    module : torch.fx.GraphModule
        What torch captured.
    inputs : Sequence[Any]
        Its example inputs.
    backend : Fuser
        Replaces chains in a graph of aten operators, in place.

    Returns
    -------
    Callable
        What torch calls instead of the graph; where torch will write it to a file, a
        `crossfuse.torch.artefact.SavedProgram`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Record | None] = []
    called: list[str] = []

    patches = _settings(backend.mode)
    whole = kept_whole(inputs, patches)

    def inner(graph: fx.GraphModule, given: Sequence[Any], **known: Any) -> Any:
        if known.get("is_inference"):
            made.append(backend.fuse(graph))
        else:
            made.append(None)
            if not known.get("is_backward"):
                warn_of_training()
        called.extend(_called(graph.graph))
        # Inductor's cache of graphs comes after us: `fuse` has offered the kernels that they call,
        # by keys that say what is in them.
        if not whole:
            return compile_fx_inner(graph, given, **known)
        with config.patch(APART):
            return compile_fx_inner(take_apart(graph), given, **known)

    known = _program(module, inputs, backend, whole)
    if whole:
        patches |= WHOLE
    with torch_caches(known):
        compiled: Callable[..., Any] = compile_fx(
            module, inputs, inner_compile=inner, config_patches=patches or None
        )
    if known is not None:
        _told(known, made)
    if to_file():
        from crossfuse.torch.artefact import SavedProgram

        return SavedProgram(compiled, [each for each in made if each is not None], called)
    return compiled


def _settings(mode: str) -> dict[str, Any]:
    """Inductor's settings of a mode, beside those that hold anyway."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode)} if mode else {}


def _program(
    module: fx.GraphModule, inputs: Sequence[Any], backend: Fuser, whole: bool = False
) -> Program | None:
    """What is known of a captured graph; None if torch is not to keep it whole."""
    places = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    if len(places) != 1 or not hasattr(torch.compiler.config, "cache_key_tag"):
        return None
    (place,) = places
    if to_file() or _dynamo_keeps():
        return None
    if not backend.runs_on(place) or backend.sequential(place):
        return None
    # Torch's own key has the settings while it traces, so ours tells that another one holds later.
    options = (*backend.choices, "products whole") if whole else backend.choices
    try:
        key = program_key(module, inputs, backend.device_of(place), options)
    except RefusedError:  # said when the graph is fused
        return None
    return program(key) if key else None


def _told(known: Program, made: Sequence[Record | None]) -> None:
    """Report what is in a program that torch had whole, or keep what became of a new one."""
    if not made:
        for each in known.records:
            keep(each.report)
        return
    records = [each for each in made if each is not None]
    if len(records) == len(made):
        write_program(with_records(known, records))


def _dynamo_keeps() -> bool:
    """Whether Dynamo keeps what it compiles by the name of a function.

    It then takes programs of a backend without asking it, whatever its options are, so none of ours
    may be among them: kernels would not be loaded.
    """
    from torch._dynamo import config as dynamo

    return bool(getattr(dynamo, "caching_precompile", False))


def _called(graph: fx.Graph) -> list[str]:
    """Keys of the kernels that a graph calls."""
    ours = (each for each in graph.nodes if getattr(each.target, "namespace", "") == "crossfuse")
    return [str(each.args[-1]) for each in ours]
