"""What ranks of a process group do in tests of tensor-parallel models; nobody has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from cpu.process_groups import main


def told() -> dict[str, Any]:
    """What became of the sums of the graph that was compiled last."""
    from crossfuse.torch import reports

    report = reports()[-1]
    names = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
    sums = [e for e in report.outcomes if any(node.startswith(names) for node in e.products)]
    return {
        "names": [each.name for each in sums],
        "texts": [each.text for each in sums],
        "reason": report.reason,
        "untranslated": [*report.untranslated],
    }


def layers() -> Any:
    """A column-parallel layer and a row-parallel one, as torch's tensor parallelism has them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    ).eval()
    x = torch.randn(4, 64)
    expected = model(x).detach()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan), x, expected


def compiled(**options: Any) -> dict[str, Any]:
    """Whether compiled layers are right, and what was reported."""
    import torch

    from crossfuse.torch import Backend

    torch._dynamo.reset()
    model, x, expected = layers()
    fn = torch.compile(model, backend=Backend(rest="eager", **options))
    with torch.no_grad():
        close = torch.allclose(fn(x), expected, atol=1e-5)
    return {"close": close, **told()}


def on_cpus() -> dict[str, Any]:
    return compiled()


def not_connected() -> dict[str, Any]:
    return compiled(cpu="llvm")


def connected() -> dict[str, Any]:
    from crossfuse.torch import connect_ranks

    assert connect_ranks() is connect_ranks()
    return compiled(cpu="llvm")


def _graph(run: Callable[[Any], Any], x: Any, **options: Any) -> dict[str, Any]:
    """A function in a graph gives what it gives without one."""
    import torch

    from crossfuse.torch import Backend

    torch._dynamo.reset()
    fn = torch.compile(run, backend=Backend(rest="eager", cpu="llvm", **options))
    with torch.no_grad():
        return {"equal": torch.equal(fn(x), run(x)), **told()}


def _summed(operation: str = "sum") -> Callable[[Any], Any]:
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    world = dist.group.WORLD
    return lambda x: all_reduce(x * 2, operation, world) + 1


def _given(*shape: int, dtype: str = "float32") -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    return torch.randn(shape).to(getattr(torch, dtype))


def bfloat16() -> dict[str, Any]:
    return _graph(_summed(), _given(8, 48, dtype="bfloat16"))


def many() -> dict[str, Any]:
    """As many GPUs have it, or links that are slower."""
    with patch("crossfuse.planner.cost.rank_rates.CollectiveTimes.nccl", lambda *_: 0.0):
        return _graph(_summed(), _given(128, 1024))


def many_of_ours() -> dict[str, Any]:
    return _graph(_summed(), _given(128, 1024))


def more_than_a_slab() -> dict[str, Any]:
    return _graph(_summed(), _given(16385, 1024), always=True)


def doubles() -> dict[str, Any]:
    return _graph(_summed(), _given(16, dtype="float64"))


def broken() -> dict[str, Any]:
    """What goes wrong behind the first change of a graph leaves it as it was."""
    from crossfuse.torch import collectives

    replace = collectives._replace

    def planted(*given: Any) -> None:
        replace(*given)
        raise ZeroDivisionError("planted")

    with patch("crossfuse.torch.collectives._replace", planted):
        return _graph(_scattered(16), _given(8, 48, dtype="bfloat16"))


def uneven() -> dict[str, Any]:
    return _graph(_summed(), _given(10007, 4), always=True)


def most() -> dict[str, Any]:
    return _graph(_summed("max"), _given(16))


