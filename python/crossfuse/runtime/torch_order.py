"""Order between the stream that torch works on and the one that TVM's virtual machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crossfuse.errors import EnvironmentRefused, WorkloadRefused, refuse


@contextmanager
def after_torch() -> Iterator[None]:
    """Let what TVM launches inside wait for torch's current stream, and that one for it.

    The machine launches on the default stream, and takes memory from a pool that no other stream
    may have a part in, so it stays there; torch's streams do not wait for that one by themselves.

    Yields
    ------
    None
        With the default stream behind torch's current one.

    Raises
    ------
    EnvironmentRefused
        While a CUDA graph is captured: the machine takes memory, and the default stream cannot be
        captured.
    """
    import torch

    if not torch.cuda.is_initialized():  # nothing of torch's is on a GPU
        yield
        return
    if torch.cuda.is_current_stream_capturing():
        raise refuse(
            EnvironmentRefused,
            "compile-model",
            "torch.cuda.current_stream()",
            found="a stream that is captured as a CUDA graph",
            limit="one that runs",
            instead="compile with torch.compile(model, backend='crossfuse'), which can be captured",
        )
    current, default = torch.cuda.current_stream(0), torch.cuda.default_stream(0)
    if current == default:
        yield
        return
    default.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(default)


def check_first_gpu(index: int) -> None:
    """Refuse a tensor on another GPU than the one that the machine runs on.

    Parameters
    ----------
    index : int
        Number of the tensor's GPU.

    Raises
    ------
    WorkloadRefused
        Unless it is 0.
    """
    if index:
        raise refuse(
            WorkloadRefused,
            "compile-model",
            "inputs",
            found=f"a tensor on cuda:{index}",
            limit="cuda:0, which TVM's virtual machine runs on",
            instead=f"move it, or choose the GPU by CUDA_VISIBLE_DEVICES={index}",
        )
