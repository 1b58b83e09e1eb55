"""Fusion of one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse import _tvm as ir
from crossfuse.cache import package_hash
from crossfuse.cascade.rewrite.work import Pass
from crossfuse.hardware import Device
from crossfuse.measure.choice import Measured
from crossfuse.measure.job import Given
from crossfuse.measure.timer import Timer
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, TILES
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.relax.calls import Equal, KernelCall, read_calls, with_early_starts
from crossfuse.relax.cascades.groups import CascadeGroup, find_cascades
from crossfuse.relax.cascades.kernels import Cascades, Found, Kernel
from crossfuse.relax.chains.experts import Experts
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.kinds import Chains, GroupKind, MadeChains
from crossfuse.relax.chains.many_rows import ManyRows
from crossfuse.relax.chains.planned import PlannedChain, PlannedRows, call_of
from crossfuse.relax.chains.products import FewRows, GatedFewRows
from crossfuse.relax.choice import (
    Candidate,
    Chosen,
    Measuring,
    PlannedGroup,
    choose,
    measured_kernels,
)
from crossfuse.relax.fuse_cascades import text_of
from crossfuse.relax.graph import (
    Graph,
    Node,
    in_order,
    is_number,
    read_graph,
    with_bindings,
    with_body,
)
from crossfuse.relax.operators import PRODUCT, dtype_of, legal_once, refused, shape_of
from crossfuse.relax.outcome import BinOutcome, ChainOutcome
from crossfuse.relax.replace import Replacement, with_replacements
from crossfuse.relax.sinks import JoinSinks
from crossfuse.relax.symbols import extents_of, is_symbolic
from crossfuse.torch.attention import is_attention, launches
from crossfuse.torch.graph_cache import Record
from crossfuse.torch.kernels import (
    BinnedKernel,
    KeptKernel,
    kernels_of,
    offer_binned,
    offer_kernels,
    wait_for,
)
from crossfuse.torch.report import Report, in_torch
from crossfuse.torch.rewrite import Call, RowsCall, is_frozen, lies_as_taken, rewrite
from crossfuse.torch.separate import EagerForm, eager_form, measuring
from crossfuse.torch.translate import Translation, translate

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend

# Cascades with products in a translated graph of torch: attention that is written as a formula.


#: The function that TVM makes of a product.
_LEGAL_PRODUCT = "matmul"
#: Products of attention, and the rank of what they multiply.
_PRODUCTS, _BATCHED = 2, 3


@dataclass(frozen=True)
class PlannedCascade(PlannedGroup):
    """A cascade with its plan and that of separate kernels."""

    group: CascadeGroup


class CascadeKernels:
    """Finds and plans cascades of products in a legalised graph, and collects their kernels.

    A kernel has to beat separate kernels of the products and of what lies between, as inductor
    makes them, or torch's own kernel of attention with what repeats its keys. Names of candidates
    are the operators that reduce.

    They begin and end with variables named as those in `known`, the nodes that they stand for,
    which stand in their calls: legalisation may bind new ones. With `measuring` kernels are timed.
    """

    def __init__(
        self, target: Device, known: Mapping[Var, fx.Node], measuring: Measuring | None
    ) -> None:
        self._target = target
        self._nodes = known
        self._known = {f"{each.name}{_OWN}": each for each in known}
        self._measuring = measuring
        self._callees: dict[Kernel, GlobalVar] = {}
        #: By what was found, and what torch launches instead.
        self._plans: dict[tuple[Found, tuple[Pass, ...]], tuple[CascadePlan, ...]] = {}

    @property
    def functions(self) -> dict[GlobalVar, Any]:
        """Scheduled functions of the kernels that were asked for."""
        return {callee: kernel.func for kernel, callee in self._callees.items()}

    def candidates(self, graph: Graph) -> Iterator[Candidate]:
        """See `crossfuse.relax.choice.Kernels`."""
        every = Cascades(self._target, None, None)
        groups, refused = find_cascades(graph, every, self._is_known)
        for group in (each for each in groups if each.kernel.form == TILES):
            names = tuple(_name(each) for each in in_order(group.members) if each.reduces)
            reason = self._refusal(graph, group)
            yield Candidate(names, None if reason else self._planned(graph, group), reason)
        for each in refused:
            if _LEGAL_PRODUCT in each.calls:
                yield Candidate(each.calls, None, each.reason)

    def kernel(self, planned: PlannedCascade, always: bool) -> Replacement:
        """See `crossfuse.relax.choice.Kernels`."""
        name = f"crossfuse_cascade_{len(self._callees)}"
        callee = self._callees.setdefault(planned.group.kernel, GlobalVar(name))
        shapes = tuple(shape_of(each, str(each.name)) for each in planned.given)
        result = planned.output
        return Replacement(callee, planned.given, shapes, (result,), (result.ty,))

    def _refusal(self, graph: Graph, group: CascadeGroup) -> str:
        """Why torch could not call the kernel; empty if it can."""
        outputs, inputs = graph.outputs(group.members), graph.inputs(group.members)
        if len(outputs) != 1:
            names = ", ".join(str(each.var.name) for each in outputs)
            return f"others read {len(outputs)} results of it: {names}"
        for each in (*inputs, outputs[0].var):
            if not self._is_known(each):
                return "it begins or ends inside of an operator"
        return ""

    def _is_known(self, value: Any) -> bool:
        """Whether an operator of torch makes a value, and not a part of one."""
        return isinstance(value, Var) and str(value.name) in self._known

    def _planned(self, graph: Graph, group: CascadeGroup) -> PlannedCascade:
        site, derivation = group.found.site, group.found.derivation
        assert site is not None and derivation is not None
        (output,) = graph.outputs(group.members)
        given = tuple(self._known[str(each.name)] for each in graph.inputs(group.members))
        made = self._known[str(output.var.name)]
        launched = self._launches(made, given)
        # Of equal layers all but the names of what torch launches is equal.
        key = group.found, tuple(replace(each, name="") for each in launched)
        plans = self._plans.get(key)
        if plans is None:
            shape = cascade_shape(site, derivation)
            shape = replace(shape, passes=launched or shape.passes)
            plans = (
                *ranked_cascade(shape, self._target, only=tuple(CASCADE_FAMILIES), keep=1),
                *ranked_cascade(shape, self._target, only=(EAGER,)),
            )
            self._plans[key] = plans
        planned = PlannedCascade(plans, None, made, given, text_of(site), group)
        return replace(planned, measured=self._measured(planned))

    def _launches(self, output: Var, given: Iterable[Var]) -> tuple[Pass, ...]:
        """Kernels of torch where attention is one operator of it; none where it is a formula."""
        node, nodes = self._nodes[output], [self._nodes[each] for each in given]
        return launches(node, eager_form([node], nodes).inside)

    def _measured(self, planned: PlannedCascade) -> Measured | None:
        if self._measuring is None:
            return None
        kernel, given = planned.group.kernel, planned.given
        return measured_kernels(
            self._measuring.timer,
            self._target,
            [ir.tvm.ir.save_json(kernel.func)],
            planned.summary,
            [planned.ours],
            lambda _: kernel.func,
            [Given(shape_of(each, str(each.name)), dtype_of(each)) for each in given],
            self._measuring.separate((planned.output,), given, [True] * len(given), {}),
        )


def may_have_attention(graph: Graph) -> bool:
    """Whether two products have batches on both sides, as products with weights of layers do not.

    Those of symbolic shapes do not count: kernels of cascades are written for one shape.

    A quick look first: to search for cascades takes more than a second for each layer of a model.
    Norms and softmaxes without products are left: inductor reads and writes them once too.
    Attention that is one operator of torch is looked at where its queries are few
    (`crossfuse.torch.attention`); of many it is left, as a fused kernel of cuDNN or flash attention
    already, and inductor makes one of the usual formulas before we see them.
    """
    if any(is_attention(each.value) for each in graph.nodes):
        return True
    products = (graph.arguments(each.var) for each in graph.nodes if each.operator == PRODUCT)
    static = (operands for operands in products if not any(map(is_symbolic, operands)))
    ranks = (min(len(extents_of(each)) for each in operands) for operands in static)
    return sum(each >= _BATCHED for each in ranks) >= _PRODUCTS


#: What names of a translated graph's variables end in while it is legalised: TVM makes several
#: calls of some operators, and names what they make as the graph names other values.
_OWN = "_"


def legalised(mod: Any) -> Graph:
    """The operators of a translated graph as calls of functions, without what nothing reads.

    Variables that the graph had have their names with `_OWN` behind them. Numbers that torch gave a
    name are read as numbers: a mask is known by them.
    """
    main = mod["main"]
    bindings = [each for block in main.body.blocks for each in block.bindings]
    every = (*main.params, *(each.var for each in bindings))
    own = {each: type(each)(f"{each.name}{_OWN}", each.ty) for each in every}
    read = own | {each.var: each.value for each in bindings if is_number(each.value)}

    def renamed(block: Any) -> list[Any]:
        return [
            relax.VarBinding(own[each.var], _with_variables(each.value, read))
            for each in block.bindings
        ]

    made = with_bindings(main, renamed, [own[each] for each in main.params])
    body = relax.SeqExpr(made.body.blocks, _with_variables(main.body.body, own))
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), with_body(made, body, made.params))
    legalize = relax.transform.LegalizeOps(legal_once(each.value for each in bindings))
    passes = [relax.transform.DeadCodeElimination(), JoinSinks(), legalize]
    legal = ir.tvm.ir.transform.Sequential(passes)(mod)
    (block,) = legal["main"].body.blocks
    return read_calls(legal, block)


def _name(node: Node) -> str:
    """The variable of a legalised graph's node, or the function where TVM bound it."""
    name = str(node.var.name)
    return name.removesuffix(_OWN) if name.endswith(_OWN) else node.name


