"""Chains of symbolic rows: a kernel for each bin of rows, which takes fewer too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from crossfuse.cache.keys import package_hash
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.lower.extract import buffer_specs
from crossfuse.relax.chains.groups import Group, find_groups
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.choice import Chosen, choose
from crossfuse.relax.graph import read_graph
from crossfuse.relax.measured import Measuring
from crossfuse.relax.replace import Replacement
from crossfuse.torch.concrete import Concrete, concrete, extent, symbols_of
from crossfuse.torch.kernels import BinnedKernel, kernels_of, offer
from crossfuse.torch.report import in_torch
from crossfuse.torch.rewrite import RowsCall, rewrite_rows
from crossfuse.torch.separate import EagerForm, Timing, eager_form
from crossfuse.torch.translate import Translation, translate

#: The least that a symbol stands for: 0 and 1 are no symbols in torch, and 1 would be broadcast.
_LEAST = 2


@dataclass(frozen=True)
class _Bin:
    """A graph planned at the sizes of a bin, with the chains that become kernels there."""

    #: Rows of the chains at these sizes.
    rows: int
    #: Replacements by output and inputs, as nodes of the symbolic graph.
    calls: dict[tuple[fx.Node, tuple[fx.Node, ...]], Replacement]
    #: Scheduled functions by name.
    functions: Mapping[str, Any]
    #: Of all chains, with torch's names.
    outcomes: tuple[ChainOutcome, ...]


def fuse_rows(
    module: fx.GraphModule,
    target: Device,
    always: bool,
    cpu: bool,
    bins: Sequence[int],
    apart: Callable[[fx.GraphModule], Callable[..., Any]] = lambda module: module,
    timing: Timing | None = None,
) -> tuple[ChainOutcome, ...]:
    """Replace chains whose number of rows is symbolic, in place.

    The graph is translated and planned once for each bin, at sizes that give the chains as many
    rows. A call takes the kernel of the smallest bin that holds its rows. More rows than any bin
    has, and bins in which fusion is not estimated to pay, are left to what `apart` makes of the
    chain's graph. Outcomes are those of the bin that the example falls in. Further parameters are
    those of `crossfuse.torch.fuse_graph.fuse_graph`.
    """
    hints = {each: max(_LEAST, size) for each, size in symbols_of(module.graph).items()}
    outcomes: list[ChainOutcome] = []
    for rows in _row_counts(module.graph, hints):
        every = [
            _planned(module.graph, rows, each, target, always, timing)
            for each in _sizes(rows, bins)
        ]
        hint = int(rows.xreplace(hints))
        first = next((each for each in every if hint <= each.rows), every[-1])
        order = [first, *(each for each in every if each is not first)]
        calls = _calls(order, every, target, cpu, apart)
        if calls:
            rewrite_rows(module, list(calls.values()))
        outcomes += [_told(each, every) for each in first.outcomes]
    return tuple(outcomes)


def _row_counts(graph: fx.Graph, hints: Mapping[sympy.Symbol, int]) -> list[sympy.Expr]:
    """Symbolic numbers of rows of a graph's chains, each once."""
    if not hints:
        return []
    image = concrete(graph, hints)
    translation = translate(image.graph)
    groups = find_groups(read_graph(translation.module["main"]))
    found = (_node_of(each, translation, image) for each in groups)
    counts = (_rows_of(each) for each in found if each is not None)
    return list(dict.fromkeys(each for each in counts if each.free_symbols))


def _node_of(group: Group, translation: Translation, image: Concrete) -> fx.Node | None:
    """A node of the symbolic graph that makes rows of a group's result."""
    known = (each for each in (group.second, *group.after) if each in translation.nodes)
    variable = next(known, None)
    return None if variable is None else image.nodes[translation.nodes[variable]]


def _rows_of(node: fx.Node) -> sympy.Expr:
    """Rows of what a node makes: the product of all extents but the last."""
    return sympy.Mul(*map(extent, node.meta["val"].shape[:-1]))


