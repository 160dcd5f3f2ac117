"""ResNets (He et al. 2015): those for CIFAR-10 and the usual ones, with no library but PyTorch."""

from __future__ import annotations

import torch
from torch import nn

#: name -> blocks per stage, width of the first stage, three convolutions per block?, for small images?
KINDS: dict[str, tuple[tuple[int, ...], int, bool, bool]] = {
    "resnet20": ((3, 3, 3), 16, False, True),
    "resnet18": ((2, 2, 2, 2), 64, False, True),
    "resnet50": ((3, 4, 6, 3), 64, True, False),
}


def _convolution(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outside)
    )


class Block(nn.Module):
    """Two convolutions of 3 x 3, or one between two of 1 x 1, beside a shortcut."""

    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        if outside == width:
            layers = [_convolution(inside, width, 3, stride), nn.ReLU(), _convolution(width, outside, 3)]
        else:
            layers = [_convolution(inside, width, 1), nn.ReLU(), _convolution(width, width, 3, stride)]
            layers += [nn.ReLU(), _convolution(width, outside, 1)]
        self.body = nn.Sequential(*layers)
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inside, outside, 1, stride)
        # a block begins as its shortcut alone
        nn.init.zeros_(self.body[-1][1].weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns images [n, outside, height / stride, width / stride]."""
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def resnet(kind: str, num_classes: int, width: int | None = None) -> nn.Sequential:
    """Returns a network that makes logits [n, classes] of images [n, 3, height, width].

    Args:
        kind: one of `KINDS`.
        num_classes: of the answer.
        width: of the first stage, if not the usual one: a smaller one is for trying things out.
    """
    blocks, usual, bottleneck, small = KINDS[kind]
    width = width or usual
    if small:
        layers: list[nn.Module] = [_convolution(3, width, 3), nn.ReLU()]
    else:
        layers = [_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = width
    for stage, count in enumerate(blocks):
        outside = width * 2**stage * (4 if bottleneck else 1)
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Block(inside, width * 2**stage, outside, stride))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, num_classes))
