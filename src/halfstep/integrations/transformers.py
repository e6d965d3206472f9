"""Hugging Face transformers: a mixin that trains a Trainer's model in halfstep's precision.

    from halfstep.integrations.transformers import Precision

    class Trainer(Precision, transformers.Trainer): ...

    Trainer(model=model, args=TrainingArguments(bf16=True, ...), level="O2", ...).train()

TRL's SFTTrainer and other classes derived from Trainer take it the same way.
"""

from __future__ import annotations

from typing import Any

from halfstep.errors import warn
from halfstep.integrations import options
from halfstep.integrations.accelerate import Accelerator


def _warn_of_rate(arguments: Any, rate: float | None) -> None:
    """Say that the host does not give its learning rate to an optimizer that it was handed with keywords."""
    asked = arguments.learning_rate
    if asked != rate and (rate is None or asked != type(arguments).learning_rate):
        warn(
            f"learning_rate={asked} of the TrainingArguments has no effect beside optimizer_cls_and_kwargs, "
            f"which has {'no lr' if rate is None else f'lr={rate}'}: name it there, as in "
            f"(hs.optim.AdamW, {{'lr': {asked}}})"
        )


class Precision:
    """Mixin for `transformers.Trainer`, written before it among the bases.

    Args:
        level and the other keywords of `halfstep.integrations.Options`: as `halfstep.prepare` takes them.
            Without a `dtype` it is that of `TrainingArguments`: `bf16=True` or `fp16=True`; without either,
            the device's best.

    `accelerator.session` is the `halfstep.Session` once training has begun.
    """

    accelerator: Any
    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._precision = options(kwargs)
        super().__init__(*args, **kwargs)
        chosen = kwargs.get("optimizer_cls_and_kwargs")
        if chosen is not None:
            _warn_of_rate(self.args, chosen[1].get("lr"))

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own Accelerator, which casts nothing itself, made one of halfstep's."""
        arguments = self.args
        word, arguments.mixed_precision = arguments.mixed_precision, "no"
        try:
            super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            arguments.mixed_precision = word
        self.accelerator.__class__ = Accelerator  # the Trainer offers no way to give it another
        self.accelerator.begin(self._precision, word)
