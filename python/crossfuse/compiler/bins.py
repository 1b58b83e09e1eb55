"""`compile_bins`: kernels for every number of rows M, one for each bin of M."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.compiler.compiled import Compiled, compile
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.files import scratch_folder
from crossfuse.hardware import Device
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from crossfuse.runtime import Dispatch, DispatchTable

_refuse = Rule(WorkloadRefused, "compile_bins")


@dataclass(frozen=True)
class CompiledBins:
    """Kernels for every number of rows, from source to a folder of libraries.

    Attributes
    ----------
    bins : Mapping[int, Compiled]
        By rows, few to many.
    table : DispatchTable
        What lies in the folder.
    folder : pathlib.Path
        The folder, which `crossfuse.runtime.load_dispatch` loads anywhere.

    Examples
    --------
    >>> import crossfuse
    >>> ffn = crossfuse.compile_bins("gated_ffn:M=16,K=64,N=128,L=64", bins=(16,))
    >>> ffn.table.rows
    (16,)
    >>> ffn(A, B_gate, B_up, D)  # on a GPU; A of any number of rows  # doctest: +SKIP
    """

    bins: Mapping[int, Compiled]
    table: DispatchTable
    folder: Path

    @cached_property
    def dispatch(self) -> Dispatch:
        """The loaded folder."""
        from crossfuse.runtime import load_dispatch

        return load_dispatch(self.folder)

    def __call__(self, *inputs: Any) -> Any:
        """Run on the GPU, see `crossfuse.runtime.Dispatch.run`."""
        return self.dispatch.run(*inputs)


@checked
def compile_bins(
    source: str | WorkloadSpec,
    *,
    bins: Sequence[int] = BINS,
    placement: str | Mapping[int, str] = "auto",
    schedule: Callable[[WorkloadSpec], Any] | None = None,
    target: str | Device | None = None,
    constant_weights: bool | None = None,
    measure: bool = False,
    directory: str | Path | None = None,
    name: str = "main",
) -> CompiledBins:
    """Compile a workload once for each bin of M, and pack the kernels with a table.

    Parameters
    ----------
    source : str | WorkloadSpec
        A packaged id or spec of any M, which the bins take the place of; N, K and L are fixed.
    bins : Sequence[int]
        Rows of the calls that each bin is for, at most. A call takes the smallest that holds it;
        one of more rows than the last is cut into several.
    placement : str | Mapping[int, str]
        Where the intermediate of a chain lives, see `crossfuse.compile`: in all bins, or by rows.
    schedule : Callable | None
        Function from the workload of a bin to its ``tvm.s_tir.Schedule`` for the Hopper pipeline,
        such as one of a plan; takes the place of `placement`.
    target : str | Device | None
        What to compile for.
    constant_weights : bool | None
        See `crossfuse.compile`.
    measure : bool
        Whether each bin gets the kernel that is the fastest at as many rows, see
        `crossfuse.compile`.
    directory : str | Path | None
        The folder, see `crossfuse.runtime.write_dispatch`; None makes one that goes with the
        process.
    name : str
        Libraries are ``<name>_<rows>.so``.

    Returns
    -------
    CompiledBins
        All bins, and the folder.

    Raises
    ------
    WorkloadRefused
        If the source is no workload with rows, bins are no different positive numbers, or a
        placement is for no bin.
    ScheduleRefused, LoweringRefused, EnvironmentRefused
        As `crossfuse.compile`, for the first bin that has no kernel.

    Examples
    --------
    >>> import crossfuse
    >>> ffn = crossfuse.compile_bins("gated_ffn:M=16,K=64,N=128,L=64", bins=(16,))
    >>> ffn.table.rows
    (16,)
    >>> ffn(A, B_gate, B_up, D)  # on a GPU; A of any number of rows  # doctest: +SKIP
    """
    from crossfuse.runtime import write_dispatch

    spec = _spec(source)
    rows = _checked(bins)
    places = _placements(placement, rows)
    folder = Path(directory if directory is not None else scratch_folder())
    compiled = {}
    for each in rows:
        of_bin = replace(spec, M=each)
        compiled[each] = compile(
            of_bin if schedule is None else schedule(of_bin),
            target=target,
            rule="tensor",
            placement=places[each],
            constant_weights=constant_weights,
            fewer_rows=True,
            measure=measure,
            directory=folder,
            name=f"{name}_{each}",
        )
    metadata = {"source": str(spec), "placement": "schedule" if schedule else places}
    artefacts = {each: result.artefact for each, result in compiled.items()}
    table = write_dispatch(folder, name, artefacts, metadata)
    return CompiledBins(compiled, table, folder)


def _spec(source: Any) -> WorkloadSpec:
    from crossfuse.workload.suites import resolve

    spec = resolve(source) if isinstance(source, str) else source
    if isinstance(spec, WorkloadSpec) and spec.kind in WorkloadSpec.kinds:
        return spec
    raise _refuse(
        "source",
        f"a {type(spec).__name__}",
        f"a workload of kind {', '.join(WorkloadSpec.kinds)}",
        "pass its spec; rows of a convolution are pixels, which a bin does not count",
    )


def _checked(bins: Sequence[int]) -> tuple[int, ...]:
    rows = tuple(sorted(bins))
    if not rows or len(set(rows)) < len(rows) or rows[0] < 1:
        raise _refuse(
            "bins", repr(tuple(bins)), "different positive numbers", f"name some, such as {BINS}"
        )
    return rows


def _placements(placement: str | Mapping[int, str], rows: tuple[int, ...]) -> dict[int, str]:
    if isinstance(placement, str):
        return dict.fromkeys(rows, placement)
    if unknown := sorted(set(placement) - set(rows)):
        raise _refuse(
            "placement", f"one for {unknown[0]} rows", f"bins of {rows} rows", "add that bin"
        )
    return {each: placement.get(each, "auto") for each in rows}
