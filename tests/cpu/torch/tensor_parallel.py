"""What ranks of a process group do in tests of tensor-parallel models; nobody has a GPU."""

from __future__ import annotations

from typing import Any

from cpu.process_groups import main


def reported() -> list[list[Any]]:
    """What became of sums of the graph that was compiled last."""
    from crossfuse.torch import reports

    report = reports()[-1]
    found = [[each.name, each.text] for each in report.outcomes if "over" in each.text]
    return [*found, [report.reason, ", ".join(report.untranslated)]]


def layers() -> Any:
    """A column- and a row-parallel layer behind one another, as torch's tensor parallelism has it."""
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
    """Whether a compiled model is right, and what was reported."""
    import torch

    from crossfuse.torch import Backend

    torch._dynamo.reset()
    model, x, expected = layers()
    fn = torch.compile(model, backend=Backend(rest="eager", **options))
    with torch.no_grad():
        close = torch.allclose(fn(x), expected, atol=1e-5)
    return {"close": close, "reported": reported()}


def left_alone() -> dict[str, Any]:
    return compiled()


def not_connected() -> dict[str, Any]:
    return compiled(cpu="llvm")


def connected() -> dict[str, Any]:
    from crossfuse.torch import connect_ranks

    assert connect_ranks() is connect_ranks()
    return compiled(cpu="llvm")


if __name__ == "__main__":
    main(left_alone, not_connected, connected)
