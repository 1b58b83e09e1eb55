"""``crossfuse emulate``: both CPU checkers on a workload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from crossfuse.cli.kernel import (
    Cluster,
    Constant,
    Placement,
    Ring,
    Rows,
    Rule,
    Scatter,
    Target,
    Workload,
    options,
    verdicts,
)
from crossfuse.cli.output import JsonFlag, print_json, print_rich
from crossfuse.errors import WorkloadRefused, refuse

#: Floating-point operations that the CPU checkers do in about two minutes.
MAX_FLOPS = 2 * 10**9


def emulate(
    workload: Workload,
    target: Target = "nvidia-h100",
    cluster: Cluster = 0,
    rows: Rows = 0,
    ring: Ring = True,
    scatter: Scatter = True,
    rule: Rule = "threads",
    placement: Placement = "auto",
    constant_weights: Constant = False,
    seed: Annotated[int, typer.Option(help="Of inputs and thread orders.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run the schedule on LLVM and the generated CUDA on the CPU; exit code 1 if one is wrong."""
    from crossfuse.compiler import check
    from crossfuse.compiler import compile as compile_source
    from crossfuse.workload.suites import resolve

    spec = resolve(workload)
    if spec.flops > MAX_FLOPS:
        raise refuse(
            WorkloadRefused,
            "emulate",
            str(spec),
            found=f"{spec.flops:.1e} floating-point operations",
            limit=f"{MAX_FLOPS:.0e}, as much as a CPU emulates in minutes",
            instead="emulate the same workload with smaller M, K, N and L: the kernel has the "
            "same structure",
        )
    shared = options(cluster, rows, ring, scatter, rule, placement, constant_weights)
    compiled = compile_source(spec, target=target, **shared)
    found = check(compiled, seed=seed, gpu=False)
    ok = all(each.status != "failed" for each in found)
    if as_json:
        image = compiled.lowered.image
        launches = [asdict(each) for each in image.launches]
        print_json(
            {
                "ok": ok,
                "workload": str(spec),
                "launches": launches,
                "verdicts": [*map(asdict, found)],
            }
        )
    else:
        print_rich(str(spec), verdicts(found))
    if not ok:
        raise typer.Exit(1)
