"""Finite flag, norm and largest magnitude of gradients, in one read-only pass.

Works on any device, dtype and layout torch has, without reading anything back to the host. The optimizers'
own one-pass kernels replace it where they exist and must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

from halfstep import distributed
from halfstep.distributed.reduce import groups_of_shards
from halfstep.torch_private import foreach_norm
from halfstep.trees import dense_values, home_device, move_to, stack_scalars

_Flag = TypeVar("_Flag", covariant=True, default=Tensor)
_Norm = TypeVar("_Norm", covariant=True, default=Tensor)
_Peak = TypeVar("_Peak", covariant=True, default=Tensor)


class GradStats(NamedTuple, Generic[_Flag, _Norm, _Peak]):
    """Stats of gradients: 0-d tensors on one device, or Python values (`HostStats`), or either (`AnyStats`).

    `norm` and `amax` are float32 (float64 if any gradient is) and describe the unscaled gradients. Where
    `finite` is false they are inf or NaN.
    """

    finite: _Flag
    norm: _Norm
    """2-norm."""
    amax: _Peak
    """Largest magnitude."""


HostStats = GradStats[bool, float, float]
"""The same as Python values, which are cheaper on a CPU."""

AnyStats = GradStats[bool | Tensor, float | Tensor, float | Tensor | None]
"""Either; `amax` is None where nobody asked for it."""


class KernelStats(GradStats[Tensor, Tensor, Tensor]):
    """Stats written by a kernel, which wrote `found_inf`, the inverse of `finite`, as well."""

    found_inf: Tensor


def found_inf_of(stats: AnyStats) -> bool | Tensor:
    """Whether gradients were not finite."""
    if isinstance(stats, KernelStats):
        return stats.found_inf
    return ~stats.finite if isinstance(stats.finite, Tensor) else not stats.finite


def on_host_if_cpu(stats: AnyStats) -> AnyStats:
    """Return Python values for stats on a CPU: cheaper than 0-d tensors, and reading costs nothing."""
    if not isinstance(stats.norm, Tensor) or not stats.norm.is_cpu:
        return stats
    return GradStats(bool(stats.finite), float(stats.norm), None if stats.amax is None else float(stats.amax))


def as_tensors(stats: AnyStats) -> GradStats:
    """Return stats as 0-d tensors: on a CPU where they are Python values."""
    if isinstance(stats.finite, Tensor):
        return cast(GradStats, stats)
    return GradStats(*(torch.tensor(value, device="cpu") for value in stats))


#: Below this many elements one call costs more than a copy: such tensors are joined first.
_SMALL = 8192


@torch.no_grad()
def measure(
    grads: Iterable[Tensor | None],
    inv_scale: float | Tensor | None = None,
) -> GradStats:
    """Return finite flag, total 2-norm and largest magnitude of `grads`, each times `inv_scale`.

    `grads` may mix dtypes (fp16, bf16, fp32, fp64, complex), devices and layouts (sparse gradients count with
    duplicates summed; of a sharded tensor only the local shard is seen: see `measure_shards`); None is
    left out. The answer lies on the first accelerator met. Norms are accumulated in at
    least float32, per tensor and then over tensors, as `torch.nn.utils.clip_grad_norm_` does, so float32
    norms are bit-identical to its. Where the squares of finite gradients overflow float32 (a norm above
    1.8e19) the norm is recomputed in float64 on a CPU, elsewhere replaced by amax * sqrt(elements).
    """
    tensors = [t for g in grads if g is not None and (t := dense_values(g.detach())).numel()]
    if not tensors:
        return GradStats(*(torch.tensor(value, device="cpu") for value in (True, 0.0, 0.0)))
    home = home_device(tensors)
    norm = torch.linalg.vector_norm(_norms(tensors, home))
    amax = _peak(tensors, home)
    finite = torch.isfinite(amax)
    return _unscale(finite, _rescue(norm, amax, finite, tensors), amax, inv_scale)


def _unscale(finite: Tensor, norm: Tensor, amax: Tensor, inv_scale: float | Tensor | None) -> GradStats:
    if inv_scale is None:
        return GradStats(finite, norm, amax)
    if isinstance(inv_scale, Tensor):
        inv_scale = move_to(inv_scale, norm.device)
    return GradStats(finite, norm * inv_scale, amax * inv_scale)


@torch.no_grad()
def measure_shards(
    grads: Iterable[Tensor | None],
    inv_scale: float | Tensor | None = None,
    groups: Iterable[tuple[Any, ...]] = (),
    *,
    stages: Any = None,
) -> GradStats:
    """Return `measure` of whole gradients of which each rank holds a shard (DTensor), the same on all ranks.

    Squares are summed in float64, so that the norm is that of the unsharded gradients but for the rounding
    of one sum; one collective for each set of process groups over which gradients are split. Ranks where a
    set has no gradients name it in `groups`, in the same order, so that none waits for ever. Gradients that
    are not sharded count once. `stages` is a process group whose ranks each hold other gradients of one model
    (stages of a pipeline): the answer is that of all of them then.
    """
    sets: dict[tuple[Any, ...], list[Tensor]] = {group_set: [] for group_set in groups} or {(): []}
    gradients = [grad for grad in grads if grad is not None]
    for grad, group_set in zip(gradients, groups_of_shards(gradients)):
        sets.setdefault(group_set, []).append(dense_values(distributed.local_of(grad)))
    all_tensors = [t for tensors in sets.values() for t in tensors]
    home = home_device(all_tensors) if all_tensors else torch.device("cpu")
    sums = [distributed.sums_over(group_set, *_sums(tensors, home)) for group_set, tensors in sets.items()]
    squares, amax = torch.stack([a for a, _ in sums]).sum(), stack_scalars([b for _, b in sums], home).amax()
    if stages is not None:
        squares, amax = distributed.sums_over((stages,), squares, amax)
    return _unscale(torch.isfinite(amax), squares.sqrt().to(amax.dtype), amax, inv_scale)


@torch.no_grad()
def measure_whole(
    grads: Sequence[Tensor],
    inv_scale: float | Tensor | None = None,
    *,
    needs_amax: bool = True,
    stages: Any = None,
) -> GradStats[Tensor, Tensor, Tensor | None]:
    """Return `measure_shards`, which every rank must call, where a gradient is elsewhere, else `measure`.

    Without `needs_amax` a largest magnitude only where it comes at no further cost: a finite norm proves
    finite gradients. On a CPU, where it is torch's bit for bit, a second look follows a bad one; on an
    accelerator squares are added in float64, in which none of float32 overflows.
    """
    if stages is not None or any(distributed.local_of(g) is not g for g in grads):
        return measure_shards(grads, inv_scale, stages=stages)
    tensors = [] if needs_amax else [t for g in grads if (t := dense_values(g.detach())).numel()]
    if not tensors or (home := home_device(tensors)).type == "mps":
        return measure(grads, inv_scale)
    if home.type != "cpu":
        norms = _norms(tensors, home, torch.float64)
        wide = any(t.dtype == torch.float64 for t in tensors)
        norm = torch.linalg.vector_norm(norms)
        return _brief(norm, torch.isfinite(norm), inv_scale, None if wide else torch.float32)
    norm = torch.linalg.vector_norm(_norms(tensors, home))
    if not math.isfinite(norm.item()):
        return measure(grads, inv_scale)
    return _brief(norm, torch.ones((), dtype=torch.bool, device="cpu"), inv_scale)


def _brief(
    norm: Tensor, finite: Tensor, inv_scale: float | Tensor | None, dtype: torch.dtype | None = None
) -> GradStats[Tensor, Tensor, None]:
    """Return the stats that follow from a norm alone."""
    if isinstance(inv_scale, Tensor):
        inv_scale = move_to(inv_scale, norm.device)
    unscaled = norm if inv_scale is None else norm * inv_scale
    return GradStats(finite, unscaled if dtype is None else unscaled.to(dtype), None)


def _sums(tensors: list[Tensor], home: torch.device) -> tuple[Tensor, Tensor]:
    """Return sum of squares in float64 (float32 where a device has none) and largest magnitude."""
    wide = torch.float32 if home.type == "mps" else torch.float64
    full = [t for t in tensors if t.numel()]
    if not full:
        return torch.zeros((), dtype=wide, device=home), torch.zeros((), device=home)
    return _norms(full, home, wide).square().sum(), _peak(full, home)


def combine(sets: Sequence[AnyStats]) -> AnyStats:
    """Return the stats of several disjoint sets of gradients taken together (at least one set)."""
    if len(sets) == 1:
        return sets[0]
    parts = list(map(as_tensors, sets))
    home = home_device([part.norm for part in parts])
    finite = torch.stack([move_to(part.finite, home) for part in parts]).all()
    norm = torch.linalg.vector_norm(stack_scalars([part.norm for part in parts], home))
    return GradStats(finite, norm, stack_scalars([part.amax for part in parts], home).amax())


def _by_kind(tensors: list[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield positions and tensors that share device and dtype, as the foreach kernels want them."""
    for device, dtype in dict.fromkeys((t.device, t.dtype) for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.device == device and t.dtype == dtype]
        yield places, [tensors[i] for i in places]


