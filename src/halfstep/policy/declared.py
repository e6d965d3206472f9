"""What a model's own classes say must stay in fp32, as rules of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from halfstep.policy.plan import PlanRule

_ALWAYS, _FP16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"


def rules_declared_by(model: nn.Module, low: torch.dtype) -> list[PlanRule]:
    """Return a rule in fp32 for each module that a class of transformers or diffusers declares.

    T5 declares its `wo`, whose output leaves the range of fp16, and DeepSeek-V3 the bias of its router.
    `from_pretrained(dtype=...)` honours `_keep_in_fp32_modules` for fp16, as here, and
    `_keep_in_fp32_modules_strict` for every 16-bit dtype. A plan's rule for the same path goes before these.
    """
    patterns = dict[str, str]()
    for path, module in model.named_modules():
        for attribute in (_ALWAYS, _FP16) if low == torch.float16 else (_ALWAYS,):
            names: Any = getattr(module, attribute, None)
            for name in sorted(cast("Iterable[str]", names or ())):
                pattern = f"{path}.**.{name}" if path else f"**.{name}"
                patterns.setdefault(pattern, f"{type(module).__name__} declares it in {attribute}")
    return [
        PlanRule(pattern, dtype=torch.float32, reason=reason, required=False)
        for pattern, reason in patterns.items()
    ]
