"""The outcome of an optimizer step, which can be read without making the accelerator wait.

An `Outcome` holds device scalars as the step left them and copies them to the host in one transfer when
a property is first read. `StepRecord` is the plain value that comes out; nothing here decides anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.devices.transfer import AsyncCopy, send_to_host
from halfstep.trees import home_device, move_to

Scalar = bool | float | Tensor | None


@dataclass(frozen=True)
class StepRecord:
    """A step's outcome as plain Python values.

    `taken`: the weights were updated. `finite`: no gradient held inf or NaN. `scale`: the loss scale the
    gradients carried. `grad_norm`, `amax`: 2-norm and largest magnitude of the unscaled gradients before
    clipping, None where nobody measured them. `reason`: why a step was skipped, or what was wrong with one
    that was taken; empty when there is nothing to say. `step`: the caller's step number, None if not counted.
    """

    taken: bool
    finite: bool
    scale: float
    grad_norm: float | None
    amax: float | None
    reason: str
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a JSON-ready dict."""
        return asdict(self)


class Outcome:
    """The lazily read outcome of one step; `bool(outcome)` is `outcome.taken`.

    Arguments may be Python values or 0-d tensors, which must not be changed in place afterwards. `result` is
    what the wrapped optimizer's own `step` returned. `reason` is said of a skipped step in place of the usual
    sentence. `on_read` runs once, with the record, when the values arrive on the host: errors that travel
    late (a loss scale that collapsed) are raised there. Building, storing and printing an outcome never
    synchronises, and a value that the host has, such as `taken` of a step that cannot be skipped, is read
    without waiting for the others. `clips`: the gradients were multiplied by `clip_norm / grad_norm`, so by 0
    where it is inf.
    """

    def __init__(
        self,
        *,
        taken: bool | Tensor,
        finite: bool | Tensor,
        scale: float | Tensor = 1.0,
        grad_norm: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        step: int | None = None,
        reason: str | None = None,
        result: Any = None,
        on_read: Callable[[StepRecord], None] | None = None,
        clips: bool = False,
    ) -> None:
        self._values: dict[str, Scalar] = {
            "taken": taken,
            "finite": finite,
            "scale": scale,
            "grad_norm": grad_norm,
            "amax": amax,
        }
        self._step = step
        self._reason = reason
        self._record: StepRecord | None = None
        self._on_read = on_read
        self._clips = clips
        self._copy: AsyncCopy | None = None
        self.result = result

    @property
    def taken(self) -> bool:
        """Whether the weights were updated."""
        return bool(self._read_one("taken"))

    @property
    def skipped(self) -> bool:
        """Whether the weights were left as they were: not `taken`. `reason` says which were not, if any."""
        return not self.taken

    @property
    def finite(self) -> bool:
        """Whether every gradient was finite."""
        return bool(self._read_one("finite"))

    @property
    def scale(self) -> float:
        """The loss scale the gradients of this step carried."""
        return float(self._read_one("scale"))

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the unscaled gradients before clipping, if measured."""
        return self.read().grad_norm

    @property
    def amax(self) -> float | None:
        """The largest magnitude among the unscaled gradients, if measured."""
        return self.read().amax

    @property
    def reason(self) -> str:
        """Why the step was skipped or what was wrong; empty for an ordinary step."""
        return self.read().reason

    @property
    def step(self) -> int | None:
        """The caller's step number."""
        return self._step

    def device_value(self, name: str) -> Scalar:
        """Return `taken`, `finite`, `scale`, `grad_norm` or `amax`: unread as the step left it, else read."""
        return self._values[name]

    @property
    def on_host(self) -> bool:
        """Whether no value lies on an accelerator."""
        return not [v for v in self._values.values() if isinstance(v, Tensor) and not v.is_cpu]

    def _read_one(self, name: str) -> Any:
        value = self._values[name]
        waits = isinstance(value, Tensor) or self.on_host
        return getattr(self.read(), name) if waits else value

    def start_copy(self) -> None:
        """Begin copying device values to the host behind the work already queued, without waiting."""
        if self._copy is None and (tensors := list(self._tensors().values())):
            home = home_device(tensors)
            moved = [move_to(t.detach(), home).reshape(1) for t in tensors]
            self._copy = send_to_host(torch.cat([t.view(torch.uint8) for t in moved]))

    def _tensors(self) -> dict[str, Tensor]:
        """Return the values that are tensors, the widest first, so that the bytes of each are aligned."""
        tensors = [(name, v) for name, v in self._values.items() if isinstance(v, Tensor)]
        return dict(sorted(tensors, key=lambda item: -item[1].element_size())) if tensors else {}

    @property
    def arrived(self) -> bool:
        """Whether reading would not wait: the values are on the host or their copy has finished."""
        return self.on_host if self._copy is None else self._copy.done()

    def read(self) -> StepRecord:
        """Copy the values to the host (once, in one transfer) and return them."""
        if self._record is None:
            self.start_copy()
            values = dict(self._values)
            if self._copy is not None:
                tensors = self._tensors()
                parts = self._copy.wait().split([t.element_size() for t in tensors.values()])
                values |= {n: part.view(t.dtype).item() for (n, t), part in zip(tensors.items(), parts)}
            host = {name: None if v is None else float(v) for name, v in values.items()}
            taken, finite = bool(host["taken"]), bool(host["finite"])
            scale, norm, amax = cast(float, host["scale"]), host["grad_norm"], host["amax"]
            reason = _reason(taken, finite) if taken or self._reason is None else self._reason
            if self._clips and taken and finite and norm == math.inf:
                reason = reason or CLIPPED_TO_ZERO
            self._record = StepRecord(taken, finite, scale, norm, amax, reason, self._step)
            self._values = {name: getattr(self._record, name) for name in values}
            self._copy = None  # a history of outcomes keeps no memory of a device
            on_read, self._on_read = self._on_read, None
            if on_read is not None:
                on_read(self._record)
        return self._record

    def __bool__(self) -> bool:
        return self.taken

    def forget(self) -> None:
        """Drop `on_read`: what it would change is of the past."""
        self._on_read = None

    def __getstate__(self) -> dict[str, Any]:
        """Return plain values, for pickle and copies."""
        self.read()
        return self.__dict__

    def __repr__(self) -> str:
        """One sentence: `step 2: taken, grad norm 1.5e-05, loss scale 65536`; reads nothing off a device."""
        name = "step" if self._step is None else f"step {self._step}"
        tensors = [v for v in self._values.values() if isinstance(v, Tensor)]
        if self._record is None and not all(t.is_cpu for t in tensors):
            return f"{name}: on the device, not read"
        record = self.read()
        norm = "" if record.grad_norm is None else f", grad norm {record.grad_norm:.3g}"
        scale = "" if record.scale == 1.0 else f", loss scale {record.scale:.12g}"
        return f"{name}: {record.reason or 'taken'}{norm}{scale}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"


