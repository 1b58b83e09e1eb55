"""Attention of a few new tokens over a static cache: what becomes one kernel, and its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cpu.torch.decoder import (  # noqa: E402
    WAYS,
    Step,
    attended,
    found,
    found_in,
    gpu_graph,
    inputs,
    planned_attention,
)
from crossfuse.cascade.rewrite.work import Pass  # noqa: E402
from crossfuse.emulate.cuda import emulate  # noqa: E402
from crossfuse.emulate.llvm import draw, limits, parameters  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.lower.extract import lower  # noqa: E402
from crossfuse.torch import Backend, Report, reports  # noqa: E402
from crossfuse.torch.translate import translate  # noqa: E402
from crossfuse.workload.tolerances import judge  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]


def copies(given: list[Any]) -> list[Any]:
    return [each.clone() for each in given]


def check(function: Any, given: list[Any], **options: Any) -> Report:
    """The compiled function, and what it leaves in the caches, are as right as torch's."""
    backend = Backend(rest="eager", cpu="llvm", **options)
    ours, theirs, doubles = copies(given), copies(given), copies(given)
    doubles = [each.double() if each.is_floating_point() else each for each in doubles]
    with torch.no_grad():
        got, eager = torch.compile(function, backend=backend)(*ours), function(*theirs)
        exact = function(*doubles)
    for one, other in zip(ours[1:3], theirs[1:3], strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    limit = 2 * (eager - exact).abs().max() + 1e-4 * exact.abs().max()
    assert got.dtype == eager.dtype and (got - exact).abs().max() <= limit
    return reports()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "step"),
    [
        *((way, Step()) for way in WAYS),
        *((way, Step(batch=3)) for way in WAYS),
        *((way, Step(batch=2, tokens=4)) for way in WAYS),
    ],
    ids=str,
)
def test_one_kernel_reads_the_cache_in_place(way: str, step: Step) -> None:
    given = inputs(step)
    (group,), _ = found(attended(step, way), given)
    shapes = [tuple(int(e) for e in each.ty.shape) for each in group.kernel.func.params]
    kept = step.batch * step.kv_heads * step.length * step.depth
    assert sorted(map(np.prod, shapes))[-2:] == [kept, kept], shapes
    report = check(attended(step, way), given, always=True)
    assert report.fused == ("crossfuse_cascade_0",), report.text()


def test_keys_that_are_the_values() -> None:
    """One call of an operator that is given a tensor twice, of which the kernel takes one."""
    given = [torch.randn(1, 2, rows, 64).bfloat16() for rows in (1, 256)]
    attention = torch.nn.functional.scaled_dot_product_attention
    report = check(lambda query, cache: attention(query, cache, cache), given, always=True)
    assert report.fused == ("crossfuse_cascade_0",), report.text()


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("added", [False, True], ids=["flags", "added"])
def test_masks(added: bool, window: int) -> None:
    step = Step(length=256)
    given = inputs(step, added=added, place=200, window=window)
    assert check(attended(step, "repeated"), given).fused


@pytest.mark.slow
def test_it_has_to_beat_what_torch_launches() -> None:
    """Torch's operator, and copies in front where keys are repeated; of a formula its passes.

    The operator takes as long as if a second kernel ended it.
    """
    step = Step(batch=4, heads=16, kv_heads=2, depth=64, length=512)
    own, kept = step.batch * step.heads * step.depth * 2, step.batch * step.length * step.depth * 4
    mask = step.batch * step.length * 2
    repeated = step.heads // step.kv_heads * kept
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    flops = 4 * step.batch * step.heads * step.length * step.depth
    end = Pass(f"{operator} (end)", own, own)
    due = {
        "shared": [Pass(operator, own + 2 * kept + mask, own, flops), end],
        "repeated": [
            Pass("clone", kept, repeated),
            Pass("clone_1", kept, repeated),
            Pass(operator, own + 2 * repeated + mask, own, flops),
            end,
        ],
    }
    for way, passes in due.items():
        (planned,) = planned_attention(attended(step, way), inputs(step))
        assert list(planned.plans[0].shape.passes) == passes
    (planned,) = planned_attention(attended(Step(), "formula"), inputs(Step()))
    assert len(planned.plans[0].shape.passes) > len(due["repeated"])


def test_what_follows_is_one_more_kernel_of_torch() -> None:
    step = Step()

    def doubled(q: Any, keys: Any, values: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, keys, values, enable_gqa=True) * 2

    (planned,) = planned_attention(doubled, inputs(step)[:3])
    own = step.heads * step.depth * 2
    *_, last = planned.plans[0].shape.passes
    assert len(planned.plans[0].shape.passes) == 3
    assert (last.read, last.written, last.flops) == (own, own, 0)


