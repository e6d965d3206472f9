"""How often a step uses each weight: copies that add up in memory, and gradients that add up in 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from halfstep.formats import dtype_name
from halfstep.numerics.tape import Node
from halfstep.policy.levels import LOW_DTYPES

Row = tuple[str, str, str, str]
"""Rule, parameter, text and cure."""


class WeightUses:
    """An observer for the tape: uses of each weight in the forward passes between two backward passes.

    A use of an fp32 weight is a cast of it to 16 bits. Weights are known by where they lie, since an op may
    be given a view of one. `exact`: those whose gradients autograd adds in fp32.
    """

    def __init__(self, models: Iterable[nn.Module] = (), exact: Iterable[Tensor] = ()) -> None:
        rows, left_out = (row for model in models for row in model.named_parameters()), set(exact)
        self._weights = {
            p.data_ptr(): (name, p)
            for name, p in rows
            if p.requires_grad and not p.is_meta and p not in left_out
        }
        self._uses, self._most = Counter[int](), Counter[int]()
        """Since the last backward, and the most before one."""

    def observe(self, node: Node) -> None:
        """Count the weights that one op was given."""
        if node.phase == "backward":
            self._most |= self._uses
            self._uses.clear()
        elif node.phase == "forward" and not node.func.is_view:
            casts = node.base == "_to_copy" and any(t.dtype in LOW_DTYPES for t in node.outs)
            used = {t.data_ptr() for t in node.tensors() if (t.dtype is torch.float32) is casts}
            self._uses.update(used & self._weights.keys())

    def find_repeated_casts(self) -> Iterable[Row]:
        """Yield where copies of fp32 weights take more memory than all of these and their gradients."""
        casts = self._most_uses(torch.float32)
        copies = _bytes_of(casts)
        if copies <= sum(8 * w.numel() for _, w in self._weights.values() if w.dtype is torch.float32):
            return
        (name, _), count = max(casts.items(), key=lambda row: row[1] * row[0][1].numel())
        once = _bytes_of(dict.fromkeys(casts, 1))
        text = f"cast to 16 bits {count} times before backward: copies of this model's weights take "
        text += f"{copies / 1e6:.3g} MB until then, {once / 1e6:.2g} MB where each is cast once"
        cure = "run the model in `with hs.frozen_weights(model):` inside of the region"
        yield "repeated casts", name, text, cure

    def find_long_sums(self) -> Iterable[Row]:
        """Yield the weight whose gradients autograd adds in 16 bits, one by one, past what these can hold."""
        uses = self._most_uses(*LOW_DTYPES)
        long = {row: n for row, n in uses.items() if n * torch.finfo(row[1].dtype).eps > 0.5}
        if not long:
            return
        (name, weight), count = max(long.items(), key=lambda row: row[1])
        dtype, others = dtype_name(weight.dtype), f" (and {len(long) - 1} others)" if len(long) > 1 else ""
        text = f"used {count} times before backward{others}: autograd adds the gradients of these uses in "
        text += f"{dtype}, one by one, which rounds the later ones away"
        cure = "give hs.optim accumulate='fp32', keep this module in fp32 by a plan rule, or use level O1"
        yield "long gradient sum", name, text, cure

    def _most_uses(self, *dtypes: torch.dtype) -> dict[tuple[str, Tensor], int]:
        counts = self._most | self._uses
        return {row: n for at, n in counts.items() if (row := self._weights[at])[1].dtype in dtypes}


def _bytes_of(casts: Mapping[tuple[str, Tensor], int]) -> int:
    return sum(2 * count * weight.numel() for (_, weight), count in casts.items())
