"""torchtitan: its optimizers container, with optimizers of `halfstep.optim` in it.

    from halfstep.integrations.torchtitan import OptimizersContainer

    how = {"lr": 3e-4, "state_dtype": "8bit"}
    adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=how)
    config.optimizer = OptimizersContainer.Config(param_groups=[adamw])

With `training.dtype="bfloat16"` each weight keeps its exact fp32 value; schedulers, clipping and checkpoints
are torchtitan's.
"""

# The host is not in the environment of the checks.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import halfstep as hs

try:
    from torchtitan.components.optimizer import OptimizersContainer as HostContainer
except ImportError as error:
    raise ImportError(f"{error}: this module needs torchtitan, pip install 'torchtitan>=0.3'") from error

KINDS = {"Adam": hs.optim.Adam, "AdamW": hs.optim.AdamW}


class OptimizersContainer(HostContainer):
    """torchtitan's own, with `hs.optim.Adam` and `AdamW` in place of torch's; others stay as they are.

    `optimizer_kwargs` of a group may also hold `master`, `state_dtype`, `clip_norm` and `skip_nonfinite`.
    `implementation` changes nothing, except that "fused_opt_states_bf16" keeps the states in bf16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HostContainer.Config):
        """torchtitan's own."""

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        bf16 = {"state_dtype": "bf16"} if config.implementation == "fused_opt_states_bf16" else {}
        for i, optimizer in enumerate(self.optimizers):
            if kind := KINDS.get(type(optimizer).__name__):
                self.optimizers[i] = kind([{**bf16, **group} for group in optimizer.param_groups])

    def state_dict(self) -> dict[str, Any]:
        """As the base does, without the empty step by which it makes states that are not there yet."""
        self._init_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base does, without that step."""
        self._init_states()
        super().load_state_dict(state_dict)

    def _init_states(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, hs.optim.Adam):
                optimizer.init_states()
