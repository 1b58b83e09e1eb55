"""Compiling by inductor what is left after our chains were taken out of its graph."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from operator import getitem
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import fx

from crossfuse.errors import RefusedError
from crossfuse.torch.graph_cache import (
    Program,
    Record,
    program,
    program_key,
    to_file,
    torch_caches,
    write_program,
)
from crossfuse.torch.kernels import wait_for
from crossfuse.torch.report import BACKWARD, FORWARD, keep, left_to_torch, reports
from crossfuse.torch.short_sorts import sort_short

if TYPE_CHECKING:
    from crossfuse.torch.backend import Backend

_LOG = logging.getLogger(__name__)

# Products that inductor changes before we see them: kept whole until our chains are out.
#
# With ``coordinate_descent_tuning``, as the modes ``max-autotune`` set it, inductor's
# decompositions make sums of a GPU's products of one row or one column. With ``shape_padding``, as
# it is by default, its passes of joint graphs pad the operands of products of, say, four rows where
# that was faster when it timed both: a graph is another one from run to run, and what made the rows
# is cut off from the product. So both settings are off while torch traces a graph, and on again
# when our kernels stand in it: inductor's own rules then change the products that are left.
# Inductor asks for the first only there and where it writes kernels, which is later.

_SUMS, _PADDED = "coordinate_descent_tuning", "shape_padding"
#: Kernels that need nothing of each other share a launch.
_TOGETHER = "combo_kernels"
#: Rows of products at most beside which other kernels take little more than their launch.
_SHORT = 128
#: Operators that change by the first two.
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
#: Extents whose rows have whole 16 bytes need no padding.
_ALIGNED = 16
#: What later passes ask of a node beside its value, as torch notes it while it traces.
_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "seq_nr")


def kept_whole(inputs: Sequence[Any], patches: Mapping[str, Any]) -> dict[str, bool]:
    """Settings by which inductor would change products that our chains need, as they hold now.

    `patches` are its settings for this graph, beside those that hold anyway. None without a GPU,
    and with gradients: training has many rows.
    """
    from torch._inductor import config

    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if not any(each.device.type == "cuda" for each in tensors):
        return {}
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return {}
    names = (_SUMS, _PADDED)
    return {each: True for each in names if patches.get(each, getattr(config, each, False))}


def take_apart(module: fx.GraphModule, settings: Mapping[str, bool]) -> fx.GraphModule:
    """Change the products that a graph still has as inductor does; it may change in place.

    `settings` are those of `kept_whole`. Inductor's passes of joint graphs saw the products whole,
    and run again on what becomes of them. A product that cannot be traced again stays whole, which
    inductor compiles as well.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(settings):
        changed = False
        if _SUMS in settings:
            rules = select_decomp_table()
            changed = any([_take_apart(each, rules) for each in _parts(module)])
        if _PADDED in settings:
            changed = changed or any(map(_is_odd, _products(module)))
        return _joint_passes(module) if changed else module


