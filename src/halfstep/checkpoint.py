"""Checkpoints: written whole or not at all, checked when read, keyed by fully qualified names.

A checkpoint is an ordinary `torch.save` file that `torch.load(path, weights_only=True)` reads; its zip
records carry CRC-32 sums, all of which are verified here. `CheckpointFolder` keeps the last k of a run.
What a session saves is in `session/saving.py`.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import socket
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]
from torch.optim import Optimizer

from halfstep.errors import CheckpointError, HalfstepWarning, show
from halfstep.names import fqns, named_parameters
from halfstep.torch_private import tree_leaves

FORMAT = 1
"""Version of the layout written by `training_state`."""


def save(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write `state` (tensors, numbers, strings, lists, tuples, dicts of these) to `path` atomically.

    numpy numbers become Python's. The bytes go to a temporary file beside it, are forced to the disk, and
    take the name in one rename: a crash at any moment leaves the old file or the new one. Raises
    CheckpointError where `state` holds what `load` could not read, by its place, or when the disk refuses.
    """
    path = Path(path)
    plain = _plain(state, "state")
    temporary = path.with_name(f".{path.name}.{HOST}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        tensors = [t for t in tree_leaves(plain) if isinstance(t, torch.Tensor)]
        needed = sum(t.numel() * t.element_size() for t in tensors)
        raise CheckpointError(f"cannot write checkpoint {path}: {reason(error, path, needed)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname()) or "host"
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def reason(error: BaseException, path: Path, needed: int) -> str:
    """What a failed write says; where the disk is full, the bytes needed and free."""
    causes = [error, error.__context__, error.__cause__]
    full = any(isinstance(cause, OSError) and cause.errno in _FULL for cause in causes)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return str(error)
    if not (full or free < needed):
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"no room for it: about {needed:,} bytes are needed, {free:,} are free on this disk (or a quota or "
        "file size limit is lower); what was saved before stands. Free some, or choose another folder"
    )


_SAFE = {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
_SAFE_MAPPINGS = {dict, OrderedDict, Counter}


def _plain(value: Any, place: str) -> Any:
    """`value` with numpy's numbers as Python's; CheckpointError for what could be saved but never loaded."""
    if type(value) in _SAFE or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, defaultdict) or type(value) in _SAFE_MAPPINGS:
        items = {_plain(k, f"a key of {place}"): _plain(v, f"{place}[{k!r}]") for k, v in value.items()}
        return items if isinstance(value, defaultdict) else type(value)(items)
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item, f"{place}[{index}]") for index, item in enumerate(value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_ | numpy.number):
        return value.item()
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint that runs no code cannot hold: "
        "use tensors, Python's numbers and strings, and lists, tuples and dicts of these"
    )


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, where the system can."""
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
    try:
        return _load(path, map_location)
    except CheckpointError as error:
        error.damaged = True
        raise


def _load(path: Path, map_location: Any) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    state: Any = None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            state = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # zipfile, zlib, pickle and torch each raise their own kinds on damaged bytes
        raise CheckpointError(f"checkpoint {path} {_wrong_with(error)}") from error
    if damaged is not None:
        raise CheckpointError(f"checkpoint {path} is corrupt: the checksum of {damaged} does not match")
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {path} holds a {type(state).__name__}, expected a mapping")
    return state


def _wrong_with(error: Exception) -> str:
    """What a file that cannot be read is, in words of ours: torch's come with advice on running its code."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{named[1]}, " if named else ""
        return (
            f"is not a checkpoint of halfstep: it holds {what}objects that only running its code would make"
        )
    what = _ESCAPE.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return f"is corrupt or not a checkpoint: {what[0]}"


_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def training_state(model: nn.Module, optimizer: Optimizer, names: list[str], session: Any) -> dict[str, Any]:
    """Model, optimizer and session of one run, keyed by name, with the layout's version and the threads."""
    return {
        "format": FORMAT,
        "threads": torch.get_num_threads(),
        "model": model_state(model),
        "optimizer": optimizer_state(optimizer, names),
        "amp": session.state_dict(),
    }


def load_training_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, names: list[str], session: Any
) -> None:
    """Go on from a `training_state`; CheckpointError where it is of another model, optimizer or level."""
    warn_if_threads_differ(state["threads"])
    check_model_state(model, state["model"])
    check_optimizer_state(optimizer, names, state["optimizer"])
    session.load_state_dict(state["amp"])
    load_model_state(model, state["model"])
    load_optimizer_state(optimizer, names, state["optimizer"])


