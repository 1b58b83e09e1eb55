"""What ranks of a process group do in tests on one GPU, which two processes share."""

from __future__ import annotations

from cpu.process_groups import main


def sums() -> list[bool]:
    """Whether sums are those of float32 in the order of ranks, call by call and in a graph."""
    import torch
    import torch.distributed as dist

    from crossfuse.torch import all_reduce, connect_ranks

    torch.manual_seed(dist.get_rank())
    connection, right = connect_ranks(deadline=30.0), []
    for shape, dtype in (((1, 4096), torch.bfloat16), ((33, 8), torch.float32)):
        given = torch.randn(shape).to(dtype)
        every = [torch.empty_like(given) for _ in range(2)]
        dist.all_gather(every, given)
        expected = sum(each.float() for each in every).to(dtype)
        x = given.cuda()
        right += [torch.equal(all_reduce(x).cpu(), expected) for _ in range(10)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = all_reduce(x)
        for _ in range(3):
            y.zero_()
            graph.replay()
            right.append(torch.equal(y.cpu(), expected))
    connection.check()
    return right


def behind() -> list[bool]:
    """Whether collectives are right where one rank comes a while after the other, each in turn."""
    import time

    import torch
    import torch.distributed as dist

    import crossfuse.torch as ours

    connection, right = ours.connect_ranks(deadline=30.0), []
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for shape in ((16, 64), (512, 4096)):
        for turn in range(6):
            given = torch.randn(shape, generator=generator).bfloat16()
            every = [torch.empty_like(given) for _ in range(2)]
            dist.all_gather(every, given)
            due = sum(each.float() for each in every).bfloat16()
            half = slice(rank * shape[0] // 2, (rank + 1) * shape[0] // 2)
            calls = {
                "all_reduce": due,
                "all_gather": torch.cat(every),
                "reduce_scatter": due[half],
                "all_to_all": torch.cat([each[half] for each in every]),
            }
            x = given.cuda()
            for name, expected in calls.items():
                torch.cuda.synchronize()
                dist.barrier()
                if rank == turn % 2:
                    time.sleep(0.02)
                got = getattr(ours, name)(x)
                right.append(torch.equal(got.cpu(), expected))
    connection.check()
    return right


def in_parts() -> list[bool]:
    """Whether products in parts are those of one product, call by call and in a graph."""
    import time
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    import crossfuse.torch as ours

    connection, right = ours.connect_ranks(deadline=30.0), []
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x, weight = torch.randn(256, 512).bfloat16(), torch.randn(512, 384).bfloat16()
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x)
    x, weight, full = x.cuda(), weight.cuda(), torch.cat(every).cuda()
    made = full @ weight
    products = [torch.empty_like(made.cpu()) for _ in range(2)]
    dist.all_gather(products, made.cpu())
    half = slice(rank * 256, (rank + 1) * 256)
    due = sum(each.float() for each in products)[half].cuda()

    def check(gathered: torch.Tensor, scattered: torch.Tensor) -> None:
        right.append(torch.allclose(gathered, made, rtol=1e-2, atol=1e-2))
        right.append(torch.allclose(scattered.float(), due, rtol=2e-2, atol=0.2))

    where = "crossfuse.torch.rank_products"
    with (
        patch(f"{where}.gathered_times", return_value=(1.0, 2.0)),
        patch(f"{where}.scattered_times", return_value=(1.0, 2.0)),
    ):
        for turn in range(10):
            dist.barrier()
            if rank == turn % 2:
                time.sleep(0.02)
            check(ours.all_gather_matmul(x, [weight])[0], ours.matmul_reduce_scatter(full, weight))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ours.all_gather_matmul(x, [weight])[0], ours.matmul_reduce_scatter(full, weight)
        for _ in range(20):
            for each in found:
                each.zero_()
            graph.replay()
            check(*found)
    connection.check()
    return right


def late() -> str:
    """What the rank is told that was waiting."""
    import torch
    import torch.distributed as dist

    from crossfuse.errors import EnvironmentRefused
    from crossfuse.torch import all_reduce, connect_ranks
    from crossfuse.torch.collectives import ALL_REDUCE

    connect_ranks().close()
    connection, text = connect_ranks(deadline=0.5), "nothing"
    x = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    connection.ranks.prepare(ALL_REDUCE, 4096, "bfloat16")
    dist.barrier()
    if dist.get_rank() == 0:
        all_reduce(x)
        try:
            connection.check()
        except EnvironmentRefused as error:
            text = str(error)
        try:
            all_reduce(x)
        except EnvironmentRefused as error:
            text += str(error)
    dist.barrier()
    return text


if __name__ == "__main__":
    main(sums, behind, in_parts, late)
