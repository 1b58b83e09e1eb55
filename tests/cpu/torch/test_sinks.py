"""Attention sinks: softmaxes over scores and one more number of the row, found in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cpu.torch.decoder import Step, found, inputs, repeated  # noqa: E402
from crossfuse import compile_model  # noqa: E402
from crossfuse.emulate.cuda import emulate  # noqa: E402
from crossfuse.emulate.llvm import draw, parameters  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.lower.extract import lower  # noqa: E402
from crossfuse.torch import Backend, Report, reports  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

#: Forms of a softmax of scores and a column, which give what scores weigh.
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda x, s: torch.cat([x, s], -1).softmax(-1)[..., :-1],
    "in front": lambda x, s: torch.cat([s, x], -1).softmax(-1)[..., 1:],
    "wide": lambda x, s: torch.cat([x, s], -1).softmax(-1, dtype=torch.float32)[..., :-1],
    "shifted": lambda x, s: _shifted(torch.cat([x, s], -1)).softmax(-1)[..., :-1],
    "by amax": lambda x, s: ((both := torch.cat([x, s], -1)) - both.amax(-1, keepdim=True)).softmax(
        -1
    )[..., :-1],
}
#: Forms that are none: of more columns, of other parts, and along another axis.
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "two": lambda x, s: torch.cat([x, s, s], -1).softmax(-1)[..., :-2],
    "wide column": lambda x, s: torch.cat([x, s.expand_as(x)], -1).softmax(-1)[..., : x.shape[-1]],
    "not the column": lambda x, s: torch.cat([x, s], -1).softmax(-1)[..., 1:],
    "every other": lambda x, s: torch.cat([x, s], -1).softmax(-1)[..., :-1:1].flip(-1),
    "other axis": lambda x, s: torch.cat([x, s], -1).softmax(1)[..., :-1],
    "shifted by less": lambda x, s: (
        (both := torch.cat([x, s], -1)) - both.amin(-1, keepdim=True)
    ).softmax(-1)[..., :-1],
}


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x - x.max(dim=-1, keepdim=True).values


def attended(step: Step, form: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A function of queries, both caches, places, new keys and values, a mask and sinks."""

    def forward(q: Any, keys: Any, values: Any, at: Any, k: Any, v: Any, mask: Any, s: Any) -> Any:
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        scores = q @ repeated(step, keys).transpose(2, 3) * step.depth**-0.5 + mask
        column = s.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[-2], -1)
        y = form(scores, column).to(values.dtype) @ repeated(step, values)
        return y.transpose(1, 2).reshape(step.batch, step.tokens, -1)

    return forward


def given_of(step: Step) -> list[Any]:
    torch.manual_seed(0)
    return [*inputs(step, added=True), torch.randn(step.heads).bfloat16() + 1]


def check(function: Callable[..., Any], given: list[Any], **options: Any) -> Report:
    """Compiled, it errs at most twice as much as eager does."""
    ours, theirs, doubles = ([each.clone() for each in given] for _ in range(3))
    doubles = [each.double() if each.is_floating_point() else each for each in doubles]
    backend = Backend(rest="eager", cpu="llvm", target="nvidia-h200", **options)
    with torch.no_grad():
        got = torch.compile(function, backend=backend, dynamic=False)(*ours)
        eager, exact = function(*theirs), function(*doubles)
    assert torch.equal(got.isnan(), eager.isnan())
    got, eager, exact = (each.nan_to_num() for each in (got, eager, exact))
    limit = 2 * (eager - exact).abs().max() + 1e-4 * exact.abs().max()
    assert (got - exact).abs().max() <= limit
    return reports()[-1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [Step(depth=64), Step(batch=3, tokens=2)], ids=str)
def test_attention_with_sinks_is_one_kernel(form: str, step: Step) -> None:
    report = check(attended(step, FORMS[form]), given_of(step), always=True)
    assert report.fused == ("crossfuse_cascade_0",), report.text()


@pytest.mark.parametrize("form", OTHERS)
def test_other_softmaxes_stay_what_they_are(form: str) -> None:
    step = Step(length=64)
    check(attended(step, OTHERS[form]), given_of(step), always=True)


