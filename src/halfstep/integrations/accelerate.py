"""Hugging Face accelerate: an Accelerator whose models and optimizers train in halfstep's precision.

    from halfstep.integrations.accelerate import Accelerator

    accelerator = Accelerator(level="O2", dtype="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the script stays as it is: `autocast`, `backward`, `clip_grad_norm_`, `optimizer.step()`,
schedulers, `accumulate`, `save_state` and `load_state`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.integrations import prepare

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, convert_to_fp32
except ImportError as error:
    raise ImportError(f"{error}: this module needs accelerate, pip install 'accelerate>=1.10'") from error

_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with halfstep's arguments; takes all arguments of its base.

    Args:
        level, dtype, policy, plan, loss_scale, on_nonfinite: as `halfstep.prepare` takes them. Without a
            `dtype`, the host's `mixed_precision="bf16"` or "fp16" is taken as it. A dynamic loss scale starts
            at 1,024.

    `session` is the `halfstep.Session` that `prepare(model, optimizer)` makes; before that it is None.

    Raises:
        ConfigError: `mixed_precision="fp8"`; a second pair of model and optimizer.
        UnsupportedError: DeepSpeed, FSDP or Megatron: use `halfstep.optim` and the host's own precision.
    """

    session: hs.Session | None = None
    _clip: float | None

    def __init__(
        self,
        *args: Any,
        level: str = "O1",
        dtype: str | torch.dtype | None = None,
        policy: Any = None,
        plan: Any = None,
        loss_scale: Any = None,
        on_nonfinite: str | None = None,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, mixed_precision="no", **kwargs)
        how = {"level": level, "dtype": dtype_of(dtype, mixed_precision), "policy": policy, "plan": plan}
        self.begin({**how, "loss_scale": loss_scale, "on_nonfinite": on_nonfinite})

    def begin(self, how: dict[str, Any]) -> None:
        """Keep the arguments of `halfstep.prepare` for the first model that comes with its optimizer."""
        if self.distributed_type not in _KNOWN:
            raise hs.UnsupportedError(
                f"accelerate runs {self.distributed_type}, for which this Accelerator prepares no models: "
                "use accelerate.Accelerator with an optimizer of halfstep.optim, which needs no preparation"
            )
        self._how, self._clip = how, None

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As the base does, after `halfstep.prepare` where a model and its optimizer are among them."""
        models = [x for x in args if isinstance(x, nn.Module)]
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer)]
        fresh = [x for x in optimizers if not isinstance(x, AcceleratedOptimizer)]
        if fresh and self.session is not None:
            raise hs.ConfigError(
                "this Accelerator has prepared an optimizer already: give all models that are trained, and "
                "their optimizers, to one accelerator.prepare(...)"
            )
        if fresh and not models:
            raise hs.ConfigError(
                "accelerator.prepare() was given an optimizer without its model: give both to one call, "
                "model, optimizer = accelerator.prepare(model, optimizer)"
            )
        if fresh:
            self._adopt(models, fresh)
        return super().prepare(*args, device_placement=device_placement)

    def _adopt(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        for model in models if self.device_placement else ():
            model.to(self.device)
        self.session = prepare(models, optimizers, self._how)
        for model in models:
            run_within(model, self.session)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An optimizer whose `step()` is the session's; as the base does where there is no session."""
        if self.session is None or optimizer not in self.session.optimizers:
            return super().prepare_optimizer(optimizer, device_placement)
        ours = Optimizer(optimizer, self)
        self._optimizers.append(ours)
        return ours

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Generator[None]:
        """The session's region; before `prepare` nothing."""
        with nullcontext() if self.session is None else self.session.autocast():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss and run backward, divided by the number of accumulated batches."""
        if self.session is None:
            super().backward(loss, **kwargs)
            return
        self.session.backward(loss / self.gradient_accumulation_steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the loss scale out of the gradients, of all optimizers where none is given."""
        if self.session is None:
            return
        chosen = self._optimizers if optimizer is None else listed(optimizer)
        for one in chosen:
            self.session.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip in the coming step, in its one pass over the gradients; returns their unscaled 2-norm now.

        Of several optimizers the gradients are clipped here, as the base does.
        """
        session = self.session
        if session is None or len(session.optimizers) > 1 or norm_type != 2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self.sync_gradients:
            return None
        self._clip = float(max_norm) if math.isfinite(max_norm) else None
        return torch.as_tensor(session.measure().norm)


class Optimizer(AcceleratedOptimizer):
    """What `Accelerator.prepare` returns for an optimizer: its `step()` is a step of the session.

    `outcome` is the latest `halfstep.Outcome`. `state_dict()` holds the session's state too (loss scale,
    counts), so that whatever saves the optimizer saves it.
    """

    outcome: hs.Outcome | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    @property
    def _session(self) -> hs.Session:
        assert self._accelerator.session is not None
        return self._accelerator.session

    def step(self, closure: None = None) -> None:
        """A step of the session where this batch ends an accumulation; gradients stay until `zero_grad`."""
        if not self.gradient_state.sync_gradients:
            return
        clip, self._accelerator._clip = self._accelerator._clip, None
        self.outcome = self._session.step(self.optimizer, clip_norm=clip, zero_grad=False)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped; on an accelerator reading it waits for the device."""
        return self.outcome is not None and not self.outcome.taken

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the session's under "halfstep"."""
        return {**self.optimizer.state_dict(), "halfstep": self._session.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or an optimizer's own."""
        own = dict(state_dict)
        session = own.pop("halfstep", None)
        self.optimizer.load_state_dict(own)
        if session is not None:
            self._session.load_state_dict(session)


def run_within(model: nn.Module, session: hs.Session) -> None:
    """From now on calls of the model run in the session's region, around its hooks; outputs are fp32."""
    opened = list[Any]()

    def enter(module: nn.Module, args: Any) -> None:
        opened.append(session.autocast())
        opened[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        opened.pop().__exit__(None, None, None)
        return convert_to_fp32(output)

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def dtype_of(dtype: Any, mixed_precision: str | None) -> Any:
    """The dtype that was given, or the one that the host's word means; ConfigError for "fp8"."""
    if mixed_precision not in (None, "no", "fp16", "bf16"):
        raise hs.ConfigError(f"mixed_precision={mixed_precision!r}: expected 'no', 'fp16' or 'bf16'")
    return dtype if dtype is not None or mixed_precision == "no" else mixed_precision


def listed(value: Any) -> Iterable[Any]:
    """One thing or several, as several."""
    return value if isinstance(value, list | tuple) else (value,)
