"""What `amp` remembers: its options, and by optimizer what gradients carry until `step()`.

The options are Apex's table of levels as data, with its rules for overriding them. Gradients of earlier
losses are set aside before a backward, so that each loss is unscaled by its own scale and checked alone, and
added again afterwards. The hooks on models cast batches and give fp32 checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.casting.context import autocast
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.gradients.unscale import unscale_
from halfstep.optim import MasterWeights
from halfstep.policy.levels import LOW_DTYPES
from halfstep.scaling.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, StaticLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.torch_private import pytree
from halfstep.trees import compute_device, parameters_of


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
            chosen = replace(chosen, **{name: _check_option(opt_level, name, value)})
    return chosen


_SENSELESS_AT_O1 = {
    "keep_batchnorm_fp32": "at O1 batch norm runs in fp32 by itself: leave keep_batchnorm_fp32 None",
    "master_weights": "at O1 the weights themselves are fp32: master_weights makes no sense, leave it None",
}


def _check_option(level: str, name: str, value: Any) -> Any:
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


class AmpState:
    """Everything that is in force between `initialize` and `shutdown`."""

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1
        self.device = "cpu"
        self.accounts: dict[torch.optim.Optimizer, Account] = {}
        self.undo: list[Callable[[], object]] = []
        """What takes down all that `initialize` set up, in this order."""
        self.replaced: list[tuple[Any, str, Any]] = []
        """Module, name and function, where a register function put another in its place."""
        self.region: autocast | None = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that passed through `initialize`."""
        return list(self.accounts)

    def keep(self, *handles: Any) -> None:
        """Remove these hooks when all is taken down."""
        self.undo += [handle.remove for handle in handles]

    def say(self, text: str) -> None:
        """Print, unless verbosity is 0."""
        if self.verbosity > 0:
            print(text)

    def begin(self, chosen: Properties, models: list[nn.Module]) -> None:
        """Note the options and the device, and print the options."""
        self.opt_properties = chosen
        self.device = compute_device(p for m in models for p in m.parameters()).type
        self.say(f"Selected optimization level {chosen.opt_level}")
        for name, value in chosen.options.items():
            self.say(f"{name:22} : {value}")

    def open_account(self, optimizer: torch.optim.Optimizer) -> Account:
        """The account of an optimizer that comes in; its masters are to be added."""
        account = self.accounts[optimizer] = Account(optimizer, self)
        self.undo.append(account.remove)
        return account

    def account(self, optimizer: torch.optim.Optimizer) -> Account:
        """The account of an optimizer that went through `initialize`."""
        if optimizer not in self.accounts:
            raise AmpError(f"this {type(optimizer).__name__} did not come from amp.initialize")
        return self.accounts[optimizer]

    def take_down(self, count: int = 0) -> None:
        """Undo all but the first `count` things."""
        late = self.undo[count:]
        del self.undo[count:]
        for undo in late:
            undo()


class Account:
    """One optimizer under `amp`.

    `scaled`: its gradients carry a loss scale, inside a `scale_loss` and after one that delays. `skip` holds
    the message of a step that must not be taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owner: AmpState) -> None:
        self.optimizer, self._owner = optimizer, owner
        self.masters: MasterWeights | None = None
        self.scaled = False
        self.skip: str | None = None
        self._aside: dict[Tensor, Tensor] = {}
        # Before the masters' own hook: a skipped step then widens nothing.
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Take the hook and the masters off the optimizer."""
        del self._owner.accounts[self.optimizer]
        self._handle.remove()
        if self.masters is not None:
            self.masters.revert()

    def _parameters(self) -> list[Tensor]:
        """What the optimizer updates; the gradients of its masters are fp32, on the weights too."""
        if self.masters is not None:
            self.masters.copy_grads()
        return parameters_of(self.optimizer)

    def before_backward(self) -> None:
        """Set finished gradients aside; those of delayed losses stay, to be accumulated on."""
        if not self.scaled:
            for p in self._parameters():
                if p.grad is not None:
                    self._aside[p] = p.grad
                    p.grad = None
        self.scaled = True

    @torch.no_grad()
    def after_backward(self, inv_scale: Tensor) -> Tensor:
        """Unscale the new gradients and add the earlier ones; a flag: some new ones are not finite."""
        self.scaled = False
        parameters = self._parameters()
        found_inf = unscale_([p.grad for p in parameters], inv_scale)
        for p in parameters:
            if (before := self._aside.pop(p, None)) is not None:
                p.grad = before if p.grad is None else p.grad + before
        return found_inf

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            raise AmpError("amp does not support closures with optimizers: call step() without one")
        if self.scaled:
            raise AmpError(
                f"{type(optimizer).__name__}.step() while its gradients carry the loss scale: step after the "
                "`with amp.scale_loss` has ended, and leave delay_unscale=True out of the last one before it"
            )
        if self.skip is not None:
            self._owner.say(self.skip)
            self.skip = None
            # Without gradients torch's optimizers change nothing: no update, no decay, no step count.
            for p in parameters_of(optimizer):
                p.grad = None


def cast_batches(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook (with kwargs): batches of the user's own class are cast by their own `to(dtype)`."""

    def cast(leaf: Any) -> Any:
        has_to = not isinstance(leaf, Tensor | nn.Module) and callable(getattr(leaf, "to", None))
        return leaf.to(dtype) if has_to else leaf

    return pytree.tree_map(cast, (args, kwargs))


def check_device(expected: str, module: nn.Module, args: Any) -> None:
    """Forward pre-hook: raise AmpError where the model was moved since its functions are cast on a device."""
    kind = compute_device(module.parameters()).type
    if kind != expected:
        raise AmpError(
            f"the model is on {kind} and was on {expected} at amp.initialize, which casts functions there "
            "alone: move the model first, model.cuda(), then call amp.initialize, as Apex requires"
        )


class CheckpointInFp32:
    """Module hook: `state_dict()` gives fp32 tensors, the masters where there are any (a copy has none)."""

    def __init__(self, masters: Sequence[MasterWeights] = ()) -> None:
        self._masters = masters

    def __reduce__(self) -> tuple[type[CheckpointInFp32], tuple[()]]:
        return CheckpointInFp32, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        masters = {w: m for each in self._masters for w, m in each.masters().items()}
        named = module.named_parameters(remove_duplicate=False)
        exact = {prefix + name: masters[p] for name, p in named if p in masters}
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                if key in exact:
                    state[key] = exact[key]
                elif value.dtype in LOW_DTYPES:
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

    def set(self, value: float) -> None:
        """Go on from another scale; a dynamic one stays dynamic."""
        self.value = self.value.with_value(value)

    _loss_scale = property(loss_scale, set, doc="The present scale, which scripts set under this name.")

    @property
    def unskipped(self) -> int:
        """Clean backward passes since the last overflow or growth; 0 where the scale is constant."""
        return int(self.value.clean) if isinstance(self.value, DynamicLossScale) else 0

    _unskipped = unskipped

    def update(self, found_inf: bool) -> bool:
        """Take in what a backward gave; whether the step must be skipped."""
        self.value = self.value.adjust(not found_inf)
        if not self.dynamic:
            return False
        self._skips = self._skips.after(not found_inf, scale=self.loss_scale())
        return found_inf

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Continue from saved numbers."""
        if isinstance(self.value, DynamicLossScale):
            bounded = min(max(float(loss_scale), self.value.min), self.value.max)
            self.value = replace(self.value, current=bounded, clean=int(unskipped))
        else:
            self.value = StaticLossScale(float(loss_scale))
