"""`Session.save` and `Session.load`: a folder that any number of ranks writes and any other number reads.

One safetensors file a rank holds its share of the fp32 master of every weight (under the weight's own name,
so that the folder is the export too), the optimizers' states as they are and the rank's random generators;
`manifest.json` holds all else. Here is what goes into the folder and how it comes back; `checkpoint` writes
and reads it.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from halfstep import checkpoint, rng, shardfiles
from halfstep.distributed import gather, local_of, rank, world_size
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, HalfstepError, HalfstepWarning, UnsupportedError
from halfstep.names import fqns
from halfstep.optim.checkpoints import KEPT
from halfstep.optim.masters import holder_of, holders_of, weight_of
from halfstep.optim.shards import as_shard
from halfstep.session.checks import holds_values
from halfstep.session.steppers import weights_of
from halfstep.shardfiles import Piece
from halfstep.torch_private import is_one_box, place_of_shard
from halfstep.trees import parameters_of

if TYPE_CHECKING:
    from halfstep.session import dcp
    from halfstep.session.session import Session

    Found = shardfiles.Index | dcp.Found

#: What is not a weight in the files begins with a dot, which no parameter's name does.
_OWN = (".optimizer.", ".rank.", ".rest.")
_OWN_IN_FORMAT_1 = ("optimizer.", "rank.", "rest.")
_DERIVED = {"master", "lacking", "weight", KEPT}


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds besides the session: `extra` and this rank's `position`, as they were given."""

    extra: Any
    position: Any


# ---- what there is to save ------------------------------------------------------------------------------


def _masters(session: Session) -> dict[int, Tensor]:
    """The fp32 value of every weight that an optimizer keeps one of, by the weight's id."""
    holders = holders_of(session.optimizers)
    return {id(p): value for holder in holders for p, value in holder.masters().items()}


def _tensors(session: Session) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every weight and buffer, by name in the file; and the parameter that it is."""
    for index, model in enumerate(session.models):
        prefix = f"{index}." if len(session.models) > 1 else ""
        by_key = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict()
        short = fqns(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield prefix + short[key], value, by_key.get(key)


def _names(session: Session) -> dict[int, str]:
    """The name in the file of every parameter of the models, by id; of a tied one the first."""
    return {id(p): name for name, _, p in reversed([*_tensors(session)]) if p is not None}


def optimizer_names(session: Session) -> list[list[str]]:
    """The names of each optimizer's parameters, in their order; group and place where no model has one."""
    names = _names(session)
    return [
        [
            names.get(id(weight_of(p)), f"{number}.{place}")
            for number, group in enumerate(optimizer.param_groups)
            for place, p in enumerate(group["params"])
        ]
        for optimizer in session.optimizers
    ]


def _split(t: Tensor, number: int, group: Group | None) -> Piece | None:
    """This rank's piece of a tensor, None where another rank writes it."""
    placed: Any = t
    if local_of(t) is t:
        owner = _owner(number, world_size(group)) if t.dim() else 0  # all counts of steps are in one file
        return Piece.of(t) if owner == rank(group) else None
    placements, mesh = placed.placements, placed.device_mesh
    copies = [mesh.get_local_rank(d) for d, p in enumerate(placements) if p.is_replicate()]
    if any(copies):
        return None
    offsets, _ = _box_of(t, t.shape)
    local = local_of(t).detach()
    return Piece(local, tuple(offsets), tuple(t.shape)) if local.numel() else None


