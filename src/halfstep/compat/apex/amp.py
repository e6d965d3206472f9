"""`apex.amp`: initialize, scale_loss, master_params, state_dict, function casts; and `shutdown`.

State is process-wide, as in Apex, but nothing of the user's is rebound: models and optimizers get hooks,
torch's functions stay as they are (O1 runs in an open `halfstep.autocast` region under the op table
"apex"). Differences: it runs on any device; masters start from the exact fp32 weights; after `scale_loss` a
weight at O2 has its master's gradient, unscaled and in fp32.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from halfstep.casting.context import active_policy, autocast
from halfstep.compat.apex._state import (
    Account,
    AmpError,
    AmpState,
    CheckpointInFp32,
    LossScaler,
    Properties,
    cast_batches,
    check_device,
    properties,
)
from halfstep.compat.torch_amp import runs_natively
from halfstep.convert.conversion import convert
from halfstep.convert.hooks import CastOutputs, HookSwitch, RunInAutocast
from halfstep.distributed import all_ranks
from halfstep.errors import ConfigError, warn
from halfstep.optim import MasterWeights
from halfstep.optim.replicas import follow_wraps
from halfstep.policy.levels import LOW_DTYPES
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy
from halfstep.torch_private import pytree
from halfstep.trees import cast_floats, is_wide_float

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "AmpError",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
]


def _casting(fn: F, dtype: torch.dtype | None) -> F:
    """`fn` with floating arguments cast while amp casts: to `dtype`, or where it is None to their widest."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes = [leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if is_wide_float(leaf)]
        acts = _amp_state.region is not None and active_policy(_amp_state.device) is not None
        if not acts or not dtypes:
            return fn(*args, **kwargs)
        target = functools.reduce(torch.promote_types, dtypes) if dtype is None else dtype
        return fn(*cast_floats(args, target), **cast_floats(kwargs, target))

    return cast(F, wrapper)


def _register(module: Any, name: str, dtype: torch.dtype | None) -> None:
    """Replace `module.name` until shutdown; it casts from `initialize` on."""
    if not hasattr(module, name):
        raise ConfigError(f"no function named {name} in module {module}")
    original = getattr(module, name)
    _amp_state.replaced.append((module, name, original))
    setattr(module, name, _casting(original, dtype))


