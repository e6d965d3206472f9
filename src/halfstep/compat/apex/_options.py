"""The options of `amp.initialize`: Apex's table of levels as data, and its rules for overriding them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.formats import parse_dtype


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
            chosen = replace(chosen, **{name: _CHECKS[name](opt_level, value)})
    return chosen


def _cast_model_type(level: str, value: Any) -> torch.dtype | bool:
    dtype = value if value is False else parse_dtype(value)
    if level == "O1" and dtype is not False and dtype != torch.float32:
        raise AmpError(
            f"O1 casts around functions and leaves the weights fp32, given cast_model_type={value}: "
            "use opt_level='O2' or 'O3' to cast the model"
        )
    return dtype


def _patch_torch_functions(level: str, value: Any) -> bool:
    chosen = _boolean("patch_torch_functions", value)
    if level != "O1" and chosen:
        raise AmpError(f"patch_torch_functions=True belongs to opt_level='O1', given {level}")
    return chosen


def _keep_batchnorm_fp32(level: str, value: Any) -> bool:
    if level == "O1":
        raise AmpError(
            f"at O1 batch norm runs in fp32 by itself: leave keep_batchnorm_fp32 None, given {value!r}"
        )
    return _boolean("keep_batchnorm_fp32", value)


def _master_weights(level: str, value: Any) -> bool:
    if level == "O1":
        raise AmpError("at O1 the weights themselves are fp32: master_weights makes no sense, leave it None")
    return _boolean("master_weights", value)


def _loss_scale(level: str, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        return float(value)
    except (TypeError, ValueError):
        raise AmpError(f"loss_scale is a number, its text or 'dynamic', given {value!r}") from None


def _boolean(name: str, value: Any) -> bool:
    words = {"True": True, "False": False}
    if isinstance(value, bool) or value in words:
        return words[value] if isinstance(value, str) else value
    raise AmpError(f"{name} is a boolean, 'True' or 'False', given {value!r}")


_CHECKS: Mapping[str, Any] = MappingProxyType(
    {
        "cast_model_type": _cast_model_type,
        "patch_torch_functions": _patch_torch_functions,
        "keep_batchnorm_fp32": _keep_batchnorm_fp32,
        "master_weights": _master_weights,
        "loss_scale": _loss_scale,
    }
)


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
            stacklevel=4,
        )
    mine = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        if mine and not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            warnings.warn(
                f"{type(optimizer).__name__} holds no parameter of the models given to amp.initialize: it "
                "will not train them; build it from their parameters()",
                HalfstepWarning,
                stacklevel=4,
            )
