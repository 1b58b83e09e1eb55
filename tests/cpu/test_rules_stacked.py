"""Tiles of chains with several tiles of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfuse.blocks.chain import Chain, Layer
from crossfuse.hardware import device
from crossfuse.planner.kernels.phase import widest
from crossfuse.schedule.rules.tensor_tiles import (
    is_wide,
    stacked_across,
    stacked_columns,
    stacked_split,
)

H100 = device("nvidia-h100")


def chain(m: int, n: int, k: int, width: int) -> Chain:
    first = Layer(("gate", "up"), None, n, k, "sum", (2, 2), 2, (), 0)
    second = Layer(("down",), None, width, n, "sum", (2,), 2, (), 0)
    return Chain((first, second), m, item=2, repeats=1, k_major=True)


@pytest.mark.parametrize(
    ("m", "n", "wide"),
    [(256, 4224, True), (256, 4216, False), (300, 2816, True), (512, 2048, False)],
)
def test_wide_chains_have_a_tile_for_each_sm(m: int, n: int, wide: bool) -> None:
    assert is_wide(chain(m, n, 2048, 2048), 128, H100) == wide


def test_the_device_says_how_many_clusters_run_at_once() -> None:
    half = replace(H100, sms=66)
    assert is_wide(chain(256, 2112, 2048, 2048), 128, half)
    assert stacked_columns(chain(256, 5504, 4096, 4096), 128, 128, 2, 1, half) == 88


@pytest.mark.parametrize(
    ("m", "columns"),
    [
        # 126 tiles in two turns of 66 clusters; wider tiles would take two turns as well.
        (256, 88),
        # 198 tiles are three whole turns.
        (512, 112),
    ],
)
def test_columns_fill_the_last_turn(m: int, columns: int) -> None:
    assert stacked_columns(chain(m, 11008, 4096, 4096), 128, 128, 2, 1, H100) == columns


@pytest.mark.parametrize(
    ("n", "across", "columns"),
    [(11008, 1, 96), (11008, 2, 96), (5632, 1, 96), (8192, 1, 64), (8192, 2, 80), (9728, 1, 80)],
)
def test_tiles_of_256_rows_have_columns_that_two_share(n: int, across: int, columns: int) -> None:
    """Each loads a half, of whole groups of eight."""
    tiles = chain(512, n, 4096, 4096)
    assert stacked_columns(tiles, 256, widest(256, 2), 2, across, H100) == columns


@pytest.mark.parametrize(
    ("rows", "products", "columns"),
    [(64, 1, 256), (128, 2, 128), (128, 3, 80), (192, 1, 192), (256, 1, 192), (256, 2, 96)],
)
def test_columns_that_registers_have_room_for(rows: int, products: int, columns: int) -> None:
    assert widest(rows, products) == columns


@pytest.mark.parametrize(
    ("m", "across", "found"),
    [
        (256, 1, (2, 128)),
        (256, 2, (2, 144)),
        (512, 1, (2, 256)),
        # Parts of 8 rows of tiles find no room at once; tiles of the last rows are not whole.
        (1024, 1, (1, 256)),
        (300, 1, (1, 128)),
    ],
)
def test_the_second_reduction_is_split_where_all_parts_run_at_once(
    m: int, across: int, found: tuple[int, int]
) -> None:
    assert stacked_split(chain(m, 11008, 4096, 4096), 128, 64, 2, across, H100) == found


@pytest.mark.parametrize(
    ("m", "n", "across"),
    [(256, 11008, 2), (256, 8192, 1), (512, 11008, 1)],
)
def test_rows_are_shared_too_where_tiles_take_turns(m: int, n: int, across: int) -> None:
    assert stacked_across(chain(m, n, 2048, 2048), 128, 128, 2, H100) == across
