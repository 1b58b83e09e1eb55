"""From a model to an executable's functions: our passes before TVM's own, in numbered phases."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from crossfuse.hardware import Device, device, tvm_target
from crossfuse.relax.attention import ATTENTION
from crossfuse.relax.build_kernels import BuildKernels
from crossfuse.relax.dataflow import clean
from crossfuse.relax.fuse_cascades import FuseCascades
from crossfuse.relax.fuse_chains import FuseChains
from crossfuse.relax.gather import GATHER
from crossfuse.relax.keep_nans import KeepNans
from crossfuse.relax.on_cpu import serial_kernels
from crossfuse.relax.powers import POWERS
from crossfuse.relax.wide_arithmetic import WideArithmetic
from crossfuse.runtime.bin_rows import BINS

#: The folder for the modules of all phases, of a pipeline that is not told one.
DUMP = "CROSSFUSE_DUMP"


@dataclass(frozen=True)
class Phase:
    """A step of the pipeline.

    Attributes
    ----------
    name : str
        What it does.
    run : tvm.ir.transform.Pass | Callable
        A pass, or a function from module to module.
    """

    name: str
    run: Any


def phases(
    target: str | Device | None = None,
    *,
    always: bool = False,
    bins: Sequence[int] = BINS,
    build: bool = True,
    weights: Collection[str] = (),
) -> tuple[Phase, ...]:
    """Our phases in order; TVM's pipeline for the device comes after them.

    Parameters
    ----------
    target : str | Device | None
        What to compile for.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    bins : Sequence[int]
        Rows that kernels of chains of symbolic rows are made for, see
        `crossfuse.relax.FuseChains`.
    build : bool
        Whether scheduled functions become libraries; else they become loops for the CPU.
    weights : Collection[str]
        Parameters that are the same in each call, see `crossfuse.relax.FuseChains`.

    Returns
    -------
    tuple[Phase, ...]
        ``clean``, ``fuse_chains``, ``wide_arithmetic``, ``legalize``, ``fuse_cascades``,
        ``build_kernels``, ``keep_nans``; that before the last is ``serial_kernels`` if nothing is
        built.
    """
    spec = device(target)
    return (
        Phase("clean", clean),
        Phase("fuse_chains", FuseChains(spec, always=always, bins=bins, weights=weights)),
        Phase("wide_arithmetic", WideArithmetic()),
        Phase("legalize", relax.transform.LegalizeOps({**ATTENTION, **POWERS, **GATHER})),
        Phase("fuse_cascades", FuseCascades(spec)),
        Phase("build_kernels", BuildKernels(spec))
        if build
        else Phase("serial_kernels", serial_kernels),
        Phase("keep_nans", KeepNans()),
    )


def pipeline(
    target: str | Device | None = None,
    *,
    bins: Sequence[int] = BINS,
    dump: str | Path | None = None,
    steps: Sequence[Phase] | None = None,
) -> Any:
    """The pipeline that TVM knows as ``"crossfuse"``.

    Chains and cascades that pay become kernels of ours. All else goes through TVM's own pipeline
    for CUDA, with dlight's schedules.

    Parameters
    ----------
    target : str | Device | None
        What to compile for.
    bins : Sequence[int]
        Of chains of symbolic rows, see `crossfuse.relax.FuseChains`.
    dump : str | Path | None
        A folder that gets the module after each phase, ``01_clean.py`` and so on, and what became
        of chains and cascades beside it, ``02_fuse_chains.txt``; None takes the environment
        variable ``CROSSFUSE_DUMP``, and writes nothing without it.
    steps : Sequence[Phase] | None
        From `phases`, for who wants to see their outcomes; None makes them, with the bins.

    Returns
    -------
    tvm.ir.transform.Pass
        For ``relax.build(mod, target, relax_pipeline=...)``.

    Examples
    --------
    >>> executable = relax.build(mod, "nvidia/nvidia-h100", relax_pipeline="crossfuse")
    ...                                              # doctest: +SKIP
    """
    spec = device(target)
    folder = dump if dump is not None else os.environ.get(DUMP)
    chosen = phases(spec, bins=bins) if steps is None else tuple(steps)

    @tvm.transform.module_pass(opt_level=0, name="crossfuse.pipeline")
    def run(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        for number, phase in enumerate(chosen, 1):
            mod = phase.run(mod)
            if folder:
                _write(Path(folder), f"{number:02}_{phase.name}", mod, phase)
        current = tvm.target.Target.current() or tvm_target(spec)
        with current:
            return relax.get_default_pipeline(current)(mod)

    return run


def _write(folder: Path, name: str, mod: tvm.IRModule, phase: Phase) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(f"{mod.without_attr('external_mods')}\n")
    outcomes = getattr(phase.run, "outcomes", ())
    if outcomes:
        (folder / f"{name}.txt").write_text("".join(f"{each}\n" for each in outcomes))