CLIPPED_TO_ZERO = (
    "taken, but its gradients were clipped to 0: they are finite, their norm is over what its dtype holds"
)


def _reason(taken: bool, finite: bool) -> str:
    if finite:
        return "" if taken else "skipped"
    what = "gradients hold inf or NaN"
    return f"taken although {what}" if taken else f"skipped: {what}"


class OutcomeQueue:
    """Reads outcomes two steps after they were pushed, by when they have arrived on a device that keeps up.

    An outcome whose values are on the host is read at once. When a copy happens to arrive decides nothing.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outcome] = deque()

    def __copy__(self) -> OutcomeQueue:
        twin = OutcomeQueue()
        twin._waiting.extend(self._waiting)
        return twin

    def push(self, outcome: Outcome) -> list[StepRecord]:
        """Queue one outcome; return, oldest first, the records of those on the host or two steps old."""
        outcome.start_copy()
        self._waiting.append(outcome)
        return self._take(2)

    def drain(self) -> list[StepRecord]:
        """Wait for all that are queued and return their records, oldest first."""
        return self._take(0)

    def read_before(self, step: int) -> None:
        """Wait for those of earlier steps, so that steps are counted in their order whoever reads which."""
        for outcome in [*self._waiting]:
            if outcome.step is not None and outcome.step < step:
                outcome.read()

    def forget(self) -> None:
        """Drop all that are queued, and what reading them would do."""
        for outcome in self._waiting:
            outcome.forget()
        self._waiting.clear()

    def _take(self, may_wait: int) -> list[StepRecord]:
        records: list[StepRecord] = []
        while self._waiting and (len(self._waiting) > may_wait or self._waiting[0].on_host):
            records.append(self._waiting.popleft().read())
        return records
