"""What runs the passes of a step: a class for each backend, and which of them serves which tensors."""

from collections.abc import Sequence

import torch

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.run import kernels
from halfstep.kernels.cuda import launch
from halfstep.optim.backends.backend import RANGE, Backend, RangeErrors
from halfstep.optim.backends.numba import Numba
from halfstep.optim.backends.reference import Reference
from halfstep.optim.backends.triton import Triton
from halfstep.optim.bundles import TensorGroup

__all__ = ["RANGE", "Backend", "Backends", "Numba", "Reference", "Triton"]


class Backends:
    """The backends of one optimizer, chosen by name; "auto" leaves the choice to the device."""

    def __init__(self) -> None:
        self.errors = RangeErrors()
        self.numba, self.triton = Numba(), Triton(self.errors)
        self.references = {on_host: Reference(self.errors, on_host) for on_host in (True, False)}

    def of(self, choice: str, device: torch.device, algorithm: int | None = None) -> Backend:
        """Return what serves tensors on `device`, of the algorithm with this code."""
        has_kernels = algorithm != L.NO_KERNEL
        if has_kernels and (choice == "triton" or (choice == "auto" and device.type == "cuda")):
            if launch.usable(device, choice == "triton"):
                return self.triton
        elif has_kernels and choice == "auto" and device.type == "cpu" and kernels() is not None:
            return self.numba
        return self.references[device.type == "cpu"]

    def serving(self, choice: str, groups: Sequence[TensorGroup]) -> dict[Backend, list[TensorGroup]]:
        """Return the groups by what updates them."""
        served: dict[Backend, list[TensorGroup]] = {}
        for group in groups:
            served.setdefault(self.of(choice, group.device, group.algorithm.code), []).append(group)
        return served
