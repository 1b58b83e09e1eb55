"""Products of one operand side by side on a GPU: right, and bit for bit the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.runtime import load
from crossfuse.runtime.artefact import build_library
from crossfuse.schedule.rules.together import schedule_together
from crossfuse.workload import parse
from crossfuse.workload.build import emit_products, form_of

torch = pytest.importorskip("torch")

REPEATS = 300


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (33, 2048, (2048, 512, 512)),
        (64, 2048, (2048, 512, 512)),
        (128, 768, (768, 768, 768)),
        (512, 2048, (2048, 512, 512)),
        (1000, 4096, (4096, 1024, 1032)),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_products_side_by_side(
    rows: int, depth: int, columns: tuple[int, ...], early: bool, tmp_path: Path
) -> None:
    text = f"gemm:M={rows},K={depth},N={{}},weights=nk,bias=last"
    func = emit_products([form_of(parse(text.format(each))) for each in columns])
    torch.manual_seed(0)
    given = {
        str(each.name): torch.randn(*map(int, each.ty.shape), device="cuda").bfloat16()
        for each in func.params
        if not str(each.name).startswith("out")
    }
    main = schedule_together(func).mod["main"]
    constant = [each for each in given if each.startswith("B")]
    image = lower(starting_early(main, constant) if early else main, device()).image
    kernel = load(build_library(image, tmp_path).shared_object)
    first = [each.clone() for each in kernel.run(*given.values())]
    for number, got in enumerate(first):
        a, b = (given[each].double() for each in ("A", f"B_{number}"))
        made, size = a @ b.t() + given[f"bias0_{number}"].double(), a.abs() @ b.abs().t()
        assert ((got.double() - made).abs() <= 2.0**-8 * made.abs() + 2.0**-18 * size).all()
    side = torch.cuda.Stream()
    for turn in range(REPEATS):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            again = kernel.run(*given.values())
        torch.cuda.synchronize()
        for one, other in zip(again, first, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
