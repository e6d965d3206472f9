"""Checkpoints: written whole or not at all, checked when read, keyed by canonical names.

A checkpoint is an ordinary `torch.save` file that `torch.load(path, weights_only=True)` reads; its zip
records carry CRC-32 sums, all of which are verified here. `CheckpointFolder` keeps the last k of a run.
Deciding when to save is the Trainer's.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim import Optimizer

from halfstep.errors import CheckpointError, HalfstepWarning
from halfstep.names import canonical_all, named_parameters

FORMAT = 1
"""Version of the layout written by `training_state`."""


def save(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write `state` (tensors, numbers, strings, lists, tuples, dicts of these) to `path` atomically.

    The bytes go to a temporary file beside it, are forced to the disk, and take the name in one rename: a
    crash at any moment leaves the old file or the new one. Raises CheckpointError when the disk refuses.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write checkpoint {path}: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint after verifying every record's checksum.

    No code in the file is run (`weights_only`). Raises CheckpointError, in one line, for a file that is
    missing, truncated, altered or not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            state = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # zipfile, zlib, pickle and torch each raise their own kinds on damaged bytes
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"checkpoint {path} is corrupt or not a checkpoint: {what[0]}") from error
    if damaged is not None:
        raise CheckpointError(f"checkpoint {path} is corrupt: the checksum of {damaged} does not match")
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path} holds a {type(state).__name__}, expected a mapping")
    return state


def model_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` under canonical names."""
    state = model.state_dict()
    names = canonical_all(state)
    return {names[name]: value for name, value in state.items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a `model_state` into `model`, or raise as `check_model_state` does, with nothing copied."""
    check_model_state(model, state)
    own = {short: name for name, short in canonical_all(model.state_dict()).items()}
    try:
        model.load_state_dict({own[name]: value for name, value in state.items()})
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"the checkpoint is of another model: {lines[-1].strip()}") from error


def check_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError that names what is missing, unexpected or misshapen in a `model_state`."""
    present = model.state_dict()
    own = {short: name for name, short in canonical_all(present).items()}
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"the checkpoint is of another model: missing {_some(missing)}, unexpected {_some(extra)}"
        )
    for name, value in state.items():
        given, expected = (getattr(t, "shape", None) for t in (value, present[own[name]]))
        if given != expected and not isinstance(present[own[name]], UninitializedTensorMixin):
            raise CheckpointError(
                f"the checkpoint is of another model: size mismatch for {name}, {_shape(given)} "
                f"and here {_shape(expected)}"
            )


def _shape(shape: Any) -> str:
    return "none" if shape is None else str(list(shape))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """A name for each parameter of the optimizer, in its order: canonical, or `group.position` where unknown.

    Take the names before `hs.prepare`, which may put masters in the optimizer's groups.
    """
    known = {id(parameter): name for name, parameter in named_parameters(model).items()}
    return [
        known.get(id(parameter), f"{index}.{position}")
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


def optimizer_state(optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
    """`optimizer.state_dict()` with each parameter's number replaced by its name."""
    state = optimizer.state_dict()
    groups = [dict(group, params=[names[i] for i in group["params"]]) for group in state["param_groups"]]
    return {
        **state,
        "state": {_named(k, names): v for k, v in state["state"].items()},
        "param_groups": groups,
    }


def _named(key: Any, names: list[str]) -> Any:
    return names[key] if isinstance(key, int) else key


def load_optimizer_state(optimizer: Optimizer, names: list[str], state: Mapping[str, Any]) -> None:
    """Put an `optimizer_state` back; or raise as `check_optimizer_state` does."""
    check_optimizer_state(optimizer, names, state)
    numbers = {name: number for number, name in enumerate(names)}
    own = optimizer.state_dict()["param_groups"]
    # torch pairs saved and present parameters by place, so the numbers must stand in the present order.
    groups = [dict(group, params=here["params"]) for group, here in zip(state["param_groups"], own)]
    numbered = {numbers.get(key, key): value for key, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": numbered, "param_groups": groups})


def check_optimizer_state(optimizer: Optimizer, names: list[str], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an `optimizer_state` of other parameters or of another kind of optimizer."""
    present = optimizer.state_dict()
    own = present["param_groups"]
    stored = [set(group["params"]) for group in state["param_groups"]]
    mine = [{names[number] for number in group["params"]} for group in own]
    if stored != mine:
        saved, known = set().union(*stored), set(names)
        raise CheckpointError(
            "the checkpoint's optimizer holds other parameters or other groups: missing "
            f"{_some(sorted(known - saved))}, unexpected {_some(sorted(saved - known))}"
        )
    # Newer versions of an optimizer bring flags that older checkpoints lack; its numbers say what it is.
    numbers = {key for key, value in optimizer.defaults.items() if _is_numeric(value)}
    lacking = sorted({key for group in state["param_groups"] for key in numbers - group.keys()})
    kind = type(optimizer).__name__
    if lacking:
        raise CheckpointError(
            f"the checkpoint is of another optimizer: it has no {_some(lacking)}, which {kind} needs"
        )
    if ("masters" in state) != ("masters" in present):
        with_it, without = ("checkpoint", kind) if "masters" in state else (kind, "checkpoint")
        raise CheckpointError(
            f"the {with_it} has fp32 masters from MasterWeights, the {without} has none: "
            "resume with the same optimizer and level"
        )


def _is_numeric(value: Any) -> bool:
    return isinstance(value, int | float | tuple) and not isinstance(value, bool)


class CheckpointFolder:
    """The last `keep` checkpoints of a run, as `step-00000100.pt` files in one folder."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}; a folder keeps at least 1 checkpoint")
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then delete those beyond `keep` and what crashed saves left."""
        path = save(self.folder / f"step-{step:08d}.pt", state)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        for leftover in self.folder.glob(".step-*.tmp"):
            leftover.unlink(missing_ok=True)
        return path

    def load_latest(self, map_location: Any = "cpu") -> dict[str, Any] | None:
        """The newest checkpoint, or None; a corrupt newest one is an error that names the one before."""
        paths = self.paths()
        if not paths:
            return None
        try:
            return load(paths[-1], map_location)
        except CheckpointError as error:
            cure = (
                f"delete it to resume from {paths[-2].name}"
                if len(paths) > 1
                else "delete it to start afresh"
            )
            raise CheckpointError(f"{error}; {cure}") from error


def warn_if_threads_differ(saved: int) -> None:
    """Warn once when a run resumes with another thread count, since sums may then round differently."""
    now = torch.get_num_threads()
    if now != saved:
        warnings.warn(
            f"the checkpoint was written with {saved} threads and resumes with {now}: "
            "results may differ in the last bits",
            HalfstepWarning,
            stacklevel=3,
        )