def test_weights_that_are_read_elsewhere_are_made_there() -> None:
    """As by a model that returns what scores weigh."""
    step = Step(length=64)

    def both(*given: Any) -> Any:
        kept = []

        def form(x: Any, s: Any) -> Any:
            kept.append(torch.cat([x, s], -1).softmax(-1))
            return kept[0][..., :-1]

        return attended(step, form)(*given) + kept[0][..., -1].mean()

    check(both, given_of(step), always=True)


#: Sinks, and how many keys are hidden, by what is added to their scores.
ROWS = {
    "of any size": ("drawn", 40, -np.inf),
    "no sink, first tiles hidden": (-np.inf, 400, -np.inf),
    "no sink, hidden by numbers": (-np.inf, 400, -3e38),
    "nothing else": (5.0, 512, -np.inf),
    "nothing else, far below": (-200.0, 512, -np.inf),
    "nothing else, by numbers": (-3.0, 512, -3e38),
    "far above": (1e4, 40, -np.inf),
    "far below": (-1e4, 40, -np.inf),
}


@pytest.mark.parametrize("depth", [pytest.param(32, marks=pytest.mark.slow), 64])
def test_the_kernel_knows_what_a_sink_weighs(depth: int) -> None:
    """By the emulator, in two orders of threads: rows that see nothing give all to their sink."""
    step = Step(batch=2, length=512, depth=depth)
    (group,), _ = found(attended(step, FORMS["plain"]), given_of(step))
    plain = group.found.func.with_attr("global_symbol", "main")
    image = lower(group.kernel.func, device("nvidia-h200")).image
    known = parameters(plain)
    (output,) = (each.name for each in known if each.output)
    inputs_of = {(int(np.prod(e.shape)), e.shape[-1]): e for e in known if not e.output}
    sinks, mask, query = (
        inputs_of[each] for each in ((8, 1), (2 * 512, 512), (2 * 8 * depth, depth))
    )
    keys, values = (each for each in known if np.prod(each.shape) == 2 * 2 * 512 * depth)
    for sink, hidden, number in ROWS.values():
        given = draw(known)
        given[query.name] = np.asarray(given[query.name] * 3).astype(given[query.name].dtype)
        if sink != "drawn":
            given[sinks.name] = np.full(sinks.shape, sink).astype(given[sinks.name].dtype)
        hide = np.where(np.arange(step.length) < hidden, number, 0.0)
        given[mask.name] = np.broadcast_to(hide, mask.shape).astype(given[mask.name].dtype)
        report = emulate(image, given)
        report.raise_if_wrong()
        wide = {name: each.astype(np.float64) for name, each in given.items()}
        q = wide[query.name].reshape(2, 8, depth)
        shape = (2, 2, 512, depth)
        k, v = (np.repeat(wide[e.name].reshape(shape), 4, 1) for e in (keys, values))
        scores = np.einsum("bhd,bhld->bhl", q, k) * depth**-0.5
        scores = scores + wide[mask.name].reshape(2, 1, -1)
        every = np.concatenate(
            [scores, np.broadcast_to(wide[sinks.name].reshape(1, 8, 1), (2, 8, 1))], -1
        )
        power = np.exp(every - every.max(-1, keepdims=True))
        weights = (power / power.sum(-1, keepdims=True))[..., :-1]
        exact = np.einsum("bhl,bhld->bhd", weights, v).reshape(-1)
        got = report.outputs[output].astype(np.float64).reshape(-1)
        limit = 2.0**-7 * np.einsum("bhl,bhld->bhd", weights, np.abs(v)).reshape(-1)
        assert (np.abs(got - exact) <= limit + 1e-35).all(), (sink, hidden)


class _Attention(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sinks = torch.nn.Parameter(torch.randn(heads))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        column = self.sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[-2], -1)
        return FORMS["plain"](scores, column) @ v


def test_models_of_relax_have_sinks_too() -> None:
    torch.manual_seed(1)
    model = _Attention(4).half().eval()
    given = [torch.randn(2, 4, rows, 64).half() for rows in (64, 128, 128)]
    fn = compile_model(model, tuple(given), always=True, runs_on="llvm")
    with torch.no_grad():
        exact, eager = model.double()(*(each.double() for each in given)), model.half()(*given)
    got = fn(*given)
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()
    assert any(each.form == "tiles" for each in fn.report.cascades), fn.report.text()