def _products(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Products of a graph and of those nested in it."""
    for part in _parts(module):
        yield from (each for each in part.graph.nodes if _name(each.target) in _PRODUCTS)


def _is_odd(product: fx.Node) -> bool:
    """Whether a product of more than few rows has operands that inductor may pad."""
    from crossfuse.planner.families.skinny import ROWS

    if _rows(product) <= ROWS:
        return False
    values = [each.meta.get("val") for each in product.all_input_nodes[-2:]]
    return any(
        not isinstance(extent, int) or extent * each.element_size() % _ALIGNED
        for each in values
        if isinstance(each, torch.Tensor)
        for extent in each.shape[-2:]
    )


def _rows(product: fx.Node) -> float:
    """Rows of a product; no number where they are not known."""
    value = product.meta.get("val")
    rows = value.shape[-2] if isinstance(value, torch.Tensor) else None
    return rows if isinstance(rows, int) else math.inf


def _sums(product: fx.Node) -> bool:
    """Whether a product adds up anything: positions by frequencies are an outer product."""
    value = product.args[-2].meta.get("val") if isinstance(product.args[-2], fx.Node) else None
    return not isinstance(value, torch.Tensor) or value.shape[-1] != 1


def _parts(module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and those nested in it, as branches have them."""
    return [each for each in module.modules() if isinstance(each, fx.GraphModule)]


def _take_apart(module: fx.GraphModule, rules: Mapping[Any, Callable[..., Any]]) -> bool:
    """Decompose the products of one graph; False if all of them stay whole."""
    products = [each for each in module.graph.nodes if _name(each.target) in _PRODUCTS]
    changed = [each for each in products if _inlined(each, rules)]
    if changed:
        module.graph.lint()
        module.recompile()
    return bool(changed)


def _inlined(node: fx.Node, rules: Mapping[Any, Callable[..., Any]]) -> bool:
    """Put what a rule makes of a product in its place; False where the product stays whole."""
    inner = _traced(node, rules)
    if inner is None or any(each.target is node.target for each in inner.nodes):
        return False
    given = iter(node.all_input_nodes)
    images: dict[fx.Node, fx.Node] = {}
    with node.graph.inserting_before(node):
        for each in inner.nodes:
            if each.op == "placeholder":
                images[each] = next(given)
            elif each.op == "output":
                node.replace_all_uses_with(images[each.args[0]])
            else:
                images[each] = node.graph.node_copy(each, images.__getitem__)
                images[each].meta |= {key: node.meta[key] for key in _ORIGIN if key in node.meta}
    node.graph.erase_node(node)
    return True


def _traced(node: fx.Node, rules: Mapping[Any, Callable[..., Any]]) -> fx.Graph | None:
    """The graph that tracing one node by rules gives; None where torch cannot trace it."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = node.all_input_nodes
    values = [each.meta.get("val") for each in inputs]
    if not all(isinstance(each, torch.Tensor) for each in values):
        return None

    def whole(*given: Any) -> Any:
        images = dict(zip(inputs, given, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), images.__getitem__)
        return node.target(*args, **kwargs)

    # What autocast casts is in the graph already.
    modes = (enable_python_dispatcher(), torch.no_grad(), torch._C._DisableAutocast())
    with ExitStack() as stack:
        for each in modes:
            stack.enter_context(each)
        try:
            traced = make_fx(whole, dict(rules))(*values)
        except Exception:  # whatever torch says to it, the product is right as it stands
            return None
    ops = {each.op for each in traced.graph.nodes}
    return traced.graph if ops <= {"placeholder", "call_function", "output"} else None


def _joint_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Run inductor's passes of joint graphs again, such as those that merge casts.

    A user's own passes ran when the products were whole.
    """
    from torch._inductor import compile_fx, config

    passes = compile_fx._recursive_joint_graph_passes
    known: dict[str, Any] = {}
    if "input_device" in inspect.signature(passes).parameters:
        known["input_device"] = _place(module)
    own = ("joint_custom_pre_pass", "joint_custom_post_pass")
    with config.patch({each: None for each in own if hasattr(config, each)}):
        found = passes(module, **known)
    return module if found is None else found


def _place(module: fx.GraphModule) -> torch.device | None:
    """The device by which inductor chooses patterns: that of the first tensor among the inputs."""
    given = (each.meta.get("val") for each in module.graph.nodes if each.op == "placeholder")
    return next((each.device for each in given if isinstance(each, torch.Tensor)), None)


def _name(operator: Any) -> str:
    """Name of an operator without its overload, as ``aten::mm``; empty for what has no schema."""
    return str(getattr(getattr(operator, "_schema", None), "name", ""))


def launched_together(module: fx.GraphModule) -> dict[str, bool]:
    """Inductor's settings by which kernels that need nothing of each other share a launch.

    Of a graph whose products have few rows each kernel takes little more than its launch; of larger
    ones it takes as long as memory needs, and gains nothing. Inductor calls such kernels
    experimental: those that draw random numbers do not compile (torch 2.11).
    """
    from torch._inductor import config

    place = _place(module)
    # Not those of one matrix for each head.
    products = [each for each in _products(module) if _name(each.target) != "aten::bmm"]
    rows = [_rows(each) for each in products if _sums(each)]
    few = bool(rows) and max(rows) <= _SHORT
    if not few or place is None or place.type != "cuda":
        return {}
    nodes = (each for part in _parts(module) for each in part.graph.nodes)
    if any(_draws(each.target) for each in nodes):
        return {}
    return {each: True for each in (_TOGETHER,) if hasattr(config, each)}


#: Kernels start while the one before them ends (programmatic dependent launch).
_EARLY = "triton.enable_pdl"


@contextmanager
def waiting_first() -> Iterator[bool]:
    """Let kernels of inductor that start early wait before they read or write anything.

    Inductor lets them read what the kernel before the last one has written before they wait, as
    that one has ended: each of its own kernels waits before it lets the next one start. Ours let it
    start first, so that weights are on their way, and may end later. Says whether this torch has
    such kernels; one that writes them elsewhere writes none.
    """
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    name = "_handle_pdl_before_access"
    knows = hasattr(config.triton, "enable_pdl")
    if not hasattr(TritonKernel, name):
        with config.patch({_EARLY: False} if knows else {}):
            yield False
        return

    def wait(kernel: Any, buffer: Any, *_: Any, **__: Any) -> None:
        if kernel._enable_pdl_codegen():
            in_loop = kernel.inside_reduction and kernel.range_trees[-1].is_loop
            (kernel.body if in_loop else buffer).writeline(kernel.GDC_WAIT)

    with patch.object(TritonKernel, name, wait):
        yield knows


def count_together(module: fx.GraphModule) -> None:
    """Let inputs of one element that are counted up in place share one launch.

    So are positions of caches: those of each layer are its own, and are read far apart, where
    inductor shares launches (`launched_together`) only of what its order has side by side.
    """
    counted: dict[Any, list[tuple[fx.Node, fx.Node, fx.Node]]] = {}
    for node in module.graph.nodes:
        if (found := _counted(node)) is not None:
            held, sum_of, step = found
            value = held.meta["val"]
            counted.setdefault((step, value.dtype, value.device), []).append((held, sum_of, node))
    for (step, *_), every in counted.items():
        if len(every) > 1:
            _count(module.graph, step, every)
    module.recompile()


def _counted(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """The input of one element that a node writes, its sum with a number, and the number."""
    if node.target is not torch.ops.aten.copy_.default:
        return None
    held, made, *_ = node.args
    if not isinstance(made, fx.Node) or made.target is not torch.ops.aten.add.Tensor:
        return None
    first, step = made.args if len(made.args) == 2 and not made.kwargs else (None, None)
    value = held.meta.get("val") if isinstance(held, fx.Node) and held.op == "placeholder" else None
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or type(step) is not int:
        return None
    same = first is held and made.meta["val"].dtype == value.dtype
    return (held, made, step) if same and set(made.users) == {node} else None


def _count(graph: fx.Graph, step: int, every: Sequence[tuple[fx.Node, fx.Node, fx.Node]]) -> None:
    """Add a number to several inputs at once, in front of where the first of them is written."""
    sums = torch.ops.aten._foreach_add.Scalar
    with graph.inserting_before(every[0][-1]):
        together = graph.call_function(sums, ([held for held, _, _ in every], step))
        together.meta["val"] = [each.meta["val"] for _, each, _ in every]
        for place, (_, each, _) in enumerate(every):
            one = graph.call_function(getitem, (together, place))
            one.meta |= each.meta
            each.replace_all_uses_with(one)
            graph.erase_node(each)


def _draws(operator: Any) -> bool:
    """Whether inductor writes a kernel with random numbers for an operator.

    It calls a library's for attention, which is tagged so because it can drop weights.
    """
    seeded = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    return seeded and "attention" not in _name(operator)


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], backend: Backend
) -> Callable[..., Any]:
    """Compile a captured graph by inductor, after our chains were taken out of it.

    We stand before the compiler of inner graphs: of inductor's hooks only that one learns in every
    release whether a graph is for inference. Of a graph with gradients it is given two, as
    inductor's own partitioner cuts them; that of the backward pass may come as late as in the first
    backward pass. Torch calls what is returned instead of the graph; where it will write that to a
    file, it is a `crossfuse.torch.inductor_artifact.SavedProgram`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError

    made: list[Record | None] = []
    called: list[str] = []

    patches = _settings(backend.mode)
    whole = kept_whole(inputs, patches)
    kept = _program(module, inputs, backend, whole)

    def inner(graph: fx.GraphModule, given: Sequence[Any], **known: Any) -> Any:
        part, settings = _part(known), launched_together(graph)
        if settings:
            sort_short(graph)
        unfused = _copy(graph)
        made.append(backend.fuse(graph, part, wait=False))
        report, keys = reports()[-1], _called(graph.graph)
        # Before torch keeps the program, which it does with its last graph.
        if kept is not None and part != FORWARD and None not in made:
            write_program(kept, [each for each in made if each is not None])
        # Inductor's cache of graphs comes after us: `fuse` has offered the kernels that they call,
        # by keys that say what is in them.
        compiled = rest(graph, given, settings, known)
        try:
            wait_for(keys)  # nvcc ran beside inductor
        except Exception as error:  # whatever it is, the graph is right without us
            keep(replace(left_to_torch(error), part=part), report)
            made[-1] = None
            if kept is not None:  # the program that torch keeps is another one
                write_program(replace(kept, records=()))
            if context := torch._guards.TracingContext.try_get():
                del (context.output_strides or [])[:]  # those of the fused graph
            backend.fuse_over_ranks(unfused)  # as other ranks do, which may have their kernels
            return rest(unfused, given, settings, known)
        called.extend(keys)
        return compiled

    def rest(
        graph: fx.GraphModule,
        given: Sequence[Any],
        settings: Mapping[str, bool],
        known: Mapping[str, Any],
    ) -> Any:
        apart = take_apart(graph, whole)
        plain = _copy(apart) if settings else apart
        if settings:
            count_together(apart)
        try:
            with waiting_first() as early:
                more = {_EARLY: True} if early and settings and backend.early else {}
                with config.patch({**whole, **settings, **more}):
                    return compile_fx_inner(apart, given, **known)
        except InductorError as error:
            if not settings:
                raise
            _LOG.warning("inductor compiles each kernel alone: sharing launches, %s", error)
            with waiting_first(), config.patch(whole):
                return compile_fx_inner(plain, given, **known)

    patches |= dict.fromkeys(whole, False)
    with torch_caches(kept):
        compiled: Callable[..., Any] = compile_fx(
            module, inputs, inner_compile=inner, config_patches=patches or None
        )
    if kept is not None and not made:  # torch had the program
        for each in kept.records:
            keep(each.report)
    if to_file():
        from crossfuse.torch.inductor_artifact import SavedProgram

        return SavedProgram(compiled, [each for each in made if each is not None], called)
    return compiled


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(module, deepcopy(module.graph))


def _settings(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode)} if mode else {}


def _program(
    module: fx.GraphModule, inputs: Sequence[Any], backend: Backend, whole: Mapping[str, bool]
) -> Program | None:
    """The cache's record of a captured graph; None if torch is not to keep the graph whole."""
    places = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    if len(places) != 1 or not hasattr(torch.compiler.config, "cache_key_tag"):
        return None
    (place,) = places
    if to_file() or _dynamo_keeps():
        return None
    if not backend.runs_on(place) or backend.sequential(place):
        return None
    # Torch's own key has the settings while it traces, so ours tells that another one holds later.
    options = (*backend.choices, *sorted(whole))
    try:
        key = program_key(module, inputs, backend.device_of(place), options)
    except RefusedError:  # said when the graph is fused
        return None
    return program(key) if key else None


def _part(known: Mapping[str, Any]) -> str:
    """Which graph of a training step inductor compiles, by what it is told; none in inference."""
    if known.get("is_inference"):
        return ""
    return BACKWARD if known.get("is_backward") else FORWARD


def _dynamo_keeps() -> bool:
    """Whether Dynamo caches what it compiles by the name of a function.

    It then takes programs of a backend without asking it, whatever its options are, so none of ours
    may be among them: kernels would not be loaded.
    """
    from torch._dynamo import config as dynamo

    return bool(getattr(dynamo, "caching_precompile", False))


def _called(graph: fx.Graph) -> list[str]:
    ours = [each for each in graph.nodes if getattr(each.target, "namespace", "") == "crossfuse"]
    return [str(each.args[-1]) for each in ours if _takes_kernel(each.target)]


def _takes_kernel(operator: Any) -> bool:
    """Whether an operator of ours is told the key of a kernel."""
    return bool(operator._schema.arguments[-1].name == "kernel")
