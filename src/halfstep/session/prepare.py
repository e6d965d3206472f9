"""`prepare` and `tune`: check the arguments, choose a level where asked to, apply it, make the `Session`.

Every function raises before it changes anything, or takes back what it changed. Steps are `session.py`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import devices
from halfstep.casting.kernel_choice import Kernels, table_of
from halfstep.convert.compiled import Compiled
from halfstep.convert.conversion import Casting, Conversion
from halfstep.convert.layout import Relayout, check_layout
from halfstep.errors import ConfigError, PlanError, show, warn
from halfstep.formats import dtype_name, parse_dtype
from halfstep.numerics.lint import coarse_weights
from halfstep.numerics.uncast import casts_weights
from halfstep.optim.loading import MasterHolder
from halfstep.optim.master_link import Master
from halfstep.optim.masters import MasterWeights
from halfstep.policy.levels import Level, dtype_of, level_of
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.scaling.loss_scale import LossScale
from halfstep.session.checks import check_expanded, check_parameters, check_sharing, skips_of
from halfstep.session.precision import Precision, lower
from halfstep.session.preparation import MastersByNumber, OwnMasters, fit_states
from halfstep.session.ranks import check_groups
from halfstep.session.session import Models, Optimizers, Session
from halfstep.trees import compute_device, each_parameter, parameters_of
from halfstep.tuning.choices import TORCHS, LevelChoice
from halfstep.tuning.search import Tuning, search


def as_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; ConfigError for anything that is none."""
    if optimizer is None:
        return []
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise ConfigError(
                f"prepare got {type(item).__name__} as an optimizer: pass a torch.optim.Optimizer"
            )
    if len({id(item) for item in optimizers}) < len(optimizers):
        raise ConfigError("prepare got the same optimizer twice: pass each one once")
    return optimizers


def as_models(model: Any) -> list[nn.Module]:
    """Return the models as a list; ConfigError for anything that is none."""
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for item in models:
        if not isinstance(item, nn.Module):
            what = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
            raise ConfigError(
                f"prepare got {what} as a model: expected prepare(model, optimizer), where the model is a "
                "torch.nn.Module or a list of them"
            )
        if isinstance(item, torch.jit.ScriptModule):
            raise ConfigError(
                "prepare got a ScriptModule, whose compiled code no cast can reach: prepare the module that "
                "it was scripted from"
            )
    return models


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return where the models compute; ConfigError where they have no parameters."""
    parameters = [*each_parameter(models)]
    if parameters:
        return compute_device(parameters)
    names = ", ".join(type(m).__name__ for m in models) or "nothing"
    raise ConfigError(f"prepare got a model without parameters ({names}): pass the module that is trained")


def check_parts(
    precision: Precision, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise ConfigError where an optimizer has masters or clips already, or parameters that do not fit."""
    for index, optimizer in enumerate(optimizers):
        if any(isinstance(p, Master) for p in parameters_of(optimizer)):
            raise ConfigError(
                f"optimizer {index} ({type(optimizer).__name__}) already has master weights: "
                "revert() the earlier session or MasterWeights first"
            )
        options = [
            k for k in ("clip_norm", "skip_nonfinite") if any(g.get(k) for g in optimizer.param_groups)
        ]
        if options and isinstance(optimizer, MasterHolder):
            raise ConfigError(
                f"optimizer {index} ({type(optimizer).__name__}) has {' and '.join(options)}, for loops that "
                "call its own step(): leave it out and give skip_nonfinite=True to prepare(), or to a host's "
                "adapter, and clip_norm= to amp.step()"
            )
    empty = sum(p.is_meta for optimizer in optimizers for p in parameters_of(optimizer))
    if empty:
        raise ConfigError(
            f"{empty} parameters are on the meta device, without values: call model.to_empty(device=...) "
            "first (after model.bfloat16(), where fp32 would not fit), then build the optimizer and prepare; "
            "amp.load() or load_state_dict() gives them values"
        )
    check_parameters(models, optimizers)
    check_expanded(models, optimizers)
    wide = sum(p.dtype == torch.float64 for model in models for p in model.parameters())
    if wide and precision.masters:
        raise ConfigError(
            f"{wide} parameters are fp64, of which {precision.level.name} would keep fp32 masters: call "
            "model.float() before prepare(), or prepare at level O0"
        )