def check_parts(state: Any, whose: str, parts: Iterable[str]) -> None:
    """Raise CheckpointError for what is no `training_state` that `whose` state_dict() added `parts` to."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"got {show(state)}: expected what {whose} state_dict() gave")
    held = cast("Mapping[str, Any]", state)
    if held.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint layout {held.get('format')!r}; this version reads {FORMAT}")
    missing = sorted({*parts, "threads", "model", "optimizer", "amp"} - held.keys())
    if missing:
        raise CheckpointError(f"not {whose} checkpoint: {', '.join(missing)} missing")


def model_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` under fully qualified names."""
    state = model.state_dict()
    names = fqns(state)
    return {names[name]: value for name, value in state.items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a `model_state` into `model`, or raise as `check_model_state` does, with nothing copied."""
    check_model_state(model, state)
    own = {short: name for name, short in fqns(model.state_dict()).items()}
    try:
        model.load_state_dict({own[name]: value for name, value in state.items()})
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"the checkpoint is of another model: {lines[-1].strip()}") from error


def check_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError that names what is missing, unexpected or misshapen in a `model_state`."""
    present = model.state_dict()
    own = {short: name for name, short in fqns(present).items()}
    shapes = {short: getattr(present[name], "shape", None) for short, name in own.items()}
    saved = {name: getattr(value, "shape", None) for name, value in state.items()}
    lazy = {short for short, name in own.items() if isinstance(present[name], UninitializedTensorMixin)}
    check_shapes(saved, {**shapes, **{name: saved[name] for name in lazy & saved.keys()}})


def check_shapes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointError that names what is missing, unexpected or misshapen among saved tensors."""
    missing, extra = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    if missing or extra:
        raise CheckpointError(
            f"the checkpoint is of another model: missing {_some(missing)}, unexpected {_some(extra)}"
        )
    for name, given in saved.items():
        if given != here[name]:
            raise CheckpointError(
                f"the checkpoint is of another model: size mismatch for {name}, {_shape(given)} "
                f"and here {_shape(here[name])}"
            )


def _shape(shape: Any) -> str:
    return "none" if shape is None else str(list(shape))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """A name for each parameter of the optimizer, in its order: its FQN, or `group.position` where unknown.

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
        "algorithm": algorithm_of(optimizer),
        "state": {names[k] if isinstance(k, int) else k: v for k, v in state["state"].items()},
        "param_groups": groups,
    }


