"""Weights that were changed between steps: what is set by hand is what the master then is.

An exact master is a 16-bit weight and the bits it lacks, so a weight that is set leaves bits behind that
belong to the value before. Nothing in the two tells which elements are new: every pair of halves is some
fp32 number. What does tell is torch's count of changes, which a step raises for both alike, and, from the
first change on, a copy of the weight as the step left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from halfstep.optim.split import LOW_DTYPES
from halfstep.optim.tensor_facts import Versions, versions_of


class HandEdits:
    """The pairs of one optimizer, and what is known of changes to the weight alone.

    The first change of a weight clears the bits of elements that are zero now, and all of them where one
    value fills the weight; elements otherwise keep theirs, which is within half a step of 16 bits. From then
    on a copy (2 bytes an element) tells exactly which elements changed: those are what they were set to, the
    others keep every bit. A change that no version counts (`.data`) is seen with the next one that does.
    """

    def __init__(self) -> None:
        self._bits: dict[Tensor, Tensor] = {}
        self._ahead: dict[Tensor, int] = {}
        self._left: dict[Tensor, Tensor] = {}
        self.awaiting: set[Tensor] = set()
        """Weights whose bits were loaded since the last step: 16 bits that come in belong to them."""
        self._expected: int | None = None
        self._counted: Versions | None = None
        self.wholes: Mapping[Tensor, Tensor] = {}
        """What a local tensor is a shard of: it counts what a user does, the shard what steps do."""
        self.planned = 0
        """How many of the weights one call of the CPU plan updates."""

    def know(self, p: Tensor, bits: Tensor | None) -> None:
        """From now on `p` lacks these bits, or none; a change since they were first given still counts."""
        if bits is None or p.is_inference() or bits.is_inference():
            for known in (self._bits, self._ahead, self._left):
                known.pop(p, None)
        elif self._bits.get(p) is not bits:
            self._bits[p], self._ahead[p] = bits, self._ahead_of(p, bits)
            if p in self._left:
                self._left[p] = p.detach().clone()
        self.awaiting.discard(p)
        self._expected = self._counted = None

    def loaded(self, p: Tensor, bits: Tensor | None) -> None:
        """Bits of a checkpoint, whose 16-bit weights may come before or after them."""
        self._left.pop(p, None)
        self.know(p, bits)
        self.awaiting.add(p)

    def expect(self, weights: Iterable[Tensor]) -> None:
        """The next change of each of these writes the values that are there."""
        for p in weights:
            if p in self._bits:
                self._ahead[p] += 1
        self._expected = None

    def is_set(self, p: Tensor) -> bool:
        """Whether `p` was set by hand since the last step."""
        bits = self._bits.get(p)
        return bits is not None and self._ahead_of(p, bits) > self._ahead[p]

    def take(self) -> None:
        """Clear the bits of what was set by hand since the last step."""
        if not self._bits:
            return
        if self._counted is None:
            wholes = [w for p in self._bits if (w := self._whole(p)) is not None]
            self._counted = versions_of([*self._bits, *wholes])
        if self._expected is None or self._counted.total() != self._expected:
            for p in self._bits:
                self.take_one(p)
            total = self._counted.total()
            self._expected = total if total >= 0 else None

    def _whole(self, p: Tensor) -> Tensor | None:
        whole = self.wholes.get(p)
        return None if whole is p else whole

    def _ahead_of(self, p: Tensor, bits: Tensor) -> int:
        """How many changes of the weight its bits have not seen."""
        whole = self._whole(p)
        return p._version - bits._version + (0 if whole is None else whole._version)

    def take_one(self, p: Tensor) -> None:
        """`take` for one weight."""
        if not self.is_set(p):
            return
        bits = self._bits[p]
        if p.dtype not in LOW_DTYPES or p.shape != bits.shape or p.device != bits.device:
            return  # the next step makes new bits
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if p in self.awaiting:
            self._ahead[p] = self._ahead_of(p, bits)
            return
        with torch.inference_mode(False), torch.no_grad():
            bits.masked_fill_(_was_set(p.detach(), bits, self._left.get(p)), 0)
            self._left[p] = p.detach().clone()
        self._ahead[p] = self._ahead_of(p, bits)

    def untouched(self, p: Tensor, low: Tensor) -> Tensor:
        """Where `p`, widened since the last step and now `low` in 16 bits, is what that step left: bool."""
        if not self.is_set(p):
            return torch.ones((), dtype=torch.bool, device=p.device)
        left = self._left.get(p)
        if left is None or p in self.awaiting or left.dtype != low.dtype or left.shape != low.shape:
            return torch.zeros((), dtype=torch.bool, device=p.device)
        return left.view(torch.int16) == low.view(torch.int16)

    def after_plan(self) -> None:
        """`after_step` of the CPU plan, which counts one change of each weight that it updates."""
        expected = self._expected
        self.after_step()
        self._expected = None if expected is None else expected + self.planned

    def after_step(self) -> None:
        """Keep how a step left the weights that were changed by hand before."""
        self._expected = None
        self.awaiting.clear()
        for p, left in self._left.items():
            left.copy_(p.detach())

    def after_one(self, p: Tensor) -> None:
        """`after_step` for one weight."""
        self._expected = None
        self.awaiting.discard(p)
        if p in self._left:
            self._left[p].copy_(p.detach())

    def plan(self, updated: list[Tensor]) -> None:
        """From now on the CPU plan updates these parameters."""
        self.planned = sum(p in self._bits for p in updated)


def _was_set(weight: Tensor, bits: Tensor, left: Tensor | None) -> Tensor:
    """Which elements were set by hand: bool, of the weight's shape or one that broadcasts to it."""
    if left is not None and left.dtype == weight.dtype and left.shape == weight.shape:
        return left.view(torch.int16) != weight.view(torch.int16)
    return (weight == 0) | (_is_uniform(weight.view(torch.int16)) & ~_is_uniform(bits))


def _is_uniform(t: Tensor) -> Tensor:
    return (t == t[(slice(0, 1),) * t.dim()]).all()
