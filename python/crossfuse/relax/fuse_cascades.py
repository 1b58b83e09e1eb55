"""The pass that rewrites cascades of reductions in a module as streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import tvm
from tvm import relax
from tvm.ir import GenericConst, GlobalVar

from crossfuse import _tvm as ir
from crossfuse.cache import answered, content_key, shelf
from crossfuse.calls import checked
from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.cascade.spec import Site
from crossfuse.hardware import Device, device
from crossfuse.relax.calls import SCHEDULED, marked, read_calls
from crossfuse.relax.cascades.groups import CascadeGroup, calls_of, find_cascades
from crossfuse.relax.cascades.kernels import Cascades, Kernel, swept
from crossfuse.relax.graph import Graph, with_body
from crossfuse.relax.merge import name_of
from crossfuse.relax.replace import Replacement, call_of_nodes, replaced
from crossfuse.schema import Damaged, read, shown

#: Bytes of constants in a module that is looked up. Weights belong to the parameters: in the module
#: they would be hashed, and kept, with each of its versions.
_MOST = 16 * 2**20
#: TVM's attribute of functions that says how they fuse, and its value for those that never do.
_PATTERN, _OPAQUE = "op_pattern", 8


@dataclass(frozen=True)
class Outcome:
    """What became of a function, or of several that are called in a dataflow block.

    Attributes
    ----------
    function : str
        Its name in the module; of several that of the function that took their place, empty if
        none did.
    form : str
        ``"tiles"`` of products, ``"threads"`` that stream, ``"rows"`` that the kernel of their
        product makes first, or empty where it was left alone.
    reason : str
        The reductions that were fused, with the estimates that chose ``"rows"``; or why none were.
    calls : tuple[str, ...]
        Functions whose calls were taken together, in order; empty for a function of its own.
    apart : tuple[str, ...]
        Neighbours in the dataflow that were not taken in, each with the reason.
    before, after : int
        Bytes that one run moves, see `crossfuse.relax.cascades.kernels`; equal where nothing was
        fused.

    Examples
    --------
    >>> sums = "max (max), sum (sum) over 1024 elements"
    >>> made = Outcome("softmax", "threads", sums, before=1_048_576, after=524_288)
    >>> made.before // made.after  # of the bytes that one run moves
    2
    """

    function: str
    form: str
    reason: str
    calls: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    before: int = 0
    after: int = 0


# Modules in which cascades were fused before, from the cache.


@dataclass(frozen=True)
class _Changes:
    """What the pass changed in a module: new and replaced functions, and names of removed ones."""

    #: A module of these functions in TVM's JSON; empty if nothing changed.
    new: str
    gone: tuple[str, ...]
    #: The lines of the report.
    rows: tuple[Outcome, ...]


def _once(
    mod: Any,
    target: Device,
    options: Sequence[Any],
    make: Callable[[], tuple[Any, Sequence[Outcome]]],
) -> tuple[Any, tuple[Outcome, ...]]:
    """Run the pass on a module, or take its result from the cache.

    A module with attributes, such as libraries, or with many bytes of constants is not looked up.
    Options enter the cache key by their ``repr``. `make` runs the pass and gives the module, `mod`
    itself where nothing changed, and the report.
    """
    if mod.attrs or _constant_bytes(mod) > _MOST:
        made, rows = make()
        return made, tuple(rows)

    def use(text: str) -> tuple[Any, tuple[Outcome, ...]]:
        found = read(_Changes, text)
        return _changed(mod, found), found.rows

    key = content_key(target, "cascades", *map(repr, options), tvm.ir.save_json(mod))
    names = ", ".join(str(each.name_hint) for each in mod.get_global_vars())
    label = f"{names[:80]} for {target.name}"
    answer = partial(_changes, mod, make)
    return answered(shelf("cascades"), key, label, answer, use)


def _changes(mod: Any, make: Callable[[], tuple[Any, Sequence[Outcome]]]) -> str:
    made, rows = make()
    before, after = dict(mod.functions_items()), dict(made.functions_items())
    new = {
        name: func
        for name, func in after.items()
        if name not in before or not before[name].same_as(func)
    }
    gone = tuple(str(name.name_hint) for name in before if name not in after)
    text = tvm.ir.save_json(tvm.IRModule(new)) if new else ""
    return json.dumps(asdict(_Changes(text, gone, tuple(rows))))


def _changed(mod: Any, changes: _Changes) -> Any:
    """A module with `_changes` applied.

    Functions that did not change and global variables stay the same objects.
    """
    if not changes.new:
        return mod
    names = {str(each.name_hint): each for each in mod.get_global_vars()}

    def name_of(variable: Any) -> Any:
        return names.setdefault(str(variable.name_hint), variable)

    made = mod.clone()
    for variable, func in ir.load_json(changes.new, tvm.IRModule).functions_items():
        renamed = ir.mutate(func, (GlobalVar, lambda each, _: name_of(each)))
        made.update_func(name_of(variable), renamed)
    for name in changes.gone:
        if name not in names:
            raise Damaged(f"gone: {shown(name)}", "functions of the module")
        del made[names[name]]
    return made


def _constant_bytes(mod: Any) -> int:
    found: list[Any] = []
    for func in mod.functions.values():
        ir.walk(func, (GenericConst, found.append))
    return sum(each.value.numpy().nbytes for each in found)


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.FuseCascades")
@checked
class FuseCascades:
    """Rewrite cascades of reductions as streams, scheduled for the GPU.

    A pass over modules after ``LegalizeOps``; ``FuseOps`` and ``FuseTIR`` may run before it or
    behind it. Calls in a dataflow block whose reductions share an axis, and element-wise calls
    around them, become one function: in the tile form if products make its elements or its results
    (attention, products behind norms), else threads that stream (softmax, norms, losses). Which
    calls is found by what they read and over which loops. What is called elsewhere, and holds a
    cascade of its own, is rewritten too. All others stay as they are.

    Parameters
    ----------
    target : str | Device | None
        What sizes are chosen for.
    tiles : CascadeTiles | None
        Sizes of tile forms. None leaves those of each cascade to the planner, and leaves alone
        what does not lower.
    stream : StreamTiles | None
        The same of other streams.

    Attributes
    ----------
    outcomes : tuple[Outcome, ...]
        What became of the last module: groups of calls, then functions of their own.

    Examples
    --------
    >>> import torch
    >>> import tvm
    >>> from crossfuse.relax import import_torch
    >>> mod = import_torch(torch.nn.Softmax(-1).eval(), (torch.zeros(64, 1024),)).mod
    >>> fuse = FuseCascades()
    >>> mod = tvm.ir.transform.Sequential([tvm.relax.transform.LegalizeOps(), fuse])(mod)
    >>> [each.form for each in fuse.outcomes]
    ['threads']
    """

    def __init__(
        self,
        target: str | Device | None = None,
        *,
        tiles: CascadeTiles | None = None,
        stream: StreamTiles | None = None,
    ) -> None:
        self.target = device(target)
        self.tiles = tiles
        self.stream = stream
        self.outcomes: tuple[Outcome, ...] = ()

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `FuseCascades`.

        Parameters
        ----------
        mod : tvm.IRModule
            The module; it stays as it is.

        Returns
        -------
        tvm.IRModule
            With calls of the kernels.
        """
        options = (self.tiles, self.stream)
        made, self.outcomes = _once(mod, self.target, options, lambda: self._made(mod))
        return made

    def _made(self, mod: Any) -> tuple[Any, list[Outcome]]:
        work = _Module(mod, Cascades(self.target, self.tiles, self.stream))
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                work.take_function(name, func)
        for name, func in mod.functions_items():
            if isinstance(func, ir.PrimFunc):
                work.take_kernel(name, func)
        return work.finished(), work.outcomes


