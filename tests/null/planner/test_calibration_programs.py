"""What the micro-benchmarks print becomes a record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crossfuse.bench.calibrate import (
    COLUMNS,
    PROGRAMS,
    SOURCES,
    TYPES,
    assemble,
    parse,
    products,
)
from crossfuse.errors import EnvironmentRefused
from crossfuse.planner.cost.rates import measured, read

MACHINE = {"gpu": {"name": "NVIDIA H100 80GB HBM3"}}
BY_ALL_SMS = ("hbm_read", "hbm_write", "l2_read", "l2_write", "sm_ingest_all", "hbm_ingest_all")
SCALARS = (*BY_ALL_SMS, "sm_ingest", "flag", "launch", "early_launch")
BY_SIZE = ("multicast_ingest", "multicast_ingest_one", "cluster_barrier", "resident")


def printed() -> list[dict[str, Any]]:
    """The lines of all programs on a GPU with the numbers of the shipped record."""
    record = measured("nvidia-h100").to_json()
    rows: list[dict[str, Any]] = [{"name": each, "value": record[each]} for each in SCALARS]
    for each in BY_SIZE:
        rows += [{"name": each, "size": size, "value": value} for size, value in record[each]]
    for field, method in (("dsm_push", "st.async"), ("dsm_push_bulk", "bulk")):
        head = {"name": "dsm_push", "method": method}
        rows += [{**head, "size": size, "value": value} for size, value in record[field]]
    for height, width, dtype, value in record["tensor"]:
        keys = {"rows": height, "columns": width, "dtype": dtype}
        rows.append({"name": "tensor", **keys, "value": value})
    for level in ("hbm", "l2"):
        rows.append({"name": "latency", "level": level, "value": record[level]})
    for size in (2, 4, 8):
        value = record["dsm"] * (1 if size == 4 else 2)
        rows.append({"name": "latency", "level": "dsm", "size": size, "value": value})
    return [{**row, "spread": 0.01, "repeats": 11} for row in rows]


def test_lines_become_a_record() -> None:
    text = "\n".join(json.dumps(row) for row in printed())
    found = assemble("nvidia-h100", parse(text, "all"), MACHINE)
    known = measured("nvidia-h100").to_json()
    told = {"provisional": False, "machine": MACHINE, "spread": found.spread, "fitted": {}}
    assert found == read({**known, **told})


def test_the_spread_of_a_table_is_its_worst() -> None:
    rows = printed()
    next(row for row in rows if row["name"] == "tensor")["spread"] = 0.3
    assert assemble("nvidia-h100", rows, MACHINE).spread["tensor"] == 0.3


def test_clusters_are_counted_by_integers() -> None:
    rows = parse("\n".join(map(json.dumps, printed())), "all")
    for size, count in assemble("nvidia-h100", rows, MACHINE).resident:
        assert isinstance(size, int)
        assert isinstance(count, int)


def test_a_program_that_said_nothing_is_named_by_its_fields() -> None:
    rows = [row for row in printed() if row["name"] != "flag"]
    with pytest.raises(EnvironmentRefused, match="measurement of nvidia-h100: found flag: nothing"):
        assemble("nvidia-h100", rows, MACHINE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no lines"),
        ("\n", "no lines"),
        ("segmentation fault", "'segmentation fault'"),
        ('{"name": "flag", "spread": 0}', "flag"),
        ('{"name": 3, "value": 1, "spread": 0}', "3"),
        ('{"name": "flag", "value": "fast", "spread": 0}', "fast"),
        ("[1]", "[1]"),
    ],
)
def test_other_output_is_refused(text: str, found: str) -> None:
    with pytest.raises(EnvironmentRefused) as caught:
        parse(text, "flag")
    assert "calibration-output: program flag: found" in str(caught.value)
    assert found in caught.value.refusal.found


def test_every_source_is_a_program_and_packaged() -> None:
    assert {each.source for each in PROGRAMS} == {path.name for path in SOURCES.glob("*.cu")}
    assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_take_a_register_for_two_columns(dtype: str) -> None:
    text = products(dtype)
    kind = TYPES[dtype]
    for columns in COLUMNS:
        name = f"m64n{columns}k{kind.k}.f32.{kind.ptx}.{kind.ptx} {{"
        registers = text.split(name)[1].split("}")[0].split(", ")
        assert registers == [f"%{i}" for i in range(columns // 2)]
    # Operands of 8 bits are K-major, and no immediate says so.
    assert text.count(", 0, 0;") == (len(COLUMNS) if kind.k == 16 else 0)
