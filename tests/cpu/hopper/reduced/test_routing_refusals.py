"""What the lowering of row reductions refuses, by rule and in words."""

from __future__ import annotations

import pytest
import tvm

import crossfuse
from cpu.hopper.reduced.routing import schedule, spec
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower

pytestmark = pytest.mark.cpu

SMALL = spec(64, 128, 16, 2)
TILES = {
    "two tiles of experts": (
        {"elements": 8},
        "stream: loop 't': found 2 tiles that pipelined loops multiply; limit: one tile, whose "
        "rows are whole. Instead: take tiles of all elements, at most 256.",
    ),
    "rows of three warpgroups": (
        {"rows": 192, "elements": 16},
        "tile-shape: product of 'logits': found tiles of 192 rows, which are reduced in registers; "
        "limit: 64 or 128 rows: other warpgroups have no registers left beside the sums. Instead: "
        "split rows by 64.",
    ),
    "experts that wgmma cannot take": (
        {"elements": 20},
        "tile-shape: product of 'logits': found a tile of 64 x 20",
    ),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles(name: str) -> None:
    tiles, text = TILES[name]
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule(SMALL, **tiles))
    assert text in str(caught.value)


def test_more_experts_than_a_tile_holds() -> None:
    text = (
        "stream: block 'top_init': found a list of a row's best elements; limit: the store of one "
        "element; lists take rows that one tile holds, at most 256 elements, of a product that "
        "nothing else is multiplied with. Instead: select the best elements in a kernel of its own."
    )
    with pytest.raises(LoweringRefused) as caught:
        crossfuse.compile("moe_routing:tokens=64,hidden=128,experts=300,top_k=2")
    assert text in str(caught.value)


#: Text of the tile form, what stands there instead, and what is said.
FORMS = {
    "of equal scores the higher expert": (
        "top_from[0] < top_index[v_i, p]",
        "top_from[0] > top_index[v_i, p]",
        "stream: block 'top_update': found several statements; limit: an insertion of each element "
        "into a list in descending order, of equal ones the lower key first",
    ),
    "the least scores": (
        "top_coming[0] > top[v_i, p]",
        "top_coming[0] < top[v_i, p]",
        "block 'top_update': found several statements; limit: an insertion",
    ),
    "an element that is lost": (
        "top_coming[0] = top_moved[0]",
        "top_coming[0] = top_coming[0]",
        "block 'top_update': found several statements; limit: an insertion",
    ),
    "other places": (
        "top_from[0] = v_j",
        "top_from[0] = v_j + 1",
        "block 'top_update': found elements from place key + 1; limit: the element's column of the "
        "tile",
    ),
    "lists that are not empty": (
        'top[v_i, p] = T.float32("-inf")',
        "top[v_i, p] = T.float32(0)",
        "block 'top_init': found several statements; limit: a list of -inf, from places 2147483647",
    ),
    "half of a list": (
        "for p in range(2):\n                            top[v_i, p]",
        "for p in range(1):\n                            top[v_i, p]",
        "block 'top_init': found several statements; limit: a list that is emptied in a loop over "
        "all its ranks",
    ),
    "a row made of a list": (
        "m_old[v_i] = m[v_i]",
        "m_old[v_i] = top[v_i, 0]",
        "block 'm_keep'",
    ),
    "scores that are stored": (
        "= T.exp2(T.float32(1.4426950408889634) * top[v_i, v_c] - m_safe[v_i]) / s_safe[v_i]",
        "= logits[v_i, v_c]",
        "block 'gates_store'",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    old, new, text = FORMS[name]
    script = schedule(SMALL).mod.script()
    assert old in script, script
    func = tvm.script.from_source(script.replace(old, new, 1))
    with pytest.raises(LoweringRefused) as caught:
        lower(func)
    assert text in str(caught.value)
