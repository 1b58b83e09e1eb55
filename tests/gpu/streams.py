"""Graphs of a kernel that run on two streams at once, beside a busy one."""

from __future__ import annotations

from typing import Any

import pytest


def replayed_on_two_streams(kernel: Any) -> list[tuple[Any, Any]]:
    """Replay two graphs of four launches each, 50 times, while a third stream multiplies.

    Returns
    -------
    list[tuple[torch.Tensor, torch.Tensor]]
        For each graph its last output, and that of a launch by itself on the same inputs.
    """
    torch = pytest.importorskip("torch")

    def inputs(seed: int) -> list[Any]:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        shapes = [each.shape for each in kernel.buffers if not each.output]
        return [
            torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) / 16
            for shape in shapes
        ]

    given = [inputs(seed) for seed in (1, 2)]
    due = [kernel.run(*each) for each in given]
    outputs = [torch.zeros_like(each) for each in due]
    torch.cuda.synchronize()
    graphs, streams = [], [torch.cuda.Stream() for _ in given]
    for each, output in zip(given, outputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                kernel(*each, output)
        graphs.append(graph)
    busy, square = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            square @ square
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return list(zip(outputs, due, strict=True))
