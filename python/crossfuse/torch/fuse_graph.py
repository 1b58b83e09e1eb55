"""Fusion of one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm.ir import GlobalVar

from crossfuse.cache import package_hash
from crossfuse.hardware import Device
from crossfuse.measure.timer import Timer
from crossfuse.relax.calls import Equal, KernelCall, with_early_starts
from crossfuse.relax.chains.gated import GatedFewRows
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.kinds import Chains, GroupKind, MadeChains
from crossfuse.relax.chains.planned import PlannedChain, PlannedRows, call_of
from crossfuse.relax.chains.products import FewRows
from crossfuse.relax.choice import Chosen, choose
from crossfuse.relax.graph import Graph, read_graph
from crossfuse.relax.measured import Measuring
from crossfuse.relax.operators import refused
from crossfuse.relax.outcome import BinOutcome, ChainOutcome
from crossfuse.relax.replace import Replacement, with_replacements
from crossfuse.relax.symbols import is_symbolic
from crossfuse.torch.fuse_cascades import CascadeKernels, legalised, may_have_attention
from crossfuse.torch.graph_cache import Record
from crossfuse.torch.kernels import (
    BinnedKernel,
    KeptKernel,
    kernels_of,
    offer_binned,
    offer_kernels,
)
from crossfuse.torch.report import Report, in_torch
from crossfuse.torch.rewrite import Call, RowsCall, is_frozen, lies_as_taken, rewrite
from crossfuse.torch.separate import EagerForm, eager_form, measuring
from crossfuse.torch.translate import Translation, translate

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend


def fuse_graph(
    module: fx.GraphModule,
    options: Backend,
    target: Device,
    sequential: bool,
    timer: Timer | None = None,
) -> tuple[Record, bool]:
    """Fuse a graph that the cache does not have, in place; False if a part of that went wrong.

    The graph has aten operators without mutation in between; its nodes carry ``meta["val"]``. It is
    translated once: its chains become kernels, those of symbolic rows one for each bin; what is
    left of the translation is searched for cascades; and the graph then calls all kernels. A
    failure in cascades leaves the chains. `sequential` runs the scheduled functions on the CPU
    instead of kernels. `timer` times kernels and takes the fastest; with None estimates choose.
    """
    mode = (options.mode or "default") if options.rest == "inductor" else None
    translation = translate(module.graph)
    graph = read_graph(translation.module["main"])
    timed = None if timer is None else measuring(timer, mode, module.graph, translation)
    where, always = (target, sequential), options.always
    weights = _weights(module, translation)
    few = (FewRows(), GatedFewRows()) if options.products else ()
    kinds = (Chains(), MadeChains(), *few)
    kernels = TorchKernels(translation, target, options.bins, timed, weights, kinds)
    chains = in_torch(choose("main", graph, kernels, always), translation.names)
    static = [each for each in chains.replacements if not each.bins]
    starts = Starts(module.graph, translation.nodes, options.early)
    made, calls = _offered(translation, static, kernels.module, *where, starts)
    rows = [each for each in chains.replacements if each.bins]
    rows_calls = _offered_rows(rows, translation.nodes, kernels.module, *where, options)
    cascades, failed = Chosen((), ()), False
    try:
        if options.cascades and may_have_attention(graph):
            of_cascades = CascadeKernels(target, translation.nodes, timed)
            rest = kernels.module.clone()
            main = with_replacements(translation.module["main"], graph, static)
            rest.update_func(rest.get_global_var("main"), main)
            found = choose("main", legalised(rest), of_cascades, always)
            cascades = in_torch(found, translation.names)
            functions = of_cascades.functions
            more = _offered(translation, found.replacements, functions, *where, starts)
            made, calls = (*made, *more[0]), (*calls, *more[1])
    except Exception as error:  # whatever it is, the graph is right without cascades
        text, failed = f"{type(error).__name__}: {error}", True
        cascades = Chosen((), (ChainOutcome("main", ("cascades",), "", "", None, None, text),))
        warnings.warn(f"crossfuse left cascades of a graph to torch: {text}", stacklevel=2)
    if calls or rows_calls:
        rewrite(module, calls, rows_calls)
    outcomes = (*map(_with_bins, chains.outcomes), *cascades.outcomes)
    return Record(Report(outcomes, translation.untranslated), made, calls), not failed


def _weights(module: fx.GraphModule, translation: Translation) -> Collection[Any]:
    """Variables of weights that no call changes, which torch promises of frozen ones alone.

    A copy of others would be out of date whenever their memory is written, which no counter of
    torch shows: ``parameter.data`` has its own, and CUDA graphs are replayed without any code.
    """
    if not is_frozen(module):
        return ()
    return tuple(each for each, node in translation.nodes.items() if node.op == "get_attr")


def _offered(
    translation: Translation,
    replacements: Sequence[Replacement],
    functions: Mapping[Any, Any],
    target: Device,
    cpu: bool,
    starts: Starts,
) -> tuple[tuple[KeptKernel, ...], tuple[Call, ...]]:
    """Build the kernels of groups of static shapes, and give the calls that take their place."""
    started = starts.calls(replacements)
    functions = with_early_starts(
        {e.function: functions[e.function] for e in replacements}, started
    )
    offered = offer_kernels(replacements, functions, target, cpu)
    called = [
        offered[each.function].as_first() if each.is_first(functions) else offered[each.function]
        for each in started
    ]
    name = {variable: node.name for variable, node in translation.nodes.items()}

    def call(found: Replacement, kernel: KeptKernel) -> Call:
        shapes = tuple(tuple(map(int, each)) for each in found.shapes)
        made, given = (tuple(name[each] for each in e) for e in (found.outputs, found.inputs))
        return Call(made, given, shapes, kernel.key)

    return tuple(dict.fromkeys(called)), tuple(map(call, replacements, called))


# Which calls of kernels start early, see `crossfuse.relax.calls`.

#: Nodes whose values are there before the graph is called.
_GIVEN = ("placeholder", "get_attr")


class Starts:
    """How calls that will replace groups of a graph start, as they are found.

    `nodes` are those of the variables in replacements. Without `early` no call follows another one.
    """

    def __init__(self, graph: fx.Graph, nodes: Mapping[Any, fx.Node], early: bool) -> None:
        self._graph = graph
        self._nodes = nodes
        self._early = early
        self._made: set[fx.Node] = set()

    def calls(self, replacements: Sequence[Replacement]) -> list[KernelCall]:
        """How further calls start, which may follow each other and those before."""
        if not self._early:
            return [KernelCall(each.function) for each in replacements]
        self._made |= {self._nodes[made] for each in replacements for made in each.outputs}
        behind, read_only = _behind(self._graph, self._made), _read_only(self._graph)

        def call(found: Replacement) -> KernelCall:
            given = [self._nodes[each] for each in found.inputs]
            # What has other extents or strides in the graph may be a copy that the graph makes.
            constant = frozenset(
                place
                for place, (node, shape) in enumerate(zip(given, found.shapes, strict=True))
                if node in read_only and _is_taken_as_it_is(node, shape)
            )
            return KernelCall(found.function, any(each in behind for each in given), constant)

        return [call(each) for each in replacements]


def _behind(graph: fx.Graph, made: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that are kernels' results in each call of the graph, or need some.

    What needs no input of the graph may be computed once, when it is compiled.
    """
    moving: set[fx.Node] = set()
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(each in moving for each in node.all_input_nodes):
            moving.add(node)
        needs = any(each in behind for each in node.all_input_nodes)
        if needs or (node in made and node in moving):
            behind.add(node)
    return behind