def apply_precision(
    precision: Precision,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    conversions: list[Conversion],
    masters: dict[int, MasterWeights],
) -> None:
    """Convert the models; give fp32 masters to the optimizers of a level that has them."""
    level, compute, plan = precision.level, precision.policy.compute_dtype, precision.plan
    parameters, jobs = {p for o in optimizers for p in parameters_of(o)}, list[Casting]()
    torchs = {p for o in optimizers if not isinstance(o, MasterHolder) for p in parameters_of(o)}
    for model in models:
        # fp32 shards are masters then
        keeps_shards = precision.masters and not torchs.isdisjoint(model.parameters())
        jobs.append(
            Casting.of(model, level, compute, plan=plan, keep_originals=parameters, keep_shards=keeps_shards)
        )
    becomes = {t: dtype for job in jobs for t, dtype in job.wanted.values() if not job.leaves(t)}
    check_sharing(models, optimizers, precision.masters, becomes)
    keeper = OwnMasters(optimizers)
    for job in jobs:
        job.keeper = keeper
        conversions.append(job.record)
        job.run()
    originals = {p: value for c in conversions for p, value in c.originals.items()}
    for index, optimizer in enumerate(optimizers if precision.masters else ()):
        if not isinstance(optimizer, MasterHolder):
            masters[index] = MasterWeights(optimizer, list(models), initial=originals)
    fit_states(precision, optimizers)
    for optimizer in optimizers:
        if isinstance(optimizer, MasterHolder):
            optimizer.init_states()  # torch.distributed.checkpoint loads what is there


def warn_of_lost_masters(precision: Precision, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn where a checkpoint was loaded before `prepare`, which dropped the masters it held.

    An optimizer that has taken steps, and weights that hold nothing but 16-bit values, tell so.
    """
    compute = precision.policy.compute_dtype
    torchs = [o for o in optimizers if not isinstance(o, MasterHolder) and len(o.state)]
    weights = [
        p.detach() for o in torchs for p in parameters_of(o) if p.dtype == torch.float32 and p.dim() > 1
    ]
    if not precision.masters or sum(w.numel() for w in weights) < 32:
        return
    if all(bool((w.to(compute).float() == w).all()) for w in weights):
        warn(
            f"{type(torchs[0]).__name__} has taken steps, but the weights hold only {dtype_name(compute)} "
            "values: a checkpoint of this level that is loaded before prepare() loses its fp32 masters. "
            "Call prepare() first, then load_state_dict() of model, optimizer and session"
        )


# ---- level="auto" ---------------------------------------------------------------------------------------


def read_plan(plan: Any) -> Plan | None:
    """Return the plan, read from TOML where a path was given; PlanError where it cannot be read."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.read(plan)
    raise PlanError(f"got {type(plan).__name__} as a plan: expected a Plan or the path of a TOML file")


def settings_of(
    plan: Plan | None, level: Any, dtype: Any, layout: str
) -> tuple[Any, str | torch.dtype | None, str]:
    """Level, dtype and layout with those of the plan's settings, where it has any.

    A level, dtype or layout beside them is an error unless it is the default or the same.
    """
    if plan is None or plan.settings is None:
        return level, dtype, layout
    settings = plan.settings
    theirs = level_of(settings.level)[0].name
    level_name = level if level in ("auto", "O1") else level_of(level)[0].name
    if level_name not in ("O1", theirs):
        raise ConfigError(f"level={show(level)} beside a plan made for {settings.level}: give one of the two")
    if dtype is not None and settings.dtype is not None and parse_dtype(dtype) != settings.dtype:
        raise ConfigError(
            f"dtype={dtype!r} beside a plan made for {dtype_name(settings.dtype)}: give one of the two"
        )
    return settings.level, settings.dtype, layout if layout != "keep" else settings.layout


def check_compile(value: Any) -> bool:
    """Return whether to compile; ConfigError for what is not True or False."""
    if not isinstance(value, bool):
        hint = "torch's options are for model.compile(...) after prepare()"
        raise ConfigError(f"compile={show(value)}: expected True or False; {hint}")
    return value


def check_step(step: Any, batch: Any, seconds: Any, option: str) -> None:
    """Raise ConfigError for what training steps cannot be run with, where "auto" wants to."""
    if not callable(step):
        raise ConfigError(
            f"{option} is chosen by running training steps, but step={step!r:.60}: expected a function "
            "step(amp, *batch) that makes one training step, and batch=(x, y), what it is called with"
        )
    if isinstance(batch, Tensor) or not isinstance(batch, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"batch is a {type(batch).__name__}: expected what step(amp, *batch) is called with, as a tuple; "
            "for one argument batch=(x,)"
        )
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"seconds={show(seconds)}: expected a number above 0")


