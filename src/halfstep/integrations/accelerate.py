"""Hugging Face accelerate: an Accelerator whose models and optimizers train in halfstep's precision.

    from halfstep.integrations.accelerate import Accelerator

    accelerator = Accelerator(level="O2", dtype="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the script stays as it is: `autocast`, `backward`, `clip_grad_norm_`, `optimizer.step()`,
schedulers, `accumulate`, `save_state` and `load_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.formats import dtype_name
from halfstep.integrations import Options, clip, options, precision_of, prepare, run_within, with_dtype
from halfstep.trees import gradients_of

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import convert_to_fp32, parse_choice_from_env
except ImportError as error:
    raise ImportError(f"{error}: this module needs accelerate, pip install 'accelerate>=1.10'") from error


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with halfstep's arguments; takes all arguments of its base.

    Args:
        level, dtype and the other keywords of `halfstep.integrations.Options`: as `halfstep.prepare` takes
            them. Without a `dtype`, the host's `mixed_precision="bf16"` or "fp16" is taken as it, and without
            that ACCELERATE_MIXED_PRECISION (`accelerate launch --mixed_precision`). A dynamic loss scale
            starts at 1,024.

    `session` is the `halfstep.Session` that `prepare(model, optimizer)` makes; before that, and after
    `free_memory()`, it is None, and the next model may be prepared.

    Raises:
        ConfigError: `mixed_precision="fp8"`, or another than `dtype`; an unknown level or "auto"; an
            optimizer without its model, or a second pair of them.
        UnsupportedError: DeepSpeed, FSDP or Megatron: use `halfstep.optim` and the host's own precision.
    """

    session: hs.Session | None = None

    def __init__(self, *args: Any, mixed_precision: str | None = None, **kwargs: Any) -> None:
        how = options(kwargs)
        super().__init__(*args, mixed_precision="no", **kwargs)
        asked = parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
        self.begin(how, asked if mixed_precision is None else mixed_precision.lower())

    @property
    def mixed_precision(self) -> str:
        """What ops run in, in the host's words: "fp16", "bf16" or "no"."""
        dtype = precision_of(self.session, self._how, self.device).policy.compute_dtype
        return "no" if dtype == torch.float32 else dtype_name(dtype)

    def begin(self, how: Options, mixed_precision: str | None) -> None:
        """Keep the arguments of `halfstep.prepare` for the first model that comes with its optimizer."""
        if self.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise hs.UnsupportedError(
                f"accelerate runs {self.distributed_type}, for which this Accelerator prepares no models: "
                "use accelerate.Accelerator with an optimizer of halfstep.optim, which needs no preparation"
            )
        self._how = with_dtype(how, mixed_precision)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As the base does, after `halfstep.prepare` where a model and its optimizer are among them."""
        models = [x for x in args if isinstance(x, nn.Module)]
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer)]
        if fresh := [x for x in optimizers if not isinstance(x, AcceleratedOptimizer)]:
            if self.session is not None or not models:
                raise hs.ConfigError(
                    "accelerator.prepare() was given an optimizer without its model, or after another: give "
                    "all models that are trained, and their optimizers, to one accelerator.prepare(...); "
                    "between two trainings call accelerator.free_memory()"
                )
            for model in models if self.device_placement else ():
                model.to(self.device)
            self.session = prepare(models, fresh, self._how)
            for model in models:
                run_within(self.session, model, convert_to_fp32)
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):  # given again after free_memory()
                self.session = optimizer.session
        return super().prepare(*args, device_placement=device_placement)

    def free_memory(self, *objects: Any) -> Any:
        """As the base does; the session is released as well, and another model may be prepared."""
        self.session = None
        return super().free_memory(*objects)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return an optimizer whose `step()` is the session's; as the base does where there is no session."""
        if self.session is None or optimizer not in self.session.optimizers:
            return super().prepare_optimizer(optimizer, device_placement)
        self._optimizers.append(Optimizer(optimizer, self.session))
        return self._optimizers[-1]

    def autocast(self, autocast_handler: Any = None) -> Any:
        """Return the session's region; before `prepare` nothing."""
        return super().autocast(autocast_handler) if self.session is None else self.session.autocast()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss and run backward, divided by the number of accumulated batches."""
        if self.session is None:
            super().backward(loss, **kwargs)
        else:
            self.session.backward(loss / self.gradient_accumulation_steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the loss scale out of the gradients; without `optimizer`, of all that have gradients."""
        optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for wrapper in filter(gradients_of, self._optimizers) if optimizer is None else optimizers:
            wrapper.session.unscale(wrapper.optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Unscale and clip these gradients, as the base does; returns the norm that they had, unscaled."""
        if self.session is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return clip(self.session, parameters, max_norm, norm_type)


class Optimizer(AcceleratedOptimizer):
    """What `Accelerator.prepare` returns for an optimizer: its `step()` is a step of the session.

    `outcome` is the latest `halfstep.Outcome`; whatever saves the optimizer saves the session's state too.
    """

    outcome: hs.Outcome | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, session: hs.Session) -> None:
        super().__init__(optimizer, device_placement=False)
        self.session = session

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """A step of the session where this batch ends an accumulation; gradients stay until `zero_grad`.

        A `closure` is called once before it: it runs forward and backward, as in torch's optimizers.
        """
        if self.gradient_state.sync_gradients:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            self.outcome = self.session.step(self.optimizer, zero_grad=False)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped; on an accelerator reading it waits for the device."""
        return self.outcome is not None and not self.outcome.taken

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the session's under "halfstep"."""
        return {**self.optimizer.state_dict(), "halfstep": self.session.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or an optimizer's own."""
        self.optimizer.load_state_dict(state_dict)
        if "halfstep" in state_dict:
            self.session.load_state_dict(state_dict["halfstep"])