def _owner(number: int, ranks: int) -> int:
    """Which rank writes a tensor that all hold: about the root of all do, whose files a load opens."""
    writers = math.isqrt(ranks - 1) + 1
    return number % writers * (ranks // writers)


def _box_of(like: Tensor, whole: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Where this rank's part of a tensor cut as `like` begins, and its shape; all of one of another shape."""
    if local_of(like) is like or tuple(whole) != tuple(like.shape):
        return [0] * len(whole), whole
    placed: Any = like
    shape, offsets = place_of_shard(like.shape, placed.device_mesh, placed.placements)
    if shape != tuple(local_of(like).shape) or not is_one_box(placed):
        raise UnsupportedError(
            f"a tensor of shape {list(like.shape)} placed {placed.placements} has more than one piece on a "
            "rank, or sizes that its placement does not say: shard dimensions that the ranks divide evenly"
        )
    return offsets, shape


# ---- save -----------------------------------------------------------------------------------------------


def save(
    self: Session,
    path: str | Path,
    *,
    schedulers: Sequence[Any] = (),
    position: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    background: bool = False,
    storage: Any = None,
) -> Any:
    """Write all that a resumed run needs into the folder `path`, whole or not at all; every rank calls.

    One safetensors file a rank: fp32 masters under the weights' names, optimizer states as they are,
    random generators; and a manifest with the SHA-256 of each file. No pickle. Any number of ranks reads
    it, into any master or state format. Returns `path`: as a Path, with `storage` as it was given.

    Args:
        path: a folder on a disk that all ranks see; a checkpoint there is replaced, nothing else.
        schedulers: learning-rate schedulers, in an order that `load` repeats.
        position: where this rank stands in its data: tensors, numbers, strings, nests of these.
        extra: the same on all ranks.
        keep_last: delete older checkpoints beside it beyond this many, by the number its name ends in.
        background: copy everything now and write in a thread while training goes on.
        storage: "dcp" writes through torch.distributed.checkpoint, where `path` may be a URL that fsspec
            knows ("s3://..."), or a StorageWriter of it. A name is then used once, and reading its
            `.metadata` unpickles.

    Raises:
        CheckpointError: a full disk, raised on every rank, a value that cannot be saved, or a folder in
            the way that is no checkpoint. In the background: at the next `save` or `load`, or by
            `wait_until_saved`.
    """
    checkpoint.check_keep(Path(path), keep_last)
    write = _writer_of(path, storage, keep_last)
    contents = _on_every_rank(lambda: _contents(self, schedulers, position, extra), self.group)
    if background:
        self.writer = self.writer or checkpoint.Background()
        self.writer.start(write, contents, self.group)
    else:
        write(contents=contents, group=self.group)
    return Path(path) if storage is None else path


def _on_every_rank(make: Callable[[], checkpoint.Contents], group: Group | None) -> checkpoint.Contents:
    """What `make` gives; where it raises on a rank the others raise a CheckpointError that names it."""
    made, raised = None, None
    try:
        made = make()
    except Exception as error:
        raised = error
    told = gather(None if raised is None else str(raised), group)
    if raised is not None:
        raise raised
    for number, text in enumerate(told):
        if text is not None:
            raise CheckpointError(f"rank {number} cannot save: {text}")
    assert made is not None
    return made


def _contents(session: Session, schedulers: Sequence[Any], position: Any, extra: Any) -> checkpoint.Contents:
    """All that this rank writes; CheckpointError for what cannot be saved, or not now."""
    _check_gradients(session)
    _make_ready(session)
    pieces, group = dict[str, Piece](), session.group
    held: dict[str, Any] = {"": rank(group) if session.stages else 0}
    masters = _masters(session)
    for number, (name, value, p) in enumerate(_tensors(session)):
        shardfiles.check_layout(name, value)
        t = masters.get(id(p), value.detach())
        # Buffers may differ over ranks (batch norm): rank 0's, which DDP hands to all, and all of one rank.
        piece, held[name] = _split(t, 0 if p is None else number, group), tuple(t.shape)
        if piece is not None:
            pieces[name] = piece
    manifest = {**_manifest(session, pieces, schedulers, extra, group), "model": checkpoint.checksum_of(held)}
    mine = dict[str, Tensor]()
    own = {"random": rng.random_state(), "position": position}
    about = {"own": shardfiles.packed(own, f".rank.{rank(group)}", mine.__setitem__)}
    pieces |= {name: Piece.of(value) for name, value in mine.items()}
    return checkpoint.Contents(pieces, {**about, "ranks": world_size(group)}, manifest)


def _check_gradients(session: Session) -> None:
    """Raise CheckpointError where an optimizer has gradients, not 0, of a loss that it has not stepped on."""
    pending = frozenset[int]().union(*(loss.waiting for loss in session.state.losses))
    for index in sorted(pending):
        stepper = session._steppers[index]
        applied = stepper.releases and stepper.optimizer.release.stats(None) is not None
        if applied or holds_values(stepper.optimizer):
            raise CheckpointError(
                "save() between backward() and step(): gradients are not saved. Call step() first, or "
                "zero_grad() to drop them"
            )


def _writer_of(path: str | Path, storage: Any, keep_last: int | None) -> Callable[..., None]:
    if storage is None:
        return partial(checkpoint.write_folder, checkpoint.local(path), keep_last=keep_last)
    from halfstep.session import dcp

    dcp.check(storage, dcp.StorageWriter, keep_last)
    return partial(dcp.write, str(path), keep_last=keep_last, storage=storage)


def _make_ready(session: Session) -> None:
    if session.evaluates:
        raise CheckpointError(
            "save() or load() inside `with amp.evaluating()`, where the weights are stand-ins: call it "
            "after the block"
        )
    wait_until_saved(session)
    for module in (m for model in session.models for m in model.modules()):
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            cast(Any, module).reshard()  # whole since a forward without backward


def wait_until_saved(self: Session) -> None:
    """Return when no save in the background is under way; CheckpointError where the last one failed.

    Every rank calls it, before `destroy_process_group` above all.
    """
    if self.writer is not None:
        self.writer.wait()


def _manifest(
    session: Session,
    pieces: dict[str, Piece],
    schedulers: Sequence[Any],
    extra: Any,
    group: Group | None,
) -> dict[str, Any]:
    def put(numbers: Iterator[int], at: str, value: Tensor) -> None:
        if (piece := _split(value, next(numbers), group)) is not None:
            pieces[at] = piece

    shared, of_rank_0 = partial(put, itertools.count(1)), partial(put, itertools.repeat(0))
    optimizers = list[Any]()
    for index, (optimizer, own) in enumerate(zip(session.optimizers, optimizer_names(session))):
        state = optimizer.state_dict()
        optimizers.append(
            {
                "algorithm": checkpoint.algorithm_of(optimizer),
                "names": own,
                "sizes": [len(group["params"]) for group in optimizer.param_groups],
                "state": {
                    own[key]: {
                        what: shardfiles.packed(value, f".optimizer.{index}.{own[key]}.{what}", shared)
                        for what, value in entry.items()
                        if what not in _DERIVED
                    }
                    for key, entry in state["state"].items()
                },
                "groups": [
                    shardfiles.packed(
                        {k: v for k, v in options.items() if k not in ("params", "release")},
                        f".optimizer.{index}.group.{i}",
                        of_rank_0,
                    )
                    for i, options in enumerate(state["param_groups"])
                ],
            }
        )
    rest = {
        "schedulers": [s.state_dict() for s in schedulers],
        "extra": extra,
        "session": session.state_dict(),
    }
    return {
        "format": checkpoint.FOLDER_FORMATS[-1],
        "halfstep": sys.modules["halfstep"].__version__,
        "torch": torch.__version__,
        "ranks": world_size(group),
        "threads": torch.get_num_threads(),
        "optimizers": optimizers,
        "rest": shardfiles.packed(rest, ".rest", of_rank_0),
    }


# ---- load -----------------------------------------------------------------------------------------------


def load(self: Session, path: str | Path, *, schedulers: Sequence[Any] = (), storage: Any = None) -> Loaded:
    """Go on from what `save` wrote, on as many ranks as there are now; every rank calls.

    Model, optimizers, level and policy must be those that were saved; master and state formats may
    differ, and so may the order of an optimizer's groups, which are matched by the names of their
    parameters. `storage` is "dcp" for what was saved with it, or a StorageReader of
    torch.distributed.checkpoint. Returns `extra` and this rank's `position` (None where the number of
    ranks changed, which is said). Raises CheckpointError on every rank, with nothing changed, for a damaged
    or other checkpoint.
    """
    _make_ready(self)
    if storage is not None:
        from halfstep.session import dcp

        dcp.check(storage, dcp.StorageReader)
        read = dcp.read(str(path), partial(_boxes, self), self.group, storage)
        return _load(self, read.manifest, read, schedulers)
    path, manifest = checkpoint.read_manifest(checkpoint.local(path), self.group)
    with _damage_named():
        index = shardfiles.Index(path, manifest["files"], manifest.get("index"))
    with closing(index) as found:
        return _load(self, manifest, found, schedulers)


def _boxes(session: Session, wholes: Mapping[str, Sequence[int]]) -> dict[str, tuple[Any, Any]]:
    """This rank's part of every saved tensor."""
    likes = {name: t for name, t, _ in _tensors(session)}
    for index, (optimizer, own) in enumerate(zip(session.optimizers, optimizer_names(session))):
        likes |= {f".optimizer.{index}.{name}": w for name, w in zip(own, weights_of(optimizer))}
    plain = torch.empty(0, device="cpu")
    cut = {name: likes.get(name, likes.get(name.rpartition(".")[0], plain)) for name in wholes}
    return {name: _box_of(cut[name], whole) for name, whole in wholes.items()}


class _Content(NamedTuple):
    """What a checkpoint holds for this rank but the weights, read and checked."""

    rest: Mapping[str, Any]
    optimizers: list[dict[str, Any]]
    rank: Mapping[str, Any] | None
    """Random generators and position; None where the number of ranks changed."""


def _load(self: Session, manifest: Mapping[str, Any], found: Found, schedulers: Sequence[Any]) -> Loaded:
    content, error = None, None
    try:
        with _damage_named():
            content = _read(self, manifest, found, schedulers)
    except HalfstepError as raised:
        error = raised
    told = gather(None if error is None else (str(error), getattr(error, "damaged", False)), self.group)
    if error is not None:
        raise error
    for text, damaged in filter(None, told):
        raise CheckpointError(text, damaged=damaged)
    assert content is not None
    with _undone_on_error(self, schedulers):
        self.load_state_dict(content.rest["session"])
        for optimizer, state in zip(self.optimizers, content.optimizers):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(schedulers, content.rest["schedulers"]):
            scheduler.load_state_dict(state)
    _load_weights(self, found)
    if content.rank is not None:
        rng.load_random_state(content.rank["random"])
    _warn_of_ranks_and_threads(manifest, self.group)
    return Loaded(content.rest["extra"], None if content.rank is None else content.rank["position"])


@contextmanager
def _damage_named() -> Generator[None]:
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
def _undone_on_error(session: Session, schedulers: Sequence[Any]) -> Generator[None]:
    """Put session, optimizers and schedulers back where one of them refuses its state."""
    restore, kernels = session.remember(), session.kernels
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


def _read(session: Session, manifest: Mapping[str, Any], found: Found, schedulers: Sequence[Any]) -> _Content:
    """Read and check all that a checkpoint holds, but for the weights' values, and change nothing."""
    _check(session, manifest, found, schedulers)
    used = set[str]()

    def read(name: str, *box: Sequence[int]) -> Tensor:
        used.add(name)
        return found.read(name, *box)

    rest = shardfiles.unpacked(manifest["rest"], read)
    session._restored(rest["session"])
    rest["extra"]  # a KeyError now
    for number, (scheduler, state) in enumerate(zip(schedulers, rest["schedulers"], strict=True)):
        if type(scheduler).__module__.startswith("torch."):  # what others keep is theirs to change
            _check_options(f"scheduler {number}", state, scheduler.state_dict(), whole=True)
    states = list[dict[str, Any]]()
    for optimizer, names, saved in zip(session.optimizers, optimizer_names(session), manifest["optimizers"]):
        states.append(_read_optimizer(optimizer, names, saved, found.wholes, read))
    private = (".optimizer.", ".rest.") if manifest["format"] != 1 else ("optimizer.", "rest.")
    if unused := [name for name in found.wholes if name.startswith(private) and name not in used]:
        raise CheckpointError(
            f"the checkpoint is damaged: its manifest leaves out {len(unused)} of its tensors, the first "
            f"{unused[0]!r}",
            damaged=True,
        )
    for name, value, _ in _tensors(session):
        found.check(name, *_box_of(value, found.wholes[name]))
    return _Content(rest, states, _rank_content(session, manifest, found))


def _rank_content(session: Session, manifest: Mapping[str, Any], found: Found) -> Mapping[str, Any] | None:
    """This rank's random generators and position, tried once; None where the number of ranks changed."""
    if not all(type(manifest[key]) is int for key in ("ranks", "threads")):
        raise ValueError("ranks and threads are whole numbers")
    if manifest["ranks"] != world_size(session.group):
        return None
    mine = rank(session.group)
    content = shardfiles.unpacked(found.about(mine)["own"], partial(found.private, mine))
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
    here: Mapping[str, Any],
    whole: bool = False,
    empty: Collection[str] = (),
) -> None:
    """Raise CheckpointError where saved options are of other kinds than those here; `empty` ones may be None.

    With `whole`, also where a public one is missing.
    """
    for key, value in here.items():
        if key not in saved and whole and not key.startswith("_"):
            raise CheckpointError(f"the checkpoint's {what} has no {key!r}: it is another one's")
        if key not in saved or (saved[key] is None and (value is None or key in empty)):
            continue
        given, expected = _kind_of(saved[key]), _kind_of(value)
        if value is not None and given != expected:
            raise CheckpointError(f"the checkpoint's {what} has a {given} as {key!r}, expected a {expected}")


def _kind_of(value: Any) -> str:
    kinds = {
        "flag": bool,
        "number": (int, float, Tensor),
        "text": str,
        "sequence": (list, tuple),
        "mapping": Mapping,
    }
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)


