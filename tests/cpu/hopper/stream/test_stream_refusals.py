"""What the lowering of streams refuses, by rule and in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from cpu.hopper.stream.attention import Attention, attention
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower

SMALL = Attention(rows=128, keys=128, heads=1, kv_heads=1)

PLANS = {
    "rows of no warpgroup": (
        Attention(tile=(96, 64)),
        "stream-tile: scores 'S': found a tile of 96 rows and 64 keys; limit: 64, 128 or 192 rows",
    ),
    "keys that wgmma cannot take": (
        Attention(tile=(128, 24)),
        "found a tile of 128 rows and 24 keys",
    ),
    "too many keys": (
        Attention(tile=(64, 272)),
        "values of 64 and results of 64 columns, in tiles of 272 keys; limit: as many columns of "
        "both operands, at most 256 keys",
    ),
    "columns that TMA cannot copy": (
        Attention(depth=72),
        "stream-operand: tensor 'Q': found rows of 72 elements; limit: a multiple of 16",
    ),
    "too few registers": (
        Attention(tile=(192, 128), depth=128),
        "stream-registers: scores 'S': found 160 registers for 1 arrays of 128 keys, their weights "
        "and 128 columns of sums; limit: 132 registers a thread with 3 multiplying warpgroups. "
        "Instead: take fewer keys a tile",
    ),
    "too many stages": (
        Attention(tile=(128, 128), depth=128, stages=4),
        "shared-memory: kernel: found 327",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    case, text = PLANS[name]
    with pytest.raises(LoweringRefused) as caught:
        lower(attention(case))
    assert text in str(caught.value)


@dataclass(frozen=True)
class Empty(Attention):
    """Its first tile of rows looks at no keys."""

    def bounds(self, q: Any) -> tuple[Any, Any]:
        return T.int32(0), q * 2


def test_a_stream_has_a_tile_for_each_place() -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(attention(Empty(rows=256)))
    assert str(caught.value) == (
        "stream: loop 't': found 0 tiles of keys for q = 0; limit: one tile at least: a kernel "
        "multiplies the first one before it looks further. Instead: let the loop go through one "
        "tile there, whose keys are all masked."
    )


def test_streams_have_no_timeline() -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(attention(SMALL), timeline=True)
    assert "timeline: function 'main': found a stream of tiles" in str(caught.value)


#: Text of the tile form, what stands there instead, and what is said.
FORMS = {
    "an intermediate in memory": (
        'm_old = T.sblock_alloc_buffer((128,), scope="local")',
        "m_old = T.sblock_alloc_buffer((128,))",
        "buffer 'm_old': found an intermediate in global memory; limit: streams that take and "
        "store parameters",
    ),
    "sums that do not start at zero": (
        "sums[vr, vd] = T.float32(0.0)",
        "sums[vr, vd] = T.float32(1.0)",
        "buffer 'sums': found 1 first values of the sums, or another than zero",
    ),
    "scores that do not start at zero": (
        "S[vr, vk] = T.float32(0.0)",
        "S[vr, vk] = T.float32(1.0)",
        "block 'scores': found sums with other first values",
    ),
    "keys left out": (
        'with T.sblock("s"):',
        'with T.sblock("s"):\n                        T.where(j < 3)',
        "the condition",
    ),
    "rows in shared memory": (
        'c = T.sblock_alloc_buffer((128,), scope="local")',
        'c = T.sblock_alloc_buffer((128,), scope="shared")',
        "found 4 tiles in shared memory; limit: those of queries, keys and values",
    ),
    "keys that are no copy": (
        "K_s[vb, vh, vk, vd] = K[vb, vh, vk, vd]",
        "K_s[vb, vh, vk, vd] = K[vb, vh, vk, vd] * K[vb, vh, vk, vd]",
        "block 'load_k': found a tile in shared memory of",
    ),
    "half of the columns": (
        'T.grid(128, 64):\n                with T.sblock("load_q")',
        'T.grid(128, 32):\n                with T.sblock("load_q")',
        "block 'load_q', buffer 'Q': found a box of 2 dimensions, 32 of 64 columns",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    old, new, text = FORMS[name]
    script = attention(SMALL).script()
    assert old in script, script
    func = tvm.script.from_source(script.replace(old, new))
    with pytest.raises(LoweringRefused) as caught:
        lower(func)
    assert text in str(caught.value)


def test_keys_of_a_cluster_are_the_same() -> None:
    script = attention(replace(SMALL, heads=2, kv_heads=2)).script()
    loop = 'T.thread_binding(2, thread="blockIdx.y"'
    assert loop in script, script
    heads = loop + ', annotations={"crossfuse.cluster_axis": "x"}'
    with pytest.raises(LoweringRefused) as caught:
        lower(tvm.script.from_source(script.replace(loop, heads)))
    assert (
        "loop 't': found a stream in a cluster; limit: loops over the grid alone, one loop over "
        "CTAs that go through the same keys and values, or two nests over a cluster, of which the "
        "second merges" in str(caught.value)
    )
