"""What a step does with gradients, as pure values: two factors, or nothing. To decide reads no device."""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

from torch import Tensor

from halfstep.errors import ConfigError, show

Scalar = float | Tensor | None


class Clip(NamedTuple):
    """The factor that clips gradients of this norm to `limit`, to be computed by a kernel."""

    norm: float | Tensor
    limit: float


Factor = Scalar | Clip
"""What gradients are multiplied by."""


class Decision(NamedTuple):
    """What an update does: gradients are multiplied by two factors, or nothing changes."""

    inv_scale: Scalar = None
    clips: Sequence[Factor] = ()
    """The clip factor of each parameter group; empty where none is clipped."""
    skip: bool | Tensor = False
    """Whether nothing changes."""

    def factors(self, number: int) -> tuple[Scalar, Factor]:
        """Return the inverse scale and the clip factor of this parameter group."""
        return self.inv_scale, self.clips[number] if self.clips else None

    def factor(self, number: int) -> float:
        """Return the product of both as a Python number, for a CPU."""
        inv_scale, clip = self.factors(number)
        clip = clip_coefficient(*clip) if isinstance(clip, Clip) else clip
        return (1.0 if inv_scale is None else float(inv_scale)) * (1.0 if clip is None else float(clip))


def decide(
    norm: float | Tensor | None, limits: Sequence[float | None], inv_scale: Scalar, skip: bool | Tensor
) -> Decision:
    """Return what to do with gradients of this 2-norm: clip each group to its limit, unless skipped.

    A group without a limit is not clipped, and without a norm none is.
    """
    clips = [None if limit is None or norm is None else Clip(norm, limit) for limit in limits]
    return Decision(inv_scale, clips, skip)


def check_clip(clip_norm: float | None) -> None:
    """Raise ConfigError unless it is None or a number above 0."""
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, Real) or not float(clip_norm) > 0:
        raise ConfigError(
            f"clip_norm={show(clip_norm)}: expected a number above 0, such as 1.0 (a norm of 0 leaves "
            "no update; of a tensor give its item()), or None to clip nothing"
        )


def clip_coefficient(norm: float | Tensor, clip_norm: float) -> float | Tensor:
    """Return `min(1, clip / (norm + 1e-6))`, the coefficient of `torch.nn.utils.clip_grad_norm_`."""
    coefficient = clip_norm / (norm + 1e-6)
    return coefficient.clamp(max=1.0) if isinstance(coefficient, Tensor) else min(coefficient, 1.0)
