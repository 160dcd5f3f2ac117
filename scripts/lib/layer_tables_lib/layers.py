"""Layers as rows of a table: name, shape, and multiply-adds for one sample."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Table:
    """Rows in forward order. Work is in multiply-adds of the forward pass, per sample."""

    rows: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], work: int) -> None:
        self.rows.append((name, shape, work))

    def conv(
        self,
        name: str,
        channels: tuple[int, int],
        kernel: tuple[int, int],
        out: tuple[int, int],
        *,
        bias: bool,
    ) -> None:
        """`out` is height and width of what comes out."""
        places = out[0] * out[1]
        shape = (channels[1], channels[0], *kernel)
        self.add(f"{name}.weight", shape, channels[0] * channels[1] * kernel[0] * kernel[1] * places)
        if bias:
            self.add(f"{name}.bias", (channels[1],), channels[1] * places)

    def norm(self, name: str, features: int, places: int) -> None:
        """Scale and shift, each one multiply or add for every value."""
        for part in ("weight", "bias"):
            self.add(f"{name}.{part}", (features,), features * places)

    def linear(self, name: str, inputs: int, outputs: int, places: int = 1, *, bias: bool = True) -> None:
        self.add(f"{name}.weight", (outputs, inputs), inputs * outputs * places)
        if bias:
            self.add(f"{name}.bias", (outputs,), outputs * places)