def algorithm_of(optimizer: Optimizer) -> str:
    """What the optimizer computes: the nearest class that torch or halfstep ships, else its own class."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith(("torch.optim.", "halfstep.optim.")) and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def load_optimizer_state(optimizer: Optimizer, names: list[str], state: Mapping[str, Any]) -> None:
    """Put an `optimizer_state` back; or raise as `check_optimizer_state` does."""
    check_optimizer_state(optimizer, names, state)
    numbers = {name: number for number, name in enumerate(names)}
    own = optimizer.state_dict()["param_groups"]
    # torch pairs saved and present parameters by place, so the numbers must stand in the present order.
    groups = [dict(group, params=here["params"]) for group, here in zip(state["param_groups"], own)]
    numbered = {numbers.get(key, key): value for key, value in state["state"].items()}
    given = {**state, "state": numbered, "param_groups": groups}
    given.pop("algorithm", None)
    optimizer.load_state_dict(given)


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
    numbers = {
        key
        for key, value in optimizer.defaults.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    }
    lacking = sorted({key for group in state["param_groups"] for key in numbers - group.keys()})
    kind = type(optimizer).__name__
    if lacking:
        raise CheckpointError(
            f"the checkpoint is of another optimizer: it has no {_some(lacking)}, which {kind} needs"
        )
    saved_by, here = state.get("algorithm"), algorithm_of(optimizer)
    if saved_by is not None and saved_by != here:
        raise CheckpointError(f"the checkpoint is of another optimizer: {saved_by} saved it, here is {here}")
    if ("masters" in state) != ("masters" in present):
        with_it, without = ("checkpoint", kind) if "masters" in state else (kind, "checkpoint")
        raise CheckpointError(
            f"the {with_it} has fp32 masters from MasterWeights, the {without} has none: "
            "resume with the same optimizer and level"
        )


class CheckpointFolder:
    """The last `keep` checkpoints of one run in one folder: `step-00000100.pt` files, or folders of sessions.

    Only what has exactly such a name (`step-00000100` for a folder that `Session.save` wrote) is looked at. A
    folder that holds checkpoints which this object neither wrote nor loaded belongs to another run: `claim`
    and `save` refuse it.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}; a folder keeps at least 1 checkpoint")
        self.folder, self.keep = Path(folder), keep
        self._known: set[str] = set()

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [path for path in found if _NAME.fullmatch(path.name)]
        return sorted(named, key=lambda path: (_step_of(path), not path.suffix))

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` was written or loaded here."""
        path = self.path_of(step)
        return path.name in self._known or path.stem in self._known

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` lies, a file; a session's folder has the same name without `.pt`."""
        return self.folder / f"step-{step:08d}.pt"

    def claim(self) -> None:
        """Raise CheckpointError where the folder holds checkpoints of another run."""
        strangers = [path.name for path in self.paths() if path.name not in self._known]
        if strangers:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of another run ({_some(strangers)}): pass resume=True to "
                "go on with that run, or another folder for this one"
            )

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then delete those beyond `keep` and what crashed saves left.

        The one just written always stays. What another living process is writing is left alone.
        """
        self.claim()
        path = self.wrote(save(self.path_of(step), state))
        files = [other for other in self.paths() if other.suffix and _step_of(other) <= step]
        for old in files[: -self.keep]:
            old.unlink(missing_ok=True)
        for leftover in self.folder.glob(".step-*.tmp"):
            if was_abandoned(leftover, r"step-\d{8,}\.pt") and leftover.is_file():
                leftover.unlink(missing_ok=True)
        return path

    def wrote(self, path: Path) -> Path:
        """`path`, which from now on is known as a checkpoint of this run."""
        self._known.add(path.name)
        return path

    def load_latest(self, map_location: Any = "cpu") -> dict[str, Any] | None:
        """The newest file that can be read, or None where there is none; the folder is then claimed.

        A damaged one is named in a warning and set aside as `step-00000100.pt.damaged`. Raises
        CheckpointError where there are checkpoints and all are damaged.
        """
        found: list[dict[str, Any]] = []
        self.read_latest(lambda path: found.append(load(path, map_location)), files=True)
        return found[0] if found else None

    def read_latest(self, read: Callable[[Path], Any], *, files: bool = False) -> None:
        """Call `read` for the newest checkpoint, for the one before it where that is damaged, and so on."""
        damaged: list[tuple[Path, CheckpointError]] = []
        paths = [path for path in self.paths() if path.suffix or not files]
        self._known |= {path.name for path in paths}
        while paths:
            path = paths.pop()
            try:
                read(path)
            except CheckpointError as error:
                if not error.damaged:
                    raise
                damaged.append((path, error))
                continue
            self._set_aside(damaged, path.name)
            return
        if damaged:
            raise CheckpointError(
                f"{damaged[0][1]}; {self.folder} has no earlier checkpoint that can be read: "
                "start afresh in another folder"
            ) from damaged[0][1]

    def _set_aside(self, damaged: Sequence[tuple[Path, CheckpointError]], good: str) -> None:
        for path, error in damaged:
            self._known.discard(path.name)
            aside = path.with_name(f"{path.name}.damaged")
            if aside.is_dir():
                shutil.rmtree(aside)
            with suppress(FileNotFoundError):  # another rank did it
                os.replace(path, aside)
                told = f"{error}; it is now {aside.name}, going on from {good}"
                warnings.warn(told, HalfstepWarning, stacklevel=5)


_NAME = re.compile(r"step-\d{8,}(\.pt)?")


def _step_of(path: Path) -> int:
    return int(path.stem[len("step-") :])


def was_abandoned(temporary: Path, name: str) -> bool:
    """Whether this is a name that `save` gives what becomes `name` (a pattern), and its process has ended.

    False for any other name, and for one of another host, where the process may live.
    """
    found = re.fullmatch(rf"\.{name}\.{HOST}-(\d+)\.tmp", temporary.name)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


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
