"""A small GPT that reads and writes bytes, for the examples: `gpt_text.py` and `demo.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: bytes
VOCABULARY = 256


class Layer(nn.Module):
    """A transformer layer: causal attention and two dense layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense_in, self.dense_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns states [batch, length, width]."""
        batch, length, width = x.shape
        parts = self.attention_in(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense_out(functional.gelu(self.dense_in(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings of bytes and places, layers, and the bytes' embedding once more to guess the next one."""

    def __init__(
        self, layers: int, width: int, heads: int, length: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                out = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if out else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, length, vocabulary] of the bytes that follow."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups for an optimizer: matrices with weight decay, biases and norms without."""
    parameters = list(parameters)
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]
