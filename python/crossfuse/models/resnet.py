"""A residual network of bottleneck blocks, NCHW, with its norms in evaluation mode."""

from __future__ import annotations

import torch
from torch import nn

from crossfuse.models.spec import ModelSpec
from crossfuse.models.widths import Convolutions


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with norms between them, and a residual."""

    def __init__(self, outside: int, inside: int, given: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(given, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            nn.Conv2d(inside, inside, 3, padding=1, bias=False),
            *(nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        same = given == outside
        self.skip = nn.Identity() if same else nn.Conv2d(given, outside, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to [batch, given, height, width]."""
        return torch.relu(self.path(x) + self.skip(x))


class ResNet(nn.Module):
    """Stages of blocks, halved between; with a head, logits of the mean over pixels."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        widths = spec.widths
        assert isinstance(widths, Convolutions)
        given, stages = widths.channels[0], []
        for number, inside in enumerate(widths.channels):
            blocks: list[nn.Module] = [nn.MaxPool2d(2)] if number else []
            for _ in range(spec.layers):
                blocks.append(Bottleneck(4 * inside, inside, given))
                given = 4 * inside
            stages.append(nn.Sequential(*blocks))
        self.stem = nn.Conv2d(3, widths.channels[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(given, widths.classes) if spec.head else None

    @property
    def mlps(self) -> list[nn.Module]:
        """Empty, since convolutional networks have no feed-forward ones."""
        return []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to images [batch, 3, side, side]."""
        x = self.stages(self.stem(x))
        return x if self.head is None else self.head(x.mean((2, 3)))