def _check(session: Session, manifest: Mapping[str, Any], found: Found, schedulers: Sequence[Any]) -> None:
    """Raise CheckpointError before anything is changed."""
    own = _OWN_IN_FORMAT_1 if manifest["format"] == 1 else _OWN
    saved = {n: list(shape) for n, shape in found.wholes.items() if not n.startswith(own)}
    checkpoint.check_shapes(saved, {name: list(t.shape) for name, t, _ in _tensors(session)})
    algorithms = [one["algorithm"] for one in manifest["optimizers"]]
    here = [checkpoint.algorithm_of(o) for o in session.optimizers]
    if algorithms != here:
        raise CheckpointError(
            f"the checkpoint is of other optimizers: {algorithms} saved it, here are {here}"
        )
    for optimizer, names, saved in zip(session.optimizers, optimizer_names(session), manifest["optimizers"]):
        sources = _match_groups(optimizer, names, saved)
        if schedulers and sources != sorted(sources):
            raise CheckpointError(
                "the optimizer's parameter groups stand in another order than when it was saved, and "
                "schedulers keep learning rates by that order: build the groups in the saved order"
            )
    ((kind, held),) = dict(manifest["rest"]["dict"])["schedulers"].items()
    count = len(held[1] if kind == "rows" else held)
    checkpoint.check_schedulers(count, len(schedulers))


