"""halfstep in training loops that others own: one module for each host, imported by its name.

`halfstep.integrations.accelerate` has an Accelerator, `halfstep.integrations.transformers` a mixin for
Trainer, `halfstep.integrations.lightning` a plugin for Trainer, `halfstep.integrations.fabric` a Fabric,
`halfstep.integrations.torchtitan` an optimizers container. `import halfstep` imports none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.convert.hooks import HookSwitch, RunInAutocast
from halfstep.gradients.stats import measure
from halfstep.policy import level_of
from halfstep.session.precision import Precision, lower
from halfstep.torch_private import never_compiled
from halfstep.trees import gradients_of

FIRST_SCALE = 1024.0
"""Where a dynamic loss scale starts: 65,536 skips three or four of the first steps of a short run."""


class Options(TypedDict, total=False):
    """The arguments of `halfstep.prepare` that adapters take."""

    level: str | hs.Level
    dtype: str | torch.dtype | None
    policy: Any
    plan: Any
    layout: str
    loss_scale: Any
    skip_nonfinite: bool | None
    on_nonfinite: str | None
    max_skips: int
    kernels: Any


def options(arguments: dict[str, Any]) -> Options:
    """Take ours, checked, out of the arguments of a host's constructor."""
    return check_options({name: arguments.pop(name) for name in Options.__annotations__ if name in arguments})


def check_options(how: dict[str, Any]) -> Options:
    """These options; TypeError for one that there is not, ConfigError for a level that no host can give."""
    if unknown := sorted(how.keys() - Options.__annotations__):
        raise TypeError(f"there is no option {unknown[0]!r}: expected {', '.join(Options.__annotations__)}")
    for name, choices in (("level", "O0 to O3"), ("layout", "'keep' or 'channels_last'")):
        if str(how.get(name)).strip().lower() == "auto":
            raise hs.ConfigError(
                f"{name}='auto' runs training steps to choose, and here the host runs them: choose {choices}"
            )
    if "level" in how:
        level_of(how["level"])
    return cast(Options, how)


def with_dtype(how: Options, mixed_precision: str | None) -> Options:
    """The options with the host's word as the dtype; ConfigError for a word of no dtype, or of another."""
    if mixed_precision not in (None, "no", "fp16", "bf16"):
        raise hs.ConfigError(f"mixed_precision={mixed_precision!r}: expected 'no', 'fp16' or 'bf16'")
    word, dtype = None if mixed_precision == "no" else mixed_precision, how.get("dtype")
    if word and dtype and hs.format_of(word) != hs.format_of(dtype):
        raise hs.ConfigError(
            f"mixed_precision={word!r} (an argument, or ACCELERATE_MIXED_PRECISION) beside dtype={dtype!r}: "
            "give one of the two"
        )
    return {**how, "dtype": dtype or word}


def get_session(session: hs.Session | None) -> hs.Session:
    """Return the session; ConfigError where no optimizer was set up."""
    if session is None:
        raise hs.ConfigError(
            "no optimizer was set up with its model: give both to one fabric.setup(model, optimizer)"
        )
    return session


def precision_of(session: hs.Session | None, how: Options, device: torch.device) -> Precision:
    """The precision of a session, or what these options come to on a device before there is one."""
    if session is not None:
        return session.precision
    return lower(how.get("level", "O1"), how.get("dtype"), how.get("policy"), None, device)


def prepare(models: Any, optimizers: Any, how: Options) -> hs.Session:
    """`halfstep.prepare` with these options, in place of what an earlier training prepared.

    A dynamic loss scale starts at `FIRST_SCALE`.
    """
    for model in models if isinstance(models, list) else [models]:
        with suppress(hs.ConfigError):  # it was not prepared
            hs.revert(model)
    keywords: dict[str, Any] = {**how}
    session = hs.prepare(models, optimizers, **keywords)
    if how.get("loss_scale") in (None, "dynamic") and isinstance(session.loss_scale, hs.DynamicLossScale):
        session.loss_scale = hs.DynamicLossScale(init=FIRST_SCALE)
    return session


class _InSession(RunInAutocast):
    """Runs a model's forward in its session's region and hands its outputs through `widen`.

    In a copy of the model, also an unpickled one, the region has the session's policy.
    """

    def __init__(self, session: hs.Session, widen: Callable[[Any], Any]) -> None:
        super().__init__(HookSwitch(), session.policy)
        self._session: hs.Session | None = session
        self.widen = widen

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_session": None}

    @never_compiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Forward pre-hook."""
        if self._session is None:
            super().enter(module, args, kwargs)
        else:
            self.open_scopes().enter_context(self._session.autocast())

    @never_compiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook, also after an exception."""
        super().leave(module, args, output)
        return self.widen(output)


def run_within(session: hs.Session, model: nn.Module, widen: Callable[[Any], Any]) -> None:
    """Until `revert` calls of the model run in the session's region, around its hooks; `widen` gets outputs.

    Each thread has a region of its own: nn.DataParallel calls the model's replicas beside each other.
    """
    session._preparation.handles += _InSession(session, widen).attach(model, first=True)


def clip(session: hs.Session, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
    """Unscale the optimizers that these parameters belong to, and clip their gradients as torch does.

    A 2-norm is added up in fp32, also over 16-bit gradients. Returns the norm before clipping, on their
    device.
    """
    optimizer_grads = [
        (o, set(gradients_of(o))) for o in session.optimizers
    ]  # first: masters widen gradients
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clipped = {p.grad for p in parameters}
    for optimizer, gradients in optimizer_grads:
        if gradients & clipped:
            session.unscale(optimizer)
    if norm_type != 2:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norm = measure(p.grad for p in parameters).norm
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
