"""Training through the backend: graphs with gradients, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from torch.utils.checkpoint import checkpoint  # noqa: E402

from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

D, H = 64, 128
CHAIN = "crossfuse_gemm_chain"
#: Kernels run as functions of the CPU, whatever estimates say; torch runs the rest as it is.
HERE = Backend(rest="eager", always=True, cpu="llvm", cascades=False)


class Mlp(nn.Module):
    """Two layers behind a norm, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Frozen(Mlp):
    """The layers have no gradients of their own, so nothing else reads what lies between."""

    def __init__(self) -> None:
        super().__init__()
        for each in (self.up, self.down):
            each.requires_grad_(False)


class Checkpointed(Mlp):
    """The forward pass keeps nothing of what lies between the layers."""

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().layers, x, use_reentrant=False)


class Tied(Checkpointed):
    """Weights and inputs that are used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        y = self.layers(self.layers(x) * x)
        return y + F.linear(F.linear(y, self.up.weight).sin(), self.down.weight)


class Block(Frozen):
    """Attention as a formula in front of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.query, self.project = (
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        given = self.query(self.first(x)).view(rows, length, 3, 2, D // 2).permute(2, 3, 0, 1, 4)
        q, k, v = given.flatten(1, 2)
        seen = torch.softmax(4 * torch.tanh(q @ k.mT / 24), -1) @ v
        heads = seen.view(2, rows, length, D // 2).permute(1, 2, 0, 3).reshape(x.shape)
        return super().forward(x + self.project(heads))


def trained(
    module: nn.Module, fn: Callable[..., Any], batches: Sequence[torch.Tensor], rate: float = 0.1
) -> list[list[torch.Tensor]]:
    """Losses and gradients of steps of SGD, which change the weights in place."""
    weights = [each for each in module.parameters() if each.requires_grad]
    optimiser = torch.optim.SGD(weights, rate)
    found = []
    for x in batches:
        optimiser.zero_grad()
        loss = (fn(x).double() - x.double().flip(-1)).square().mean()
        loss.backward()
        found.append([loss.detach(), *(each.grad.clone() for each in weights)])
        optimiser.step()
    return found


def check(made: type[nn.Module], backend: Backend) -> tuple[int, int]:
    """Three steps err at most twice as much as eager; numbers of kernels in the two graphs."""
    torch.manual_seed(0)
    module = made()
    # More rows than single products have kernels for.
    batches = [torch.randn(2, 24, D) for _ in range(3)]
    exact, eager = deepcopy(module).double(), deepcopy(module).half()
    module = module.half()
    half = [each.half() for each in batches]
    got = trained(module, torch.compile(module, backend=backend), half)
    due, right = trained(eager, eager, half), trained(exact, exact, [e.double() for e in batches])
    for step in zip(got, due, right, strict=True):
        for ours, theirs, value in zip(*step, strict=True):
            error, allowed = ((each - value).norm() for each in (ours, theirs))
            assert error <= 2 * allowed + 1e-3 * value.norm()
    forward, backward = reports()[-2:]
    assert (forward.part, backward.part) == ("forward", "backward")
    assert not forward.reason and not backward.reason
    return len(forward.fused), len(backward.fused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "kernels"),
    [
        (Mlp, (0, 0)),
        (Frozen, (0, 1)),
        (Checkpointed, (1, 0)),
        (Tied, (2, 0)),
        (Block, (0, 1)),
    ],
)
def test_steps_in_place(made: type[nn.Module], kernels: tuple[int, int]) -> None:
    assert check(made, HERE) == kernels


@pytest.mark.slow
def test_inductor_compiles_the_rest() -> None:
    backend = Backend(always=True, cpu="llvm")
    assert check(Frozen, backend) == (0, 1)


def test_an_intermediate_that_the_backward_pass_needs_is_left() -> None:
    check(Mlp, HERE)
    text = " ".join(reports()[-2].text().split())
    assert text.startswith("forward graph of a training step: left, outline: relax.add")
    assert "found an intermediate that the model's results reads too" in text


@pytest.mark.slow
def test_gradients_add_up_and_evaluation_has_the_new_weights() -> None:
    torch.manual_seed(0)
    module = Checkpointed().half()
    eager, x = deepcopy(module), torch.randn(2, 16, D).half().requires_grad_()
    y = x.detach().clone().requires_grad_()
    fn = torch.compile(module, backend=HERE)
    for each, given in ((fn, x), (eager, y)):
        for factor in (1, 2):
            (factor * each(given)).float().square().mean().backward()
    for ours, theirs in zip([x, *module.parameters()], [y, *eager.parameters()], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=1e-4)
    with torch.no_grad():
        before = fn(x)
        for each in module.parameters():
            each.add_(each.grad, alpha=-1)
        assert reports()[-1].part == "" and reports()[-1].fused == (CHAIN,)
        torch.testing.assert_close(fn(x), module(x), rtol=1e-2, atol=1e-2)
        assert (fn(x) - before).abs().max() > 0.05


def test_random_numbers_are_those_of_torch() -> None:
    class Dropped(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dropped = F.dropout(x, 0.5, self.training)
            x = dropped + checkpoint(self.layers, dropped, use_reentrant=False)
            return x + F.dropout(self.layers(x), 0.3, self.training)

    module, x = Dropped().double(), torch.randn(16, D).double()
    fn, found = torch.compile(module, backend=HERE), []
    for each in (module, fn):
        torch.manual_seed(3)
        module.zero_grad()
        each(x).square().sum().backward()
        found.append([one.grad.clone() for one in module.parameters() if one.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_autocast() -> None:
    torch.manual_seed(0)
    module, x = Checkpointed(), torch.randn(16, D)
    eager = deepcopy(module)
    fn = torch.compile(module, backend=HERE)
    for each in (fn, eager):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).square().mean()
        loss.backward()
    assert reports()[-2].fused == (CHAIN,)
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() <= 2e-2 * theirs.grad.norm()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fn(x), module(x), rtol=2e-2, atol=2e-2)
    assert reports()[-1].fused == (CHAIN,)  # a weight that is cast in each call


@pytest.mark.slow
def test_a_second_batch_size() -> None:
    torch.manual_seed(0)
    module = Checkpointed().half()
    eager = deepcopy(module)
    backend = Backend(rest="eager", always=True, cpu="llvm", cascades=False, bins=(32,))
    fn = torch.compile(module, backend=backend, dynamic=True)
    for rows in (16, 24, 40):  # the last are more than the bin has
        x = torch.randn(rows, D).half()
        got, due = (trained(m, f, [x]) for m, f in ((module, fn), (eager, eager)))
        for ours, theirs in zip(got[0], due[0], strict=True):
            assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
    assert "; kernels for up to 32 rows" in reports()[-2].outcomes[-1].text


@pytest.mark.slow
def test_a_run_has_the_losses_of_eager() -> None:
    """With weights of float32 and products of bfloat16, as models are trained."""
    torch.manual_seed(0)

    class Small(Block):
        def layers(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().layers, x, use_reentrant=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    module = Small().requires_grad_()
    eager = deepcopy(module)
    data = torch.randn(4, 1, 16, D)
    batches = [data[step % 4] for step in range(24)]
    got = trained(module, torch.compile(module, backend=HERE), batches, 0.5)
    due = trained(eager, eager, batches, 0.5)
    ours, theirs = (torch.stack([loss for loss, *_ in each]) for each in (got, due))
    assert reports()[-2].fused == (CHAIN,)
    assert theirs[-4:].mean() < 0.8 * theirs[:4].mean()
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)


def test_what_is_refused() -> None:
    module = Checkpointed().half()
    x = torch.randn(16, D).half().requires_grad_()
    fn = torch.compile(module, backend=HERE)
    (slope,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.sum().backward()
    with pytest.raises(RefusedError, match=r"found a call that records gradients.*no_grad\(\)"):
        torch.ops.crossfuse.run([x], "a key")
    with pytest.raises(RefusedError, match="found a call that records gradients"):
        torch.ops.crossfuse.run_rows([x], [], "a key")
