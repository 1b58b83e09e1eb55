"""How long a model's first call takes through torch.compile: with empty caches, and again.

    python scripts/start_times.py model:llama-3.2-1b,layers=8 --backend ahead,crossfuse,inductor

Each start is a process of its own. All starts of a backend share one folder of caches, of ours and
of torch, that is empty before the first. Printed are seconds of wall clock and of processor time:

    torch     import torch
    call      the first call with all that it imports, less a second call
    tvm       whether TVM was imported
    fused     groups that are kernels of ours

The backend `ahead` is `crossfuse.torch.compile_ahead`. Making the module counts as far as a second
one is made faster: torch imports much of its compiler for tensors of no device. Weights are not
set: nothing depends on them. Without a GPU kernels are built for an H100, a call ends at the first
of them, and inductor does not test what instructions the CPU has, which it does for no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_process import found_apart

BACKENDS = ("ahead", "crossfuse", "inductor")


def main() -> None:
    """Print a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="such as model:llama-3.2-1b,layers=8,tokens=16")
    parser.add_argument("--backend", default=",".join(BACKENDS), help="which, with commas")
    parser.add_argument("--starts", type=int, default=3, help="of each, the first one included")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each start")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(one_start(given.model, given.child)))
        return
    rows = []
    print(f"{'backend':10} {'start':>5} {'torch':>12} {'call':>14}  tvm  fused")
    for backend in given.backend.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for start in range(1, given.starts + 1):
                row = {"backend": backend, "start": start}
                row |= _apart(given.model, backend, Path(folder), given.timeout)
                rows.append(row)
                print(_text(row), flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))


def _apart(model: str, backend: str, folder: Path, timeout: float) -> dict[str, Any]:
    """A start in a process of its own."""
    caches = {"XDG_CACHE_HOME": "ours", "TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "t"}
    environment = {**os.environ, **{name: str(folder / each) for name, each in caches.items()}}
    environment.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    return found_apart([__file__, model, "--child", backend], timeout, environment)


def _text(row: dict[str, Any]) -> str:
    head = f"{row['backend']:10} {row['start']:5}"
    if "error" in row:
        return f"{head} {row['error']}"
    words = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in (row["torch"], row["call"])]
    return (
        f"{head} {words[0]:>12} {words[1]:>14}  {'yes' if row['tvm'] else 'no':3}  {row['fused']}"
    )


def one_start(text: str, backend: str) -> dict[str, Any]:
    """What a start of this process takes."""
    begun = _now()
    import torch

    imported = _since(begun)
    from crossfuse.models import build, parse

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    begun = _now()
    build(parse(text), "meta")
    first, begun = _since(begun), _now()
    built = build(parse(text), "meta")
    made = _less(first, _since(begun))
    module = built.module.to_empty(device=device)
    inputs = [torch.zeros(each.shape, dtype=each.dtype, device=device) for each in built.inputs]
    if gpu:
        torch.zeros(1, device=device).cpu()  # the context of CUDA is no part of the call
    begun = _now()
    if not gpu:
        _end_at_kernels()
    with torch.inference_mode():
        fn = _compiled(module, inputs, backend, gpu)
        call = _call(fn, inputs, begun)
        again = _call(fn, inputs, _now())
    return {
        "torch": imported,
        "call": [sum(each) for each in zip(made, _less(call, again), strict=True)],
        "tvm": "tvm" in sys.modules,
        "fused": 0 if backend == "inductor" else _fused(),
    }


def _compiled(module: Any, inputs: list[Any], backend: str, gpu: bool) -> Any:
    import torch

    if backend == "inductor":
        return torch.compile(module)
    from crossfuse.torch import Backend, compile_ahead

    ours = Backend() if gpu else Backend(cpu="build")
    if backend == "crossfuse":
        return torch.compile(module, backend=ours)
    return compile_ahead(module, inputs, backend=ours)


class _Launched(Exception):
    """A kernel would be launched now."""


def _end_at_kernels() -> None:
    """Let calls of kernels raise; the refusal of a tensor of the CPU takes a second to make."""
    from crossfuse.runtime.kernel import LoadedKernel

    def ended(*_: Any, **__: Any) -> None:
        raise _Launched

    LoadedKernel.__call__ = ended  # type: ignore[method-assign]


def _call(fn: Any, inputs: list[Any], begun: tuple[float, float]) -> tuple[float, float]:
    import torch

    with contextlib.suppress(_Launched):
        fn(*inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return _since(begun)


def _fused() -> int:
    from crossfuse.torch import reports

    return sum(len(each.fused) for each in reports())


def _less(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return first[0] - second[0], first[1] - second[1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(begun: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


if __name__ == "__main__":
    main()
