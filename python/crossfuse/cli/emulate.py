"""``crossfuse emulate``: both CPU checkers on a workload."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from crossfuse.workload.cascade_spec import CascadeSpec
    from crossfuse.workload.spec import WorkloadSpec

#: Floating-point operations of a chain that the CPU checkers do in about two minutes.
MAX_FLOPS = 2 * 10**9
#: Iterations of a cascade's reductions that they do in as long.
MAX_ITERATIONS = 4 * 10**7


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
    from crossfuse.workload.cascades import resolve_any

    spec = resolve_any(workload)
    _check_size(spec)
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


def _check_size(spec: WorkloadSpec | CascadeSpec) -> None:
    """Refuse what would take hours."""
    from crossfuse.workload.cascade_spec import CascadeSpec

    if isinstance(spec, CascadeSpec):
        from crossfuse.emulate.reference import iterations
        from crossfuse.workload.cascade_build import prim_func

        count, most, what = iterations(prim_func(spec)), MAX_ITERATIONS, "iterations of reductions"
        smaller = "fewer or shorter rows"
    else:
        count, most, what = spec.flops, MAX_FLOPS, "floating-point operations"
        smaller = "smaller M, K, N and L"
    if count > most:
        raise refuse(
            WorkloadRefused,
            "emulate",
            str(spec),
            found=f"{count:.1e} {what}",
            limit=f"{most:.0e}, as much as a CPU emulates in minutes",
            instead=f"emulate the same workload with {smaller}: the kernel has the same structure",
        )
