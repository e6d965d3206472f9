"""halfstep in training loops that others own: one module for each host, imported by its name.

`halfstep.integrations.accelerate` has an Accelerator, `halfstep.integrations.transformers` a mixin for
Trainer, `halfstep.integrations.lightning` a plugin for Trainer, `halfstep.integrations.fabric` a Fabric,
`halfstep.integrations.torchtitan` an optimizers container. `import halfstep` imports none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, cast

import torch
from torch import nn

import halfstep as hs

FIRST_SCALE = 1024.0
"""Where a dynamic loss scale starts: 65,536 skips three or four of the first steps of a short run."""


class Options(TypedDict, total=False):
    """The arguments of `halfstep.prepare` that adapters take."""

    level: str
    dtype: str | torch.dtype | None
    policy: Any
    plan: Any
    loss_scale: Any
    on_nonfinite: str | None


def options(arguments: dict[str, Any]) -> Options:
    """Take ours out of the arguments of a host's constructor."""
    return cast(Options, {name: arguments.pop(name) for name in Options.__annotations__ if name in arguments})


def prepare(models: Any, optimizers: Any, how: Options) -> hs.Session:
    """`halfstep.prepare` with these options; a dynamic loss scale starts at `FIRST_SCALE`."""
    given: dict[str, Any] = {**how}
    session = hs.prepare(models, optimizers, **given)
    if how.get("loss_scale") in (None, "dynamic") and isinstance(session.loss_scale, hs.DynamicLossScale):
        session.loss_scale = hs.DynamicLossScale(init=FIRST_SCALE)
    return session


def run_within(session: hs.Session, model: nn.Module, widen: Callable[[Any], Any]) -> None:
    """From now on calls of the model run in the session's region, around its hooks; `widen` gets outputs."""
    opened = list[Any]()

    def enter(module: nn.Module, args: Any) -> None:
        opened.append(session.autocast())
        opened[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        opened.pop().__exit__(None, None, None)
        return widen(output)

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)
