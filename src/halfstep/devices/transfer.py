"""Tensors on their way from a device to the host, without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AsyncCopy:
    """A tensor on its way to the host; `wait()` gives it once it is there."""

    tensor: Tensor
    event: torch.Event | None

    def done(self) -> bool:
        """Whether it has arrived."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The tensor in host memory, after waiting if it must."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


def send_to_host(t: Tensor) -> AsyncCopy:
    """Start copying `t` to the host without waiting for the device.

    A device without pinned memory (a vendor's first port) has it copied at once.
    """
    if t.device.type == "cpu":
        return AsyncCopy(t, None)
    try:
        copy = t.to("cpu", non_blocking=True)
    except NotImplementedError:
        return AsyncCopy(t.to("cpu"), None)
    event = torch.Event(t.device)
    event.record(torch.accelerator.current_stream(t.device))
    return AsyncCopy(copy, event)
