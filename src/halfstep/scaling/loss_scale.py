"""Loss scales as immutable values.

A loss scale multiplies the loss so that small gradients survive 16-bit arithmetic, and is divided out of the
gradients before anybody looks at them (Micikevicius et al., ICLR 2018, arXiv 1710.03740, section 3.2). Every
`adjust` returns the next value; state lives on the host after `adjust(bool)` and on the device, without any
synchronisation, after `adjust(tensor)`. Holders with torch's interface are in `grad_scaler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypeIs

from halfstep.devices import refuse_reading
from halfstep.errors import ConfigError, show
from halfstep.kernels.cuda import launch as cuda
from halfstep.trees import as_float32, map_floats, move_to, multiply, reciprocal

#: The largest power of two in float32: no scale lies above.
LARGEST_SCALE = 2.0**127
#: Smallest scale whose reciprocal is a normal float32.
SMALLEST_SCALE = 2.0**-126


def is_number(value: Any) -> bool:
    """Whether `value` is a Python number, NaN and infinities included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_scale(owner: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number within [low, high]."""
    if not (is_number(value) and low <= value <= high):
        raise ConfigError(f"{owner}: the scale must be a number in [{low:g}, {high:g}], got {show(value)}")


def check_count(owner: str, name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigError(f"{owner}: {name} must be an integer of at least 1, got {show(value)}")


def check_one(value: float | Tensor) -> None:
    """Raise ConfigError for a tensor that is not one real number without a gradient; nothing is read."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad or value.is_complex()):
        raise ConfigError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, got "
            f"{value.dtype} of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )


T = TypeVar("T")
L = TypeVar("L", bound="LossScale")


class LossScale:
    """Base of all loss scales: an immutable multiplier with `scale`, `unscale` and `adjust`.

    One of your own is a frozen dataclass with `value` (a field or property) and `adjust`: its fields are what
    checkpoints keep.
    """

    _kinds: ClassVar[dict[str, type[LossScale]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        LossScale._kinds[cls.__name__] = cls

    #: Whether `adjust` wants the largest gradient magnitude.
    needs_amax: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def value(self) -> float | Tensor:
            """The scale: a float when its state is on the host, else a 0-d float32 device tensor."""
            ...

    def read(self) -> float:
        """Return the scale as a Python float (synchronises when it lives on an accelerator)."""
        if isinstance(self.value, Tensor):
            refuse_reading(self.value.device, "reading the loss scale")
        return float(self.value)

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the scale as a 0-d float32 tensor on `device`."""
        value = self.value
        if isinstance(value, Tensor):
            return value if device is None else move_to(value, device)
        return torch.full((), value, dtype=torch.float32, device=device)

    def inverse(self, device: torch.device | str | None = None) -> Tensor:
        """Return 1/scale as a 0-d float32 tensor, rounded once where the device has float64."""
        return reciprocal(self.tensor(device))

    def scale(self, tree: T) -> T:
        """Multiply every floating tensor of the nest; 16-bit tensors are computed and returned in float32.

        (A scaled 16-bit loss may not fit its own format; casting the scale to fp16 would make it inf.)
        """
        return map_floats(lambda t: multiply(t, self.tensor(t.device)), tree)

    def unscale(self, tree: T, dtype: torch.dtype | None = None) -> T:
        """Divide the scale out of every floating tensor, in float32 (float64 stays float64).

        Results have each tensor's own dtype, or `dtype`: pass torch.float32 for 16-bit gradients, whose
        unscaled values may fall below what 16 bits hold.
        """
        return map_floats(lambda t: multiply(t, self.inverse(t.device), dtype or t.dtype), tree)

    def adjust(self: L, finite: bool | Tensor, amax: float | Tensor | None = None) -> L:
        """Return the next scale after a step whose gradients were, or were not, finite.

        `amax` is the largest magnitude of the unscaled gradients; only scales with `needs_amax` look.
        """
        return self

    @property
    def at_lowest(self) -> bool:
        """Whether an overflow lowers it no further, so that the scale cannot be its cause (reads)."""
        return self.adjust(False, 0.0).read() >= self.read()

    def with_value(self, value: float | Tensor) -> LossScale:
        """Return this kind of scale set by hand to `value` (a number, or a 1-element tensor, not read)."""
        raise ConfigError(f"the value of a {type(self).__name__} cannot be set")

    def state_dict(self) -> dict[str, Any]:
        """Return configuration and state as plain Python values; `LossScale.from_state` reads it."""
        self.check_serializable()
        state: dict[str, Any] = {"kind": type(self).__name__}
        for f in fields(self):  # pyright: ignore[reportArgumentType]
            item = getattr(self, f.name)
            if isinstance(item, LossScale):
                item = item.state_dict()
            item = item.tolist() if isinstance(item, Tensor) else item
            state[f.name] = list(item) if isinstance(item, tuple) else item
        return state

    def check_serializable(self) -> None:
        """Raise ConfigError where checkpoints could not keep it: it is no dataclass, nor writes its state."""
        if not is_dataclass(self) and type(self).state_dict is LossScale.state_dict:
            name = type(self).__name__
            raise ConfigError(
                f"the loss scale {name} is no dataclass, so checkpoints cannot keep it: write "
                f"@dataclass(frozen=True) above class {name}, and its settings and state as fields"
            )

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> LossScale:
        """Build the loss scale that `state_dict` described; ConfigError where it describes none."""
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"expected the mapping that LossScale.state_dict() returns, got {show(state)}")
        kinds = LossScale._kinds
        kind = state.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(f"unknown loss scale kind {kind!r}; expected one of {', '.join(sorted(kinds))}")
        try:
            return kinds[kind](**{k: v for k, v in state.items() if k != "kind"})
        except TypeError as error:
            raise ConfigError(f"a {kind} state does not fit: {error}") from error


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """Scale 1: the no-op object. `scale` and `unscale` hand back what they were given."""

    @property
    def value(self) -> float:
        """Always 1."""
        return 1.0

    def scale(self, tree: T) -> T:
        """Return the nest itself."""
        return tree

    def unscale(self, tree: T, dtype: torch.dtype | None = None) -> T:
        """Return the nest itself, cast where `dtype` is given."""
        return tree if dtype is None else map_floats(lambda t: t.to(dtype), tree)


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A constant scale. Steps that overflow are skipped; the scale stays."""

    value: float  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_scale("StaticLossScale", self.value, SMALLEST_SCALE, LARGEST_SCALE)

    def with_value(self, value: float | Tensor) -> StaticLossScale:
        """Return a constant scale of `value` (a tensor is read)."""
        check_one(value)
        return StaticLossScale(float(value))


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Grow after `interval` clean steps in a row, back off on overflow, stay within [min, max].

    Overflow multiplies by `backoff` and clears the count of clean steps; `interval` clean steps multiply by
    `growth` (torch's rule, in float32). A product outside [min, max] becomes the bound, so growth never
    reaches inf and backoff never reaches 0. `hysteresis=k`: the first k-1 overflows since the tolerance was
    last full leave the scale alone (the step is skipped all the same); each later one backs off. The
    tolerance fills up again whenever `interval` clean steps in a row complete (Megatron's and DeepSpeed's
    default rule). `current`, `clean` and `overflows` are the state; leave them to `adjust` (after a GPU's
    kernel `current` holds the scale and its inverse).
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 1.0
    max: float = 2.0**24
    current: float | Tensor | None = field(default=None, kw_only=True)
    clean: int | Tensor = field(default=0, kw_only=True)
    overflows: int | Tensor = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        numbers = is_number(self.min) and is_number(self.max)
        if not numbers or not SMALLEST_SCALE <= self.min <= self.max <= LARGEST_SCALE:
            raise ConfigError(
                f"{owner}: expected {SMALLEST_SCALE:g} <= min <= max <= {LARGEST_SCALE:g}, "
                f"got min={self.min!r}, max={self.max!r}"
            )
        check_scale(owner, self.init, self.min, self.max)
        if not is_number(self.growth) or not 1.0 <= self.growth < math.inf:
            raise ConfigError(f"{owner}: growth must be a finite number of at least 1, got {self.growth!r}")
        if not is_number(self.backoff) or not 0.0 < self.backoff <= 1.0:
            raise ConfigError(f"{owner}: backoff must be above 0 and at most 1, got {self.backoff!r}")
        check_count(owner, "interval", self.interval)
        check_count(owner, "hysteresis", self.hysteresis)
        if self.current is None:
            object.__setattr__(self, "current", as_float32(self.init))
        elif not isinstance(self.current, Tensor):
            check_scale(owner, self.current, self.min, self.max)
        for name in ("clean", "overflows"):
            count = getattr(self, name)
            if not isinstance(count, Tensor) and (not is_number(count) or count != int(count) or count < 0):
                raise ConfigError(f"{owner}: {name} must be a count, got {count!r}")

    @property
    def value(self) -> float | Tensor:
        """The scale: a float on the host, a 0-d float32 tensor after `adjust(tensor)`."""
        assert self.current is not None  # __post_init__ filled it in
        return self.current[0] if _is_pair(self.current) else self.current

    def inverse(self, device: torch.device | str | None = None) -> Tensor:
        """Return 1/scale as a 0-d float32 tensor, the one that a kernel wrote where there is one."""
        if _is_pair(self.current) and device in (None, self.current.device):
            return self.current[1]
        return super().inverse(device)

    def with_value(self, value: float | Tensor) -> DynamicLossScale:
        """Return this scale set to `value`, clamped into [min, max]; the counts stay."""
        if isinstance(value, Tensor):
            check_one(value)
            scale = value.detach().reshape(()).float().clone().clamp(self.min, self.max)
            if scale.is_cpu and bool(scale.isnan()):  # elsewhere nothing is read: the skipped steps tell
                raise ConfigError("a loss scale cannot be NaN: give a positive number")
            return replace(self, current=scale)
        check_scale(type(self).__name__, value, self.min, self.max)
        return replace(self, current=as_float32(value))

    @property
    def at_lowest(self) -> bool:
        """Whether it is down to `min` (reads)."""
        return self.read() <= self.min

    def adjust(self, finite: bool | Tensor, amax: float | Tensor | None = None) -> DynamicLossScale:
        """Return the next scale; with a tensor nothing is read and the state moves to the tensor's device."""
        if isinstance(finite, Tensor) and not cuda.why_not(finite.device):
            return self._adjust_in_one_launch(finite)
        now: Any = self.tensor(finite.device) if isinstance(finite, Tensor) else self.read()
        clean, overflows = _count_on(self.clean, finite), _count_on(self.overflows, finite)
        full = clean + 1 >= min(self.interval, 2**31 - 1)  # counted in int32
        more = overflows + 1
        spent = more >= self.hysteresis
        grown = _choose(full, self._times(now, self.growth), now)
        shrunk = _choose(spent, self._times(now, self.backoff), now)
        return replace(
            self,
            current=_choose(finite, grown, shrunk),
            clean=_choose(finite, _choose(full, 0, clean + 1), 0),
            overflows=_choose(finite, _choose(full, 0, overflows), _choose(spent, self.hysteresis, more)),
        )

    def _adjust_in_one_launch(self, finite: Tensor) -> DynamicLossScale:
        new = torch.empty(4, dtype=torch.int32, device=finite.device)
        clean, overflows = _count_on(self.clean, finite), _count_on(self.overflows, finite)
        cuda.launch(
            cuda.kernels().adjusted, finite.device, 1, finite.to(torch.bool).view(torch.uint8),
            self.tensor(finite.device), clean, overflows, new, GROWTH=self.growth, BACKOFF=self.backoff,
            INTERVAL=min(self.interval, 2**31 - 1), HYSTERESIS=min(self.hysteresis, 2**31 - 1),
            LEAST=self.min, MOST=self.max,
        )  # fmt: skip
        return replace(self, current=new[:2].view(torch.float32), clean=new[2], overflows=new[3])

    def state_dict(self) -> dict[str, Any]:
        """Return configuration and state as plain Python values; `LossScale.from_state` reads it."""
        return super().state_dict() | {"current": self.read()}

    def _times(self, scale: Any, factor: float) -> float | Tensor:
        """Return a scale times a factor, within bounds, rounded once to float32 where there is float64."""
        if isinstance(scale, Tensor):
            wide = scale if scale.device.type == "mps" else scale.double()
            return (wide * factor).clamp(self.min, self.max).float()
        return as_float32(min(max(scale * factor, self.min), self.max))

    def adjust_by_kernel(self, update: Callable[..., None], found_inf: Tensor) -> DynamicLossScale:
        """Return the next scale as a device's own scale-update kernel makes it, kept within the bounds."""
        if self.hysteresis != 1:
            return self.adjust(found_inf == 0)
        scale = self.tensor(found_inf.device).clone()
        clean = _count_on(self.clean, found_inf).clone()
        update(scale, clean, found_inf.float(), self.growth, self.backoff, self.interval)
        return replace(self, current=scale.clamp(self.min, self.max), clean=clean)


def _is_pair(current: Any) -> TypeIs[Tensor]:
    """Whether it is a scale with its inverse beside it."""
    return isinstance(current, Tensor) and current.dim() == 1


def _choose(condition: Any, a: Any, b: Any) -> Any:
    """Return one of two numbers; where the condition is a flag on a device, a tensor there, unread."""
    if isinstance(condition, Tensor):
        return torch.where(condition.reshape(()).bool(), a, b)
    return a if condition else b


def _count_on(count: int | Tensor, flag: bool | Tensor) -> Any:
    """Return a count where the flag is: a Python number, or an int32 tensor on its device."""
    if not isinstance(flag, Tensor):
        return int(count)
    if isinstance(count, Tensor):
        return move_to(count, flag.device)
    return torch.full((), count, dtype=torch.int32, device=flag.device)