def _box(found: Found, name: str, like: Tensor) -> Tensor:
    """This rank's part of a saved tensor, cut as `like` is."""
    return found.read(name, *_box_of(like, found.wholes[name]))


def _read_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    saved: Mapping[str, Any],
    wholes: Mapping[str, Sequence[int]],
    read: Callable[..., Tensor],
) -> dict[str, Any]:
    """The state dict that a checkpoint holds for an optimizer; it is matched by names and changes nothing."""
    state: dict[int, Any] = {}
    for number, (name, p) in enumerate(zip(names, parameters_of(optimizer))):

        def cut(place: str, p: Tensor = p, name: str = name) -> Any:
            if f".{name}." not in place:
                raise ValueError(f"{place!r} as a state of {name!r}")
            return as_shard("", _laid_out(read(place, *_box_of(p, wholes[place])), local_of(p)), p)

        if entry := saved["state"].get(name):
            state[number] = {what: shardfiles.unpacked(value, cut) for what, value in entry.items()}
    groups = list[Any]()
    optional = {
        option
        for kind in type(optimizer).__mro__
        for option, about in inspect.signature(kind.__init__).parameters.items()
        if about.default is None
    }
    sources = _match_groups(optimizer, names, saved)
    for number, (source, new) in enumerate(zip(sources, optimizer.state_dict()["param_groups"])):
        options = shardfiles.unpacked(saved["groups"][source], read)
        _check_options(f"parameter group {number}", options, new, empty=optional)
        keeps = {key: new[key] for key in ("params", "param_names") if key in new}
        defaults = {key: new[key] for key in optimizer.defaults if key in new}
        groups.append({**defaults, **{k: v for k, v in options.items() if k != "param_names"}, **keeps})
    return {"state": state, "param_groups": groups}


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A value with the strides of `like`, where it has its shape: torch's fused optimizers walk memory."""
    if value.shape != like.shape or like.is_contiguous():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def _match_groups(
    optimizer: torch.optim.Optimizer, names: Sequence[str], saved: Mapping[str, Any]
) -> list[int]:
    """Which saved group each of the optimizer's is, by the names of its parameters.

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
def _load_weights(session: Session, found: Found) -> None:
    names = _names(session)
    for optimizer in session.optimizers:
        held = [p for p in weights_of(optimizer) if id(p) in names]
        if (holder := holder_of(optimizer)) is not None:
            holder.seed_masters({p: _box(found, names[id(p)], p).float() for p in held})
    known = set(_masters(session))
    for name, value, p in _tensors(session):
        if id(p) not in known:
            local_of(value).copy_(_box(found, name, value))


def _warn_of_ranks_and_threads(manifest: Mapping[str, Any], group: Group | None) -> None:
    checkpoint.warn_if_threads_differ(manifest["threads"])
    if manifest["ranks"] != world_size(group):
        warnings.warn(
            f"the checkpoint was written by {manifest['ranks']} ranks and is read by {world_size(group)}: "
            "weights and states are exact, random generators and positions in the data begin anew",
            HalfstepWarning,
            stacklevel=4,
        )
