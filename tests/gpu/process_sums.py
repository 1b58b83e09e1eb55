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


def late() -> str:
    """What the rank is told that was waiting."""
    import torch
    import torch.distributed as dist

    from crossfuse.errors import EnvironmentRefused
    from crossfuse.torch import all_reduce, connect_ranks

    connect_ranks().close()
    connection, text = connect_ranks(deadline=0.5), "nothing"
    x = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    connection.sums.prepare(4096, "bfloat16")
    dist.barrier()
    if dist.get_rank() == 0:
        all_reduce(x)
        try:
            connection.check()
        except EnvironmentRefused as error:
            text = str(error)
    dist.barrier()
    return text


if __name__ == "__main__":
    main(sums, late)
