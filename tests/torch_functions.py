"""Functions of torch as modules: what models are tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)
