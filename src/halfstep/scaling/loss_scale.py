"""Loss scales as immutable values, and the tree functions that go with them.

A loss scale multiplies the loss so that small gradients survive 16-bit arithmetic, and is divided out of the
gradients before anybody looks at them (Micikevicius et al., ICLR 2018, arXiv 1710.03740, section 3.2). Every
`adjust` returns the next value; state lives on the host after `adjust(bool)` and on the device, without any
synchronisation, after `adjust(tensor)`. Holders with torch's interface are in `grad_scaler.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.errors import ConfigError, LossScaleCollapsed
from halfstep.formats import FP16
from halfstep.scale_checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_bounds,
    check_count,
    check_one,
    check_scale,
    is_number,
)

T = TypeVar("T")
L = TypeVar("L", bound="LossScale")


def as_float32(x: float) -> float:
    """Round a Python float to float32 (nearest even); above its range the answer is inf."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def is_float_tensor(x: object) -> bool:
    """Whether `x` is a real or complex floating tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def map_floats(fn: Callable[[Tensor], Tensor], tree: T) -> T:
    """Apply `fn` to every floating tensor of a nest (list, tuple, dict, named tuple ...); leave the rest."""

    def on_leaf(leaf: Any) -> Any:
        return fn(leaf) if is_float_tensor(leaf) else leaf

    return pytree.tree_map(on_leaf, tree)


def all_finite(tree: Any) -> Tensor:
    """Return a 0-d bool tensor: no floating tensor in `tree` holds inf or NaN.

    Tensors may differ in dtype and device and may be sparse. The answer lies on the first accelerator met,
    otherwise on the CPU; nothing is read back. A nest without floating tensors is finite.
    """
    flags = [_finite(leaf) for leaf in pytree.tree_leaves(tree) if is_float_tensor(leaf)]
    if not flags:
        return torch.ones((), dtype=torch.bool)
    home = home_device(flags)
    return torch.stack([flag.to(home, non_blocking=True) for flag in flags]).all()


def _finite(t: Tensor) -> Tensor:
    t = dense_values(t.detach())
    if t.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=t.device)
    low, high = torch.aminmax(t)
    return torch.isfinite(low) & torch.isfinite(high)


def dense_values(t: Tensor) -> Tensor:
    """Return the numbers a tensor really holds: local shard, coalesced sparse values, complex as pairs."""
    if type(t) is Tensor and t.layout is torch.strided and not t.is_complex():
        return t
    to_local = getattr(t, "to_local", None)
    if to_local is not None:
        t = cast(Tensor, to_local())
    if t.layout != torch.strided:
        t = (t if t.is_coalesced() else t.coalesce())._values() if t.is_sparse else t.values()
    return torch.view_as_real(t) if t.is_complex() else t


def home_device(tensors: list[Tensor]) -> torch.device:
    """Return where scalars of these tensors meet: the first accelerator, so that no copy waits."""
    return next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)


def select_tree(pred: bool | Tensor, a: T, b: T) -> T:
    """Return nest `a` where `pred` (a bool or 0-d bool tensor) holds, else `b`, leaf by leaf.

    Tensor leaves go through `torch.where`, so nothing synchronises; other leaves must be equal in both nests
    unless `pred` is a plain bool. Raises ConfigError when the nests differ in shape.
    """
    if not isinstance(pred, Tensor):
        return a if pred else b
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    if spec_a != spec_b:
        raise ConfigError(f"select_tree needs two nests of one shape, got {spec_a} and {spec_b}")
    return pytree.tree_unflatten([_select(pred, x, y) for x, y in zip(leaves_a, leaves_b)], spec_a)


def _select(pred: Tensor, x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.where(pred.to(x.device, non_blocking=True), x, y)
    if type(x) is type(y) and x == y:
        return x
    raise ConfigError(
        f"select_tree cannot choose between {x!r} and {y!r} without reading the flag: "
        "make them tensors, or pass a plain bool"
    )


class LossScale:
    """Base of all loss scales: an immutable multiplier with `scale`, `unscale` and `adjust`."""

    _kinds: ClassVar[dict[str, type[LossScale]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        LossScale._kinds[cls.__name__] = cls

    #: Whether `adjust` wants the largest gradient magnitude.
    needs_max_abs: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def value(self) -> float | Tensor:
            """The scale: a float when its state is on the host, else a 0-d float32 device tensor."""
            ...

    def read(self) -> float:
        """Return the scale as a Python float (synchronises when it lives on an accelerator)."""
        return float(self.value)

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the scale as a 0-d float32 tensor on `device`."""
        value = self.value
        if isinstance(value, Tensor):
            return value if device is None else value.to(device, non_blocking=True)
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

    def adjust(self: L, finite: bool | Tensor, max_abs: float | Tensor | None = None) -> L:
        """Return the next scale after a step whose gradients were, or were not, finite.

        `max_abs` is the largest magnitude of the unscaled gradients; only scales with `needs_max_abs` look.
        """
        return self

    def with_value(self, value: float | Tensor) -> LossScale:
        """Return this kind of scale set by hand to `value` (a number, or a 1-element tensor, not read)."""
        raise ConfigError(f"the value of a {type(self).__name__} cannot be set")

    def state_dict(self) -> dict[str, Any]:
        """Return configuration and state as plain Python values; `LossScale.from_state` reads it."""
        state: dict[str, Any] = {"kind": type(self).__name__}
        for f in fields(self):  # pyright: ignore[reportArgumentType]
            item = getattr(self, f.name)
            if isinstance(item, LossScale):
                item = item.state_dict()
            item = item.tolist() if isinstance(item, Tensor) else item
            state[f.name] = list(item) if isinstance(item, tuple) else item
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> LossScale:
        """Build the loss scale that `state_dict` described; ConfigError where it describes none."""
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"expected the mapping that LossScale.state_dict() returns, got {state!r}")
        kinds = LossScale._kinds
        kind = state.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise ConfigError(f"unknown loss scale kind {kind!r}; expected one of {', '.join(sorted(kinds))}")
        try:
            return kinds[kind](**{k: v for k, v in state.items() if k != "kind"})
        except TypeError as error:
            raise ConfigError(f"a {kind} state does not fit: {error}") from error


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1/scale in float32, rounded once where the device has float64."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def multiply(t: Tensor, factor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return t * factor computed in at least float32; `dtype` None keeps the computing dtype."""
    if not t.is_complex():
        t = t.to(torch.promote_types(t.dtype, torch.float32))
    product = t * factor
    return product if dtype is None else product.to(dtype)


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
    default rule). `current`, `clean` and `overflows` are the state; leave them to `adjust`.
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
        check_bounds(owner, self.min, self.max)
        check_scale(owner, self.init, self.min, self.max)
        if not is_number(self.growth) or not 1.0 < self.growth < math.inf:
            raise ConfigError(f"{owner}: growth must be a finite number above 1, got {self.growth!r}")
        if not is_number(self.backoff) or not 0.0 < self.backoff < 1.0:
            raise ConfigError(f"{owner}: backoff must be a number between 0 and 1, got {self.backoff!r}")
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
        return self.current

    def with_value(self, value: float | Tensor) -> DynamicLossScale:
        """Return this scale set to `value`, clamped into [min, max]; the counts stay."""
        if isinstance(value, Tensor):
            check_one(value)
            kept = value.detach().reshape(()).float().clone().clamp(self.min, self.max)
            if kept.is_cpu and bool(kept.isnan()):  # elsewhere nothing is read: the skipped steps tell
                raise ConfigError("a loss scale cannot be NaN: give a positive number")
            return replace(self, current=kept)
        check_scale(type(self).__name__, value, self.min, self.max)
        return replace(self, current=as_float32(value))

    def on_host(self) -> DynamicLossScale:
        """Return the same scale with its state as Python numbers (one read if it lives on a device)."""
        if not any(isinstance(x, Tensor) for x in (self.current, self.clean, self.overflows)):
            return self
        return replace(self, current=self.read(), clean=int(self.clean), overflows=int(self.overflows))

    def adjust(self, finite: bool | Tensor, max_abs: float | Tensor | None = None) -> DynamicLossScale:
        """Return the next scale; with a tensor nothing is read and the state moves to the tensor's device."""
        if isinstance(finite, Tensor):
            return self._adjust_on_device(finite)
        here = self.on_host()
        clean, overflows, current = int(here.clean), int(here.overflows), here.read()
        if not finite:
            overflows = min(overflows + 1, self.hysteresis)
            if overflows >= self.hysteresis:
                current = self._clamp(as_float32(current * self.backoff))
            return replace(self, current=current, clean=0, overflows=overflows)
        clean += 1
        if clean >= self.interval:
            current, clean, overflows = self._clamp(as_float32(current * self.growth)), 0, 0
        return replace(self, current=current, clean=clean, overflows=overflows)

    def adjust_by_kernel(self, update: Callable[..., None], found_inf: Tensor) -> DynamicLossScale:
        """Return the next scale as a device's own scale-update kernel makes it, kept within the bounds."""
        if self.hysteresis != 1:
            return self.adjust(found_inf == 0)
        scale = self.tensor(found_inf.device).clone()
        clean = _count_tensor(self.clean, found_inf.device).clone()
        update(scale, clean, found_inf.float(), self.growth, self.backoff, self.interval)
        return replace(self, current=scale.clamp(self.min, self.max), clean=clean)

    def _clamp(self, value: float) -> float:
        return as_float32(min(max(value, self.min), self.max))

    def _adjust_on_device(self, finite: Tensor) -> DynamicLossScale:
        device = finite.device
        finite = finite.reshape(()).bool()
        current = self.tensor(device)
        clean = _count_tensor(self.clean, device) + 1
        overflows = (_count_tensor(self.overflows, device) + 1).clamp(max=self.hysteresis)
        wide = current if device.type == "mps" else current.double()
        grown = (wide * self.growth).clamp(self.min, self.max).float()
        shrunk = (wide * self.backoff).clamp(self.min, self.max).float()
        full = clean >= self.interval
        after_clean = torch.where(full, grown, current)
        after_overflow = torch.where(overflows >= self.hysteresis, shrunk, current)
        kept = torch.where(full, 0, _count_tensor(self.overflows, device))
        return replace(
            self,
            current=torch.where(finite, after_clean, after_overflow),
            clean=torch.where(finite, torch.where(full, 0, clean), 0).to(torch.int32),
            overflows=torch.where(finite, kept, overflows).to(torch.int32),
        )


