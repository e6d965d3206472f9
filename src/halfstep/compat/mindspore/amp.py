"""mindspore.amp: levels, lists, scalers, managers and training networks, translated to halfstep.

Levels become a `Plan` that says what each module computes in (parameters stay stored as they are), `auto` a
`Policy` with the op table "mindspore". Differences from MindSpore 2.10: it runs on any device; a user's
`to_float` holds at O2 and O3 too, where MindSpore overrides it; a second conversion replaces the first, and
warns.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from halfstep.casting.context import autocast
from halfstep.compat.mindspore import nn, ops
from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._loss_scale import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    GroupLossScaleManager,
    LossScaleManager,
    LossScaler,
    StaticLossScaler,
)
from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_kind
from halfstep.compat.mindspore.dtype import bfloat16, float16, float32
from halfstep.compat.mindspore.nn._training import TrainOneStepWithGroupScalesCell
from halfstep.convert.conversion import convert
from halfstep.convert.hooks import CastOutputs, HookSwitch, RunInAutocast, own_dtype
from halfstep.errors import ConfigError, warn
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy
from halfstep.torch_private import pytree
from halfstep.trees import all_finite as finite_tree

__all__ = [
    "DynamicLossScaleManager",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "GroupLossScaleManager",
    "LossScaleManager",
    "LossScaler",
    "StaticLossScaler",
    "all_finite",
    "auto_mixed_precision",
    "build_train_network",
    "custom_mixed_precision",
    "get_black_list",
    "get_white_list",
]

AMP_LEVELS = ("O0", "O1", "O2", "O3", "auto")

_WHITE: tuple[type[torch.nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Conv1dTranspose,
    nn.Conv2dTranspose,
    nn.Conv3dTranspose,
    nn.Dense,
    nn.LSTMCell,
    nn.RNNCell,
    nn.GRUCell,
    ops.Conv2D,
    ops.Conv3D,
    ops.Conv2DTranspose,
    ops.Conv3DTranspose,
    ops.Conv2DBackpropInput,
    ops.MatMul,
    ops.BatchMatMul,
    ops.PReLU,
    ops.ReLU,
    ops.Ger,
)
_BLACK: tuple[type[torch.nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)

_AUTO = Policy(table="mindspore").with_rules(
    low=("mv", "addmv", "addbmm", "baddbmm"),
    full=("log10", "log2", "l1_loss", "nll_loss"),
    keep=("relu", "addr"),
    widest=("conv_transpose1d",),
)
"""The table "mindspore" holds the white list; level auto has lists of its own, which differ in these."""


def all_finite(inputs: Any) -> Tensor:
    """Whether no floating tensor of a nest holds inf or NaN: a 0-d bool tensor, which nothing reads here.

    Raises:
        TypeError: something else than tensors and nests of them. ValueError: no tensor at all.
    """
    if isinstance(inputs, str) or not isinstance(inputs, torch.Tensor | Iterable):
        raise TypeError(
            f"For 'all_finite', the 'inputs' must be a Tensor or a tuple or list of them, "
            f"but got '{type(inputs).__name__}'."
        )
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(inputs)):
        raise ConfigError("For 'all_finite', the 'inputs' must hold at least one Tensor, but got none.")
    return as_tensor(finite_tree(inputs))


def get_white_list() -> list[type[torch.nn.Module]]:
    """A copy of the layers and operators that O1 runs low."""
    return list(_WHITE)


def get_black_list() -> list[type[torch.nn.Module]]:
    """A copy of the layers that O2 runs in fp32."""
    return list(_BLACK)


_CONVERTED: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, ExitStack]] = weakref.WeakKeyDictionary()
"""The level of each network that has one, and what undoes it."""


def auto_mixed_precision(network: Any, amp_level: str = "O0", dtype: torch.dtype = float16) -> Any:
    """Convert a network in place and return it; parameters stay stored in fp32, outputs are fp32.

    Args:
        network: a Cell or torch.nn.Module; at level "auto" a function too.
        amp_level: "O0" changes nothing; "O1" runs the white list low, each output back in fp32; "O2" runs all
            low but the black list; "O3" runs all low; "auto" decides op by op, its output as it comes.
        dtype: float16 or bfloat16.

    Raises:
        TypeError: a network of another kind.
        ValueError: an unknown level, or a dtype of another kind.
    """
    is_function = inspect.isfunction(network) or inspect.ismethod(network)
    if not isinstance(network, torch.nn.Module) and not (is_function and amp_level == "auto"):
        kinds = "Cell or function" if amp_level == "auto" else "Cell"
        raise TypeError(f"For amp_level '{amp_level}', the network type should be {kinds}.")
    _check_dtype(dtype)
    check_level(amp_level)
    if amp_level == "O0":
        return network
    if is_function:
        return _auto_function(network, dtype)
    assert isinstance(network, torch.nn.Module)
    _forget_earlier(network, amp_level)
    if amp_level == "auto":
        _run_in_region(network, dtype)
    elif amp_level == "O1":
        _run_low(network, _WHITE, dtype, "O1")
    else:
        _run_low_but(network, _BLACK if amp_level == "O2" else (), dtype, amp_level)
    return network


def custom_mixed_precision(
    network: torch.nn.Module,
    *,
    white_list: list[type[torch.nn.Module]] | None = None,
    black_list: list[type[torch.nn.Module]] | None = None,
    dtype: torch.dtype = float16,
) -> torch.nn.Module:
    """Convert a network in place with a list of your own: as O1 with a white, as O2 with a black list.

    Raises:
        TypeError: a network that is none, a list that is none, or something in it that is no class of cells
            (or, in a white list, of operators).
        ValueError: no list or both, or a dtype other than float16 and bfloat16.
    """
    check_kind("custom_mixed_precision", "network", network, torch.nn.Module)
    if (white_list is None) == (black_list is None):
        raise ConfigError(
            "For custom_mixed_precision, one of white_list and black_list must be provided, and they cannot "
            "be provided at the same time."
        )
    _check_dtype(dtype)
    name, kinds = ("white_list", white_list) if black_list is None else ("black_list", black_list)
    _check_list(name, kinds)
    assert kinds is not None
    level = f"a {name.replace('_', ' ')}"
    _forget_earlier(network, level)
    (_run_low if black_list is None else _run_low_but)(network, kinds, dtype, level)
    return network


def _check_dtype(dtype: Any) -> None:
    if dtype not in (float16, bfloat16):
        raise ConfigError(f"The dtype should be one of (mstype.float16, mstype.bfloat16), but got {dtype}.")


def _check_list(name: str, classes: Any) -> None:
    check_kind("custom_mixed_precision", name, classes, list)
    for element in classes:
        check_kind("custom_mixed_precision", f"element of {name}", element, type)
        primitive = issubclass(element, ops.Primitive)
        if not issubclass(element, torch.nn.Module) or (primitive and name == "black_list"):
            kinds = "'Cell' and 'Primitive'" if name == "white_list" else "'Cell'"
            raise TypeError(f"The subclass of element in {name} should be one of {kinds}, but got {element}")
    if name == "black_list":
        for element in _BLACK:
            if element not in classes:
                warn(f"{element} is removed from internal black list.")


def _forget_earlier(network: torch.nn.Module, level: str) -> None:
    if network not in _CONVERTED:
        return
    earlier, undo = _CONVERTED.pop(network)
    warn(
        f"The network's auto mixed-precision level is adjusted from {earlier} to {level}; convert a "
        "network once, and give build_train_network and Model the level O0 for one that is converted."
    )
    undo.close()


def _patterns(kinds: Iterable[type[torch.nn.Module]]) -> list[str]:
    """Plan patterns for classes, and for the torch layers that stand behind ours."""
    names: list[str] = []
    for kind in kinds:
        behind = [b.__name__ for b in kind.__mro__ if b.__module__.startswith("torch.nn.modules")]
        names += [kind.__name__, *(name for name in behind[:1] if name != "Module")]
    return [f"type:{name}" for name in dict.fromkeys(names)]


def _run_low(
    network: torch.nn.Module, kinds: Sequence[type[torch.nn.Module]], dtype: torch.dtype, level: str
) -> None:
    reason = f"{level}: listed, so it runs in 16 bits"
    plan = Plan(tuple(PlanRule(p, rule=Rule.LOW, reason=reason, required=False) for p in _patterns(kinds)))
    resolved = plan.resolve(network)
    outermost = {path for path in resolved if not path or path.rpartition(".")[0] not in resolved}
    _apply(network, plan, dtype, level, outermost, float32)


def _run_low_but(
    network: torch.nn.Module, kinds: Sequence[type[torch.nn.Module]], dtype: torch.dtype, level: str
) -> None:
    low = PlanRule("**", rule=Rule.LOW, reason=f"{level}: everything runs in 16 bits", required=False)
    reason = f"{level}: listed, so it runs in fp32"
    full = [PlanRule(p, rule=Rule.FULL, reason=reason, required=False) for p in _patterns(kinds)]
    plan = Plan((low, *full))
    rules = {path: rule.rule for path, rule in plan.resolve(network).items()}
    outermost = {p for p in rules if p and (rules[p], rules[p.rpartition(".")[0]]) == (Rule.FULL, Rule.LOW)}
    _apply(network, plan, dtype, level, outermost, dtype)


def _apply(
    network: torch.nn.Module,
    plan: Plan,
    dtype: torch.dtype,
    level: str,
    edges: Collection[str],
    outside: torch.dtype,
) -> None:
    """Convert by a plan; modules at these paths give `outside` unless a user's `to_float` says otherwise."""
    undo = ExitStack()
    undo.callback(convert(network, plan, dtype).revert)
    casts = [
        (module, outside)
        for path, module in network.named_modules()
        if path in edges and own_dtype(module) is None
    ]
    for module, output in (*casts, (network, float32)):
        undo.callback(module.register_forward_hook(CastOutputs(HookSwitch(), output)).remove)
    _CONVERTED[network] = level, undo