class _Module:
    def __init__(self, mod: Any, cascades: Cascades) -> None:
        self.mod = mod
        self.cascades = cascades
        self.builder = relax.BlockBuilder(mod.clone())
        self.outcomes: list[Outcome] = []
        self.callees: dict[Any, Any] = {}
        self.changed: dict[Any, Any] = {}
        self.left_over: list[Any] = []
        self.apart: dict[str, tuple[str, ...]] = {}

    def take_function(self, name: Any, func: Any) -> None:
        """Replace groups of calls in the dataflow blocks of a Relax function."""
        if not isinstance(func.body, relax.SeqExpr):
            return
        blocks = [self._block(each) for each in func.body.blocks]
        if any(new is not old for new, old in zip(blocks, func.body.blocks, strict=True)):
            body = self.builder.normalize(relax.SeqExpr(blocks, func.body.body))
            self.changed[name] = with_body(func, body, func.params)

    def _block(self, block: Any) -> Any:
        if not isinstance(block, relax.DataflowBlock):
            return block
        graph = read_calls(self.mod, block)
        every, refused = find_cascades(graph, self.cascades)
        groups = [each for each in every if _several(each)]
        alone = [each for each in every if not _several(each)]
        self.apart |= {calls_of(each.members)[0]: each.apart for each in alone}
        several = [each for each in refused if len(each.calls) > 1]
        self.outcomes += [Outcome("", "", each.reason, each.calls) for each in several]
        if not groups:
            return block
        calls = [self._replacement(graph, each) for each in groups]
        return relax.DataflowBlock(replaced(graph, graph.nodes, calls))

    def _replacement(self, graph: Graph, group: CascadeGroup) -> Replacement:
        if group.kernel not in self.callees:
            image = _finished(group.kernel.func, group.found.func)
            self.callees[group.kernel] = self.builder.add_func(image, _name(group))
        callee = self.callees[group.kernel]
        outcome = Outcome(
            str(callee.name_hint),
            group.kernel.form,
            _reason_of(group.found.site, group.kernel),
            calls_of(group.members),
            group.apart,
            group.before,
            group.kernel.bytes,
        )
        self.outcomes.append(outcome)
        return call_of_nodes(callee, graph, group.members)

    def take_kernel(self, name: Any, func: Any) -> None:
        """Replace a function that holds a cascade of its own, unless nothing calls it any more."""
        label = str(name.name_hint)
        private = not (func.attrs and "global_symbol" in func.attrs)
        if private and name in self.dropped:
            self.left_over.append(name)
            return
        if func.attrs and SCHEDULED in func.attrs:
            self.outcomes.append(Outcome(label, "", "it is scheduled already"))
            return
        found = self.cascades.found(func)
        kernel = found.reason or found.plain or self.cascades.kernel(found)
        before = swept(func)
        if not isinstance(kernel, Kernel):
            self.outcomes.append(Outcome(label, "", kernel, before=before, after=before))
            return
        self.changed[name] = _finished(kernel.func, func)
        text = _reason_of(found.site, kernel)
        apart = self.apart.get(label, ())
        self.outcomes.append(Outcome(label, kernel.form, text, (), apart, before, kernel.bytes))

    @cached_property
    def dropped(self) -> frozenset[Any]:
        """What Relax functions called before the pass alone; valid once all were rewritten."""
        before = {n: f for n, f in self.mod.functions_items() if isinstance(f, relax.Function)}
        now = [self.changed.get(name, func) for name, func in before.items()]
        return _names(before.values()) - _names(now)

    def finished(self) -> Any:
        """The module with all replacements."""
        if not self.changed:
            return self.mod
        made = self.builder.get()
        for name, func in self.changed.items():
            made.update_func(name, func)
        for name in self.left_over:
            del made[name]
        return made


def _names(functions: Iterable[Any]) -> frozenset[Any]:
    """Global variables that functions mention."""
    found: list[Any] = []
    for each in functions:
        ir.walk(each, (GlobalVar, found.append))
    return frozenset(found)


def _several(group: CascadeGroup) -> bool:
    return len(calls_of(group.members)) > 1


def _name(group: CascadeGroup) -> str:
    return "_".join(["fused", *name_of(group.members).split(", ")])


def text_of(site: Site | None) -> str:
    """Reductions and their axis, for reports."""
    assert site is not None
    stages = ", ".join(f"{each.name} ({each.monoid.name})" for each in site.cascade.stages)
    return f"{stages} over {int(site.extents[site.axis])} elements"


def _reason_of(site: Site | None, kernel: Kernel) -> str:
    """Reductions of a kernel, and the planner's estimates for it."""
    return "; ".join(filter(None, (text_of(site), kernel.why)))


def _finished(image: Any, func: Any) -> Any:
    """A function with the attributes of the one it replaces, scheduled and never to be fused."""
    image = marked(image)
    for name, value in (func.attrs or {}).items():
        image = image.with_attr(name, value)
    return image.with_attr(_PATTERN, _OPAQUE)
