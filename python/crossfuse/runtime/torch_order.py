"""Order between torch's current stream and the stream of TVM's virtual machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crossfuse.errors import EnvironmentRefused, WorkloadRefused, refuse


@contextmanager
def after_torch() -> Iterator[None]:
    """Make what TVM launches inside wait for torch's current stream, and that stream for it.

    The machine launches on the default stream, and its memory pool must not be shared with other
    streams, so it stays there; torch's streams do not wait for the default one by themselves. While
    a CUDA graph is captured this raises `EnvironmentRefused`: the machine allocates memory, and the
    default stream cannot be captured.
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
    """Raise `WorkloadRefused` for a tensor on another GPU than 0, which the machine runs on."""
    if index:
        raise refuse(
            WorkloadRefused,
            "compile-model",
            "inputs",
            found=f"a tensor on cuda:{index}",
            limit="cuda:0, which TVM's virtual machine runs on",
            instead=f"move it, or choose the GPU by CUDA_VISIBLE_DEVICES={index}",
        )
