"""What `amp` remembers: its options, and by optimizer what gradients carry until `step()`.

The options are Apex's table of levels as data, with its rules for overriding them. Gradients of earlier
losses are set aside before a backward, so that each loss is unscaled by its own scale and checked alone, and
added again afterwards. The hooks on models cast batches and give fp32 checkpoints.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.casting.context import autocast
from halfstep.convert.conversion import Conversion
from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.formats import parse_dtype
from halfstep.gradients.unscale import any_of, unscale_
from halfstep.optim import MasterWeights
from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, StaticLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.torch_private import pytree
from halfstep.trees import all_finite

CHANGED = (
    "gradients of 16-bit weights were changed between scale_loss and step() while they carry the loss scale: "
    "clipping then cuts far too much. Clip amp.master_params(optimizer) instead (said once)"
)


class AmpError(ConfigError, RuntimeError):
    """Wrong use of `amp`; a RuntimeError as in Apex."""


@dataclass(frozen=True)
class Properties:
    """What `amp.initialize` was asked for. `loss_scale`: a number or "dynamic"."""

    enabled: bool
    opt_level: str
    cast_model_type: torch.dtype | bool | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, as Apex keeps them."""
        return asdict(self)


OPT_LEVELS: Mapping[str, Properties] = MappingProxyType(
    {
        "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
        "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
        "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
        "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
    }
)


def properties(opt_level: str, **overrides: Any) -> Properties:
    """The level's properties with the overrides that are not None; AmpError where they do not fit."""
    if opt_level not in OPT_LEVELS:
        raise AmpError(
            f"unexpected optimization level {opt_level!r}: the options are {', '.join(OPT_LEVELS)} "
            "(the letter O, not the number zero)"
        )
    chosen = OPT_LEVELS[opt_level]
    for name, value in overrides.items():
        if value is not None:
            chosen = replace(chosen, **{name: _checked(opt_level, name, value)})
    return chosen


_SENSELESS_AT_O1 = {
    "keep_batchnorm_fp32": "at O1 batch norm runs in fp32 by itself: leave keep_batchnorm_fp32 None",
    "master_weights": "at O1 the weights themselves are fp32: master_weights makes no sense, leave it None",
}


def _checked(level: str, name: str, value: Any) -> Any:
    """An option's value as it is kept; AmpError where it does not fit the level."""
    if level == "O1" and name in _SENSELESS_AT_O1:
        raise AmpError(f"{_SENSELESS_AT_O1[name]}, given {value!r}")
    if name == "loss_scale":
        try:
            return value if value == "dynamic" else float(value)
        except (TypeError, ValueError):
            raise AmpError(f"loss_scale is a number, its text or 'dynamic', given {value!r}") from None
    if name == "cast_model_type":
        dtype = value if value is False else parse_dtype(value)
        if level == "O1" and dtype not in (False, torch.float32):
            raise AmpError(
                f"O1 casts around functions and leaves the weights fp32, given cast_model_type={value}: "
                "use opt_level='O2' or 'O3' to cast the model"
            )
        return dtype
    if not isinstance(value, bool) and value not in ("True", "False"):
        raise AmpError(f"{name} is a boolean, 'True' or 'False', given {value!r}")
    chosen = str(value) == "True"
    if name == "patch_torch_functions" and chosen and level != "O1":
        raise AmpError(f"patch_torch_functions=True belongs to opt_level='O1', given {level}")
    return chosen


def tell_of_odd_calls(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    chosen: Properties,
    earlier: Properties | None,
) -> None:
    """Warn of options unlike those in force, and of an optimizer that trains none of the models."""
    if earlier is not None and earlier.enabled and earlier != chosen:
        warnings.warn(
            f"amp.initialize was called with {earlier.opt_level} before, and now with {chosen.opt_level} or "
            "other options: these, and new loss scales, hold for all models from here on, and casts of O1 "
            "stay. Initialize all at once, or call amp.shutdown() between",
            HalfstepWarning,
            stacklevel=3,
        )
    mine = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        if mine and not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            warnings.warn(
                f"{type(optimizer).__name__} holds no parameter of the models given to amp.initialize: it "
                "will not train them; build it from their parameters()",
                HalfstepWarning,
                stacklevel=3,
            )


