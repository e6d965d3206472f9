"""What a backend is: it runs the passes of a step over tensors that are stored alike.

On a CPU scalars are Python numbers. On an accelerator step counts, scale, clip factor and skip stay device
tensors and nothing is read back; the one error that needs a value travels by asynchronous copy.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.devices.transfer import AsyncCopy, capturing, send_to_host
from halfstep.errors import MasterRangeError
from halfstep.gradients.decision import Decision, Scalar
from halfstep.gradients.stats import AnyStats
from halfstep.optim.bundles import TensorGroup

RANGE = "a weight grew over 65504, the largest fp16, and was held there: use bf16 weights, or keep it in fp32"


class Backend(ABC):
    """Runs the two passes of a step over collected groups; one class for each way to compile them."""

    on_host = True
    """Whether scalars and the flag of a skip are Python values, so that a skipped step runs nothing."""
    fuses = False
    """Whether an update can measure on the way, and a measure sums over ranks."""

    @abstractmethod
    def measure(self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]) -> AnyStats:
        """Return the stats of the groups' gradients times `inv_scale`; `params` are all of the optimizer."""

    @abstractmethod
    def update(self, groups: Sequence[TensorGroup], decision: Decision, seed: int, measures: bool) -> bool:
        """Update the groups, whose states are collected, unless a flag on their device says to skip.

        True where a weight left the range of its master, as far as the host knows.
        """

    def measured(
        self, groups: Sequence[TensorGroup], inv_scale: Scalar, params: Sequence[Tensor]
    ) -> AnyStats:
        """Return what `measure` would, from an update that measured."""
        raise NotImplementedError


class RangeErrors:
    """Flags of out-of-range masters on accelerators: copied to the host meanwhile, raised two steps later."""

    def __init__(self) -> None:
        self.flags: dict[torch.device, Tensor] = {}
        self._sent: deque[list[AsyncCopy]] = deque()

    def flag(self, device: torch.device) -> Tensor:
        """Return the device's flag, a 0-d int32: what is not 0 stays so until it was raised."""
        if device not in self.flags:
            self.flags[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self.flags[device]

    def check(self) -> None:
        """Begin a step: raise MasterRangeError if a flag that the step before the last sent is set.

        While a graph is captured it does nothing.
        """
        if len(self._sent) < 2 or any(map(capturing, self.flags)):
            return
        if any(bool(copy.wait()) for copy in self._sent.popleft()):
            self._sent.clear()
            for flag in self.flags.values():
                flag.zero_()
            raise MasterRangeError(RANGE)

    def send(self) -> None:
        """End a step: send the flags, to be read two steps later; not under capture."""
        if not any(map(capturing, self.flags)):
            self._sent.append([send_to_host(flag) for flag in self.flags.values()])
