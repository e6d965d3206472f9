"""One group's update on one device: scalars, random keys and skip, then the kernels or the reference.

On a CPU scalars are Python numbers. On an accelerator step counts, scale, clip factor and skip stay device
tensors and nothing is read back; the one error that needs a value travels by asynchronous copy.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.devices.transfer import AsyncCopy, send_to_host
from halfstep.errors import MasterRangeError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients import cuda as gpus_
from halfstep.gradients.stats import Clip, GradStats, clip_coefficient, combine, measure
from halfstep.kernels import codes as L
from halfstep.optim import cuda, reference, rounding
from halfstep.optim.algorithms import Number, Scalars
from halfstep.optim.arguments import numbers_of
from halfstep.optim.bundles import Bundle
from halfstep.trees import as_float32, move_to

Scalar = float | Tensor | None
Factor = Scalar | Clip
"""What gradients are multiplied by."""
RANGE = "a weight grew over 65504, the largest fp16, and was held there: use bf16 weights, or keep it in fp32"


class LateErrors:
    """Flags of out-of-range masters on accelerators: copied to the host meanwhile, raised two steps later."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._sent: list[AsyncCopy] = []

    def flag(self, device: torch.device) -> Tensor:
        """The device's flag, a 0-d int32: what is not 0 stays so until it was raised."""
        if device not in self._flags:
            self._flags[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self._flags[device]

    def check(self) -> None:
        """Begin a step: raise MasterRangeError if a flag of two steps ago was set, send the last step's.

        While a graph is captured it does nothing.
        """
        if not self._flags or any(map(cuda.capturing, self._flags)):
            return
        due, self._sent = self._sent, [send_to_host(flag) for flag in self._flags.values()]
        if any(bool(copy.wait()) for copy in due):
            self._sent = []
            for flag in self._flags.values():
                flag.zero_()
            raise MasterRangeError(RANGE)


def number(value: Factor) -> float:
    """A scalar as a Python number; None is 1."""
    if isinstance(value, Clip):
        value = clip_coefficient(*value)
    return 1.0 if value is None else float(value)


def factor_of(factors: tuple[Scalar, Factor], hyper: Mapping[str, Any]) -> float:
    """What gradients are multiplied by, as a Python number."""
    factor = number(factors[0]) * number(factors[1])
    return -factor if hyper["maximize"] else factor


def runner(backend: str, device: torch.device, algorithm: int | None = None) -> str:
    """What runs the passes on `device`: "numba", "triton" or "reference"; `algorithm` by its code."""
    if algorithm == L.NO_KERNEL:
        return "reference"
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        if gpus_.usable(device, backend == "triton"):
            return "triton"
    elif backend == "auto" and device.type == "cpu" and cpus_.kernels() is not None:
        return "numba"
    return "reference"


def measure_all(grads: list[Tensor], inv_scale: Scalar, backend: str, plans: cuda.Plans) -> GradStats:
    """Finite flag, norm and largest magnitude of flat gradients, by what runs on each one's device."""
    parts: list[GradStats] = []
    devices = [grad.device for grad in grads]
    for device in dict.fromkeys(devices):
        own = [grad for grad, its in zip(grads, devices) if its == device]
        name = runner(backend, device)
        if name == "numba":
            found = cpus_.measure(own, number(inv_scale))
            parts.append(GradStats(*(torch.tensor(value, device="cpu") for value in found)))
        else:
            parts.append(plans.measure(own, inv_scale) if name == "triton" else measure(own, inv_scale))
    return combine(parts) if parts else measure([])


@torch.no_grad()
def by_reference(
    bundle: Bundle, scalars: tuple[Scalar, Factor], found_inf: bool | Tensor | None, seed: int
) -> Tensor | None:
    """Update a bundle in plain torch; returns the flag of weights that left their master's range.

    `scalars` are the inverse scale and the clip factor. On an accelerator, or where `found_inf` is a tensor,
    nothing is read back.
    """
    device, steps = bundle.device, bundle.states["step"]
    skip = _there(found_inf, device).to(torch.bool) if isinstance(found_inf, Tensor) else None
    for step in steps:
        step.add_(1 if skip is None else (~skip).to(torch.float32))
    rows, factor = _scalars(bundle, scalars, on_host=device.type == "cpu" and skip is None)
    keys: list[rounding.Int] = [0] * len(steps)
    if bundle.rounds_randomly:
        keys = [
            (rounding.key_of(base, step.to(torch.int64)) + shift) & rounding.WORD
            for base, step, shift in zip(bundle.base_keys(seed), steps, bundle.key_shifts())
        ]
    found = [
        reference.update(bundle.algorithm, slot, row, factor, key, skip)
        for slot, row, key in zip(bundle.slots(), rows, keys)
        if slot.weight.numel()
    ]
    over = [flag for flag in found if flag is not None]
    return torch.stack(over).any() if over else None


def _scalars(bundle: Bundle, factors: tuple[Scalar, Factor], on_host: bool) -> tuple[list[Scalars], Number]:
    """The scalars of each parameter and what multiplies gradients, as Python numbers or on the device."""
    device, group, factor = bundle.device, bundle.group, torch.ones((), device=bundle.device)
    if on_host:
        hyper, counts = numbers_of(group), list(map(float, bundle.states["step"]))
        factor = as_float32(factor_of(factors, hyper))
    else:
        wide = torch.float32 if device.type == "mps" else torch.float64
        hyper = {k: _there(v, device).to(wide) if isinstance(v, Tensor) else v for k, v in group.items()}
        counts = [step.to(wide) for step in bundle.states["step"]]
        for scalar in factors:
            scalar = clip_coefficient(*scalar) if isinstance(scalar, Clip) else scalar
            factor = factor if scalar is None else factor * _there(scalar, device).to(torch.float32)
        factor = -factor if group["maximize"] else factor
    return [tuple(map(_fp32, bundle.algorithm.scalars(hyper, count))) for count in counts], factor


def _there(value: float | bool | Tensor, device: torch.device) -> Tensor:
    return move_to(value, device) if isinstance(value, Tensor) else torch.full((), value, device=device)


def _fp32(value: Number) -> Number:
    """Rounded to fp32, so that every backend multiplies by the same number."""
    return value.to(torch.float32) if isinstance(value, Tensor) else as_float32(value)
