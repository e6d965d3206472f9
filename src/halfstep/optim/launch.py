"""One group's update on one device: scalars, random keys and skip, then the kernels or the reference.

On a CPU scalars are Python numbers. On an accelerator step counts, scale, clip factor and skip stay device
tensors and nothing is read back; the one error that needs a value travels by asynchronous copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.devices import Arriving, send_to_host
from halfstep.errors import MasterRangeError
from halfstep.optim import _layout as L
from halfstep.optim import _numba_backend, reference, rounding
from halfstep.optim.algorithms import Algorithm, Number, Row
from halfstep.optim.slots import Slot

Scalar = float | Tensor | None
foreach_add_ = cast("Callable[[list[Tensor], float], None]", vars(torch)["_foreach_add_"])
_RANGE = (
    "a weight grew over 65504, the largest fp16, and was held there: use bf16 weights, or keep it in fp32"
)


@dataclass(frozen=True)
class Job:
    """The parameters of one group on one device, with their flat gradients and the step's scalars."""

    algorithm: Algorithm
    group: Mapping[str, Any]
    entries: list[tuple[Slot, Tensor]]
    inv_scale: Scalar
    clip_coef: Scalar


class LateErrors:
    """Flags of out-of-range masters on accelerators: copied to the host meanwhile, raised two steps later."""

    def __init__(self) -> None:
        self._waiting: list[Arriving] = []

    def add(self, flag: Tensor | None) -> None:
        """Remember a 0-d bool device tensor."""
        if flag is not None:
            self._waiting.append(send_to_host(flag))

    def check(self) -> None:
        """Raise MasterRangeError if a flag of two or more steps ago was true."""
        if len(self._waiting) > 1 and bool(self._waiting.pop(0).wait()):
            self._waiting.clear()
            raise MasterRangeError(_RANGE)


def number(value: Scalar) -> float:
    """A scalar as a Python number; None is 1."""
    return 1.0 if value is None else float(value)


def as_fp32(row: tuple[Number, ...]) -> Row:
    """Scalars rounded to fp32, so that every backend multiplies by the same number."""
    return tuple(torch.tensor(row, dtype=torch.float64).to(torch.float32).tolist())


def on_host(job: Job, compiled: bool) -> None:
    """Update CPU parameters; raises MasterRangeError."""
    hyper = {k: float(v) if isinstance(v, Tensor) else v for k, v in job.group.items() if k != "params"}
    rows: dict[float, Row] = {}
    work: list[tuple[Slot, Tensor, Row, int]] = []
    foreach_add_([slot.step for slot, _ in job.entries], 1)
    for slot, grad in job.entries:
        step = float(slot.step)
        if step not in rows:
            rows[step] = as_fp32(job.algorithm.scalars(hyper, step))
        key = cast(int, rounding.key_of(slot.base_key, int(step)))
        work.append((slot, grad, rows[step], key))
    factor = number(job.inv_scale) * number(job.clip_coef) * (-1.0 if hyper["maximize"] else 1.0)
    if compiled:
        over = _numba_backend.update(job.algorithm, work, factor)
    else:
        flag = reference.update(job.algorithm, work, as_fp32((factor,))[0], None)
        over = flag is not None and bool(flag)
    if over:
        raise MasterRangeError(_RANGE)


def on_device(job: Job, device: torch.device, found_inf: bool | Tensor | None) -> Tensor | None:
    """Update parameters of an accelerator without reading anything back; returns the out-of-range flag."""
    skip = None if found_inf is None else _there(found_inf, device).to(torch.bool)
    steps = [slot.step for slot, _ in job.entries]
    for step in steps:
        step.add_(1 if skip is None else (~skip).to(torch.float32))
    counts = torch.stack(steps).to(_wide(device))
    columns = job.algorithm.scalars(job.group, counts)
    rows = [tuple(_pick(column, i) for column in columns) for i in range(len(steps))]
    factor = torch.ones((), device=device)
    for scalar in (job.inv_scale, job.clip_coef):
        factor = factor if scalar is None else factor * _there(scalar, device).to(torch.float32)
    factor = -factor if job.group["maximize"] else factor
    needs_key = [s.state_kind != L.STATE_FP32 or s.kind == L.BF16_STOCHASTIC for s, _ in job.entries]
    work = [
        (slot, grad, row, rounding.key_of(slot.base_key, slot.step.to(torch.int64)) if keyed else 0)
        for (slot, grad), row, keyed in zip(job.entries, rows, needs_key)
    ]
    return reference.update(job.algorithm, work, factor, skip)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _there(value: float | bool | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value).to(device, non_blocking=True)


def _pick(column: Number, index: int) -> Number:
    if not isinstance(column, Tensor):
        return as_fp32((column,))[0]
    return (column if column.dim() == 0 else column[index]).to(torch.float32)