def _with_variables(value: Any, image: Mapping[Any, Any]) -> Any:
    return ir.mutate(value, (Var, lambda var, _: image.get(var, var)))


def fuse_graph(
    module: fx.GraphModule,
    options: Backend,
    target: Device,
    sequential: bool,
    timer: Timer | None = None,
    wait: bool = True,
) -> tuple[Record, bool]:
    """Fuse a graph that the cache does not have, in place; False if a part of that went wrong.

    The graph has aten operators without mutation in between; its nodes carry ``meta["val"]``. It is
    translated once: its chains become kernels, those of symbolic rows one for each bin; what is
    left of the translation is searched for cascades; and the graph then calls all kernels. A
    failure in cascades leaves the chains. `sequential` runs the scheduled functions on the CPU
    instead of kernels. `timer` times kernels and takes the fastest; with None estimates choose.
    Without `wait` kernels may still be built, see `crossfuse.torch.kernels.wait_for`.
    """
    mode = (options.mode or "default") if options.rest == "inductor" else None
    translation = translate(module.graph)
    graph = read_graph(translation.module["main"])
    timed = None if timer is None else measuring(timer, mode, module.graph, translation)
    where, always = (target, sequential), options.always
    weights = _weights(module, translation)
    few = (FewRows(), GatedFewRows(), ManyRows(), Experts()) if options.products else ()
    kinds = (Chains(), MadeChains(), *few)
    kernels = TorchKernels(translation, target, options.bins, timed, weights, kinds)
    chains = in_torch(choose("main", graph, kernels, always), translation.names)
    static = [each for each in chains.replacements if not each.bins]
    starts = Starts(module.graph, translation.nodes, options.early)
    wait = wait or timed is not None  # beside what is timed, here or by inductor, nothing runs
    made, calls = _offered(translation, static, kernels.module, *where, starts, wait)
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
            more = _offered(translation, found.replacements, functions, *where, starts, wait)
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
    wait: bool,
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
    if wait:
        wait_for(each.key for each in called)
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
