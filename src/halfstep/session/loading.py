"""`Session.load`: how a folder that `saving` wrote comes back, on any number of ranks.

Everything is read and checked before anything changes; then the tensors that are there are filled.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfstep import checkpoint, rng, shardfiles
from halfstep.distributed import gather, local_of, rank, world_size
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, ConfigError, HalfstepError, warn
from halfstep.optim import storage
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.checkpoints import read as read_state
from halfstep.optim.loading import warn_of_zero_moments
from halfstep.optim.saved_masters import SavedMasters
from halfstep.optim.shards import as_dtensor
from halfstep.optim.shards import local_part as cut_state
from halfstep.session.preparation import OwnMasters
from halfstep.session.saving import (
    Named,
    box_of,
    make_ready,
    names_in,
    optimizer_names,
    tensors_of,
    undescribed_state,
)
from halfstep.session.steppers import weights_of
from halfstep.torch_private import load_hooks
from halfstep.trees import parameters_of

if TYPE_CHECKING:
    from halfstep.session import dcp
    from halfstep.session.session import Session

    Found = shardfiles.Index | dcp.ReadContent

#: What is not a weight in the files begins with a dot, which no parameter's name does.
_OWN = (".optimizer.", ".rank.", ".rest.")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds besides the session: `extra` and this rank's `position`, as they were given."""

    extra: Any
    position: Any


def load(self: Session, path: str | Path, *, schedulers: Sequence[Any] = (), storage: Any = None) -> Loaded:
    """Go on from what `save` wrote, on as many ranks as there are now; every rank calls.

    Model, optimizers, level and policy must be those that were saved; master and state formats may
    differ, and so may the order of an optimizer's groups, which are matched by the names of their
    parameters. `storage` is "dcp" for what was saved with it, or a StorageReader of
    torch.distributed.checkpoint. Returns `extra` and this rank's `position` (None where the number of
    ranks changed, which is said). Everything is checked first, without holding it, and then read into the
    tensors that are there, a part at a time; with "dcp" a rank's whole part is held meanwhile.

    Raises CheckpointError on every rank, with nothing changed, for a damaged or other checkpoint. A file that
    cannot be read the second time leaves the run "half loaded", which the error says: load again.
    """
    make_ready(self)
    if storage is not None:
        from halfstep.session import dcp

        dcp.check(storage, dcp.StorageReader)
        read = dcp.read(str(path), partial(_boxes, self), self.group, storage)
        return _load(self, read.manifest, read, schedulers)
    path, manifest = checkpoint.read_manifest(checkpoint.local(path), self.group)
    with _name_damage():
        index = shardfiles.Index(path, manifest["files"], manifest.get("index"))
    with closing(index) as reader:
        return _load(self, manifest, reader, schedulers)


def _boxes(session: Session, wholes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Any, Any]]:
    """This rank's part of every saved tensor."""
    likes = {name: t for name, t, _ in tensors_of(session)}
    for index, (optimizer, names) in enumerate(zip(session.optimizers, optimizer_names(session))):
        likes |= {f".optimizer.{index}.{name}": w for name, w in zip(names, weights_of(optimizer))}
    plain = torch.empty(0, device="cpu")
    cut = {name: likes.get(name, likes.get(name.rpartition(".")[0], plain)) for name in wholes}
    return {name: box_of(cut[name], whole) for name, whole in wholes.items()}


@dataclass(frozen=True)
class _Saved:
    """A state of a parameter that lies in the files: its name there, this rank's box, what stands for it."""

    name: str
    box: tuple[Sequence[int], Sequence[int]]
    stand_in: Tensor

    def fill(self, reader: Found, target: Tensor) -> None:
        """Write the values into this rank's part of a tensor."""
        reader.fill(self.name, *self.box, target)


class _State(NamedTuple):
    """What a checkpoint holds for an optimizer: a state dict, and which values of it are still in the files.

    `late`: by the number of a parameter, what `_Saved` says of its states. `groups`: the options that an
    optimizer of `halfstep.optim` gets; None where it loads the state dict as any other does.
    """

    state: dict[str, Any]
    late: dict[int, dict[str, _Saved]]
    groups: list[dict[str, Any]] | None


