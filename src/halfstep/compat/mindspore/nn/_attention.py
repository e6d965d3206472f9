"""Embedding and attention with MindSpore's names, arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore.nn._cell import Cell, check_positive, promotes
from halfstep.compat.mindspore.nn._initializer import Init, initialize
from halfstep.errors import ConfigError


class Embedding(torch.nn.Embedding, Cell):
    """Rows of a table by index; `use_one_hot` multiplies by one-hot rows instead, so that lists reach it."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        use_one_hot: bool = False,
        embedding_table: Init = "normal",
        padding_idx: int | None = None,
    ) -> None:
        check_positive(self, vocab_size=vocab_size, embedding_size=embedding_size)
        super().__init__(vocab_size, embedding_size, padding_idx)
        self.vocab_size, self.embedding_size, self.use_one_hot = vocab_size, embedding_size, use_one_hot
        initialize(self.weight, embedding_table)
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx] = 0.0

    @property
    def embedding_table(self) -> torch.nn.Parameter:
        """The table, [vocab_size, embedding_size]."""
        return self.weight  # pyright: ignore[reportReturnType]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Integers of any shape to [*shape, embedding_size]."""
        if not self.use_one_hot:
            return super().forward(ids)
        return F.one_hot(ids.long(), self.vocab_size).to(self.weight.dtype) @ self.weight


class MultiheadAttention(torch.nn.MultiheadAttention, Cell):
    """Attention in several heads: (query, key, value) to (output, weights)."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        has_bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        **kwargs: Any,
    ) -> None:
        check_positive(self, embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ConfigError(
                "The init argument 'embed_dim' must be divisible by 'num_heads', "
                f"but got {embed_dim} and {num_heads}."
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            has_bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            **kwargs,
        )

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's; where bias additions promote, the output is as wide as the bias."""
        output, weights = super().forward(*args, **kwargs)
        bias = self.out_proj.bias
        if bias is None or not promotes(output):  # pyright: ignore[reportUnnecessaryComparison]
            return output, weights
        return output.to(torch.promote_types(output.dtype, bias.dtype)), weights
