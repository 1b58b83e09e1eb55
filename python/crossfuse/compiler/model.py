"""`compile_model`: a whole model, in which every chain and cascade that pays becomes one kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import RefusedError, Rule, WorkloadRefused
from crossfuse.files import sha256
from crossfuse.hardware import Device, device, tvm_target
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.runtime.manifest import limits_of, releases
from crossfuse.runtime.model_artefact import RUNS_ON, RunningModel, Uncopied, exact_cuda
from crossfuse.runtime.model_record import ModelArtefact, ModelInput, ModelInputs
from crossfuse.runtime.tensors import operators_in

if TYPE_CHECKING:
    from crossfuse.relax.fuse_cascades import Outcome
    from crossfuse.relax.outcome import ChainOutcome
    from crossfuse.relax.torch_import import Imported

_refused = Rule(WorkloadRefused, "compile-model")


@dataclass(frozen=True)
class ModelReport:
    """Which parts of a model were fused, and why the others were not."""

    #: Each pair of layers of matrix products: its kernel, or why it has none.
    chains: tuple[ChainOutcome, ...]
    #: Each group of reductions, and each function that was left, with the reason.
    cascades: tuple[Outcome, ...]
    #: Operators that neither Crossfuse nor TVM has: torch runs them, inside the model.
    by_torch: tuple[str, ...] = ()

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of kernels: of chains, then of cascades of several calls, in order."""
        chains = (each.name for each in self.chains if each.name)
        cascades = (each.function for each in self.cascades if each.form and each.calls)
        return (*chains, *cascades)

    def text(self) -> str:
        """The report as text, one line for each part."""
        from crossfuse.relax.outcome import told

        lines = [told(self.chains)]
        for each in self.cascades:
            what = ", ".join(each.calls) or each.function
            saved = f", {each.before} to {each.after} bytes" if each.form else ""
            kernel = f"{each.function} ({each.form}){saved}" if each.form else "left"
            lines.append(f"{what}: {kernel}; {each.reason}")
        if self.by_torch:
            lines.append(f"left to torch: {', '.join(self.by_torch)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class CompiledModel(Uncopied):
    """A model as an executable of Relax.

    Attributes
    ----------
    imported : Imported
        What was compiled, with the weights.
    executable : Any
        The ``tvm.relax.VMExecutable``.
    report : ModelReport
        What was fused, and why the rest was not.
    target : Device
        What it is compiled for.
    runs_on : str
        One of `crossfuse.runtime.model_artefact.RUNS_ON`.

    Examples
    --------
    >>> import torch
    >>> from crossfuse import compile_model
    >>> x = torch.zeros(4, 8)
    >>> fn = compile_model(torch.nn.Softmax(-1).eval(), (x,), runs_on="llvm")
    >>> tuple(fn(x).shape)  # of the model's output: [rows, columns]
    (4, 8)
    """

    imported: Imported
    executable: Any
    report: ModelReport
    target: Device
    runs_on: str = "cuda"

    def __call__(self, *inputs: Any) -> Any:
        """Run the model.

        Parameters
        ----------
        *inputs : torch.Tensor | numpy.ndarray
            The model's inputs, row-major; on a GPU as they are, others are copied there.

        Returns
        -------
        torch.Tensor | numpy.ndarray | tuple
            The results, in the framework of the first input.

        Raises
        ------
        WorkloadRefused
            For another number of inputs, other shapes and types than were compiled for, or other
            strides.
        EnvironmentRefused
            If a model for a GPU is run where TVM finds none.
        """
        return self._running(*inputs)

    def export(self, folder: str | os.PathLike[str], *, weights: bool = True) -> ModelArtefact:
        """Write the model to a folder, for `crossfuse.load_model`.

        Parameters
        ----------
        folder : path
            Gets ``model.so`` with all kernels, ``model.json``, and ``weights.npz``.
        weights : bool
            Whether weights are written; without them `crossfuse.load_model` is given them.

        Returns
        -------
        ModelArtefact
            What was written.

        Examples
        --------
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> from crossfuse import compile_model, load_model
        >>> x = torch.zeros(4, 8)
        >>> fn = compile_model(torch.nn.Softmax(-1).eval(), (x,), runs_on="llvm")
        >>> with TemporaryDirectory() as folder:
        ...     written = fn.export(folder)
        ...     tuple(load_model(folder)(x).shape)
        (4, 8)
        """
        import tvm

        from crossfuse.runtime.model_artefact import write_model

        inputs, params = self._running.inputs, self.imported.params
        record = ModelArtefact(
            device=self.target.name,
            arch=self.target.arch,
            limits=limits_of(self.target),
            versions=releases(),
            runs_on=self.runs_on,
            inputs=inputs.inputs,
            most=dict(inputs.most),
            weights=tuple(
                ModelInput(name, str(each.dtype), tuple(each.shape))
                for name, each in params.items()
            ),
            stored=weights,
            fused=self.report.fused,
            report=self.report.text(),
            source_sha256=sha256(tvm.ir.save_json(self.imported.mod).encode()),
            library_sha256="",  # of the file that is written
        )
        return write_model(folder, self.executable, record, params)

    @cached_property
    def _running(self) -> RunningModel:
        inputs = _inputs(self.imported.mod["main"], self.imported.inputs)
        weights = tuple(self.imported.params.values())
        return RunningModel(self.executable, inputs, weights, self.runs_on)


@checked
def compile_model(
    model: Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    target: str | Device | None = None,
    always: bool = False,
    bins: Sequence[int] = BINS,
    early: bool = True,
    runs_on: str = "cuda",
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    opset: int | None = None,
    dump: str | Path | None = None,
) -> CompiledModel:
    """Compile a whole model: each chain and cascade that pays is one kernel, TVM makes the rest.

    Users of torch who want the rest to stay with inductor or eager take
    ``torch.compile(model, backend="crossfuse")``. `crossfuse.compile` takes single workloads.

    Parameters
    ----------
    model : Any
        A torch module or a module of ``tvm.relax.frontend.nn`` with `example_inputs`, an exported
        program of torch, an ONNX model or its path, or a Relax module. Exported programs and Relax
        modules may have symbolic extents, such as batch and sequence.
    example_inputs : Sequence[tensor] | None
        Inputs of a module, whose shapes and types are compiled for.
    target : str | Device | None
        What to compile for.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    bins : Sequence[int]
        Rows that kernels are made for where the model's extents are symbolic, see
        `crossfuse.relax.FuseChains`.
    early : bool
        Whether a kernel of ours that follows another one starts before that is over, and loads its
        weights before it waits, see `crossfuse.relax.BuildKernels`.
    runs_on : str
        ``"cuda"``, or ``"llvm"`` to run the scheduled functions one thread after the other on the
        CPU, which says what they compute and nothing of their time.
    shapes, opset
        Of ONNX models, see `crossfuse.importers.import_onnx`.
    dump : str | Path | None
        See `crossfuse.relax.pipeline.pipeline`.

    Returns
    -------
    CompiledModel
        Called with the model's inputs; its `report` says what was fused.

    Raises
    ------
    WorkloadRefused, EnvironmentRefused, LoweringRefused
        For models that cannot be imported, and kernels that cannot be built.

    Notes
    -----
    Weights are not copied before they go to the device, at the first call. Until then a change of
    them in place counts, later it does not; `CompiledModel.export` writes what they are then.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.workload import chain_module
    >>> x = torch.zeros(16, 32, dtype=torch.bfloat16)  # [M, K]
    >>> fn = compile_model(chain_module(32, 64), (x,), always=True, runs_on="llvm")
    >>> tuple(fn(x).shape)  # [M, L]
    (16, 32)
    >>> len(fn.report.fused)  # kernels; print(fn.report.text()) says why
    1
    >>> fn = compile_model(model, (x,))  # for a GPU  # doctest: +SKIP
    """
    from crossfuse.importers import read_model
    from crossfuse.relax.pipeline import phases, pipeline

    if runs_on not in RUNS_ON:
        limit = " or ".join(map(repr, RUNS_ON))
        raise _refused("runs_on", repr(runs_on), limit, "name one of these")
    imported = read_model(model, example_inputs, shapes=shapes, opset=opset)
    _check_elements(imported.mod["main"])
    spec = device(target)
    weights, build = tuple(imported.params), runs_on == "cuda"
    steps = phases(spec, always=always, bins=bins, build=build, weights=weights, early=early)
    built = pipeline(spec, dump=dump, steps=steps)
    try:
        executable = _build(imported.mod, built, spec, runs_on)
    except RefusedError:
        raise
    except Exception as error:  # TVM's passes and code generators raise whatever they like
        found = f"a failure of TVM: {_reason(error)}"
        instead = "leave out what it names, or call torch.compile(model, backend='crossfuse')"
        raise _refused("model", found, "operators that TVM builds", instead) from error
    outcomes = {each.name: getattr(each.run, "outcomes", ()) for each in steps}
    by_torch = operators_in(imported.mod)
    report = ModelReport(outcomes["fuse_chains"], outcomes["fuse_cascades"], by_torch)
    return CompiledModel(imported, executable, report, spec, runs_on)


def _reason(error: Exception) -> str:
    """An error's message, without the C++ frames and remarks that TVM's errors have."""
    lines = [each.strip() for each in str(error).splitlines()]
    lines = [each for each in lines if each and not each.startswith("#")]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _check_elements(function: Any) -> None:
    """Refuse inputs without elements, for which TVM has no schedules."""
    for each in function.params:
        extents = [_extent(extent) for extent in getattr(each.ty.shape, "values", None) or ()]
        if 0 in extents:
            limit = "at least one element"
            instead = "compile for more rows, and answer calls without any beside the model"
            raise _refused(str(each.name), f"a tensor of shape {extents}", limit, instead)


def _build(mod: Any, passes: Any, spec: Device, runs_on: str) -> Any:
    import tvm
    from tvm import relax

    if runs_on == "cuda":
        with exact_cuda(spec.arch):
            return relax.build(mod, tvm_target(spec), relax_pipeline=passes)
    # Wider vectors of bfloat16 go wrong in LLVM from level 2 on.
    target = tvm.target.Target({"kind": "llvm", "opt-level": 1})
    return relax.build(mod, target, relax_pipeline=passes)


def _inputs(function: Any, names: Sequence[str]) -> ModelInputs:
    """Inputs of a Relax function: its first parameters, as many as there are names."""
    bounds = (function.attrs or {}).get("tir_var_upper_bound") or {}
    most = {str(name): int(bound) for name, bound in bounds.items()}
    found = []
    for name, parameter in zip(names, function.params, strict=False):
        kind = parameter.ty
        extents = tuple(_extent(each) for each in kind.shape.values)
        found.append(ModelInput(name, str(kind.dtype), extents))
    return ModelInputs(tuple(found), most)


def _extent(extent: Any) -> int | str:
    """An extent as a number, or as text if it is symbolic."""
    try:
        return int(extent)
    except TypeError:
        return str(extent)