class _Content(NamedTuple):
    """What a checkpoint holds for this rank, checked; weights and large states are still in the files."""

    tensors: list[Named]
    rest: Mapping[str, Any]
    optimizers: list[_State]
    rank: Mapping[str, Any] | None
    """Random generators and position; None where the number of ranks changed."""


def _load(self: Session, manifest: Mapping[str, Any], reader: Found, schedulers: Sequence[Any]) -> Loaded:
    """Check everything, then what can be undone, then fill the tensors that are there from the files."""
    content = checkpoint.on_every_rank(partial(_read, self, manifest, reader, schedulers), self.group)
    with _undo_on_error(self, schedulers):
        self.load_state_dict(content.rest["session"])
        for optimizer, state in zip(self.optimizers, content.optimizers):
            if state.groups is None:
                optimizer.load_state_dict(state.state)
            for group, options in zip(optimizer.param_groups, state.groups or ()):
                group.update(options)
        for scheduler, state in zip(schedulers, content.rest["schedulers"]):
            scheduler.load_state_dict(state)
    error, problem = None, None
    try:
        for optimizer, state in zip(self.optimizers, content.optimizers):
            _fill(optimizer, state, reader)
        _load_weights(self, reader, content.tensors)
    except Exception as raised:
        error, problem = raised, (str(raised).splitlines() or [type(raised).__name__])[0]
    for text in filter(None, gather(problem, self.group)):
        raise CheckpointError(
            f"half loaded: load again, this checkpoint or another one, before training: {text}"
        ) from error
    if content.rank is not None:
        rng.load_random_state(content.rank["random"])
    _warn_of_ranks_and_threads(manifest, self.group)
    return Loaded(content.rest["extra"], None if content.rank is None else content.rank["position"])


@torch.no_grad()
def _fill(optimizer: torch.optim.Optimizer, state: _State, reader: Found) -> None:
    """Give an optimizer the states that are still in the files, one parameter at a time."""
    if isinstance(optimizer, OnePassOptimizer) and state.groups is not None:
        for number, (p, group, place) in enumerate(optimizer._places()):
            late, saved = state.late.get(number, {}), state.state["state"].get(number)
            entry: Any = optimizer.state.pop(p, {})
            if saved is None:
                continue
            if entry.keys() - storage.MASTER_KEYS == saved.keys() and all(
                _fits(entry[what], late[what].stand_in if what in late else value)
                for what, value in saved.items()
            ):
                optimizer.state[p] = entry
                for what in saved.keys() - late.keys():
                    local_of(entry[what]).copy_(saved[what])
                for what, saved_state in late.items():
                    saved_state.fill(reader, local_of(entry[what]))
            else:
                entry.clear()  # its memory goes before another takes its place
                read = {what: torch.empty_like(x.stand_in, device="cpu") for what, x in late.items()}
                for what, target in read.items():
                    late[what].fill(reader, target)
                optimizer._load_entry(p, group, place, {**saved, **read})
    else:
        for number, p in enumerate(parameters_of(optimizer)):
            for what, saved_state in state.late.get(number, {}).items():
                saved_state.fill(reader, local_of(optimizer.state[p][what]))
    if state.late:
        warn_of_zero_moments([optimizer])


def _fits(value: Any, like: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return False
    return (local_of(value).shape, value.dtype) == (like.shape, like.dtype)


@contextmanager
def _name_damage() -> Generator[None]:
    """Raise what Python or torch say of values that cannot be as a CheckpointError."""
    try:
        yield
    except HalfstepError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        what = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            "the checkpoint is damaged: its manifest does not describe its files, or says what cannot be "
            f"({type(error).__name__}: {what:.200})",
            damaged=True,
        ) from error


@contextmanager
def _undo_on_error(session: Session, schedulers: Sequence[Any]) -> Generator[None]:
    """Put session, optimizers and schedulers back where one of them refuses its state."""
    restore, kernels = session.snapshot(), session.kernels
    before = [
        (o, o.param_groups, [dict(group) for group in o.param_groups], o.state, {**o.state})
        for o in session.optimizers
    ]
    entries = [{p: {**entry} for p, entry in state.items()} for *_, state in before]
    past = [{**scheduler.state_dict()} for scheduler in schedulers]
    try:
        yield
    except Exception as error:
        restore()
        session.kernels = kernels
        for (optimizer, groups, options, state, _), old in zip(before, entries):
            for group, values in zip(groups, options):
                group.clear()
                group.update(values)
            state.clear()
            state.update(old)
            optimizer.param_groups, optimizer.state = groups, state
        for scheduler, old in zip(schedulers, past):
            scheduler.load_state_dict(old)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint does not fit, nothing was changed: {error}") from error