def refuse_measuring(step: Any, batch: Any, seconds: Any) -> None:
    """Raise ConfigError for an argument that only a choice by measurement reads."""
    no_batch = batch is None or (isinstance(batch, tuple | list) and not batch)
    arguments = {"step": step is not None, "batch": not no_batch, "seconds": seconds != 60.0}
    for name, is_set in arguments.items():
        if is_set:
            raise ConfigError(f"prepare got {name}=, which only level='auto' and layout='auto' use: drop it")


def arguments_of(choice: LevelChoice, options: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    """Return the arguments of `prepare` for a choice; what belongs to 16 bits alone is left out in fp32."""
    arguments = dict(options)
    if choice.dtype is None:
        arguments = {key: value for key, value in options.items() if key not in ("policy", "loss_scale")}
    elif plan is not None:
        arguments["plan"] = plan
    if choice.rules.rules:
        arguments["plan"] = choice.rules
    arguments |= {"level": choice.level, "dtype": choice.dtype, "layout": choice.layout}
    return {**arguments, "compile": choice.compiled or options.get("compile", False)}


# ---------------------------------------------------------------------------------------------------------


def prepare(
    model: Models,
    optimizer: Optimizers = None,
    level: str | Level = "O1",
    *,
    dtype: str | torch.dtype | None = None,
    policy: str | Policy | None = None,
    plan: Plan | str | Path | None = None,
    layout: str = "keep",
    loss_scale: LossScale | float | str | Sequence[LossScale | float | str | None] | None = None,
    skip_nonfinite: bool | None = None,
    on_nonfinite: str | None = None,
    max_skips: int = 50,
    step: Callable[..., Any] | None = None,
    batch: Sequence[Any] = (),
    seconds: float = 60.0,
    kernels: Kernels = None,
    norm_group: Any = None,
    group: Any = None,
    enabled: bool = True,
    compile: bool = False,
) -> Session:
    """Make a model and its optimizers train in mixed precision; returns the `Session` that drives them.

    Call it after moving the model to its device and before wrapping it in DDP or `torch.compile`. Parameters
    keep their identity, so optimizers built before keep working; `Session.revert()` undoes everything.

    Args:
        model: one module or several (a generator and a discriminator).
        optimizer: none (evaluation only), one or several, over parameters of these models.
        level: "O0" (fp32), "O1" (ops cast), "O2" (16-bit weights, fp32 masters), "O3" (all 16-bit), a word
            such as "bf16-mixed", or "auto": what trains fastest on this machine, found as `tune` does.
        dtype: the compute dtype; None takes the level's word, the policy's or asks the device.
        policy: op rules, compute and output dtype, instead of the level's.
        plan: precision by module path, on top of the level, or the path of its TOML file; one with settings
            (as `tune` writes it) gives level, dtype, layout and compile too.
        layout: of convolution weights in memory: "keep", "channels_last", or "auto", the faster of the two.
        loss_scale: a LossScale, a number, "dynamic", "headroom" or "none"; None is dynamic for fp16 at O1 and
            O2 and none otherwise. A list gives each loss a scale of its own: `backward(loss, loss_id=1)` uses
            the second; None in the list is what it is alone.
        skip_nonfinite: skip steps whose gradients are not finite; None skips wherever a loss scale is used.
        on_nonfinite: "raise" (NonFiniteError, with the weights of before), "skip", "continue", or None: skip
            as `skip_nonfinite` says, and warn once of a step that was taken, by step and parameter. Under a
            loss scale that adjusts itself, gradients with inf or NaN may be its own overflow: it goes down,
            and "raise" raises when it is down to its `min`; for a loss that is not finite, at once.
        max_skips: skips in a row that raise LossScaleCollapsed.
        kernels: by which kernels a CPU runs LOW ops: "measured" (the fastest here), "native", "rounded", or a
            TOML file of choices; None asks the environment variable HALFSTEP_KERNELS, else "measured". The
            ranks over which the model is wrapped, or of `group`, use those of the first of them. A loaded
            state brings its own.
        norm_group: a process group whose ranks each train other parameters of one model, such as the stages
            of a pipeline: the norm that clips is that of all of them, and a step is one that all
            ranks of the group take. Shards (DTensors) need none.
        group: the process group whose ranks are one run: they take or skip the same steps, compute by the
            same kernels and save into one folder. None is the ranks over which the model is wrapped, when
            that is needed: DDP's `process_group`, the mesh of its shards, `norm_group`, or what these join
            together; for a model that nothing wraps all ranks, but kernels are each rank's own then.
        enabled: False trains in fp32 (level O0) whatever the other arguments say of precision, layout,
            kernels, measuring and compiling, as `torch.autocast(enabled=False)` and
            `GradScaler(enabled=False)` do.
        compile: True calls `model.compile()`, which `revert()` undoes. With level="auto" it is tried for the
            two fastest levels where the seconds allow, and kept where it is faster.
        step: for "auto": `step(amp, *batch)` makes one whole training step with the session it is given and
            returns the loss. Everything it changes is put back.
        batch: for "auto": what `step` is called with.
        seconds: for "auto": measure no longer than this.

    Preparing again at O0 or O1 is harmless: the later session takes the optimizer over. At O2 and O3 it is
    refused: `revert()` first.

    Raises:
        ConfigError: an unknown level, dtype or policy, a model without parameters, an optimizer over
            parameters of another model.
        UnsupportedError: a dtype this device cannot compute in, an optimizer that cannot have masters.
    """
    models, optimizers = as_models(model), as_optimizers(optimizer)
    if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"enabled={show(enabled)}: expected True or False")
    if not enabled:
        return prepare(
            models, optimizers, "O0", skip_nonfinite=skip_nonfinite, on_nonfinite=on_nonfinite,
            max_skips=max_skips, norm_group=norm_group, group=group,
        )  # fmt: skip
    plan = read_plan(plan)
    if isinstance(level, str) and level.strip().lower() == "auto":
        level = "auto"
    level, dtype, layout = settings_of(plan, level, dtype, check_layout(layout))
    settings = None if plan is None else plan.settings
    compile = check_compile(compile) or (settings is not None and settings.compile)
    if "auto" in (level, layout):
        options = {"policy": policy, "loss_scale": loss_scale}
        options |= {"skip_nonfinite": skip_nonfinite, "max_skips": max_skips, "kernels": kernels}
        options |= {"on_nonfinite": on_nonfinite}
        options |= {"norm_group": norm_group, "group": group}
        tries = compile and level == "auto"
        tuning = _choose(models, optimizers, step, batch, level, dtype, layout, plan, seconds, options, tries)
        options["compile"] = compile and not tries
        session = prepare(models, optimizers, **arguments_of(tuning.choice, options, plan))
        session.tuning = tuning
        print(f"halfstep: {tuning.reason}", file=sys.stderr, flush=True)
        return session
    refuse_measuring(step, batch, seconds)
    device = device_of(models)
    precision = lower(level, dtype, policy, plan, device, loss_scale)
    check_parts(precision, models, optimizers)
    check_groups(group, norm_group, optimizers)
    skips = skips_of(on_nonfinite, skip_nonfinite, precision.scaled)
    table = table_of(kernels)
    warn_of_lost_masters(precision, optimizers)
    relayout = Relayout(models if layout == "channels_last" else ())
    compiled = Compiled(models if compile else ())
    conversions, masters = list[Conversion](), MastersByNumber()
    try:
        apply_precision(precision, models, optimizers, conversions, masters)
        session = Session(
            models, optimizers, precision, table, device, skips, relayout, compiled, conversions, masters,
            max_skips=max_skips, on_nonfinite=on_nonfinite, norm_group=norm_group, group=group,
        )  # fmt: skip
    except Exception:
        for conversion in conversions:
            conversion.revert(OwnMasters(optimizers))
        for part in (*masters.values(), relayout, compiled):
            part.revert()
        raise
    for conversion in conversions:
        conversion.forget_originals()
    session.install_hooks()
    if not casts_weights(precision.level, precision.policy):  # where it does, the first step looks
        for row in coarse_weights(optimizers):
            text = f"{row.where}: {row.text}, and no masters keep what is rounded away: {row.cure}"
            warn(text)
    return session