def _sizes(rows: sympy.Expr, bins: Sequence[int]) -> list[dict[sympy.Symbol, int]]:
    """Values of symbols that give a chain the rows of each bin, as nearly as they divide."""
    (*others, last) = sorted(rows.free_symbols, key=str)
    fixed: dict[Any, int] = dict.fromkeys(others, _LEAST)
    each = max(1, int(rows.xreplace({**fixed, last: 1})))
    found = {max(_LEAST, most // each): None for most in sorted(bins)}
    return [{**fixed, last: size} for size in found]


def _planned(
    graph: fx.Graph,
    rows: sympy.Expr,
    sizes: Mapping[sympy.Symbol, int],
    target: Device,
    always: bool,
    timing: Timing | None,
) -> _Bin:
    """Plan a graph at the sizes of a bin, and choose its chains."""
    image = concrete(graph, sizes)
    translation = translate(image.graph)
    measuring = None if timing is None else timing.of(translation.nodes)
    chosen, made = chosen_chains(translation, target, always, measuring, fewer_rows=True)
    count = int(rows.xreplace(dict(sizes)))
    calls = {}
    known = {each.function for each in chosen.replacements}
    by_row = {each: tuple(buffer.rows for buffer in buffer_specs(made[each])) for each in known}
    for call in chosen.replacements:
        output, *given = (
            image.nodes[translation.nodes[each]] for each in (*call.outputs, *call.inputs)
        )
        key = (output, tuple(given))
        if _fits(key, call, rows, count, by_row[call.function]):
            calls[key] = call
    functions = {str(each.function.name_hint): made[each.function] for each in calls.values()}
    return _Bin(count, calls, functions, chosen.outcomes)


def chosen_chains(
    translation: Translation,
    target: Device,
    always: bool,
    measuring: Measuring | None,
    **options: Any,
) -> tuple[Chosen, Any]:
    """The chains of a translated graph that become kernels, and its module with the kernels.

    `always` also fuses chains that are estimated to be slower than separate kernels; `options` are
    further ones of `ChainKernels`. There is an outcome for each pair of layers.
    """
    kernels = ChainKernels(
        translation.module,
        target,
        constant_weights=False,
        named=False,
        measuring=measuring,
        known=frozenset(translation.nodes),
        **options,
    )
    chosen = choose("main", read_graph(translation.module["main"]), kernels, always)
    return in_torch(chosen, translation.names), kernels.module


def _fits(
    key: tuple[fx.Node, tuple[fx.Node, ...]],
    call: Replacement,
    rows: sympy.Expr,
    count: int,
    by_row: Sequence[bool],
) -> bool:
    """Whether a chain is symbolic in its rows alone, and has them in the first extents.

    `by_row` says which of the kernel's tensors have rows, the output last: the weights may have as
    many by chance, or because they are made of the input.
    """
    output, inputs = key
    nodes, shapes = (*inputs, output), (*call.shapes, call.shape)
    for node, shape, has_rows in zip(nodes, shapes, by_row, strict=True):
        elements = sympy.Mul(*map(extent, node.meta["val"].shape))
        due = rows * prod(shape[1:]) if elements.free_symbols else sympy.Integer(prod(shape))
        symbolic = bool(elements.free_symbols)
        if sympy.expand(elements - due) != 0 or symbolic != has_rows:
            return False
        if symbolic and shape[0] != count:
            return False
    return True


def _calls(
    order: Sequence[_Bin],
    every: Sequence[_Bin],
    target: Device,
    cpu: bool,
    apart: Callable[[fx.GraphModule], Callable[..., Any]],
) -> dict[fx.Node, RowsCall]:
    """Build kernels, and make the calls by output; of chains that overlap the first one wins.

    The first one is that of the first bin in `order`.
    """
    taken: set[fx.Node] = set()
    forms: dict[tuple[fx.Node, tuple[fx.Node, ...]], EagerForm] = {}
    for key in dict.fromkeys(key for each in order for key in each.calls):
        try:
            form = eager_form(*key)
        except RefusedError:
            continue
        if not taken & form.inside:
            taken |= form.inside
            forms[key] = form
    wanted = {
        _name(each, each.calls[key]): each.functions[str(each.calls[key].function.name_hint)]
        for key in forms
        for each in every
        if key in each.calls
    }
    runs = kernels_of(wanted, target, cpu)
    calls = {}
    for key, form in forms.items():
        kernel = _kernel(key, form, every, wanted, runs, "cpu" if cpu else target.name)
        kernel = replace(kernel, eager=apart(form.run))
        offer(kernel)
        calls[key[0]] = RowsCall(key[0], key[1], form.sizes, kernel.key)
    return calls


def _kernel(
    key: tuple[fx.Node, tuple[fx.Node, ...]],
    form: EagerForm,
    every: Sequence[_Bin],
    wanted: Mapping[str, Any],
    runs: Mapping[str, Any],
    where: str,
) -> BinnedKernel:
    """Assemble the kernels of one chain under a key that hashes all that they compute."""
    found = {each.rows: _name(each, each.calls[key]) for each in every if key in each.calls}
    call = next(each.calls[key] for each in every if key in each.calls)
    symbolic = [each.meta["val"].numel() for each in key[1]]
    shapes = tuple(
        (-1, *shape[1:]) if isinstance(count, torch.SymInt) else shape
        for count, shape in zip(symbolic, call.shapes, strict=True)
    )
    bins = tuple((each.rows, runs.get(found.get(each.rows, ""))) for each in every)
    texts = [wanted[each].script() for each in found.values()]
    digest = sha256(
        "\n".join([package_hash(), where, *texts, form.run.code, str(list(found))]).encode()
    )
    name = f"{call.function.name_hint}-rows-{digest.hexdigest()[:16]}"
    columns, width = call.shapes[0][-1], call.shape[-1]
    dtype = getattr(torch, call.dtype)
    return BinnedKernel(name, columns, width, dtype, shapes, bins, form.run)


def _name(where: _Bin, call: Replacement) -> str:
    return f"{call.function.name_hint}_{where.rows}"


def _told(outcome: ChainOutcome, every: Sequence[_Bin]) -> ChainOutcome:
    """Add to an outcome in which bins there is a kernel."""
    alike = [
        (each.rows, other)
        for each in every
        for other in each.outcomes
        if other.products == outcome.products and other.name
    ]
    if not alike:
        return outcome
    name = outcome.name or alike[0][1].name
    most = ", ".join(str(rows) for rows, _ in alike)
    return replace(outcome, name=name, text=f"{outcome.text}; kernels for up to {most} rows")
