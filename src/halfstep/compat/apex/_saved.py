"""What a saved `FP16_Optimizer` holds, ours or Apex's own: its scaler, and its masters by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep.errors import CheckpointError, show
from halfstep.scaling.loss_scale import LossScale


def saved_scaler(saved: Any) -> LossScale | tuple[float, int]:
    """Our loss scale, or (scale, clean passes) of the object that Apex pickles.

    Raises:
        CheckpointError: what is neither.
    """
    if isinstance(saved, Mapping):
        return LossScale.from_state(saved)
    scale = getattr(saved, "_loss_scale", getattr(saved, "cur_scale", None))
    if scale is None:
        raise CheckpointError(f"loss_scaler={show(saved)} is no loss scaler, neither ours nor Apex's")
    return float(scale), int(getattr(saved, "_unskipped", 0))


def saved_masters(saved: Any, groups: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Each master with its saved value, of `fp32_from_fp16`; Apex keeps none for what has no gradient.

    Raises:
        CheckpointError: other groups, numbers or shapes.
    """
    lists = isinstance(saved, list | tuple) and all(isinstance(group, list | tuple) for group in saved)
    if not lists or len(saved) != len(groups):
        raise CheckpointError(
            f"fp32_from_fp16={show(saved)}: expected a list of masters for each of {len(groups)} groups"
        )
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, (values, masters) in enumerate(zip(saved, groups)):
        trained = [master for master in masters if master.requires_grad]
        mine = masters if len(values) == len(masters) else trained
        given, own = [list(value.shape) for value in values], [list(master.shape) for master in mine]
        if given != own:
            raise CheckpointError(
                f"fp32_from_fp16[{number}] has masters of shapes {show(given)}, the optimizer {show(own)}"
            )
        pairs += zip(mine, values)
    return pairs
