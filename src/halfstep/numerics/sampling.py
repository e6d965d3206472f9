"""What a watch keeps of a tensor it passes, and how that travels to the host.

On a CPU a spread of each tensor's elements is copied as it passes and all of them are counted together at the
end of the step: counting two hundred small tensors one by one would cost more in calls than in arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.devices.transfer import send_to_host
from halfstep.formats import FORMATS, dtype_name
from halfstep.gradients.per_parameter import Ends, amaxes_of, ends_of
from halfstep.numerics.histogram import Counts, count, count_many, lowest_exponent
from halfstep.numerics.series import Sample
from halfstep.trees import dense_values

_TOGETHER = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SampledTensor:
    """One tensor of a sampled step: its ends, and its count or the elements yet to be counted.

    `parts` are fp32 copies, which hold 16-bit values exactly.
    """

    dtype: str
    ends: Ends
    counts: Counts | None = None
    parts: tuple[Tensor, ...] = ()

    def joined(self, other: SampledTensor) -> SampledTensor:
        """Both together; the later alone where they cannot be added."""
        if self.dtype != other.dtype or (self.counts is None) != (other.counts is None):
            return other
        low, high = zip(self.ends, other.ends)
        ends = torch.minimum(*low), torch.maximum(*high)
        if self.counts is not None and other.counts is not None:
            return SampledTensor(self.dtype, ends, self.counts + other.counts)
        return SampledTensor(self.dtype, ends, None, self.parts + other.parts)


def see(t: Tensor, exact: bool, amax: Tensor | None = None) -> SampledTensor:
    """Takes down a tensor; `exact` counts every element, otherwise an even spread of them.

    `amax` is its largest magnitude, where that is known.
    """
    t = dense_values(t.detach())
    name = dtype_name(t.dtype)
    ends = ends_of(t) if amax is None else (amax, amax)
    if exact or t.device.type != "cpu" or t.dtype not in _TOGETHER:
        return SampledTensor(name, ends, count(t if exact else spread(t)))
    return SampledTensor(name, ends, None, (spread(t).reshape(-1).to(torch.float32, copy=True),))


def _finished(seen: list[SampledTensor]) -> list[Tensor]:
    """The bins of each: [zero, exponents..., inf, nan], fp64; in fp32's layout where counted together."""
    parts = [s.parts[0] if len(s.parts) == 1 else torch.cat(s.parts) for s in seen if s.parts]
    # fp64 holds every count below 2**53, and lets one copy carry counts and magnitudes.
    together = iter(count_many(parts).double()) if parts else iter(())
    return [next(together) if s.counts is None else s.counts.bins.double() for s in seen]


class Receiver(Protocol):
    """Whom a `Late` delivers to: the watch."""

    def take_lost(self, step: int, lost: dict[str, tuple[int, int]]) -> None:
        """How many of how many updates were lost, by parameter."""
        ...

    def take_sample(self, kind: str, name: str, sample: Sample) -> None:
        """One tensor's histogram at a step."""
        ...


class Late:
    """Device values on their way to the host, copied together, read when they have arrived."""

    def __init__(self, step: int, what: str, keys: list[Any], packed: Tensor, more: tuple[Any, ...]) -> None:
        self._step, self._what, self._keys, self._more = step, what, keys, more
        self._packed = send_to_host(packed)

    @classmethod
    def counts(cls, step: int, found: Mapping[Any, SampledTensor], scale: float | Tensor) -> Late:
        """Sampled histograms and largest magnitudes by (kind, name)."""
        bins = _finished(list(found.values()))
        amaxes = amaxes_of([seen.ends for seen in found.values()]).double()
        last = torch.as_tensor(scale, dtype=torch.float64, device=amaxes.device).view(1)
        packed = torch.cat([*bins, amaxes, last])
        shapes = tuple(
            (s.dtype, "fp32" if s.parts else s.dtype, b.numel()) for s, b in zip(found.values(), bins)
        )
        return cls(step, "counts", list(found), packed, shapes)

    @classmethod
    def shares(cls, step: int, found: dict[str, tuple[Tensor, Tensor]]) -> Late:
        """Lost updates and all updates by parameter."""
        return cls(step, "shares", list(found), torch.stack([v for pair in found.values() for v in pair]), ())

    @property
    def arrived(self) -> bool:
        """Whether the copy has finished."""
        return self._packed.done()

    def deliver(self, to: Receiver) -> None:
        """Waits if need be, and hands the values over."""
        if self._what == "counts":
            self._deliver_counts(to, self._packed.wait().numpy())
            return
        values = self._packed.wait().tolist()
        pairs = zip(self._keys, values[0::2], values[1::2])
        to.take_lost(self._step, {n: (int(a), int(b)) for n, a, b in pairs})

    def _deliver_counts(self, to: Receiver, values: Any) -> None:
        at, scale = 0, float(values[-1])
        amaxes = values[-1 - len(self._keys) : -1]
        for (kind, name), (dtype, layout, size), amax in zip(self._keys, self._more, amaxes):
            bins = values[at : at + size]
            at += size
            present = bins[1:-2].nonzero()[0]
            first, last = (int(present[0]), int(present[-1])) if len(present) else (0, -1)
            counts = tuple(bins[1 + first : 2 + last].astype(int).tolist())
            lowest = lowest_exponent(FORMATS[layout])
            zeros, infs, nans = int(bins[0]), int(bins[-2]), int(bins[-1])
            scaled = scale if kind in ("gradient", "activation_grad") else 1.0
            sample = Sample(self._step, float(amax), dtype, lowest + first, counts, zeros, infs, nans, scaled)
            to.take_sample(kind, name, sample)


def spread(t: Tensor, most: int = 1 << 12) -> Tensor:
    """About `most` elements evenly spread over a tensor: whole rows, so that every column is there."""
    size = t.numel()
    if size <= 2 * most or t.layout != torch.strided or t.is_complex():
        return t
    width = t.shape[-1]
    if 16 * width <= most:
        return t.reshape(-1, width)[:: size // most]
    stride = size // most
    while math.gcd(stride, width) > 1:
        stride += 1
    return t.reshape(-1)[::stride]