def _norms(tensors: list[Tensor], home: torch.device, least: torch.dtype = torch.float32) -> Tensor:
    """Return the 2-norm of each tensor, in order (the order decides the last bit of the total)."""
    norms: dict[int, Tensor] = {}
    for places, group in _by_kind(tensors):
        wide = torch.promote_types(group[0].dtype, least)
        group_norms = foreach_norm(group, 2, dtype=wide)
        norms.update(zip(places, group_norms, strict=True))
    return stack_scalars([norms[i] for i in range(len(tensors))], home)


def _peak(tensors: list[Tensor], home: torch.device) -> Tensor:
    """Return the largest magnitude; NaN wins. (A CPU's infinity norm is 20 times slower than its aminmax.)"""
    extremes: list[Tensor] = []
    for _, group in _by_kind(tensors):
        if group[0].device.type == "cpu":
            small = [t.reshape(-1) for t in group if t.numel() < _SMALL]
            whole = [t for t in group if t.numel() >= _SMALL]
            joined = [torch.cat(small)] if small else []
            extremes += [end for t in whole + joined for end in torch.aminmax(t)]
        else:
            extremes += foreach_norm(group, math.inf)
    return stack_scalars(extremes, home).abs().amax()


def _rescue(norm: Tensor, amax: Tensor, finite: Tensor, tensors: list[Tensor]) -> Tensor:
    """Replace a norm that overflowed although every gradient is finite."""
    if norm.dtype == torch.float64:
        return norm
    if norm.device.type != "cpu":
        bound = amax * math.sqrt(sum(t.numel() for t in tensors))
        return torch.where(finite & torch.isinf(norm), bound, norm)
    if bool(torch.isinf(norm)) and bool(finite):
        exact = [torch.linalg.vector_norm(t, dtype=torch.float64).cpu() for t in tensors]
        return torch.linalg.vector_norm(torch.stack(exact)).float()
    return norm
