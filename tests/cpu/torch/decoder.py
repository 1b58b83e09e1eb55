"""A decoder's attention over a static cache in plain torch, and what we find in its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from crossfuse.hardware import device
from crossfuse.relax.cascades.groups import CascadeGroup, Refused, find_cascades
from crossfuse.relax.cascades.kernels import Cascades
from crossfuse.torch.fuse_graph import CascadeKernels, PlannedCascade, legalised
from crossfuse.torch.translate import translate

F = nn.functional
#: Ways to write attention: an operator of torch for heads that share keys, one for keys that are
#: repeated, and products with a softmax between them.
WAYS = ("shared", "repeated", "formula")


@dataclass(frozen=True)
class Step:
    """Extents of one step, whose cache has `length` places."""

    batch: int = 1
    tokens: int = 1
    heads: int = 8
    kv_heads: int = 2
    depth: int = 32
    length: int = 128


def attended(step: Step, way: str, cap: float = 0.0) -> Callable[..., torch.Tensor]:
    """A function of queries, both caches, places of new tokens, new keys and values, and a mask.

    It writes to the caches in place. `cap` bounds scores, which no operator of torch does.
    """

    def forward(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        at: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        attend = F.scaled_dot_product_attention
        if way == "shared":
            y = attend(q, keys, values, attn_mask=mask, enable_gqa=True)
        elif way == "repeated":
            y = attend(q, repeated(step, keys), repeated(step, values), attn_mask=mask)
        else:
            scores = q @ repeated(step, keys).transpose(2, 3) * step.depth**-0.5
            scores = cap * torch.tanh(scores / cap) if cap else scores
            nothing = -torch.inf
            scores = torch.where(mask, scores, nothing) if flags(mask) else scores + mask
            weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
            y = weights.to(q.dtype) @ repeated(step, values)
        return y.transpose(1, 2).reshape(step.batch, step.tokens, -1)

    return forward


def repeated(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Keys or values, once for each head of queries."""
    share = step.heads // step.kv_heads
    wide = x[:, :, None].expand(step.batch, step.kv_heads, share, step.length, step.depth)
    return wide.reshape(step.batch, step.heads, step.length, step.depth)


def flags(mask: torch.Tensor) -> bool:
    """Whether a mask says what is seen, rather than what is added."""
    return mask.dtype == torch.bool


def inputs(step: Step, *, added: bool = False, place: int = 40, window: int = 0) -> list[Any]:
    """Operands of one step behind `place` tokens; what is not yet written is large.

    `added` makes a mask that is added; a `window` hides all but the last tokens.
    """
    torch.manual_seed(step.tokens)
    new = (step.batch, step.kv_heads, step.tokens, step.depth)
    kept = (step.batch, step.kv_heads, step.length, step.depth)
    q = torch.randn(step.batch, step.heads, step.tokens, step.depth)
    keys, values, k, v = (torch.randn(shape) for shape in (kept, kept, new, new))
    for each in (keys, values):
        each[:, :, place + step.tokens :] = 1e4
    at = torch.arange(place, place + step.tokens)
    every = torch.arange(step.length)[None]
    seen = every <= at[:, None]
    seen &= every > at[:, None] - window if window else True
    seen = seen.expand(step.batch, 1, -1, -1).contiguous()
    mask = torch.where(seen, 0.0, -torch.inf) if added else seen
    half = [each.bfloat16() for each in (q, keys, values)]
    return [*half, at, k.bfloat16(), v.bfloat16(), mask.bfloat16() if added else mask]


def graph_of(function: Callable[..., Any], given: list[Any]) -> fx.GraphModule:
    """The graph of aten operators that a backend gets for inference."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), dynamic=False)(*given)
    return found[0]


def gpu_graph(
    step: Step, name: str, *given: torch.Tensor, mask: torch.Tensor | None = None
) -> fx.Graph:
    """The graph of an operator that torch takes on GPUs alone; nothing runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> Any:
        k, v = repeated(step, k), repeated(step, v)
        if name == "flash":
            return operator(q, k, v)[0]
        added = torch.where(masks[0], 0.0, -torch.inf).to(q.dtype)
        added = F.pad(added, (0, 8))[..., : step.length]
        return operator(q, k, v, added.expand(-1, step.heads, -1, -1), False)[0]

    operands = given if mask is None else (*given, mask)
    graph = make_fx(attend, tracing_mode="fake")(*operands).graph
    graph.eliminate_dead_code()
    return graph


def found(
    function: Callable[..., Any], given: list[Any]
) -> tuple[tuple[CascadeGroup, ...], tuple[Refused, ...]]:
    """Groups of products and reductions in a function's graph, and those without a kernel."""
    return found_in(translate(graph_of(function, given).graph).module)


def found_in(module: Any) -> tuple[tuple[CascadeGroup, ...], tuple[Refused, ...]]:
    """The same of a translated graph."""
    groups, refused = find_cascades(legalised(module), _cascades())
    return tuple(each for each in groups if each.kernel.form == "tiles"), refused


def planned_attention(function: Callable[..., Any], given: list[Any]) -> list[PlannedCascade]:
    """What is planned of a function's graph: kernels, and what they have to beat."""
    translation = translate(graph_of(function, given).graph)
    kernels = CascadeKernels(device("nvidia-h100"), translation.nodes, None)
    candidates = kernels.candidates(legalised(translation.module))
    return [each.planned for each in candidates if isinstance(each.planned, PlannedCascade)]


@cache
def _cascades() -> Cascades:
    return Cascades(device("nvidia-h100"), None, None)