def _read_only(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are given to a graph, and that nothing in it writes."""
    written = {base for node in graph.nodes for each in _written(node) for base in _bases(each)}
    return {each for each in graph.nodes if each.op in _GIVEN and each not in written}


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes whose tensors a node may write: all that it is given, if it does not say which."""
    if node.op in (*_GIVEN, "output"):
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        yield from () if node.target is getitem else node.all_input_nodes
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        found: list[fx.Node] = []
        fx.node.map_arg(given, found.append)
        yield from found


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and those that it may be a view of."""
    yield node
    is_view = True
    if isinstance(node.target, torch._ops.OpOverload):
        is_view = any(each.alias_info is not None for each in node.target._schema.returns)
    for each in node.all_input_nodes if is_view else ():
        yield from _bases(each)


def _is_taken_as_it_is(node: fx.Node, shape: Sequence[Any]) -> bool:
    value = node.meta["val"]
    return tuple(value.shape) == tuple(shape) and bool(value.is_contiguous())


# Chains of symbolic rows: a kernel for each bin of rows, which takes fewer too.


@dataclass(frozen=True)
class RowsReplacement(Replacement):
    """A call of the kernel of the smallest bin that holds its rows, or of torch's own operators."""

    #: Scheduled functions by the most rows of their bins.
    kernels: Mapping[int, GlobalVar] = field(default_factory=dict)
    #: The operators that it stands for.
    form: EagerForm | None = None


class TorchKernels(ChainKernels):
    """Kernels of a translated graph's chains; see `ChainKernels`."""

    def __init__(
        self,
        translation: Translation,
        target: Device,
        bins: Sequence[int],
        measuring: Measuring | None,
        weights: Collection[Any],
        kinds: Sequence[GroupKind],
    ) -> None:
        super().__init__(
            translation.module,
            target,
            constant_weights=False,
            named=False,
            bins=bins,
            measuring=measuring,
            weights=weights,
            known=translation.nodes,
            kinds=kinds,
        )
        self._nodes = translation.nodes
        self._pickers = Equal()
        self._count = Counter[str]()

    def planned(self, graph: Graph, group: Group, kind: GroupKind) -> PlannedChain:
        """See `ChainKernels.planned`; also refuses a product of a weight that each call copies.

        A copy of a weight takes longer than the product of a few rows and the weight.
        """
        found = super().planned(graph, group, kind)
        if isinstance(kind, FewRows):
            for each in found.outlined.weights:
                _check_in_place(self._nodes[found.given[each.position]])
        return found

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
        given = [self._nodes[each] for each in call.inputs]
        form = eager_form([self._nodes[chain.output]], given)
        bins = {each.rows: kernels.get(each.rows) for each in chain.bins}
        return replace(call, bins=outcomes, kernels=bins, form=form)

    def _numbered(self, name: str) -> GlobalVar:
        count = self._count[name]
        self._count[name] += 1
        return GlobalVar(f"{name}{count or ''}")


def _check_in_place(weight: fx.Node) -> None:
    """Refuse a weight that no kernel reads where it is."""
    value = weight.meta["val"]
    if not lies_as_taken(value):
        place = f"strides {list(value.stride())}, {value.storage_offset()} elements from its start"
        raise refused(
            weight.name,
            f"a weight of shape {list(value.shape)} and {place}",
            "weights that lie row by row from a multiple of 16 bytes; others each call would copy",
            "store it so: weight.data = weight.data.contiguous()",
        )


def _offered_rows(
    replacements: Sequence[Any],
    nodes: Mapping[Any, fx.Node],
    functions: Mapping[GlobalVar, Any],
    target: Device,
    cpu: bool,
    options: Backend,
) -> list[RowsCall]:
    """Build the kernels of chains of symbolic rows, and give the calls that take their place.

    More rows than any bin has, and bins in which fusion is not estimated to pay, are left to torch.
    `nodes` are those of the translation.
    """
    names = (name for each in replacements for name in each.kernels.values() if name is not None)
    made = kernels_of({str(name.name_hint): functions[name] for name in names}, target, cpu)
    runs = {name: each.run for name, each in made.items()}
    calls = []
    for each in replacements:
        where = "cpu" if cpu else target.name
        kernel = _kernel(each, functions, runs, where)
        if options.rest == "inductor":
            compiled = torch.compile(each.form.run, dynamic=True, mode=options.mode or None)
            kernel = replace(kernel, eager=compiled)
        offer_binned(kernel)
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


def _with_bins(outcome: ChainOutcome) -> ChainOutcome:
    """Say in an outcome's text in which bins there is a kernel, if it has bins."""
    most = ", ".join(str(each.rows) for each in outcome.bins if each.name)
    return (
        replace(outcome, text=f"{outcome.text}; kernels for up to {most} rows") if most else outcome
    )
