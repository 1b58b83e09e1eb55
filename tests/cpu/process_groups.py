"""Process groups of a test: the functions of a module run in processes that gloo connects.

A module calls `main` with the functions that it has for ranks; `answers` runs them, one behind the
other: processes take seconds to begin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

TESTS = Path(__file__).parents[1]


def answers_once(module: str, factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each function of a module returns in each rank, asked once by all workers of a run."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = folder / f"{module}.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_text(json.dumps(answers(module, factory.mktemp("ranks"))))
        found: dict[str, list[Any]] = json.loads(kept.read_text())
    return found


def answers(module: str, folder: Path, ranks: int = 2) -> dict[str, list[Any]]:
    """What each function of a module returns in each rank."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(ranks), str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [each.communicate(timeout=240) for each in started]
    finally:
        for each in started:
            each.kill()
    for each, (_, errors) in zip(started, outputs, strict=True):
        assert each.returncode == 0, errors[-3000:]
    found = [json.loads(text.splitlines()[-1]) for text, _ in outputs]
    return {name: [each[name] for each in found] for name in found[0]}


def main(*functions: Callable[[], Any]) -> None:
    """Run what `answers` asks for, in one rank."""
    import torch.distributed as dist

    rank, ranks, store = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=120),
    )
    found = {each.__name__: each() for each in functions}
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
