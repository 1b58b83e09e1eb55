"""From a model to an executable's functions: our passes before TVM's own, in numbered phases."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.hardware import Device, device, tvm_target
from crossfuse.lower.hidden import keep_nans
from crossfuse.relax.build_kernels import BuildKernels
from crossfuse.relax.calls import SCHEDULED
from crossfuse.relax.fuse_cascades import FuseCascades
from crossfuse.relax.fuse_chains import FuseChains
from crossfuse.relax.graph import clean
from crossfuse.relax.operators import LEGAL
from crossfuse.relax.passes import ATTENTION, WideArithmetic
from crossfuse.relax.sinks import JoinSinks
from crossfuse.runtime.dispatch_table import BINS


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.KeepNans")
class KeepNans:
    """Let ``relu``, ``clip``, ``maximum`` and ``minimum`` be NaN where torch's are.

    A pass over modules behind ``LegalizeOps`` and `FuseCascades`, which reads cascades with TVM's
    own maxima. It changes functions of TensorIR, see `crossfuse.lower.hidden`; kernels that
    we schedule are changed when they are lowered.

    Examples
    --------
    >>> import torch
    >>> import tvm
    >>> from crossfuse.relax import KeepNans, import_torch
    >>> mod = import_torch(torch.nn.ReLU().eval(), (torch.zeros(64, 16),)).mod
    >>> mod = tvm.ir.transform.Sequential([tvm.relax.transform.LegalizeOps(), KeepNans()])(mod)
    >>> "T.crossfuse_maximum" in str(mod)
    True
    """

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `KeepNans`.

        Parameters
        ----------
        mod : tvm.IRModule
            The module; it stays as it is.

        Returns
        -------
        tvm.IRModule
            With operators of `crossfuse.lower.hidden`.
        """
        made = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, ir.PrimFunc):
                made.update_func(name, keep_nans(func))
        return made


def serial_kernels(mod: Any) -> Any:
    """A module in which loops replace the functions that are bound to a GPU's threads.

    To be built for LLVM, so that the model runs without a GPU. The functions are those that
    `crossfuse.relax.FuseChains` or `FuseCascades` scheduled; the given module is not changed.
    """
    from crossfuse.emulate.float_operators import as_on_gpu, by_bits, exact_sums
    from crossfuse.emulate.serialise import in_block, of_shapes, serialise
    from crossfuse.lower.extract import buffer_specs
    from crossfuse.lower.verify.structure import takes_fewer_rows

    plain = mod.clone()
    for name, func in mod.functions_items():
        if not isinstance(func, ir.PrimFunc):
            continue
        if SCHEDULED not in (func.attrs or {}):
            whole = ir.mutate(func, (ir.AttrStmt, _without_scope))
            plain.update_func(name, as_on_gpu(by_bits(exact_sums(whole))))
        else:
            serial = serialise(func).with_attr("global_symbol", name.name_hint)
            if takes_fewer_rows(func):
                specs = buffer_specs(func)
                # A row that needs another one, which is not there, shows it.
                rows = ir.tirx.Var("rows", "int64")
                shapes = [(rows, *each.shape[1:]) if each.rows else each.shape for each in specs]
                plain.update_func(name, of_shapes(serial, specs, shapes, float("nan")))
            else:
                plain.update_func(name, in_block(serial, serial.params, serial.body))
    return plain


def _without_scope(statement: Any, mutator: Any) -> Any:
    """Drop a mark of TVM's scatters that its LLVM code generator warns of."""
    if str(statement.attr_key) == "pragma_scope":
        return mutator.mutate(statement.body)
    return mutator.default_mutate(statement)


#: Environment variable: the folder for the modules of all phases, if `pipeline` is given none.
DUMP = "CROSSFUSE_DUMP"


@dataclass(frozen=True)
class Phase:
    """A named step of the pipeline."""

    #: What it does; part of the names of dumped files.
    name: str
    #: A pass, or a function from module to module.
    run: Any


def phases(
    target: str | Device | None = None,
    *,
    always: bool = False,
    bins: Sequence[int] = BINS,
    build: bool = True,
    weights: Collection[str] = (),
    early: bool = True,
) -> tuple[Phase, ...]:
    """Our phases in order; TVM's pipeline for the device comes after them.

    They are ``clean``, ``fuse_chains``, ``wide_arithmetic``, ``legalize``, ``fuse_cascades``,
    ``build_kernels`` and ``keep_nans``. Without `build`, ``serial_kernels`` takes the place of
    ``build_kernels``: scheduled functions become loops for the CPU. `always`, `bins` and `weights`
    are those of `crossfuse.relax.FuseChains`, `early` that of `crossfuse.relax.BuildKernels`.
    """
    spec = device(target)
    return (
        Phase("clean", clean),
        Phase("fuse_chains", FuseChains(spec, always=always, bins=bins, weights=weights)),
        Phase(
            "wide_arithmetic",
            tvm.transform.Sequential(
                [JoinSinks(), WideArithmetic(), relax.transform.CanonicalizeBindings()]
            ),
        ),
        Phase("legalize", relax.transform.LegalizeOps({**ATTENTION, **LEGAL})),
        Phase("fuse_cascades", FuseCascades(spec)),
        Phase("build_kernels", BuildKernels(spec, early=early))
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
    """The pipeline that TVM knows as ``"crossfuse"``, to be given as ``relax_pipeline``.

    Chains and cascades that pay become kernels of ours. All else goes through TVM's own pipeline
    for CUDA, with dlight's schedules. The folder `dump` gets the module after each phase,
    ``01_clean.py`` and so on, and the outcomes of chains and cascades beside it,
    ``02_fuse_chains.txt``; None takes the environment variable ``CROSSFUSE_DUMP``, and writes
    nothing without it. `bins` are those of `crossfuse.relax.FuseChains`. Callers that want to see
    outcomes pass their own `phases` as `steps`, which ignores the bins.

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