@_name_damage()
def _read(
    session: Session, manifest: Mapping[str, Any], reader: Found, schedulers: Sequence[Any]
) -> _Content:
    """Read and check all that a checkpoint holds, but for the weights' values, and change nothing."""
    tensors, used = [*tensors_of(session)], set[str]()
    _check(session, manifest, reader, schedulers, tensors)

    def read(name: str, *box: Sequence[int]) -> Tensor:
        used.add(name)
        return reader.read(name, *box)

    rest = shardfiles.unpack(manifest["rest"], read)
    session._read_state(rest["session"])
    rest["extra"]  # a KeyError now
    for number, (scheduler, state) in enumerate(zip(schedulers, rest["schedulers"], strict=True)):
        if type(scheduler).__module__.startswith("torch."):  # what others keep is theirs to change
            _check_options(f"scheduler {number}", state, scheduler.state_dict(), whole=True)
    states = list[_State]()
    parameter_names = optimizer_names(session, tensors)
    for optimizer, names, saved in zip(session.optimizers, parameter_names, manifest["optimizers"]):
        states.append(_read_optimizer(optimizer, names, saved, reader, used))
    private = [name for name in reader.wholes if name.startswith((".optimizer.", ".rest."))]
    if unused := [name for name in private if name not in used]:
        raise CheckpointError(
            f"the checkpoint is damaged: its manifest leaves out {len(unused)} of its tensors, the first "
            f"{unused[0]!r}",
            damaged=True,
        )
    for name, value, _ in tensors:
        reader.check(name, *box_of(value, reader.wholes[name]))
    return _Content(tensors, rest, states, _rank_content(session, manifest, reader))


def _rank_content(session: Session, manifest: Mapping[str, Any], reader: Found) -> Mapping[str, Any] | None:
    """This rank's random generators and position, tried once; None where the number of ranks changed."""
    if not all(type(manifest[key]) is int for key in ("ranks", "threads")):
        raise ValueError("ranks and threads are whole numbers")
    if manifest["ranks"] != world_size(session.group):
        return None
    mine = rank(session.group)
    content = shardfiles.unpack(reader.about(mine)["own"], partial(reader.private, mine))
    content["position"]
    before = rng.random_state()
    try:
        rng.load_random_state(content["random"])
    finally:
        rng.load_random_state(before)
    return content


def _check_options(
    what: str,
    saved: Mapping[str, Any],
    options: Mapping[str, Any],
    whole: bool = False,
    empty: Collection[str] = (),
) -> None:
    """Raise CheckpointError where saved options are of other kinds than those here; `empty` ones may be None.

    With `whole`, also where a public one is missing.
    """
    for key, value in options.items():
        if key not in saved and whole and not key.startswith("_"):
            raise CheckpointError(f"the checkpoint's {what} has no {key!r}: it is another one's")
        if key not in saved or (saved[key] is None and (value is None or key in empty)):
            continue
        saved_kind, expected = _kind_of(saved[key]), _kind_of(value)
        if value is not None and saved_kind != expected:
            raise CheckpointError(
                f"the checkpoint's {what} has a {saved_kind} as {key!r}, expected a {expected}"
            )


def _kind_of(value: Any) -> str:
    kinds = {
        "flag": bool,
        "number": (int, float, Tensor),
        "text": str,
        "sequence": (list, tuple),
        "mapping": Mapping,
    }
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)


def _check(
    session: Session,
    manifest: Mapping[str, Any],
    reader: Found,
    schedulers: Sequence[Any],
    tensors: list[Named],
) -> None:
    """Raise CheckpointError before anything is changed."""
    saved = {n: list(shape) for n, shape in reader.wholes.items() if not n.startswith(_OWN)}
    checkpoint.check_shapes(saved, {name: list(t.shape) for name, t, _ in tensors})
    parameter_names = optimizer_names(session, tensors)
    _check_optimizers(session, parameter_names, manifest["optimizers"])
    for optimizer, names, saved in zip(session.optimizers, parameter_names, manifest["optimizers"]):
        sources = _match_groups(optimizer, names, saved)
        if schedulers and sources != sorted(sources):
            raise CheckpointError(
                "the optimizer's parameter groups stand in another order than when it was saved, and "
                "schedulers keep learning rates by that order: build the groups in the saved order"
            )
    (saved_schedulers,) = dict(manifest["rest"]["dict"])["schedulers"].values()
    checkpoint.check_schedulers(len(saved_schedulers), len(schedulers))


