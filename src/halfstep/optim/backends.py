"""One group's update on one device: scalars, random keys and skip, then the kernels or the reference.

On a CPU scalars are Python numbers. On an accelerator step counts, scale, clip factor and skip stay device
tensors and nothing is read back; the one error that needs a value travels by asynchronous copy.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.devices.transfer import AsyncCopy, send_to_host
from halfstep.errors import MasterRangeError
from halfstep.gradients import cpu as cpus_
from halfstep.gradients.stats import Clip, GradStats, clip_coefficient, combine, measure
from halfstep.kernels import codes as L
from halfstep.kernels.cpu.run import kernels
from halfstep.kernels.cuda import launch
from halfstep.optim import cuda, reference, rounding, storage
from halfstep.optim.algorithms import Algorithm, Number
from halfstep.optim.arguments import check_betas, numbers_of
from halfstep.optim.bundles import TensorGroup
from halfstep.torch_private import foreach_add_
from halfstep.trees import as_float32, move_to

Scalar = float | Tensor | None
Factor = Scalar | Clip
"""What gradients are multiplied by."""
RANGE = "a weight grew over 65504, the largest fp16, and was held there: use bf16 weights, or keep it in fp32"


class LateErrors:
    """Flags of out-of-range masters on accelerators: copied to the host meanwhile, raised two steps later."""

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._sent: deque[list[AsyncCopy]] = deque()

    def flag(self, device: torch.device) -> Tensor:
        """Return the device's flag, a 0-d int32: what is not 0 stays so until it was raised."""
        if device not in self._flags:
            self._flags[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self._flags[device]

    def check(self) -> None:
        """Begin a step: raise MasterRangeError if a flag that the step before the last sent is set.

        While a graph is captured it does nothing.
        """
        if len(self._sent) < 2 or any(map(cuda.capturing, self._flags)):
            return
        if any(bool(copy.wait()) for copy in self._sent.popleft()):
            self._sent.clear()
            for flag in self._flags.values():
                flag.zero_()
            raise MasterRangeError(RANGE)

    def send(self) -> None:
        """End a step: send the flags, to be read two steps later; not under capture."""
        if self._flags and not any(map(cuda.capturing, self._flags)):
            self._sent.append([send_to_host(flag) for flag in self._flags.values()])


def number(value: Factor) -> float:
    """Return a scalar as a Python number; None is 1."""
    if isinstance(value, Clip):
        value = clip_coefficient(*value)
    return 1.0 if value is None else float(value)


def factor_of(factors: tuple[Scalar, Factor], hyper: Mapping[str, Any]) -> float:
    """Return what gradients are multiplied by, as a Python number."""
    factor = number(factors[0]) * number(factors[1])
    return -factor if hyper["maximize"] else factor


def runner(backend: str, device: torch.device, algorithm: int | None = None) -> str:
    """Return what runs the passes on `device`: "numba", "triton" or "reference"; `algorithm` by its code."""
    if algorithm == L.NO_KERNEL:
        return "reference"
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        if launch.usable(device, backend == "triton"):
            return "triton"
    elif backend == "auto" and device.type == "cpu" and kernels() is not None:
        return "numba"
    return "reference"


def measure_all(grads: list[Tensor], inv_scale: Scalar, backend: str, plans: cuda.Plans) -> GradStats:
    """Return finite flag, norm and largest magnitude of flat gradients, by what runs on each one's device."""
    parts: list[GradStats] = []
    devices = [grad.device for grad in grads]
    for device in dict.fromkeys(devices):
        device_grads = [grad for grad, its in zip(grads, devices) if its == device]
        name = runner(backend, device)
        if name == "numba":
            stats = cpus_.measure(device_grads, number(inv_scale))
            parts.append(GradStats(*(torch.tensor(value, device="cpu") for value in stats)))
        else:
            parts.append(
                plans.measure(device_grads, inv_scale)
                if name == "triton"
                else measure(device_grads, inv_scale)
            )
    return combine(parts) if parts else measure([])


@torch.no_grad()
def by_reference(
    bundle: TensorGroup, factors: tuple[Scalar, Factor], found_inf: bool | Tensor | None, seed: int
) -> Tensor | None:
    """Update a bundle in plain torch; returns the flag of weights that left their master's range.

    `factors` are the inverse scale and the clip factor. Parameters are joined, so that many take as many
    launches as one. On an accelerator, or where `found_inf` is a tensor, nothing is read back.
    """
    device, steps, slots = bundle.device, bundle.states["step"], bundle.slots()
    skip = _there(found_inf, device).to(torch.bool) if isinstance(found_inf, Tensor) else None
    foreach_add_(steps, 1 if skip is None else [(~skip).to(torch.float32)] * len(steps))
    on_host = device.type == "cpu" and skip is None
    hyper, factor = _hyper(bundle, factors, on_host)
    keys = list(zip(bundle.base_keys(seed), bundle.origins())) if bundle.rounds_randomly else []
    flags: list[Tensor] = []
    for run in storage.runs_of(slots):
        parts, counts = [slots[i] for i in run], torch.stack([steps[i] for i in run])
        sizes = [slot.weight.numel() for slot in parts]
        numbers = [*_scalars(bundle.algorithm, hyper, counts, on_host)]
        numbers += _keys([keys[i] for i in run], counts, sizes) if keys else [0, 0]
        *scalars, key, first = _per_element(numbers, sizes)
        joined = storage.join(parts)
        values, out_of_range = reference.update(
            bundle.algorithm, joined, tuple(scalars), factor, cast(Any, key), cast(Any, first)
        )
        if skip is not None:
            values = [torch.where(skip, before, value) for before, value in zip(joined.kept, values)]
            out_of_range = None if out_of_range is None else out_of_range & ~skip
        storage.write(parts, values)
        flags += [] if out_of_range is None else [out_of_range]
    return torch.stack(flags).any() if flags else None


def _hyper(
    bundle: TensorGroup, factors: tuple[Scalar, Factor], on_host: bool
) -> tuple[Mapping[str, Any], Number]:
    """Return the group and the gradients' factor, with Python numbers or those of the device."""
    device, group = bundle.device, bundle.group
    if on_host:
        hyper = numbers_of(group)
        return hyper, as_float32(factor_of(factors, hyper))
    if "betas" in group:
        check_betas(group["betas"])
    hyper = {k: _there(v, device).to(_wide(device)) if isinstance(v, Tensor) else v for k, v in group.items()}
    factor: Number = -1.0 if group["maximize"] else 1.0
    for scalar in factors:
        scalar = clip_coefficient(*scalar) if isinstance(scalar, Clip) else scalar
        if scalar is not None:
            factor = _there(scalar, device).to(torch.float32) * factor
    return hyper, factor


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