_amp_state = AmpState()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for an optimization level; returns them in the form they came in.

    Options and loss scales of a later call hold for the models of earlier ones too.

    Args:
        models, optimizers: one or a list of each; models in fp32 and not yet in DDP.
        enabled: False makes every amp call a no-op.
        opt_level: "O0" to "O3"; the options below override its defaults where they are not None.
        cast_model_type: dtype of weights and inputs (False: no casts). Also bfloat16.
        patch_torch_functions: casts around ops; O1 only.
        keep_batchnorm_fp32: True, False, "True" or "False".
        master_weights: keep fp32 masters.
        loss_scale: a number, its text, or "dynamic".
        cast_model_outputs: dtype of the models' outputs, whatever the level.
        num_losses: how many losses get a scale of their own. verbosity: 0 is silent.
        min_loss_scale, max_loss_scale: bounds of dynamic scales.

    Raises:
        AmpError (RuntimeError, ValueError): an unknown level, options that do not go together, a model in 16
            bits or in DDP, an optimizer initialized before. TypeError: neither a model nor a list of models.
    """
    state = _amp_state
    state.verbosity = verbosity
    chosen = properties(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    if isinstance(enabled, str):
        raise AmpError(f"enabled={enabled!r:.40}: expected True or False; a level goes by name, opt_level=")
    if not enabled:
        state.opt_properties = None if state.accounts else replace(chosen, enabled=False)
        return models if optimizers is None else (models, optimizers)
    scalers = [
        LossScaler(chosen.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    lists = _as_models(models), _as_optimizers(optimizers)
    _check(*lists, state)
    state.begin(chosen, lists[0])
    state.loss_scalers = scalers
    before = len(state.undo)
    try:
        _apply(*lists, chosen, cast_model_outputs, state)
    except Exception:
        state.take_down(before)
        raise
    return models if optimizers is None else (models, optimizers)


def _as_models(models: Any) -> list[nn.Module]:
    if isinstance(models, nn.Module):
        return [models]
    if isinstance(models, list) and all(isinstance(m, nn.Module) for m in cast(list[Any], models)):
        return cast(list[nn.Module], models)
    raise TypeError("models must be either a single model or a list of models")


def _as_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    listed = cast(list[Any], optimizers if isinstance(optimizers, list) else [optimizers])
    for optimizer in listed:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise AmpError("pass the bare optimizer to amp.initialize, not an FP16_Optimizer around it")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError("optimizers must be either a single optimizer or a list of optimizers")
    return listed


def _check(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], state: AmpState) -> None:
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for model in models:
        if isinstance(model, parallel):
            raise AmpError(f"wrap the model in {type(model).__name__} after amp.initialize, not before")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype in LOW_DTYPES:
                raise AmpError(
                    f"{name} is {tensor.dtype}, expected float32: leave the model in fp32 to amp.initialize"
                )
    for optimizer in optimizers:
        if optimizer in state.accounts:
            raise AmpError(
                "an optimizer may pass through amp.initialize only once; call amp.shutdown() to undo"
            )


def _apply(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    chosen: Properties,
    outputs: torch.dtype | None,
    state: AmpState,
) -> None:
    dtype = chosen.cast_model_type
    originals: dict[Tensor, Tensor] = {}
    for model in models:
        if isinstance(dtype, torch.dtype):
            record = convert(model, _plan(chosen, dtype), dtype, keep_originals=bool(chosen.master_weights))
            state.undo.append(record.revert)
            originals.update(record.originals)
            record.forget_originals()
            batches = functools.partial(cast_batches, dtype)
            state.keep(model.register_forward_pre_hook(batches, prepend=True, with_kwargs=True))
            state.keep(*_spare_slow_kernels(model, dtype, state.device))
        if isinstance(dtype, torch.dtype) or outputs is not None:
            state.keep(model.register_forward_hook(CastOutputs(HookSwitch(), outputs or torch.float32)))
    for optimizer in optimizers:
        account = state.open_account(optimizer)
        if chosen.master_weights:
            account.masters = MasterWeights(optimizer, models, initial=originals)
            follow_wraps(state)
        elif isinstance(dtype, torch.dtype):
            optimizer.load_state_dict(optimizer.state_dict())
    if dtype not in (None, False, torch.float32):
        masters = [account.masters for account in state.accounts.values() if account.masters is not None]
        for model in models:
            state.keep(model.register_state_dict_post_hook(CheckpointInFp32(masters)))
    for model in models if chosen.patch_torch_functions else ():
        state.keep(model.register_forward_pre_hook(functools.partial(check_device, state.device)))
    if chosen.patch_torch_functions and state.region is None:
        state.region = autocast(state.device, policy=Policy(compute_dtype=torch.float16, table="apex"))
        state.region.__enter__()


def _spare_slow_kernels(model: nn.Module, dtype: torch.dtype, device: str) -> list[Any]:
    """Where the device's kernels for `dtype` crawl, let matrix products run as rounded fp32: same dtypes."""
    if dtype == torch.float32 or runs_natively(device, dtype):
        return []
    policy = Policy(compute_dtype=dtype, table="apex")
    policy = policy.with_rules(keep=[name for name, row in policy.rows().items() if row.rule is not Rule.LOW])
    return RunInAutocast(HookSwitch(), policy).attach(model)


def _plan(chosen: Properties, dtype: torch.dtype) -> Plan:
    rules = [PlanRule("**", dtype=dtype, reason=f"{chosen.opt_level}: cast_model_type")]
    if chosen.keep_batchnorm_fp32 and dtype != torch.float32:
        norm_rule = PlanRule(
            "type:_BatchNorm", torch.float32, reason="keep_batchnorm_fp32", required=False, output=dtype
        )
        rules.append(norm_rule)
    return Plan(tuple(rules))


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[Tensor]:
    """Yield the scaled loss to run backward on; at the end unscale and check the new gradients.

    An overflow halves the scale of this loss and makes the next `step()` of exactly these optimizers a no-op.
    `loss_id` names the loss's own scale; `delay_unscale` leaves the gradients scaled for a further backward.

    Inside, a step of these optimizers is refused.

    Raises:
        AmpError: before `initialize`, or an optimizer or loss_id it did not see.
        LossScaleCollapsed: 50 overflows in a row.
    """
    state = _amp_state
    if state.opt_properties is None:
        raise AmpError("scale_loss was called before amp.initialize(model, optimizer, opt_level=...)")
    if not state.opt_properties.enabled:
        yield loss
        return
    scaler = _scaler(loss_id)
    listed: Iterable[Any] = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    accounts = [state.account(optimizer) for optimizer in listed]
    if not state.opt_properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
        yield loss.float()
        return
    for account in accounts:
        account.before_backward()
    yield scaler.value.scale(loss.float())
    if delay_unscale:
        return
    flags = [account.after_backward(scaler.value.inverse(state.device)) for account in accounts]
    if not delay_overflow_check:
        _check_overflow(scaler, loss_id, accounts, flags, state)