def _check_optimizers(
    session: Session, parameter_names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Raise CheckpointError where the optimizers are of other kinds or in another order than those saved."""
    name_sets, saved_sets = [{*names} for names in parameter_names], [{*entry["names"]} for entry in saved]
    if name_sets != saved_sets and sorted(map(sorted, name_sets)) == sorted(map(sorted, saved_sets)):
        order = [saved_sets.index(names) for names in name_sets]
        raise CheckpointError(
            f"the session's optimizers stand in another order than when they were saved: of the saved ones "
            f"they are, by the names of their parameters, numbers {order}. Give prepare() the optimizers in "
            "the saved order, and load() the schedulers in it"
        )
    theirs = [entry["algorithm"] for entry in saved]
    ours = [checkpoint.algorithm_of(o) for o in session.optimizers]
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint is of other optimizers: {theirs} saved it, here are {ours}. Prepare with the "
            "saved kind to resume. To go on with another, load with the saved kind and revert(), give the "
            "new optimizer what fits (new.load_state_dict(old.state_dict()), Adam's to AdamW say), and "
            "prepare again with it"
        )


def _read_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    saved: Mapping[str, Any],
    reader: Found,
    used: set[str],
) -> _State:
    """Return what a checkpoint holds for an optimizer; it is matched by names and changes nothing.

    States of more than one number stay in the files where the optimizer loads as halfstep's or torch's do.
    """
    is_one_pass = isinstance(optimizer, OnePassOptimizer)
    waits = _loads_as_known(optimizer)
    state, late = dict[int, Any](), dict[int, dict[str, _Saved]]()

    def read(place: str, *box: Sequence[int]) -> Tensor:
        used.add(place)
        return reader.read(place, *box)

    for number, (name, p) in enumerate(zip(names, parameters_of(optimizer))):

        def place_of(place: str, p: Tensor = p, name: str = name) -> tuple[Sequence[int], Sequence[int]]:
            if f".{name}." not in place:
                raise ValueError(f"{place!r} as a state of {name!r}")
            return box_of(p, reader.wholes[place])

        def cut(place: str, p: Tensor = p, place_of: Any = place_of) -> Any:
            return as_dtensor("", _with_strides_of(read(place, *place_of(place)), local_of(p)), p)

        def later(
            what: str,
            value: Any,
            p: Tensor = p,
            number: int = number,
            cut: Any = cut,
            place_of: Any = place_of,
        ) -> Any:
            local = local_of(p)
            place = str(value["tensor"]) if isinstance(value, Mapping) and "tensor" in value else ""
            box = place_of(place) if place else ((), ())
            if not (place and waits) or (*box[1],) != tuple(local.shape) or local.numel() < 2:
                real = shardfiles.unpack(value, cut)
                return cut_state(what, real, p) if is_one_pass and waits else real
            used.add(place)
            reader.check(place, *box)
            like = _with_strides_of(torch.empty((*box[1],), dtype=reader.dtype(place), device="meta"), local)
            late.setdefault(number, {})[what] = _Saved(place, box, like)
            old_value = optimizer.state.get(p, {}).get(what)
            if is_one_pass or _fits(old_value, like):
                return like if is_one_pass else old_value
            return as_dtensor("", torch.zeros_like(like, device=local.device), p)

        if entry := saved["state"].get(name):
            state[number] = {what: later(what, value) for what, value in entry.items()}
    whole = {"state": state, "param_groups": _read_groups(optimizer, names, saved, read)}
    if not is_one_pass or not waits:
        return _State(whole, late, None)
    try:
        return _State(whole, late, read_state(optimizer, whole, local=True)[0])
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint does not fit, nothing was changed: {error}") from error


def _read_groups(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    saved: Mapping[str, Any],
    read: Callable[[str], Tensor],
) -> list[dict[str, Any]]:
    """Return the options of each of an optimizer's groups, of the saved group of the same parameters."""
    groups = list[Any]()
    optional = {
        option
        for kind in type(optimizer).__mro__
        for option, about in inspect.signature(kind.__init__).parameters.items()
        if about.default is None
    }
    sources = _match_groups(optimizer, names, saved)
    for number, (source, new) in enumerate(zip(sources, undescribed_state(optimizer)["param_groups"])):
        options = shardfiles.unpack(saved["groups"][source], read)
        _check_options(f"parameter group {number}", options, new, empty=optional)
        keeps = {key: new[key] for key in ("params", "param_names") if key in new}
        defaults = {key: new[key] for key in optimizer.defaults if key in new}
        groups.append({**defaults, **{k: v for k, v in options.items() if k != "param_names"}, **keeps})
    return groups


def _loads_as_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps the tensors that it loads, and nobody else has a look at them."""
    before, after = load_hooks(optimizer)
    owners = (getattr(hook, "__self__", None) for hook in (*before.values(), *after.values()))
    methods = (OnePassOptimizer.load_state_dict, torch.optim.Optimizer.load_state_dict)
    return type(optimizer).load_state_dict in methods and all(isinstance(o, SavedMasters) for o in owners)


def _with_strides_of(value: Tensor, like: Tensor) -> Tensor:
    """A value with the strides of `like`, where it has its shape: torch's fused optimizers walk memory."""
    if value.shape != like.shape or like.is_contiguous():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def _match_groups(
    optimizer: torch.optim.Optimizer, names: Sequence[str], saved: Mapping[str, Any]
) -> list[int]:
    """Return which saved group each of the optimizer's is, by the names of its parameters.

    Raises CheckpointError where a group holds other parameters than each of the saved ones.
    """
    if len(names) != len(saved["names"]) or set(names) != set(saved["names"]):
        raise CheckpointError(
            "the checkpoint's optimizer holds other parameters: build it from the same model"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    # Earlier versions wrote no sizes: then the order of the names alone says that groups are the same.
    saved_sizes = saved.get("sizes", sizes if [*names] == [*saved["names"]] else [len(names)])
    ours, theirs = _groups_of(names, sizes), _groups_of(saved["names"], saved_sizes)
    free = [*range(len(theirs))]
    sources = list[int]()
    for number, group in enumerate(ours):
        source = next((n for n in free if theirs[n] == group), None)
        if source is None or len(ours) != len(theirs) or len(theirs) != len(saved["groups"]):
            shown = ", ".join(sorted(group)[:3]) or "no parameter"
            raise CheckpointError(
                f"the checkpoint's optimizer has parameter groups of {saved_sizes} parameters, this one of "
                f"{sizes}, and no saved group holds those of group {number} alone ({shown}, ...): build the "
                "groups as they were when it was saved; their order may differ"
            )
        free.remove(source)
        sources.append(source)
    return sources


def _groups_of(names: Sequence[str], sizes: Sequence[int]) -> list[frozenset[str]]:
    ends = [*itertools.accumulate(sizes)]
    return [frozenset(names[end - size : end]) for end, size in zip(ends, sizes)]


@torch.no_grad()
def _load_weights(session: Session, reader: Found, tensors: list[Named]) -> None:
    names, master_ids, keeper = names_in(tensors), set[int](), OwnMasters(session.optimizers)
    weights = dict.fromkeys(p for optimizer in session.optimizers for p in weights_of(optimizer))
    weights = [p for p in weights if id(p) in names and keeper.knows(p)]
    room = torch.empty(max((local_of(p).numel() for p in weights), default=0), device="cpu")  # used again
    for p in weights:
        master_ids.add(id(p))
        box = box_of(p, reader.wholes[names[id(p)]])
        value = room[: math.prod(box[1])].view(box[1])
        reader.fill(names[id(p)], *box, value)
        keeper.take(p, value)
    for name, value, p in tensors:
        if id(p) not in master_ids:
            _Saved(name, box_of(value, reader.wholes[name]), value).fill(reader, local_of(value))


def _warn_of_ranks_and_threads(manifest: Mapping[str, Any], group: Group | None) -> None:
    checkpoint.warn_if_threads_differ(manifest["threads"])
    if manifest["ranks"] != world_size(group):
        warn(
            f"the checkpoint was written by {manifest['ranks']} ranks and is read by {world_size(group)}: "
            "weights and states are exact, random generators and positions in the data begin anew"
        )
