"""`halfstep memory SCRIPT | --parameters COUNT`: the bytes that training holds, without holding them."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

import halfstep
from halfstep import optim
from halfstep.cli._options import Flag, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.doctor.process import StopScript, in_words, replace, run_in_process, run_main
from halfstep.errors import ConfigError, HalfstepError
from halfstep.session.memory import Footprint, footprint
from halfstep.session.prepare import as_models, as_optimizers, read_plan, settings_of
from halfstep.trainer import loop
from halfstep.trees import parameters_of

#: Layers that stand for a number of parameters: each has a share of it that the largest tensor of models has.
LAYERS = 64


def run(
    script: tyro.conf.Positional[Annotated[str | None, with_metavar("SCRIPT.py")]] = None,
    args: tyro.conf.Positional[Annotated[tuple[str, ...], with_metavar("[ARGUMENT ...]")]] = (),
    parameters: Annotated[float | None, with_metavar("COUNT")] = None,
    level: Annotated[str | None, with_metavar("LEVEL")] = None,
    optimizer: Annotated[str | None, with_metavar("NAME")] = None,
    states: Annotated[Literal["fp32", "bf16", "8bit"] | None, with_metavar("FORMAT")] = None,
    master: Annotated[Literal["exact", "fp32", "stochastic"] | None, with_metavar("KIND")] = None,
    ranks: Annotated[int, with_metavar("COUNT")] = 1,
    json: Flag = False,
) -> None:
    """Count the bytes that training holds on each rank: at rest, in a step, in prepare, save and load.

    Nothing is trained and no memory is taken: a script runs until it prepares or first calls its model, whose
    parameters have no values.

    Args:
        script: A training script ending in .py.
        args: The script's own arguments, after `--`.
        parameters: Count this many parameters instead, in 64 layers: 7e9.
        level: O0, O1, O2 or O3. Default: the script's own, or O1.
        optimizer: hs.AdamW, hs.Lion, torch.SGD ... Default: the script's own, or hs.AdamW.
        states: States of an optimizer of hs.optim: fp32, bf16 or 8bit.
        master: Its masters: exact, fp32 or stochastic.
        ranks: How many share weights, gradients and states by fully_shard. Under DDP each has all of them.
        json: Print JSON instead of the table.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: expected 1 or more")
    if (script is None) == (parameters is None):
        raise ConfigError("expected a script, or --parameters and their number, such as --parameters 7e9")
    if parameters is not None and not 1e4 <= parameters < float("inf"):
        raise ConfigError(f"--parameters {parameters:g}: expected 10000 or more")
    make, stderr = partial(make_optimizer, optimizer or "hs.AdamW", states, master), ""
    if parameters is not None:
        result: Any = footprint_of_parameters(int(parameters), level or "O1", make, ranks)
    else:
        replacement = make if optimizer or states or master else None
        result, stderr = run_in_process(
            partial(footprint_of_script, str(script), args, level, replacement, ranks), os.environ
        )
    if not isinstance(result, Footprint):
        raise ConfigError(f"{script}: {result or (stderr.strip().splitlines() or ['no message'])[-1]}")
    if json:
        return print_json(vars(result))
    rows = [
        [kind.replace("_", " "), format_bytes(size), f"{size * ranks / result.parameters:.2f}"]
        for kind, size in vars(result).items()
        if kind != "parameters"
    ]
    title = f"{result.parameters:,} parameters" + (f", each of {ranks} ranks" if ranks > 1 else "")
    console().print(table(title, ("", "memory", "bytes a parameter"), rows, "memory,bytes a parameter"))
    console().print("prepare, step, save and load: peaks, without activations and what fully_shard gathers.")
    return None


