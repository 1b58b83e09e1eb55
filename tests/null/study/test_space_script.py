"""The program that counts a space and times a search."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "search_space.py"


def test_it_prints_counts_and_a_search() -> None:
    spec = "gemm_chain:M=32,K=32,N=64,L=32"
    run = [sys.executable, str(SCRIPT), spec, "--relaxations", "published", "one CTA"]
    found = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert [each[0] for each in found["steps"]] == ["all", "R1", "R2", "R3", "R4", "R5"]
    result = found["search"]
    left_out = sum(result["left out"].values())
    assert result["scored"] + left_out == sum(result["candidates"].values()) > 0
    assert set(result["candidates"]) == {"published", "one CTA"}
    assert result["peak_mib"] > 0 and result["best"][0] > 0
