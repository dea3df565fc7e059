"""Decides what the demo trains: a small character-level transformer, in three sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of the transformer; ``context`` is the longest text it sees, in characters."""

    width: int
    num_layers: int
    num_heads: int
    context: int


MODEL_SIZES = {
    "tiny": ModelSize(width=32, num_layers=1, num_heads=2, context=32),
    "small": ModelSize(width=128, num_layers=3, num_heads=4, context=64),
    "medium": ModelSize(width=192, num_layers=4, num_heads=6, context=96),
}


class CharTransformer(nn.Module):
    """Predicts the next character: tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, size: ModelSize, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.characters(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each around a residual connection."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        mixed: Tensor = hidden + self.perceptron(hidden)
        return mixed

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return attended
