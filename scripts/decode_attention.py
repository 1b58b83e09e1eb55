"""How long attention of one token takes over a cache, ours and torch's, with a mask of keys.

    python scripts/decode_attention.py --shapes 1x32x8x64x1024,16x32x8x64x1024

A shape is sequences, heads, heads of keys, elements of a head, positions. The mask is a tensor of
flags, as a static cache has it, and leaves out the second half of the positions, or none of them. A
CUDA graph goes through so many caches that none is in L2 when its turn comes; printed are
microseconds of a call, launch and all, the median of the replays, after results were held against
float64. The floor is the time in which memory delivers the positions that the mask leaves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

#: Bytes of caches that a graph goes through: several times the L2 of an H200.
_COLD = 1 << 30
SHAPES = "1x32x8x64x1024,4x32x8x64x1024,8x32x8x64x1024,16x32x8x64x1024,64x32x8x64x1024"


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention of torch, whose keys and values heads share."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def caches(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Queries, keys and values of so many calls that they do not fit into L2."""
    batch, heads, shared, depth, length = shape
    of_one = 2 * 2 * batch * shared * depth * length
    made = torch.Generator("cuda").manual_seed(0)

    def drawn(*extents: int) -> Any:
        return torch.randn(*extents, dtype=torch.bfloat16, device="cuda", generator=made)

    return [
        (
            drawn(batch, heads, 1, depth),
            drawn(batch, shared, length, depth),
            drawn(batch, shared, length, depth),
        )
        for _ in range(max(2, min(64, _COLD // of_one)))
    ]


def timed(run: Callable[..., Any], given: list[tuple[Any, ...]], mask: Any, replays: int) -> float:
    """Microseconds of a call, the median of replays of a graph that makes all of them."""
    for each in given[:2]:
        run(*each, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in given:
            run(*each, mask)
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(given))
    return statistics.median(times[2:])


def errors(run: Callable[..., Any], given: tuple[Any, ...], mask: Any) -> tuple[float, float]:
    """Largest difference from float64, and that of torch in the same type."""
    exact = attention(*(each.double() for each in given), mask)
    return tuple(  # type: ignore[return-value]
        float((made(*given, mask).double() - exact).abs().max()) for made in (run, attention)
    )


def main() -> None:
    """Print a line for each shape and mask."""
    import crossfuse.torch
    from crossfuse.hardware import device
    from crossfuse.planner.cost.rates import rates_of

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help="with commas")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--ours-only", action="store_true", help="no other way")
    options = parser.parse_args()
    rate = rates_of(device()).measured.hbm_read
    for text in options.shapes.split(","):
        shape = tuple(map(int, text.split("x")))
        torch.compiler.reset()
        ways: dict[str, Callable[..., Any]] = {
            "crossfuse": torch.compile(attention, backend="crossfuse", dynamic=False)
        }
        if not options.ours_only:
            ways |= {"torch.compile": torch.compile(attention, dynamic=False), "torch": attention}
        given = caches(shape)
        for filled in (shape[-1] // 2, shape[-1]):
            mask = torch.zeros(shape[0], 1, 1, shape[-1], dtype=torch.bool, device="cuda")
            mask[..., :filled] = True
            floor = 4 * shape[0] * shape[2] * shape[3] * filled / rate
            found = {name: timed(run, given, mask, options.replays) for name, run in ways.items()}
            ours, plain = errors(ways["crossfuse"], given[0], mask)
            times = "  ".join(f"{name} {time:.2f}" for name, time in found.items())
            print(
                f"{text} {filled} seen: floor {floor:.2f}  {times}  "
                f"off {ours:.1e} (torch {plain:.1e})",
                flush=True,
            )
        print("  ", *crossfuse.torch.reports()[-1].text().splitlines()[-6:], sep="\n   ")


if __name__ == "__main__":
    main()
