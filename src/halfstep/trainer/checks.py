"""What a Trainer refuses before it touches a weight, on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed import gather, is_sharded, started_by_torchrun, world_size
from halfstep.errors import ConfigError, DataError, show


def _count(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: type(v) is int and v >= least, f"a whole number, {least} or more"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss_fn": (callable, "a function (output, target) -> loss"),
    "metrics": (
        lambda v: v is None or (isinstance(v, Mapping) and all(map(callable, cast("Any", v).values()))),
        "names and functions (output, target) -> value",
    ),
    **dict.fromkeys(("callbacks", "loggers"), (_is_list, "a list")),
    **dict.fromkeys(("accumulate", "read_every", "keep"), _count(1)),
    "checkpoint_every": _count(0),
    "checkpoints": (lambda v: v is None or isinstance(v, str | Path), "a folder's path"),
    "level": (
        lambda v: v != "auto",
        "a level that is chosen before training, so that a resumed run is the run that began: find one with "
        "hs.tune(model, optimizer, step, x, y) or `halfstep tune`, then pass plan=found.plan or its file",
    ),
}


def check_options(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of a Trainer that cannot be."""
    for name, (fits, expected) in _EXPECTED.items():
        if not fits(given[name]):
            raise ConfigError(f"{name}={show(given[name])}; expected {expected}")
    if (every := given["checkpoint_every"]) and given["checkpoints"] is None:
        raise ConfigError(f"checkpoint_every={every} without a folder; pass checkpoints='runs/mine'")


def check_parallel(model: nn.Module, wrapped: bool) -> None:
    """Raise ConfigError where several ranks would each train a model of their own."""
    ranks, started, remedy = world_size(), started_by_torchrun(), ""
    inside = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if ranks == 1 and started > 1 and not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group() first, torch.distributed is not initialised"
    elif ranks > 1 and not (wrapped or inside or is_sharded(model)):
        remedy = "pass wrap=torch.nn.parallel.DistributedDataParallel, or shard the model first"
    if remedy:
        raise ConfigError(f"{max(ranks, started)} ranks would each train a model of their own: {remedy}")


def last_step(loader: Iterable[Any], steps: int | None, epochs: int | None, accumulate: int) -> int:
    """The number of the last step of a `fit`; ConfigError where that is not said once and clearly."""
    if (steps is None) == (epochs is None):
        raise ConfigError(f"fit got steps={steps} and epochs={epochs}; give exactly one of them")
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and type(value) is not int:
            raise ConfigError(f"fit got {name}={show(value)}; expected a whole number")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"fit got a {type(loader).__name__} as a loader; give batches (input, target)")
    if steps is None and not hasattr(loader, "__len__"):
        raise ConfigError(f"a {type(loader).__name__} has no length; give steps= instead of epochs=")
    last = int(epochs or 0) * len(cast(Any, loader)) // accumulate if steps is None else steps
    if last < 1:
        raise ConfigError(f"fit would train {last} steps; give steps= or epochs= of at least 1")
    return last


def check_ranks(loader: Iterable[Any], last: int, alike: bool) -> None:
    """Raise on all ranks: DataError where they end apart, ConfigError where passes must be `alike`."""
    found = gather((last, len(cast(Any, loader)) if hasattr(loader, "__len__") else "unknown"))
    if len({end for end, _ in found}) > 1:
        ends = ", ".join(f"rank {number} after {end}" for number, (end, _) in enumerate(found))
        raise DataError(
            f"ranks would run out of batches at different steps ({ends}), and a step needs all of them: give "
            "every rank as many (a DistributedSampler does), or fit the same steps= on all, which begins "
            "another pass where one ends"
        )
    lengths = [str(length) for _, length in found]
    if alike and len(found) > 1 and ("unknown" in lengths or len(set(lengths)) > 1):
        raise ConfigError(
            f"EarlyStopping at the end of each pass, whose lengths on the ranks are {', '.join(lengths)}: "
            "all evaluate together, so give it every=, the steps from one evaluation to the next"
        )


def check_batch(batch: Any, step: int) -> None:
    """Raise DataError for what is no pair, or holds inf or NaN in a tensor of the CPU."""
    if not isinstance(batch, tuple | list) or len(cast("Sequence[Any]", batch)) != 2:
        raise DataError(f"a batch is a {type(batch).__name__}; expected a pair (input, target)")
    for part, value in zip(("input", "target"), cast("Sequence[Any]", batch)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != "cpu":
            continue
        # A sum is not finite as soon as one element is not; only then is the exact and slower look needed.
        if not math.isfinite(value.sum(dtype=torch.float64).item()) and (
            bad := int((~value.isfinite()).sum())
        ):
            kind = "NaN or inf" if bool(value.isnan().any()) else "inf"
            raise DataError(
                f"the {part} of the batch for step {step} holds {bad} values of {kind}; "
                "clean the data, nothing was updated with it"
            )
