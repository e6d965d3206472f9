"""The recipes' networks. Plain PyTorch: no precision is chosen here, `hs.prepare` does that."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def digits_mlp() -> nn.Module:
    """784-512-512-10 on flattened 28x28 images; returns logits [batch, 10]."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class DigitsCNN(nn.Module):
    """5x5 convolutions 1-16 and 16-32, each with ReLU and 2x2 max-pool; linear 1568-10; log_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 1, 28, 28] -> log-probabilities [batch, 10]."""
        return F.log_softmax(self.classify(self.features(x).flatten(1)), dim=1)


class Block(nn.Module):
    """A transformer block, normalised before each part: causal attention, then a GELU MLP of 4 widths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.join(output.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        x = x + self._attend(self.norm_attention(x))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class TextGPT(nn.Module):
    """A small GPT on characters: token and position embeddings, blocks, layer norm, linear head."""

    def __init__(self, vocabulary: int, context: int) -> None:
        super().__init__()
        width, layers, heads = 128, 4, 4
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and (bias := module._parameters["bias"]) is not None:
            nn.init.zeros_(bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Codes [batch, length] int64 -> logits [batch, length, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SignedLinear(nn.Module):
    """A bias-free layer whose weights begin at +1 or -1 and whose input is divided by sqrt(fan_in).

    Signed constant initialisation (Ramanujan et al. 2020, arXiv 1911.13299) with the equalised learning rate
    of Karras et al. 2018 (arXiv 1710.10196): every weight has the same spacing to the next fp16 number.
    """

    def __init__(self, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in).sign())
        self.factor = math.sqrt(gain / fan_in)

    def forward(self, x: Tensor) -> Tensor:
        """[..., fan_in] -> [..., fan_out]."""
        return F.linear(x * self.factor, self.weight)


def ink_autoencoder() -> nn.Module:
    """784-512-784; images [batch, 1, 28, 28] -> log-probabilities [batch, 784] of where the ink is."""
    return nn.Sequential(
        nn.Flatten(),
        SignedLinear(784, 512),
        nn.ReLU(),
        SignedLinear(512, 784, gain=2.0),
        nn.LogSoftmax(dim=1),
    )