def tune(
    model: Models,
    optimizer: Optimizers,
    step: Callable[..., Any],
    *batch: Any,
    dtype: str | torch.dtype | None = None,
    layout: str = "auto",
    plan: Plan | str | Path | None = None,
    seconds: float = 60.0,
    compile: bool = False,
    **options: Any,
) -> Tuning:
    """Measure on the model itself which level, layout and plan by module train it fastest on this machine.

    O0, O1 and O2 are tried, then channels_last for the fastest, then fp32 for the modules that are faster in
    it; taken is the fastest whose first step stays near fp32's loss and gradients. Plain torch.autocast is
    timed beside them, and the reason says so where it is faster than what is taken. Afterwards weights,
    gradients, optimizer states, buffers and random generators are as before, bit for bit, and nothing is
    prepared: `prepare(model, optimizer, plan=found.plan)` does that, or `prepare(level="auto")` both.

    Args:
        model, optimizer: as for `prepare`, and not prepared yet.
        step: `step(amp, *batch)` makes one whole training step with the session it is given (`autocast`,
            `backward`, `step`) and returns the loss.
        batch: what `step` is called with.
        dtype: the 16-bit dtype to try; None takes the device's own.
        layout: "auto" tries channels_last where the model has convolutions, "keep" does not.
        plan: rules of your own on top of O1 and O2; no others are then looked for.
        seconds: measure no longer than this.
        compile: True also tries `model.compile()` for the two fastest levels, while the seconds allow; the
            reason says what compiling took and what it bought.
        options: further arguments of `prepare`, such as policy or loss_scale.

    Raises:
        ConfigError: no step, a dtype or layout that is none, or a model that cannot train in fp32 either.
    """
    models, optimizers = as_models(model), as_optimizers(optimizer)
    user_plan, layout = read_plan(plan), check_layout(layout)
    tries = check_compile(compile)
    return _choose(models, optimizers, step, batch, "auto", dtype, layout, user_plan, seconds, options, tries)


