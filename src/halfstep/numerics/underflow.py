"""Gradients that vanish: results that are zero only because the format ends there.

An op is suspected when most of its low-precision result is zero, and convicted when its re-run in fp32 is
not. It counts only if parameter gradients are lost to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfstep.formats import dtype_name, format_of
from halfstep.numerics.cause import rerun
from halfstep.numerics.nodes import Node
from halfstep.numerics.tape import Tape

_MOSTLY = 0.5


@dataclass(frozen=True)
class Flushed:
    """An op that flushed `share` of its nonzero results to zero, and the gradients that are zero since.

    `missing_bits`: by how many powers of two its largest result lies below the format's smallest value.
    """

    node: Node
    share: float
    format: str
    missing_bits: int
    lost: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What happened, in words."""
        return (
            f"underflow: {self.share:.0%} of the nonzero results of {self.node.op} are zero in "
            f"{self.format}; {len(self.lost)} parameter gradients vanish"
        )


class UnderflowProbe:
    """Looks at each op's results while the tape runs (`look`), and reports what mattered afterwards."""

    def __init__(self) -> None:
        self._found: list[Flushed] = []

    def look(self, node: Node, finite: bool) -> None:
        """Re-runs the op in fp32 if most of its 16-bit results are zero."""
        if node.phase == "optimizer" or not finite or node.func.is_view:
            return
        for place, low in enumerate(node.outs):
            if low.dtype not in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2) or low.numel() == 0:
                continue
            zero = low == 0
            if zero.double().mean() < _MOSTLY:
                continue
            wide = rerun(node, torch.float32)
            if wide is None or wide[place].shape != low.shape:
                continue
            nonzero = wide[place] != 0
            lost = nonzero & zero
            share = float(lost.sum()) / max(1, int(nonzero.sum()))
            if share >= _MOSTLY:
                top = float(wide[place].abs()[lost].max())
                bits = math.ceil(math.log2(format_of(low.dtype).smallest_subnormal) - math.log2(top))
                self._found.append(Flushed(node, share, dtype_name(low.dtype), bits))
                return

    def report(self, tape: Tape) -> tuple[Flushed, ...]:
        """The ops that flushed, first ones first, if gradients vanished; otherwise nothing."""
        lost = tuple(name for name, gradient in tape.gradients.items() if not gradient.any())
        if not lost:
            return ()
        return tuple(Flushed(f.node, f.share, f.format, f.missing_bits, lost) for f in self._found)