def _run_in_region(network: torch.nn.Module, dtype: torch.dtype) -> None:
    undo = ExitStack()
    for handle in RunInAutocast(HookSwitch(), _AUTO.with_dtype(dtype)).attach(network):
        undo.callback(handle.remove)
    _CONVERTED[network] = "auto", undo


def _auto_function(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with autocast(None, dtype, policy=_AUTO):
            return function(*args, **kwargs)

    return wrapper


def _options(level: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """What a level of `build_train_network` presets, and keywords override."""
    options: dict[str, Any] = {
        "keep_batchnorm_fp32": level == "O2",
        "cast_model_type": float16 if level in ("O2", "O3") else float32,
        "loss_scale_manager": DynamicLossScaleManager() if level == "O2" else None,
    }
    if unknown := keywords.keys() - options.keys():
        raise ConfigError(f"Unsupported arg '{min(unknown)}'")
    options.update(keywords)
    if options["cast_model_type"] not in (float16, float32):
        raise TypeError(
            "The 'cast_model_type' should be one of [mindspore.float16, mindspore.float32], but got "
            f"'{options['cast_model_type']}'."
        )
    check_kind("build_train_network", "keep_batchnorm_fp32", options["keep_batchnorm_fp32"], bool)
    managers = LossScaleManager, GroupLossScaleManager, type(None)
    check_kind("build_train_network", "loss_scale_manager", options["loss_scale_manager"], *managers)
    return options


def check_level(level: Any, boost_level: Any = "O0") -> None:
    """ValueError for a level that is none; warn that boost does nothing here."""
    if level not in AMP_LEVELS:
        raise ConfigError(f"The amp level {level} is not supported: expected one of {AMP_LEVELS}")
    if boost_level not in ("O0", "O1", "O2"):
        raise ConfigError(f"The 'boost_level' should be in : ['O0', 'O1', 'O2'], but got {boost_level}.")
    if boost_level != "O0":
        warn(f"boost_level={boost_level!r} has no effect here: the network trains without it")


def build_train_network(
    network: torch.nn.Module,
    optimizer: nn.Optimizer,
    loss_fn: torch.nn.Module | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> nn.TrainOneStepCell:
    """A Cell that takes (data, label), trains one step and returns the loss; works on the CPU too.

    With a loss scale it returns (loss, overflow, scale). Outputs and labels go to fp32 before the loss.

    Args:
        network: converted in place at `level`; with the loss inside, where `loss_fn` is None.
        optimizer: over this network's parameters.
        loss_fn: a Cell of (output, label).
        level: "O2" presets cast_model_type=float16, keep_batchnorm_fp32=True and a
            DynamicLossScaleManager; "O3" float16 without a scale; "O0", "O1" and "auto" no scale.
        boost_level: accepted; anything but "O0" warns.
        kwargs: cast_model_type, keep_batchnorm_fp32, loss_scale_manager, instead of the presets.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an unknown level or keyword.
    """
    check_kind("build_train_network", "optimizer", optimizer, nn.Optimizer)
    check_kind("build_train_network", "loss_fn", loss_fn, torch.nn.Module, type(None))
    check_kind("build_train_network", "level", level, str)
    check_level(level, boost_level)
    options = _options(level, kwargs)
    if options["cast_model_type"] == float16:
        level = "O2" if options["keep_batchnorm_fp32"] else "O3"
    elif level in ("O2", "O3"):
        level = "O0"
    trained = auto_mixed_precision(network, level)
    if loss_fn is not None:
        trained = nn.WithLossCell(trained, loss_fn, full=network in _CONVERTED)
    return _training_cell(trained, optimizer, options["loss_scale_manager"]).set_train()


def _training_cell(network: torch.nn.Module, optimizer: nn.Optimizer, manager: Any) -> nn.TrainOneStepCell:
    if manager is None:
        return nn.TrainOneStepCell(network, optimizer)
    if isinstance(manager, GroupLossScaleManager):
        return TrainOneStepWithGroupScalesCell(network, optimizer, manager)
    cell = manager.get_update_cell()
    if cell is None:
        return nn.TrainOneStepCell(network, optimizer, manager.get_loss_scale())
    return nn.TrainOneStepWithLossScaleCell(network, optimizer, cell)


__getattr__ = absent("amp")
