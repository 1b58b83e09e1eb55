"""Chains of symbolic rows: a kernel for each bin of rows, which takes fewer too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import fx
from tvm.ir import GlobalVar

from crossfuse.cache.keys import package_hash
from crossfuse.hardware import Device
from crossfuse.relax.chains.calls import call_of
from crossfuse.relax.chains.forms import Chains
from crossfuse.relax.chains.kernels import ChainKernels, Equal
from crossfuse.relax.chains.made_rows import MadeChains
from crossfuse.relax.chains.planned import PlannedRows
from crossfuse.relax.outcome import BinOutcome, ChainOutcome
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import is_symbolic
from crossfuse.torch.kernels import BinnedKernel, kernels_of, offer
from crossfuse.torch.rewrite import RowsCall
from crossfuse.torch.separate import EagerForm, eager_form
from crossfuse.torch.translate import Translation


@dataclass(frozen=True)
class RowsReplacement(Replacement):
    """A call of the kernel of the smallest bin that holds its rows, or of torch's own operators."""

    #: Scheduled functions by the most rows of their bins.
    kernels: Mapping[int, GlobalVar] = field(default_factory=dict)
    #: The operators that it stands for.
    form: EagerForm | None = None


class TorchKernels(ChainKernels):
    """Kernels of a translated graph's chains; see `ChainKernels`."""

    def __init__(self, translation: Translation, target: Device, **options: Any) -> None:
        known = translation.nodes
        forms = (Chains(), MadeChains())
        given = {"named": False, "known": known, "forms": forms, **options}
        super().__init__(translation.module, target, False, **given)
        self._nodes = known
        self._pickers = Equal()
        self._count = Counter[str]()

    def picked(
        self,
        chain: PlannedRows,
        function: Any,
        extents: tuple[Any, ...],
        kernels: Mapping[int, GlobalVar],
        outcomes: tuple[BinOutcome, ...],
    ) -> Replacement:
        """See `ChainKernels.picked`; ``crossfuse::run_rows`` picks the kernel.

        Refused are chains that torch could not compute otherwise, see `eager_form`.
        """
        first = next(e.chain for e in chain.bins if e.chain is not None and e.rows in kernels)
        name = self._pickers.find(first.outlined.func, lambda: self._numbered(chain.name))
        call = call_of(RowsReplacement, name, first, chain.given, chain.output, chain.rows)
        form = eager_form(self._nodes[chain.output], [self._nodes[each] for each in call.inputs])
        bins = {each.rows: kernels.get(each.rows) for each in chain.bins}
        return replace(call, bins=outcomes, kernels=bins, form=form)

    def _numbered(self, name: str) -> GlobalVar:
        count = self._count[name]
        self._count[name] += 1
        return GlobalVar(f"{name}{count or ''}")


def offered_rows(
    replacements: Sequence[Any],
    nodes: Mapping[Any, fx.Node],
    functions: Mapping[GlobalVar, Any],
    target: Device,
    cpu: bool,
    apart: Callable[[fx.GraphModule], Callable[..., Any]],
) -> list[RowsCall]:
    """Build the kernels of chains of symbolic rows, and give the calls that take their place.

    More rows than any bin has, and bins in which fusion is not estimated to pay, are left to what
    `apart` makes of the chain's graph. `nodes` are those of the translation.
    """
    names = (name for each in replacements for name in each.kernels.values() if name is not None)
    runs = kernels_of({str(name.name_hint): functions[name] for name in names}, target, cpu)
    calls = []
    for each in replacements:
        where = "cpu" if cpu else target.name
        kernel = replace(_kernel(each, functions, runs, where), eager=apart(each.form.run))
        offer(kernel)
        output, *inputs = (nodes[one] for one in (*each.outputs, *each.inputs))
        calls.append(RowsCall(output, tuple(inputs), each.form.sizes, kernel.key))
    return calls


def _kernel(
    call: RowsReplacement, functions: Mapping[GlobalVar, Any], runs: Mapping[str, Any], where: str
) -> BinnedKernel:
    """Assemble the kernels of one chain under a key that hashes all that they compute."""
    assert call.form is not None
    run = call.form.run
    texts = [functions[each].script() for each in call.kernels.values() if each is not None]
    words = [package_hash(), where, *texts, run.code, str([*call.kernels])]
    key = f"{call.function.name_hint}-rows-{sha256(chr(10).join(words).encode()).hexdigest()[:16]}"
    shapes = tuple(
        (-1, *shape[1:]) if is_symbolic(value) else shape
        for value, shape in zip(call.inputs, call.shapes, strict=True)
    )
    bins = tuple((most, name and runs[str(name.name_hint)]) for most, name in call.kernels.items())
    columns, width = call.shapes[0][-1], call.shape[-1]
    return BinnedKernel(key, columns, width, getattr(torch, call.dtype), shapes, bins, run)


def with_bins(outcome: ChainOutcome) -> ChainOutcome:
    """Say in an outcome's text in which bins there is a kernel, if it has bins."""
    most = ", ".join(str(each.rows) for each in outcome.bins if each.name)
    return (
        replace(outcome, text=f"{outcome.text}; kernels for up to {most} rows") if most else outcome
    )
