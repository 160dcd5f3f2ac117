"""VGG-16 for CIFAR-10, ResNet-18, ResNet-50 and Inception-v4, written from the papers that define them."""

from __future__ import annotations

from .layers import Table


def vgg16_cifar() -> Table:
    """13 convolutions with batch normalization in five stages, one linear layer; 32 x 32, 10 classes."""
    table, channels, edge, number = Table(), 3, 32, 0
    for stage, (count, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for _ in range(count):
            number += 1
            name = f"stage{stage + 1}.conv{number}"
            table.conv(name, (channels, width), (3, 3), (edge, edge), bias=True)
            table.norm(f"stage{stage + 1}.norm{number}", width, edge * edge)
            channels = width
        edge //= 2
    table.linear("classifier", 512, 10)
    return table


def resnet50() -> Table:
    """A 7 x 7 convolution, then bottlenecks of 1 x 1, 3 x 3 and 1 x 1: 3, 4, 6 and 3 of them."""
    table = Table()

    def unit(name: str, channels: tuple[int, int], kernel: int, edge: int) -> None:
        table.conv(f"{name}.conv", channels, (kernel, kernel), (edge, edge), bias=False)
        table.norm(f"{name}.norm", channels[1], edge * edge)

    unit("stem", (3, 64), 7, 112)
    channels, edge = 64, 56
    for stage, (count, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for number in range(count):
            name, before = f"stage{stage + 1}.block{number + 1}", edge
            if stage and number == 0:  # the 3 x 3 convolution halves the edge
                edge //= 2
            unit(f"{name}.reduce", (channels, width), 1, before)
            unit(f"{name}.middle", (width, width), 3, edge)
            unit(f"{name}.expand", (width, 4 * width), 1, edge)
            if number == 0:
                unit(f"{name}.shortcut", (channels, 4 * width), 1, edge)
            channels = 4 * width
    table.linear("classifier", 2048, 1000)
    return table


def resnet18() -> Table:
    """A 7 x 7 convolution, then four stages of two blocks of two 3 x 3 convolutions."""
    table = Table()

    def unit(name: str, channels: tuple[int, int], kernel: int, edge: int) -> None:
        table.conv(f"{name}.conv", channels, (kernel, kernel), (edge, edge), bias=False)
        table.norm(f"{name}.norm", channels[1], edge * edge)

    unit("stem", (3, 64), 7, 112)
    channels, edge = 64, 56
    for stage, width in enumerate((64, 128, 256, 512)):
        edge = edge if stage == 0 else edge // 2
        for number in range(2):
            name = f"stage{stage + 1}.block{number + 1}"
            unit(f"{name}.first", (channels, width), 3, edge)
            unit(f"{name}.second", (width, width), 3, edge)
            if channels != width:
                unit(f"{name}.shortcut", (channels, width), 1, edge)
            channels = width
    table.linear("classifier", 512, 1000)
    return table


class _Inception:
    """Convolutions with batch normalization, in branches."""

    def __init__(self) -> None:
        self.table, self.count = Table(), 0

    def unit(self, inputs: int, outputs: int, kernel: tuple[int, int], edge: int) -> int:
        self.count += 1
        self.table.conv(f"unit{self.count}.conv", (inputs, outputs), kernel, (edge, edge), bias=False)
        self.table.norm(f"unit{self.count}.norm", outputs, edge * edge)
        return outputs

    def branch(
        self, inputs: int, edge: int, *steps: tuple[int, tuple[int, int]], end: int | None = None
    ) -> int:
        """One after the other; `end` is the edge after the last, where that one strides."""
        for number, (outputs, kernel) in enumerate(steps):
            here = end if end is not None and number == len(steps) - 1 else edge
            inputs = self.unit(inputs, outputs, kernel, here)
        return inputs


def inception_v4() -> Table:
    """Stem, 4 blocks A, reduction A, 7 blocks B, reduction B, 3 blocks C: 299 x 299 inputs."""
    net = _Inception()
    one, three, wide, tall = (1, 1), (3, 3), (1, 7), (7, 1)
    # stem, Fig. 3; convolutions without padding shrink the edge
    width = net.unit(3, 32, three, 149)
    width = net.unit(width, 32, three, 147)
    width = net.unit(width, 64, three, 147)
    width += net.unit(width, 96, three, 73)  # beside a maximum pool
    left = net.branch(width, 73, (64, one), (96, three), end=71)
    right = net.unit(net.branch(width, 73, (64, one), (64, wide), (64, tall)), 96, three, 71)
    width = left + right
    width += net.unit(width, 192, three, 35)
    for _ in range(4):  # Inception-A, Fig. 4
        width = (
            net.branch(width, 35, (96, one))
            + net.branch(width, 35, (64, one), (96, three))
            + net.branch(width, 35, (64, one), (96, three), (96, three))
            + net.branch(width, 35, (96, one))
        )
    # reduction A, Fig. 7 with k, l, m, n = 192, 224, 256, 384
    width += net.branch(width, 35, (384, three), end=17) + net.branch(
        width, 35, (192, one), (224, three), (256, three), end=17
    )
    for _ in range(7):  # Inception-B, Fig. 5
        width = (
            net.branch(width, 17, (384, one))
            + net.branch(width, 17, (192, one), (224, wide), (256, tall))
            + net.branch(width, 17, (192, one), (192, tall), (224, wide), (224, tall), (256, wide))
            + net.branch(width, 17, (128, one))
        )
    # reduction B, Fig. 8
    width += net.branch(width, 17, (192, one), (192, three), end=8) + net.branch(
        width, 17, (256, one), (256, wide), (320, tall), (320, three), end=8
    )
    for _ in range(3):  # Inception-C, Fig. 6; two branches fork at their ends
        first = net.branch(width, 8, (256, one))
        second = net.branch(width, 8, (384, one))
        ends = net.unit(second, 256, (1, 3), 8) + net.unit(second, 256, (3, 1), 8)
        third = net.branch(width, 8, (384, one), (448, (3, 1)), (512, (1, 3)))
        ends += net.unit(third, 256, (1, 3), 8) + net.unit(third, 256, (3, 1), 8)
        width = first + ends + net.branch(width, 8, (256, one))
    net.table.linear("classifier", 1536, 1000)
    return net.table