def _check_overflow(
    scaler: LossScaler, loss_id: int, accounts: list[Account], flags: list[Tensor], state: AmpState
) -> None:
    found_inf = (
        bool(all_ranks(torch.stack([flag.to(state.device) for flag in flags]).any())) if flags else False
    )
    if scaler.update(found_inf):
        new = scaler.loss_scale()
        for account in accounts:
            account.skip = (
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {new}"
            )
    elif found_inf:
        warn(
            "gradients hold inf or NaN and the loss scale is static, so the step is taken; "
            "use loss_scale='dynamic' to skip such steps"
        )


def _scaler(loss_id: int) -> LossScaler:
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        count = len(_amp_state.loss_scalers)
        raise AmpError(f"loss_id {loss_id} of {count} losses: pass num_losses to amp.initialize")
    return _amp_state.loss_scalers[loss_id]


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters the optimizer updates, masters where there are any; their gradients are unscaled."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """`{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`."""
    target: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        target[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler.unskipped}
    return target


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Continue from `state_dict()`, also Apex's own; warns where the number of losses differs.

    Raises:
        AmpError: unexpected keys; nothing is changed then.
    """
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise AmpError(f"error in loading state_dict: unexpected keys {', '.join(unexpected)}")
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        warn(f"state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for scaler, saved in zip(scalers, state_dict.values()):
        scaler.load(saved["loss_scale"], saved["unskipped"])


def init(*_args: Any, **_options: Any) -> None:
    """Apex's API before `initialize`, whose handles Apex itself refuses to scale losses with. Always raises.

    Raises:
        AmpError: always, with what to write.
    """
    raise AmpError(
        "amp.init() is Apex's old API: write model, optimizer = amp.initialize(model, optimizer, "
        'opt_level="O1"), and amp.scale_loss(loss, optimizer) for handle.scale_loss'
    )


@contextmanager
def disable_casts() -> Generator[None]:
    """Within, O1 casts nothing."""
    with nullcontext() if _amp_state.region is None else autocast(_amp_state.device, enabled=False):
        yield


def half_function(fn: F) -> F:
    """Decorator: at O1 the function gets its floating arguments in fp16."""
    return _casting(fn, torch.float16)


def float_function(fn: F) -> F:
    """Decorator: at O1 the function gets its floating arguments in fp32."""
    return _casting(fn, torch.float32)


def promote_function(fn: F) -> F:
    """Decorator: at O1 the function gets its floating arguments in the widest of their dtypes."""
    return _casting(fn, None)


def register_half_function(module: Any, name: str) -> None:
    """Treat `module.name` as `half_function` does, until `shutdown`."""
    _register(module, name, torch.float16)


def register_float_function(module: Any, name: str) -> None:
    """Treat `module.name` as `float_function` does, until `shutdown`."""
    _register(module, name, torch.float32)


def register_promote_function(module: Any, name: str) -> None:
    """Treat `module.name` as `promote_function` does, until `shutdown`."""
    _register(module, name, None)


def shutdown() -> None:
    """Undo everything `initialize` and the register functions set up; models are fp32 again.

    Weights with masters become the masters exactly. Call it in the thread that called `initialize`, which is
    also the one in which O1 casts.
    """
    global _amp_state
    state, _amp_state = _amp_state, AmpState()
    for module, name, original in reversed(state.replaced):
        setattr(module, name, original)
    if state.region is not None:
        state.region.__exit__(None, None, None)
    state.take_down()