def _count_tensor(count: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, non_blocking=True)
    return torch.full((), count, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class HeadroomLossScale(LossScale):
    """The largest power of two that leaves `bits` of headroom under `overflow_at`, never above `limit`.

    The largest gradient magnitude of the last `window` finite steps says how far the scale may go. A step
    that overflows all the same (a jump, or an inf from inside the network) counts as a gradient that just
    reached `overflow_at`, so the scale drops by `bits`, for `window` steps. `limit` is run as the blind
    growth it replaces: where all that overflows is seen in the weight gradients, its scale is what a
    DynamicLossScale of the same settings would have, ours is never above, and so a step is skipped only where
    blind growth skips it too. A short `limit.interval` follows shrinking gradients closely at no price
    in skips. `history` is the state (magnitudes of unscaled gradients); leave it to `adjust`.
    """

    needs_max_abs: ClassVar[bool] = True

    bits: int = 2
    window: int = 20
    limit: DynamicLossScale = field(default_factory=DynamicLossScale)
    overflow_at: float = FP16.max
    history: tuple[float, ...] | Tensor = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_count("HeadroomLossScale", "bits", self.bits)
        check_count("HeadroomLossScale", "window", self.window)
        check_scale("HeadroomLossScale (overflow_at)", self.overflow_at, 1.0, LARGEST_SCALE * 2)
        if isinstance(self.limit, Mapping):
            object.__setattr__(self, "limit", LossScale.from_state(self.limit))
        if not isinstance(self.limit, DynamicLossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"HeadroomLossScale: limit must be a DynamicLossScale, got {self.limit!r}")
        if isinstance(self.history, list):
            object.__setattr__(self, "history", tuple(self.history))
        known = isinstance(self.history, Tensor)
        if not known and not (isinstance(self.history, tuple) and all(map(is_number, self.history))):
            raise ConfigError(f"HeadroomLossScale: history must be a tuple of numbers, got {self.history!r}")

    @property
    def value(self) -> float | Tensor:
        """The scale: a float on the host, a 0-d float32 tensor after `adjust(tensor)`."""
        peak, limit = self._peak(), self.limit.value
        if isinstance(peak, Tensor):
            room = _power_of_two_below(self.overflow_at / (peak * 2.0**self.bits))
            return torch.minimum(room, self.limit.tensor(peak.device)).clamp(min=self.limit.min)
        assert not isinstance(limit, Tensor)  # history and limit move to a device together
        spared = peak * 2.0**self.bits
        if spared == 0.0:
            return limit
        room = as_float32(self.overflow_at / spared)
        return as_float32(max(min(2.0 ** (math.frexp(room)[1] - 1), limit), self.limit.min))

    def with_value(self, value: float | Tensor) -> HeadroomLossScale:
        """Return this scale with its limit set to `value` and its memory of gradients emptied."""
        return replace(self, limit=self.limit.with_value(value), history=())

    def _peak(self) -> float | Tensor:
        if isinstance(self.history, Tensor):
            return self.history.max()
        return max(self.history, default=0.0)

    def adjust(self, finite: bool | Tensor, max_abs: float | Tensor | None = None) -> HeadroomLossScale:
        """Return the next scale; ConfigError without `max_abs`. Tensors in, state on their device."""
        if max_abs is None:
            raise ConfigError(
                "HeadroomLossScale.adjust(finite, max_abs) needs the largest magnitude of the unscaled "
                "gradients; halfstep's GradScaler and sessions measure it"
            )
        if isinstance(finite, Tensor) or isinstance(max_abs, Tensor) or isinstance(self.history, Tensor):
            return self._adjust_on_device(finite, max_abs)
        at = self.read()
        seen = as_float32(max_abs) if finite else as_float32(self.overflow_at / at)
        clean = bool(finite) and self.limit.read() * seen <= self.overflow_at
        return replace(self, limit=self.limit.adjust(clean), history=(*self.history, seen)[-self.window :])

    def _adjust_on_device(self, finite: bool | Tensor, max_abs: float | Tensor) -> HeadroomLossScale:
        device = home_device([x for x in (finite, max_abs, self.history) if isinstance(x, Tensor)])
        flag = torch.as_tensor(finite).to(device, non_blocking=True).reshape(()).bool()
        peak = torch.as_tensor(max_abs, dtype=torch.float32).to(device, non_blocking=True).reshape(())
        seen = torch.where(flag, peak, self.overflow_at * self.inverse(device))
        clean = flag & (self.limit.tensor(device) * seen <= self.overflow_at)
        past = torch.zeros(self.window, device=device)
        if isinstance(self.history, Tensor):
            past = self.history.to(device, non_blocking=True)
        elif self.history:
            past = torch.tensor((0.0,) * (self.window - len(self.history)) + self.history, device=device)
        return replace(self, limit=self.limit.adjust(clean), history=torch.cat([past[1:], seen.reshape(1)]))


def _power_of_two_below(x: Tensor) -> Tensor:
    """Return the largest power of two not above a positive normal float32 (its exponent bits alone)."""
    return (x.float().clamp(max=LARGEST_SCALE).view(torch.int32) & 0x7F800000).view(torch.float32)


@dataclass(frozen=True)
class SkipCount:
    """How many steps were skipped: in a row, and since the beginning; an immutable host value.

    `limit` skips in a row are a collapsed loss scale: `after` then raises.
    """

    in_row: int = 0
    total: int = 0
    steps: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        check_count("SkipCount", "limit", self.limit)

    def after(self, taken: bool, *, scale: float | None = None, first_bad_op: str = "") -> SkipCount:
        """Return the count after one more step.

        Raises LossScaleCollapsed when `limit` steps in a row were skipped; `scale` and `first_bad_op`
        (where tracing is on) go into the message.
        """
        in_row = 0 if taken else self.in_row + 1
        if in_row >= self.limit:
            where = f" The first bad op was {first_bad_op}." if first_bad_op else ""
            at = "" if scale is None else f" The loss scale is down to {scale:g}."
            raise LossScaleCollapsed(
                f"{in_row} steps in a row were skipped because the gradients held inf or NaN.{at}{where} "
                "The cause is not the scale: look for NaN in the data, a division by zero or an op that "
                "overflows in the forward pass, or train in bf16."
            )
        return replace(self, in_row=in_row, total=self.total + (not taken), steps=self.steps + 1)
