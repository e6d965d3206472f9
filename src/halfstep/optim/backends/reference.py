"""The backend of every device: the reference in plain torch, over parameters that are joined."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.gradients.decision import Clip, Decision, Scalar, clip_coefficient
from halfstep.gradients.stats import AnyStats, measure
from halfstep.optim import reference, rounding, storage
from halfstep.optim.algorithms import Algorithm, Number
from halfstep.optim.arguments import check_betas, numbers_of
from halfstep.optim.backends.backend import Backend, RangeErrors
from halfstep.optim.bundles import TensorGroup
from halfstep.torch_private import foreach_add_
from halfstep.trees import as_float32, move_to


class Reference(Backend):
    """Plain torch, the one that the others equal bit for bit."""

    def __init__(self, errors: RangeErrors, on_host: bool) -> None:
        self._errors, self.on_host = errors, on_host

    def measure(self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]) -> AnyStats:
        """Return the stats as 0-d tensors."""
        return measure([grad for group in groups for grad in group.grads], inv_scale)

    def update(self, groups: Sequence[TensorGroup], decision: Decision, seed: int, measures: bool) -> bool:
        """Update one group after the other; on a CPU none that is skipped comes here."""
        if self.on_host:
            decision = decision._replace(skip=False)
        flags = [f for group in groups if (f := by_reference(group, decision, seed)) is not None]
        if self.on_host:
            return any(map(bool, flags))
        for flag in flags:
            self._errors.flag(flag.device).bitwise_or_(flag)
        return False


@torch.no_grad()
def by_reference(bundle: TensorGroup, decision: Decision, seed: int) -> Tensor | None:
    """Update a group in plain torch; returns the flag of weights that left their master's range.

    Parameters are joined, so that many take as many launches as one. On an accelerator, or where the decision
    to skip is a tensor, nothing is read back.
    """
    device, steps, slots = bundle.device, bundle.states["step"], bundle.slots()
    skip = _there(decision.skip, device).to(torch.bool) if isinstance(decision.skip, Tensor) else None
    foreach_add_(steps, 1 if skip is None else [(~skip).to(torch.float32)] * len(steps))
    on_host = device.type == "cpu" and skip is None
    hyper, factor = _hyper(bundle, decision, on_host)
    keys = list(zip(bundle.base_keys(seed), bundle.origins())) if bundle.rounds_randomly else []
    flags: list[Tensor] = []
    for run in [[i] for i in range(len(slots))] if bundle.algorithm.whole else storage.runs_of(slots):
        parts, counts = [slots[i] for i in run], torch.stack([steps[i] for i in run])
        sizes = [slot.weight.numel() for slot in parts]
        numbers = [*_scalars(bundle.algorithm, hyper, counts, on_host)]
        numbers += _keys([keys[i] for i in run], counts, sizes) if keys else [0, 0]
        *scalars, key, first = _per_element(numbers, sizes)
        joined = storage.join(parts)
        values, out_of_range = reference.update(
            bundle.algorithm, joined, tuple(scalars), factor, cast(Any, key), cast(Any, first), hyper
        )
        if skip is not None:
            values = [torch.where(skip, before, value) for before, value in zip(joined.kept, values)]
            out_of_range = None if out_of_range is None else out_of_range & ~skip
        storage.write(parts, values)
        flags += [] if out_of_range is None else [out_of_range]
    return torch.stack(flags).any() if flags else None


def _hyper(bundle: TensorGroup, decision: Decision, on_host: bool) -> tuple[Mapping[str, Any], Number]:
    """Return the group and the gradients' factor, with Python numbers or those of the device."""
    device, group = bundle.device, bundle.group
    factor = factor_of(decision, bundle.number, device, on_host)
    if on_host:
        hyper = numbers_of(group)
        return hyper, -factor if hyper["maximize"] else factor
    if "betas" in group:
        check_betas(group["betas"])
    hyper = {k: _there(v, device).to(_wide(device)) if isinstance(v, Tensor) else v for k, v in group.items()}
    return hyper, -factor if group["maximize"] else factor


def factor_of(decision: Decision, number: int, device: torch.device, on_host: bool) -> Number:
    """Return what the gradients of a parameter group are multiplied by, in fp32; on a device a tensor."""
    if on_host:
        return as_float32(decision.factor(number))
    factor: Number = 1.0
    for scalar in decision.factors(number):
        scalar = clip_coefficient(*scalar) if isinstance(scalar, Clip) else scalar
        if scalar is not None:
            factor = _there(scalar, device).to(torch.float32) * factor
    return factor


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _scalars(
    algorithm: Algorithm, hyper: Mapping[str, Any], counts: Tensor, on_host: bool
) -> Sequence[Number]:
    """Return the scalars of parameters with these `counts` of steps; tensors where they may differ."""
    if not on_host:
        return [_fp32(value) for value in algorithm.scalars(hyper, counts.to(_wide(counts.device)))]
    numbers: list[float] = counts.tolist()
    rows = {count: [as_float32(cast(float, v)) for v in algorithm.scalars(hyper, count)] for count in numbers}
    if len(rows) == 1:
        return rows[numbers[0]]
    return torch.tensor([rows[count] for count in numbers], dtype=torch.float32, device="cpu").unbind(1)


def _keys(keys: Sequence[tuple[int, int]], counts: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the random key of each parameter, by its base, and where its whole tensor would begin."""
    bases, origins, starts = _integers([*zip(*keys), [0, *accumulate(sizes[:-1])]], counts.device)
    return cast(Tensor, rounding.key_of(bases, counts.to(torch.int64))), starts - origins


def _per_element(values: Sequence[Number], sizes: Sequence[int]) -> Sequence[Number]:
    """Repeat values of parameters for each of their elements; numbers and 0-d tensors are those of all."""
    differing = [value for value in values if isinstance(value, Tensor) and value.dim()]
    if not differing:
        return values
    if len(sizes) == 1:
        return [value.reshape(()) if isinstance(value, Tensor) else value for value in values]
    ends = _integers([*accumulate(sizes)], differing[0].device)
    places = torch.searchsorted(ends, torch.arange(sum(sizes), device=ends.device), right=True)
    return [v[places] if isinstance(v, Tensor) and v.dim() else v for v in values]


def _integers(values: Sequence[Any], device: torch.device) -> Tensor:
    return move_to(torch.tensor(values, dtype=torch.int64, device="cpu"), device)


def _there(value: float | bool | Tensor, device: torch.device) -> Tensor:
    return move_to(value, device) if isinstance(value, Tensor) else torch.full((), value, device=device)


def _fp32(value: Number) -> Number:
    """Round to fp32, so that every backend multiplies by the same number."""
    return value.to(torch.float32) if isinstance(value, Tensor) else as_float32(value)
