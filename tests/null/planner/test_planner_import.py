"""What the analysis loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import crossfuse.planner.chain.build
import crossfuse.planner.plan, crossfuse.planner.explain.explanation
found = crossfuse.planner.plan.plan("gemm:M=16,K=64,N=64").explain()
found.text(), found.svg(), found.to_json()
import crossfuse.planner.tune.strategy, crossfuse.planner.tune.cost_model
print(*sorted({"tvm", "torch", "scipy", "ml_dtypes", "matplotlib"} & set(sys.modules)))
"""


def test_the_analysis_needs_numpy_alone() -> None:
    run = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(run, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_explaining_needs_no_planning() -> None:
    program = (
        "import sys, crossfuse.planner.explain.explanation\n"
        "print('crossfuse.planner.choice' in sys.modules, 'crossfuse.planner.plan' in sys.modules)"
    )
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
