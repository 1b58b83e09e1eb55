"""``crossfuse demo``: a Llama-style FFN from PyTorch to a planned and checked kernel."""

from __future__ import annotations

import typer

from crossfuse.cli.kernel import OUTPUT, Output, Target, render
from crossfuse.cli.output import JsonFlag, show
from crossfuse.errors import EnvironmentRefused

ROWS, HIDDEN, INTERMEDIATE = 32, 256, 512


def demo(
    target: Target = None,
    output: Output = OUTPUT,
    as_json: JsonFlag = False,
) -> None:
    """Import a small Llama-style FFN from PyTorch, plan it, fuse it, check it, time it on a GPU."""
    import torch

    from crossfuse.compiler import check, time_kernel
    from crossfuse.compiler import compile as compile_source
    from crossfuse.compiler.problem import make_problem
    from crossfuse.compiler.report import make_report
    from crossfuse.files import make_folder
    from crossfuse.workload import gated_ffn_module

    module = gated_ffn_module(HIDDEN, INTERMEDIATE, "bfloat16")
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
    compiled = compile_source(
        module,
        example_inputs=(x,),
        target=target,
        directory=make_folder(output),
        name="ffn",
    )
    found = check(compiled)
    try:
        timing = time_kernel(compiled, make_problem(compiled.source, compiled.schedule))
    except EnvironmentRefused:
        timing = None
    report = make_report(compiled, found, timing)
    show(as_json, report.to_json(), *render(report))
    if not report.ok:
        raise typer.Exit(1)
