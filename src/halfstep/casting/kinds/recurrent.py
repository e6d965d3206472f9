"""Recurrent layers, which are rounded as a whole or not at all."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.casting.kinds.kind import Candidates, Kind, OpClass, values_of, ways
from halfstep.formats import parse_dtype

_WIDTHS = {"tiny": (4, 16), "small": (8, 32), "medium": (16, 64), "large": (32, 128)}


def _candidates(cls: OpClass, direction: str) -> Candidates:
    """Return the candidates for a layer over 16 steps; one backward, `input`, gives both gradients.

    The weights are as small as a layer's are: larger ones close every gate, and gradients become denormal
    numbers, which fp32 kernels take three times as long for.
    """
    dtype = parse_dtype(cls.dtype)
    batch, width = _WIDTHS[cls.size]
    gates = {"lstm": 4, "gru": 3}.get(cls.op, 1)
    x, state = values_of((16, batch, width), dtype, 1), values_of((1, batch, width), dtype, 2)
    sides = [(gates * width, width), (gates * width, width), (gates * width,), (gates * width,)]
    weights = [values_of(side, dtype, i).div_(width**0.5) for i, side in enumerate(sides, 3)]
    op: Any = getattr(torch.ops.aten, cls.op).input
    training = direction != "forward"
    leaves = [t.requires_grad_(training) for t in (x, *weights)]

    def run(how: str) -> object:
        with torch.set_grad_enabled(training):
            wide = [t.float() if how == "rounded" else t for t in (*leaves, state)]
            initial: Any = [wide[-1], wide[-1]] if cls.op == "lstm" else wide[-1]
            out = op(wide[0], initial, wide[1:-1], True, 1, 0.0, training, False, False)[0].to(dtype)
            return torch.autograd.grad(out, leaves, torch.ones_like(out)) if training else out

    return ways(("rounded", "native"), run)


def _kind(*stands_for: str) -> Kind:
    limits = (4e5, 3e6, 2.4e7)
    return Kind(("plain",), limits, _candidates, stands_for=stands_for, one_backward=True)


LSTM = _kind("lstm", "mkldnn_rnn_layer")
GRU = _kind("gru")
RNN = _kind("rnn_tanh", "rnn_relu")