def _choose(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    step: Any,
    batch: Sequence[Any],
    level: str | Level,
    dtype: str | torch.dtype | None,
    layout: str,
    plan: Plan | None,
    seconds: float,
    options: dict[str, Any],
    compiles: bool,
) -> Tuning:
    """Measure and decide; leaves everything as it was."""
    device = device_of(models)
    check_step(step, batch, seconds, "level='auto'" if level == "auto" else f"layout={layout!r}")
    word = None if level == "auto" else level_of(level)[1]
    low = dtype_of(dtype) if dtype is not None else word or devices.default_dtype(device)
    fixed = level if isinstance(level, str) else level.name

    def make(choice: LevelChoice) -> Session:
        if choice.level != TORCHS:
            return prepare(models, optimizers, **arguments_of(choice, options, plan))
        others = {key: value for key, value in options.items() if key not in ("policy", "kernels")}
        session = prepare(models, optimizers, "O1", dtype=low, **others)
        session.autocast = partial(torch.autocast, device.type, low)  # type: ignore[method-assign]
        return session

    return search(
        models,
        optimizers,
        step,
        batch,
        make,
        dtype=dtype_name(low),
        device=device,
        level=None if level == "auto" else fixed,
        relayout=layout == "auto",
        by_module=plan is None,
        compiles=compiles,
        seconds=seconds,
        group=options.get("group"),
    )