def format_bytes(size: int) -> str:
    """Return bytes as people write them: MB of 10^6, GB of 10^9."""
    value, unit = (size / 1e9, "GB") if size >= 1e9 else (size / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


Make = Callable[[list[Any]], torch.optim.Optimizer]


def make_optimizer(
    name: str, states: str | None, master: str | None, params: list[Any]
) -> torch.optim.Optimizer:
    """Make the optimizer of a name such as hs.AdamW or torch.SGD; ConfigError where there is none."""
    home, _, kind = name.rpartition(".")
    cls = getattr({"hs": optim, "torch": torch.optim}.get(home), kind, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise ConfigError(f"--optimizer {name}: expected one such as hs.AdamW or torch.SGD")
    if home == "torch" and (states or master):
        raise ConfigError(f"--optimizer {name} beside --states or --master, which hs.{kind} has: drop one")
    hs_options = {"state_dtype": states or "fp32", "master": master or "exact"} if home == "hs" else {}
    return cls(params, lr=1e-3, **hs_options, **({"momentum": 0.9} if kind == "SGD" else {}))  # type: ignore[call-arg]


def footprint_of_parameters(count: int, level: str, make: Make, ranks: int = 1) -> Footprint:
    """Count what training holds of so many parameters, in layers of one width."""
    width = math.isqrt(count // LAYERS)
    heights = [*[width] * LAYERS, count // width - width * LAYERS]
    model = nn.Sequential(*(nn.Linear(width, n, bias=False, device="meta") for n in heights if n))
    return footprint([model], [make(list(model.parameters()))], level, ranks=ranks)


def footprint_of_script(
    script: str, args: Sequence[str], level: str | None, make: Make | None, ranks: int
) -> Footprint | str:
    """Count what training holds of what a script builds, run in this process; or return why it cannot."""
    models, optimizers, options = list[nn.Module](), dict[int, torch.optim.Optimizer](), dict[str, Any]()

    def note_optimizer(add: Callable[..., None], optimizer: torch.optim.Optimizer, group: Any) -> None:
        add(optimizer, group)
        optimizers[id(optimizer)] = optimizer

    def stop_at_call(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not any(p.is_meta for p in module.parameters()):
            return call(module, *args, **kwargs)
        models.append(module)
        raise StopScript

    def stop_at_prepare(_: Any, model: Any, optimizer: Any = None, level: Any = "O1", **kwargs: Any) -> Any:
        models.extend(as_models(model))
        optimizers.update({id(o): o for o in as_optimizers(optimizer)})
        options.update(kwargs, level=level if kwargs.get("enabled", True) else "O0")
        raise StopScript

    with ExitStack() as stack:
        replace(stack, nn.Module, "register_parameter", _register_without_values)
        replace(stack, nn.Module, "_apply", _apply_dtype)
        replace(stack, nn.Module, "__call__", stop_at_call)
        replace(stack, torch.optim.Optimizer, "add_param_group", note_optimizer)
        prepare_module: Any = importlib.import_module("halfstep.session.prepare")
        for place in (prepare_module, halfstep.session, halfstep, loop):  # pyright: ignore[reportAttributeAccessIssue]
            replace(stack, place, "prepare", stop_at_prepare)
        error = run_main(script, args)
    if error is not None:
        return f"{in_words(error, 0)}; its parameters have no values here, which it may need"
    if not models or not optimizers:
        return "it ends, or calls a model, before an optimizer is made: give --parameters"
    try:
        plan = read_plan(options.get("plan"))
        how, dtype, _ = settings_of(plan, level or options.get("level", "O0"), options.get("dtype"), "keep")
        if how == "auto":
            return "its level='auto' is chosen by measuring: give --level"
        params = list(dict.fromkeys(p for o in optimizers.values() for p in parameters_of(o)))
        model_params = {p for model in models for p in model.parameters()}
        if rest := [p for p in params if p not in model_params]:
            models.append(nn.ParameterList(rest))
        return footprint(models, [make(params)] if make else [*optimizers.values()], how, dtype, plan, ranks)
    except HalfstepError as error:
        return str(error)


def _register_without_values(register: Callable[..., None], module: nn.Module, name: str, param: Any) -> None:
    """Register a parameter without its values."""
    register(module, name, param)
    if type(param) is nn.Parameter and not param.is_meta:
        module._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)


def _apply_dtype(apply: Callable[..., Any], module: nn.Module, change: Any, *more: Any) -> Any:
    """Apply only the dtype of a change to parameters without values."""

    def cast(t: Tensor) -> Tensor:
        return t.to(change(torch.empty(0, dtype=t.dtype, device="cpu")).dtype) if t.is_meta else change(t)

    return apply(module, cast, *more)
