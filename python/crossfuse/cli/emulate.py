"""``crossfuse emulate``: both CPU checkers on a workload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from crossfuse.cli.kernel import (
    Cluster,
    Constant,
    Placement,
    Rule,
    Target,
    Workload,
    verdicts,
)
from crossfuse.cli.output import MOST, JsonFlag, show
from crossfuse.errors import WorkloadRefused, refuse

#: Runs of a function's blocks that the CPU checkers do in about two minutes, of chains (nearly all
#: are multiply-adds) and of cascades (exponentials, and states that merge).
MAX_ITERATIONS, MAX_IN_CASCADES = 10**9, 10**8


def emulate(
    workload: Workload,
    target: Target = None,
    rule: Rule = "auto",
    placement: Placement = "auto",
    cluster: Cluster = 0,
    constant_weights: Constant = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Of inputs and thread orders.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run the schedule on LLVM and the generated CUDA on the CPU; exit code 1 if one is wrong."""
    from crossfuse.blocks.scheduled import iterations
    from crossfuse.compiler import check, read_source
    from crossfuse.compiler import compile as compile_source

    source = read_source(workload)
    work, most = iterations(source.func), MAX_IN_CASCADES if source.cascade else MAX_ITERATIONS
    if work > most:
        raise refuse(
            WorkloadRefused,
            "emulate",
            source.summary,
            found=f"{work:.1e} multiply-adds, or what takes their place",
            limit=f"{most:.0e}, as much as a CPU emulates in minutes",
            instead="emulate the same workload with smaller extents: the kernel has the same "
            "structure",
        )
    compiled = compile_source(
        workload,
        target=target,
        rule=rule,
        placement=placement,
        cluster=cluster or None,
        constant_weights=constant_weights,
    )
    found = check(compiled, seed=seed, gpu=False)
    ok = all(each.status != "failed" for each in found)
    value = {
        "ok": ok,
        "workload": source.summary,
        "launches": [*map(asdict, compiled.lowered.image.launches)],
        "verdicts": [*map(asdict, found)],
    }
    show(as_json, value, source.summary, verdicts(found))
    if not ok:
        raise typer.Exit(1)
