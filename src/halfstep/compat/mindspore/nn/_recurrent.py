"""Recurrent layers with MindSpore's names: single steps (cells) and whole sequences, over torch's own.

At level auto, and in any region under the op table "mindspore", a cell is matrix products in 16 bits and the
rest in the widest dtype, as MindSpore builds it: its bias additions promote to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.compat.mindspore.nn._cell import Cell, check_positive, promotes

States = tuple[torch.Tensor, torch.Tensor]


class _OneStep:
    """What the cells share: MindSpore's arguments, and gates whose bias is added after the product."""

    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True, **kwargs: Any) -> None:
        check_positive(self, input_size=input_size, hidden_size=hidden_size)
        base: Any = super()
        base.__init__(input_size, hidden_size, has_bias, **kwargs)

    def _gates(self: Any, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Products of input and of state with their weights, each with its bias."""
        i, s = F.linear(x, self.weight_ih), F.linear(h, self.weight_hh)
        return (i + self.bias_ih, s + self.bias_hh) if self.bias else (i, s)


class LSTMCell(_OneStep, torch.nn.LSTMCell, Cell):
    """One step of an LSTM: (x, (h, c)) to (h, c)."""

    def forward(self, x: torch.Tensor, hx: States | None = None) -> States:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and twice [N, hidden_size] to twice [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        h, c = hx
        of_input, of_state = self._gates(x, h)
        keep_in, forget, new, out = (of_input + of_state).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(keep_in) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(c), c


class RNNCell(_OneStep, torch.nn.RNNCell, Cell):
    """One step of a plain recurrent cell: (x, h) to h; `nonlinearity` "tanh" or "relu"."""

    def forward(self, x: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and [N, hidden_size] to [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        of_input, of_state = self._gates(x, hx)
        return getattr(torch, self.nonlinearity)(of_input + of_state)


class GRUCell(_OneStep, torch.nn.GRUCell, Cell):
    """One step of a GRU: (x, h) to h."""

    def forward(self, x: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[N, input_size] and [N, hidden_size] to [N, hidden_size]."""
        if hx is None or not promotes(x):
            return super().forward(x, hx)
        of_input, of_state = self._gates(x, hx)
        (i_r, i_z, i_n), (h_r, h_z, h_n) = of_input.chunk(3, -1), of_state.chunk(3, -1)
        new = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
        return new + torch.sigmoid(i_z + h_z) * (hx - new)


class _Sequence:
    """What the layers over sequences share: MindSpore's arguments; results in the dtype of the input."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **kwargs: Any,
    ) -> None:
        check_positive(self, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        base: Any = super()
        base.__init__(
            input_size,
            hidden_size,
            num_layers,
            bias=has_bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            **kwargs,
        )

    def forward(
        self: Any, x: torch.Tensor, hx: Any = None, seq_length: torch.Tensor | Sequence[int] | None = None
    ) -> Any:
        """[L, N, input_size], states and lengths; gives the outputs of all steps and the last state."""
        base: Any = super()
        if seq_length is None:
            output, last = base.forward(x, hx)
        else:
            lengths = torch.as_tensor(seq_length, dtype=torch.int64).cpu()
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                x, lengths, self.batch_first, enforce_sorted=False
            )
            output, last = base.forward(packed, hx)
            output, _ = torch.nn.utils.rnn.pad_packed_sequence(
                output, self.batch_first, total_length=x.shape[1 if self.batch_first else 0]
            )
        if not promotes(x):
            return output, last
        states = tuple(s.to(x.dtype) for s in last) if isinstance(last, tuple) else last.to(x.dtype)
        return output.to(x.dtype), states


class RNN(_Sequence, torch.nn.RNN, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A plain recurrent network over sequences."""


class LSTM(_Sequence, torch.nn.LSTM, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An LSTM over sequences: (x, (h, c)) to (outputs, (h, c))."""


class GRU(_Sequence, torch.nn.GRU, Cell):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A GRU over sequences: (x, h) to (outputs, h)."""