@pytest.mark.slow
def test_capped_scores() -> None:
    given = inputs(Step())
    assert check(attended(Step(), "formula", cap=5.0), given, always=True).fused


def test_masks_that_are_looked_up() -> None:
    """Padding of each sequence by indices, which are several calls of one operator in TVM."""
    step = Step(batch=3)
    *operands, _ = inputs(step)
    padded = torch.arange(step.length) >= torch.tensor([[3], [0], [7]])

    def forward(q: Any, keys: Any, values: Any, at: Any, k: Any, v: Any, padded: Any) -> Any:
        places = torch.arange(step.length)[None, None, None]
        sequences = torch.arange(step.batch)[:, None, None, None]
        seen = (places <= at[:, None]) & padded[sequences, places]
        mask = torch.where(seen, 0.0, -torch.inf).to(q.dtype)
        return attended(step, "formula", cap=5.0)(q, keys, values, at, k, v, mask)

    report = check(forward, [*operands, padded], always=True)
    assert report.fused == ("crossfuse_cascade_0",), report.text()


#: The last one is shared by the CTAs of clusters, most of which see nothing but hidden keys.
@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("added", [False, True], ids=["flags", "added"])
@pytest.mark.parametrize(
    "step", [Step(), Step(tokens=3, length=200), Step(tokens=3, length=512)], ids=str
)
def test_the_kernel_is_right(step: Step, added: bool, offset: float) -> None:
    """By the emulator: rows that see all, one and no key, and scores far from zero."""
    (group,), _ = found(attended(step, "repeated"), inputs(step, added=added))
    plain = group.found.func.with_attr("global_symbol", "main")
    known = parameters(plain)
    given = draw(known)
    for each in known:
        # Queries and keys that are nearly the same have large scores that differ little.
        if each.dtype == "bfloat16" and not each.output and each.shape[-1] == step.depth:
            wide = given[each.name].astype("float32")
            near = offset**0.5 + 1e-2 * wide if offset else wide
            given[each.name] = near.astype(given[each.name].dtype)
        elif each.shape[-1] == step.length:
            seen = np.arange(step.length) < np.array([1, 50, step.length])[: each.shape[-2], None]
            hidden = np.where(seen, 0, -np.inf).astype(given[each.name].dtype)
            mask = hidden if added else seen
            given[each.name] = np.broadcast_to(mask, each.shape).copy()
    image = lower(group.kernel.func, device("nvidia-h100")).image
    report = emulate(image, given)
    report.raise_if_wrong()
    (name,) = (each.name for each in known if each.output)
    judge(limits(plain, given), report.outputs[name], "attention")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficient", "cudnn", "flash"])
def test_operators_of_gpus_are_known(name: str) -> None:
    """With keys repeated, and a mask that is padded and expanded, as torch gives it to them."""
    step = Step(batch=2, length=120)
    q, keys, values, *_, mask = inputs(step)
    flags = {} if name == "flash" else {"mask": mask}
    graph = gpu_graph(step, name, q, keys, values, **flags)
    translation = translate(graph)
    (group,), _ = found_in(translation.module)
    shapes = {tuple(int(e) for e in each.ty.shape) for each in group.kernel.func.params}
    assert sum(np.prod(each) == keys.numel() for each in shapes) and not translation.untranslated
    assert max(map(np.prod, shapes)) == keys.numel()
    assert (tuple(mask.shape) in shapes) == bool(flags)


def test_many_queries_are_left_to_torch() -> None:
    step = Step(tokens=17)
    report = check(attended(step, "shared"), inputs(step), always=True)
    assert report.fused == () and report.outcomes == ()


def test_other_results_of_the_operator_are_left() -> None:
    step = Step()

    def forward(q: Any, k: Any, v: Any) -> Any:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, logarithms = attend(q, k, v)
        return y * 2, logarithms + 1

    shape = (1, step.heads, step.length, step.depth)
    given = [torch.randn(e).bfloat16() for e in ((1, step.heads, 1, step.depth), shape, shape)]
    groups, _ = found(forward, given)
    assert not groups


def test_wider_types_say_why_they_are_left() -> None:
    given = [each.float() if each.dtype == torch.bfloat16 else each for each in inputs(Step())]
    groups, refused = found(attended(Step(), "shared"), given)
    assert not groups
    assert any("wgmma" in each.reason or "float32" in each.reason for each in refused), refused