class AmpState:
    """Everything that is in force between `initialize` and `shutdown`."""

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1
        self.device = "cpu"
        self.accounts: dict[torch.optim.Optimizer, Account] = {}
        self.conversions: list[Conversion] = []
        self.handles: list[Any] = []
        self.region: autocast | None = None
        self.told: set[str] = set()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that passed through `initialize`."""
        return list(self.accounts)

    def warn_once(self, text: str, stacklevel: int) -> None:
        """Warn unless the same was said since `initialize`; `stacklevel` as the caller would give it."""
        if text not in self.told:
            self.told.add(text)
            warnings.warn(text, HalfstepWarning, stacklevel=stacklevel + 1)

    def say(self, text: str) -> None:
        """Print, unless verbosity is 0."""
        if self.verbosity > 0:
            print(text)

    def begin(self, chosen: Properties, models: list[nn.Module]) -> None:
        """Note the options and the device, and print the options."""
        self.opt_properties = chosen
        self.device = next((p.device.type for m in models for p in m.parameters()), "cpu")
        self.say(f"Selected optimization level {chosen.opt_level}")
        for name, value in chosen.options.items():
            self.say(f"{name:22} : {value}")

    def account(self, optimizer: torch.optim.Optimizer) -> Account:
        """The account of an optimizer that went through `initialize`."""
        if optimizer not in self.accounts:
            raise AmpError(f"this {type(optimizer).__name__} did not come from amp.initialize")
        return self.accounts[optimizer]


class Account:
    """One optimizer under `amp`. `skip` holds the message of a step that must not be taken.

    `inside`: how many `scale_loss` bodies that name it are running. `announced`: one named it since its last
    step; `owner` is told where a step finds fresh gradients without.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owner: AmpState) -> None:
        self.optimizer, self._owner = optimizer, owner
        self.announced = False
        self._stepped: tuple[int, int] | None = None
        self.masters: MasterWeights | None = None
        self.scaled, self.inside = False, 0
        self.skip: str | None = None
        self._aside: dict[Tensor, Tensor] = {}
        self._left: list[tuple[Tensor, Tensor, int]] = []
        mine: weakref.ref[Account] = weakref.ref(self)
        # Before the masters' own hook: a skipped step then widens nothing.
        self._handles = [
            optimizer.register_step_pre_hook(lambda o, args, kwargs: _before_step(mine, args, kwargs)),
            optimizer.register_step_post_hook(lambda o, args, kwargs: _after_step(mine)),
        ]

    def remove(self) -> None:
        """Take the hook and the masters off the optimizer."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        if self.masters is not None:
            self.masters.revert()

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The model's weights that have masters, and the optimizer's other parameters."""
        groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.masters is None:
            return [], groups
        pairs = self.masters.pairs()
        own = {id(master) for _, master in pairs}
        return [weight for weight, _ in pairs], [p for p in groups if id(p) not in own]

    def mark(self) -> tuple[int, int] | None:
        """What tells a gradient from the one of the last step; None where there is none."""
        owned = (weight_of(p).grad for group in self.optimizer.param_groups for p in group["params"])
        first = next((grad for grad in owned if grad is not None), None)
        return None if first is None else (id(first), first._version)

    def look(self) -> None:
        """Tell of gradients that are there without a `scale_loss`, unless the last step had them already."""
        scaling = any(scaler.dynamic or scaler.loss_scale() != 1.0 for scaler in self._owner.loss_scalers)
        if not scaling or self.announced or (mark := self.mark()) is None or mark == self._stepped:
            return
        self._owner.warn_once(
            f"{type(self.optimizer).__name__}.step() takes gradients of a plain loss.backward(): the loss "
            "was not scaled, so small gradients are lost in fp16, and nothing looked for inf. Write `with "
            "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, with every optimizer "
            "that the loss trains (said once)",
            stacklevel=5,
        )

    def before_backward(self) -> None:
        """Set finished gradients aside; those of delayed losses stay, to be accumulated on."""
        if self.scaled:
            return
        self.settle()
        low, others = self.weights()
        for p in (*low, *others):
            if p.grad is not None:
                self._aside[p] = p.grad
                p.grad = None

    @torch.no_grad()
    def after_backward(self, inv_scale: Tensor) -> Tensor:
        """Unscale the new gradients (those of masters when next read); a flag: some are not finite."""
        self.scaled = False
        low, others = self.weights()
        fresh = [p for p in others if p.grad is not None]
        found = unscale_([p.grad for p in fresh], inv_scale)
        new = [p.grad for p in low if p.grad is not None]
        found = any_of([found, ~all_finite(new)]) if new else found
        self._left = [(p, p.grad, p.grad._version) for p in low if p.grad is not None]
        for p in low:
            if p.grad is None and p in self._aside:
                p.grad = self._aside.pop(p)
        if self._left and self.masters is not None:
            self.masters.link.finish = lambda: self._finish(inv_scale)
        self._add_aside([p for p in others if p in self._aside])
        return found

    def settle(self) -> None:
        """Unscale what `after_backward` left with the weights."""
        if self.masters is not None and self.masters.link.finish is not None:
            self.masters.link.widen()

    @torch.no_grad()
    def _finish(self, inv_scale: Tensor) -> None:
        current = [p for p, grad, _ in self._left if p.grad is grad]
        if any(g._version != v for _, g, v in self._left):
            self._owner.warn_once(CHANGED, stacklevel=2)
        self._left = []
        assert self.masters is not None
        self.masters.link.widen()
        unscale_([p.grad for p in current], inv_scale)
        self._add_aside([p for p in current if p in self._aside])
        self._aside.clear()

    def _add_aside(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            before = self._aside.pop(p)
            p.grad = before if p.grad is None else p.grad + before


def _before_step(account: weakref.ref[Account], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    self = account()
    if self is None:
        return
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise AmpError("amp does not support closures with optimizers: call step() without one")
    if self.inside:
        raise AmpError(
            f"{type(self.optimizer).__name__}.step() inside amp.scale_loss: the gradients carry the loss "
            "scale until the `with` ends, so step after it"
        )
    if self.scaled:
        raise AmpError(
            "step() after scale_loss(..., delay_unscale=True): the gradients are still scaled; "
            "the last backward before a step must not delay"
        )
    self.look()
    if self.skip is not None:
        self._owner.say(self.skip)
        self.skip = None
        # Without gradients torch's optimizers change nothing: no update, no decay, no step count.
        low, others = self.weights()
        for p in (*low, *others):
            p.grad = None


def _after_step(account: weakref.ref[Account]) -> None:
    self = account()
    if self is not None:
        self.announced, self._stepped = False, self.mark()


@contextmanager
def no_steps(accounts: Sequence[Account]) -> Generator[None]:
    """Within, a step of these optimizers is an error: their gradients carry the scale."""
    for account in accounts:
        account.inside += 1
    try:
        yield
    finally:
        for account in accounts:
            account.inside -= 1


@contextmanager
def backward_of(scaled: Tensor, state: AmpState) -> Generator[None]:
    """Say once that no backward of the scaled loss ran within: the gradients are unscaled all the same."""
    ran: list[bool] = []

    def note(gradient: Tensor) -> None:
        ran.append(True)

    hook = scaled.register_hook(note) if scaled.requires_grad else None
    yield
    if hook is None:
        return
    hook.remove()
    if not ran:
        state.warn_once(
            "no backward of the scaled loss ran inside amp.scale_loss, yet the gradients are now divided by "
            "its scale: write scaled_loss.backward() inside, not loss.backward() (said once)",
            stacklevel=5,
        )


def cast_batches(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook (with kwargs): batches of the user's own class are cast by their own `to(dtype)`."""

    def cast(leaf: Any) -> Any:
        own = not isinstance(leaf, Tensor | nn.Module) and callable(getattr(leaf, "to", None))
        return leaf.to(dtype) if own else leaf

    return pytree.tree_map(cast, (args, kwargs))


class CheckpointInFp32:
    """Module hook: `state_dict()` gives fp32 tensors, the masters where there are any."""

    def __init__(self, accounts: list[weakref.ref[Account]] | None = None) -> None:
        self._accounts = accounts or []

    def __reduce__(self) -> tuple[type[CheckpointInFp32], tuple[()]]:
        return CheckpointInFp32, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointInFp32:
        return CheckpointInFp32()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        live = [
            account
            for ref in self._accounts
            if (account := ref()) is not None and account.masters is not None
        ]
        masters = {id(w): m for account in live for w, m in cast(MasterWeights, account.masters).pairs()}
        exact = {
            prefix + name: masters.get(id(p)) for name, p in module.named_parameters(remove_duplicate=False)
        }
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                master = exact.get(key)
                if master is not None:
                    state[key] = master.detach()
                elif value.dtype in (torch.float16, torch.bfloat16):
                    state[key] = value.float()


class LossScaler:
    """One loss scale by Apex's rule: x2 after 2000 clean passes, halved on overflow, within bounds.

    Args:
        loss_scale: a number, its text, or "dynamic".
        init_scale: where a dynamic scale starts, as far as the bounds let it.
        scale_factor: how far it moves at a time. scale_window: clean passes before it grows.
        min_loss_scale, max_loss_scale: its bounds.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._skips = SkipCount()
        self._clean = 0
        if self.dynamic:
            low, factor = min_loss_scale or SMALLEST_SCALE, float(scale_factor)
            first = max(low, min(float(init_scale), max_loss_scale))
            self.value: LossScale = DynamicLossScale(
                first, factor, 1 / factor, int(scale_window), min=low, max=max_loss_scale
            )
        else:
            self.value = StaticLossScale(float(loss_scale))

    def loss_scale(self) -> float:
        """The present scale."""
        return self.value.read()

    @property
    def _loss_scale(self) -> float:
        """The present scale, which scripts set by hand under this name."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.set(value)

    def set(self, value: float) -> None:
        """Go on from another scale; a dynamic one stays dynamic."""
        self.value = self.value.with_value(value)

    @property
    def unskipped(self) -> int:
        """Clean backward passes since the last overflow or growth."""
        return int(self.value.clean) if isinstance(self.value, DynamicLossScale) else self._clean

    _unskipped = unskipped

    def update(self, found_inf: bool) -> bool:
        """Take in what a backward gave; whether the step must be skipped."""
        self.value = self.value.adjust(not found_inf)
        self._clean += 1
        if not self.dynamic:
            return False
        self._skips = self._skips.after(not found_inf, scale=self.loss_scale())
        return found_inf

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Continue from saved numbers."""
        self._clean = int(unskipped)
        if isinstance(self.value, DynamicLossScale):
            bounded = min(max(float(loss_scale), self.value.min), self.value.max)
            state = self.value.state_dict()
            self.value = LossScale.from_state({**state, "current": bounded, "clean": int(unskipped)})
        else:
            self.value = StaticLossScale(float(loss_scale))
