"""Feed-forward networks of the zoo."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the feed-forward network of Llama and its kind."""

    def __init__(self, hidden: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inside, bias=False)
        self.up = nn.Linear(hidden, inside, bias=False)
        self.down = nn.Linear(inside, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to rows of `hidden` elements."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    """``contract(act(expand(x)))`` with biases, the feed-forward network of BERT and GPT-2."""

    def __init__(
        self, hidden: int, inside: int, act: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(hidden, inside), nn.Linear(inside, hidden)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to rows of `hidden` elements."""
        return self.contract(self.act(self.expand(x)))


class Experts(nn.Module):
    """A shared gated network beside routed ones, as in Qwen's mixtures of experts.

    Every expert computes every token, and the router's weights choose: shapes are then fixed, as a
    captured graph needs them, at the cost of the products of experts that are not chosen. `shared`
    and `inside` are the widths inside the shared network and inside one expert.
    """

    def __init__(self, hidden: int, shared: int, inside: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.shared_gate = nn.Linear(hidden, 1, bias=False)
        self.shared = Gated(hidden, shared)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inside))
        self.down = nn.Parameter(torch.empty(experts, inside, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the mixture to [batch, tokens, hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        chance = torch.softmax(self.router(rows), dim=-1)
        best, place = torch.topk(chance, self.top_k, dim=-1)
        weight = torch.zeros_like(chance).scatter(1, place, best)
        given = rows.expand(self.down.shape[0], *rows.shape)
        gate, up = torch.bmm(given, self.gate_up).chunk(2, dim=-1)
        each = torch.bmm(functional.silu(gate) * up, self.down)
        routed = (each * weight.t().unsqueeze(-1)).sum(0)
        shared = torch.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return (routed + shared).view(x.shape)
