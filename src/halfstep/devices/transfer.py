"""Tensors on their way from a device to the host, without waiting, and what a CUDA graph may not capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.errors import UnsupportedError


def capturing(device: torch.device) -> bool:
    """Return whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, call: str) -> None:
    """Raise UnsupportedError where a CUDA graph is being captured; call it before anything is launched.

    It is for what keeps counts, scales and outcomes on the host: a replay would not bring them up to date.
    """
    if capturing(device):
        raise UnsupportedError(
            f"{call} cannot be captured in a CUDA graph: it keeps the loss scale, counts and outcomes on the "
            "host, and a replay would not update them. At bf16 capture loss.backward() and the optimizer's "
            "own step() instead (hs.optim's after a few steps outside of the graph); with a loss scale "
            f"call {call} outside of the graph"
        )


def refuse_reading(device: torch.device, call: str) -> None:
    """Raise UnsupportedError where a CUDA graph is being captured, for what brings values to the host."""
    if capturing(device):
        raise UnsupportedError(
            f"{call} cannot be captured in a CUDA graph, since it waits for values of the device: call it "
            "before or after the capture"
        )


@dataclass(frozen=True)
class AsyncCopy:
    """A tensor on its way to the host; `wait()` gives it once it is there."""

    tensor: Tensor
    event: torch.Event | None

    def done(self) -> bool:
        """Whether it has arrived."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """Return the tensor in host memory, after waiting if it must."""
        if self.event is not None:
            refuse_reading(self.event.device, "reading what a step found")
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