def _scattered(rows: int) -> Callable[[Any], Any]:
    """A tensor collected from all ranks, and the own slice of a sum."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    world = dist.group.WORLD

    def run(x: Any) -> Any:
        full = all_gather_tensor(x * 2, 0, world)
        return reduce_scatter_tensor(full[:rows] + dist.get_rank(), "sum", 0, world) - 1

    return run


def slices() -> dict[str, Any]:
    return _graph(_scattered(16), _given(8, 48, dtype="bfloat16"))


def exchanged() -> dict[str, Any]:
    """Slices of one size for all ranks, and of several."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single

    world = dist.group.WORLD
    rank = dist.get_rank()

    def run(x: Any) -> Any:
        even = all_to_all_single(x * 2, None, None, world)
        given, got = ([3, 5], [3, 3]) if rank == 0 else ([3, 5], [5, 5])
        return even.sum() + all_to_all_single(x + 1, got, given, world).sum()

    return _graph(run, _given(8, 48, dtype="bfloat16"))


def rows_used_elsewhere() -> dict[str, Any]:
    return in_parts(lambda full: full.sum())


def in_parts(also: Callable[[Any], Any] = lambda full: 0) -> dict[str, Any]:
    """A sequence-parallel network: rows are collected for two products, and scattered behind one.

    Of three axes, and the first one's weight is used in front of them, too.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

    world = dist.group.WORLD
    torch.manual_seed(0)
    weights = [torch.randn(64, 64).bfloat16() / 8 for _ in range(3)]

    def run(x: Any) -> Any:
        gate, up, down = (each.to(x.dtype) for each in weights)
        turned = gate.T
        x = x + (x.reshape(-1, 64) @ turned).reshape(x.shape)
        full = all_gather_tensor(x, 0, world)
        one = torch.nn.functional.silu(full.reshape(-1, 64) @ turned).reshape(full.shape)
        made = torch.nn.functional.linear(one * torch.nn.functional.linear(full, up), down)
        return reduce_scatter_tensor(made, "sum", 0, world) + x + also(full)

    torch._dynamo.reset()
    x = _given(4, 2, 64, dtype="bfloat16")
    with (
        patch("crossfuse.torch.rank_products.gathered_times", return_value=(1.0, 2.0)),
        patch("crossfuse.torch.rank_products.scattered_times", return_value=(1.0, 2.0)),
        torch.no_grad(),
    ):
        from crossfuse.torch import Backend

        fn = torch.compile(run, backend=Backend(rest="eager", cpu="llvm"))
        exact = run(x.double())
        off, apart = ((each(x).double() - exact).norm() for each in (fn, run))
        return {"close": bool(off <= 2 * apart), **told()}


def others_by_hand() -> list[bool]:
    """Slices and collections, of what kernels take and of what torch does."""
    import torch
    import torch.distributed as dist

    from crossfuse.torch import all_gather, all_to_all, reduce_scatter

    right = []
    for given in (_given(6, 33), _given(4, 16).T, _given(4, dtype="float64"), _given(18)[2:]):
        every = [torch.empty_like(given.contiguous()) for _ in range(2)]
        dist.all_gather(every, given.contiguous())
        right.append(torch.equal(all_gather(given), torch.cat(every)))
        rows = given.shape[0] // 2
        mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        right.append(torch.equal(reduce_scatter(given), sum(every)[mine]))
        right.append(torch.equal(all_to_all(given), torch.cat([each[mine] for each in every])))
    return right


def by_hand_in_a_graph() -> list[str]:
    """What Dynamo warns of where a model that others compile calls collectives."""
    import warnings

    import torch

    from crossfuse.torch import all_gather

    torch._dynamo.reset()
    x = _given(6, 32)
    with warnings.catch_warnings(record=True) as heard, torch.no_grad():
        warnings.simplefilter("always")
        fn = torch.compile(lambda x: all_gather(x) * 2, backend="eager", fullgraph=True)
        right = torch.equal(fn(x), all_gather(x) * 2)
    return [str(right), *(str(each.message)[:80] for each in heard)]


def products_by_hand() -> list[bool]:
    """Products of collected rows, and sums of products of which each rank keeps its rows."""
    import torch
    import torch.distributed as dist

    from crossfuse.torch import all_gather_matmul, matmul_reduce_scatter

    x, weights = _given(6, 32), [_given(32, 16), _given(24, 32).T]
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    found = all_gather_matmul(x, weights)
    right = [
        torch.allclose(each, torch.cat(every) @ weight, atol=1e-5)
        for each, weight in zip(found, weights, strict=True)
    ]
    made = x @ weights[0]
    dist.all_reduce(made)
    mine = slice(dist.get_rank() * 3, (dist.get_rank() + 1) * 3)
    strided = x.T.contiguous().T
    for each in (x, strided):
        right.append(torch.allclose(matmul_reduce_scatter(each, weights[0]), made[mine], atol=1e-5))
    return right


def wrong_calls() -> list[str]:
    """What is said of rows that ranks do not divide, and of operands that are no matrices."""
    from crossfuse.errors import RefusedError
    from crossfuse.torch import (
        all_gather,
        all_gather_matmul,
        all_to_all,
        matmul_reduce_scatter,
        reduce_scatter,
    )

    calls = (
        lambda: reduce_scatter(_given(5, 4)),
        lambda: matmul_reduce_scatter(_given(3, 4), _given(4, 4)),
        lambda: all_gather(_given()),
        lambda: all_gather_matmul(_given(2, 3, 4), [_given(4, 4)]),
        lambda: all_gather_matmul(_given(2, 4), []),
        lambda: matmul_reduce_scatter(_given(2, 4), _given(5, 4)),
        lambda: all_to_all(_given(3, 4)),
        lambda: all_gather("x"),
        lambda: all_gather(_given(2, 4), "world"),
    )
    texts = []
    for call in calls:
        try:
            call()
            texts.append("nothing")
        except RefusedError as error:
            texts.append(str(error))
    return texts


def by_hand() -> list[bool]:
    """Sums that kernels take, and those that torch does; of views too."""
    import torch
    import torch.distributed as dist

    from crossfuse.torch import all_reduce

    right = []
    every = (_given(33), _given(4, 16).T, _given(5, dtype="float64"), _given(17)[1:], _given(0))
    for given in every:
        expected = given.clone()
        dist.all_reduce(expected)
        right.append(torch.equal(all_reduce(given), expected))
    return right


def gradients() -> str:
    from crossfuse.errors import WorkloadRefused
    from crossfuse.torch import all_reduce

    try:
        all_reduce(_given(4).requires_grad_())
    except WorkloadRefused as error:
        return str(error)
    return "nothing"


def one_rank() -> list[Any]:
    """A group of this process alone is left as it is."""
    import torch
    import torch.distributed as dist

    from crossfuse.torch import all_reduce, connect_ranks

    groups = [dist.new_group([each]) for each in range(2)]
    group = groups[dist.get_rank()]
    connection = connect_ranks(group)
    given = _given(8)
    unfit = connection.unfit(given)
    same = torch.equal(all_reduce(given, group), given)
    connection.close()
    return [same, unfit]


def closed() -> list[Any]:
    """A graph that calls kernels of a connection still sums when that is closed."""
    import torch

    from crossfuse.torch import Backend, connect_ranks

    torch._dynamo.reset()
    fn, x = torch.compile(_summed(), backend=Backend(rest="eager", cpu="llvm")), _given(16)
    before = fn(x)
    names = told()["names"]
    connection = connect_ranks()
    connection.check()
    connection.close()
    return [names, torch.equal(fn(x), before)]


if __name__ == "__main__":
    main(
        *(
            on_cpus,
            not_connected,
            connected,
            bfloat16,
            many,
            many_of_ours,
            more_than_a_slab,
        ),
        *(
            doubles,
            uneven,
            broken,
            most,
            slices,
            exchanged,
            in_parts,
            rows_used_elsewhere,
            by_hand,
            others_by_hand,
            by_hand_in_a_graph,
            products_by_hand,
            wrong_calls,
        ),
        *(gradients, one_rank, closed),
    )
