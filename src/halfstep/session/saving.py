"""`Session.save`: a folder that any number of ranks writes and any other number reads.

One safetensors file a rank holds its share of the fp32 master of every weight (under the weight's own name,
so that the folder is the export too), the optimizers' states as they are and the rank's random generators;
`manifest.json` holds all else. Here is what goes into the folder and how it comes back; `checkpoint` writes
and reads it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from halfstep import checkpoint, rng, shardfiles
from halfstep.devices import refuse_reading
from halfstep.distributed import local_of, rank, world_size
from halfstep.distributed.reduce import Group
from halfstep.errors import CheckpointError, UnsupportedError
from halfstep.names import fqns
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.checkpoints import KEPT
from halfstep.optim.masters import holders_of, weight_of
from halfstep.session.checks import has_nonzero
from halfstep.shardfiles import Piece
from halfstep.torch_private import is_one_box, place_of_shard

if TYPE_CHECKING:
    from halfstep.session.session import Session

_DERIVED = {"master", "lacking", "weight", KEPT}
Named = tuple[str, Tensor, Tensor | None]  # its name in the file, a tensor, and the parameter that it is


# ---- what there is to save ------------------------------------------------------------------------------


def _masters(session: Session) -> dict[int, Tensor | Callable[[Any], Tensor]]:
    """Return the fp32 value of every weight that an optimizer keeps one of, by the weight's id.

    Of an optimizer of `halfstep.optim` it is what gives those of some rows of this rank's part.
    """
    masters: dict[int, Any] = {}
    for holder in holders_of(session.optimizers):
        is_one_pass = isinstance(holder, OnePassOptimizer)
        masters |= {
            id(p): value for p, value in (holder._readers() if is_one_pass else holder.masters()).items()
        }
    return masters


def tensors_of(session: Session) -> Iterator[Named]:
    """Yield every weight and buffer, by name in the file; and the parameter that it is."""
    for index, model in enumerate(session.models):
        prefix = f"{index}." if len(session.models) > 1 else ""
        by_key = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict()
        short = fqns(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield prefix + short[key], value, by_key.get(key)


def names_in(tensors: list[Named]) -> dict[int, str]:
    """Return the name in the file of every parameter of the models, by id; of a tied one the first."""
    return {id(p): name for name, _, p in reversed(tensors) if p is not None}


def optimizer_names(session: Session, tensors: list[Named] | None = None) -> list[list[str]]:
    """The names of each optimizer's parameters, in their order; group and place where no model has one."""
    names = names_in([*tensors_of(session)] if tensors is None else tensors)
    return [
        [
            names.get(id(weight_of(p)), f"{number}.{place}")
            for number, group in enumerate(optimizer.param_groups)
            for place, p in enumerate(group["params"])
        ]
        for optimizer in session.optimizers
    ]


def undescribed_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return its state dict; one of `halfstep.optim` does not say which weights its masters belong to."""
    is_one_pass = isinstance(optimizer, OnePassOptimizer)
    return optimizer._undescribed_state() if is_one_pass else optimizer.state_dict()


def _piece_of(t: Tensor, number: int, group: Group | None) -> Piece | None:
    """This rank's piece of a tensor, None where another rank writes it."""
    placed: Any = t
    if local_of(t) is t:
        owner = _owner(number, world_size(group)) if t.dim() else 0  # all counts of steps are in one file
        return Piece.of(t) if owner == rank(group) else None
    placements, mesh = placed.placements, placed.device_mesh
    copies = [mesh.get_local_rank(d) for d, p in enumerate(placements) if p.is_replicate()]
    if any(copies):
        return None
    offsets, _ = box_of(t, t.shape)
    local = local_of(t).detach()
    return Piece(local, tuple(offsets), tuple(t.shape)) if local.numel() else None


def _owner(number: int, ranks: int) -> int:
    """Return which rank writes a tensor that all hold: about sqrt(ranks) of them share these."""
    writers = math.isqrt(ranks - 1) + 1
    return number % writers * (ranks // writers)


def box_of(like: Tensor, whole: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
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
    make = partial(_contents, self, schedulers, position, extra)
    contents = checkpoint.on_every_rank(make, self.group, "rank {rank} cannot save: {text}")
    if background:
        self.writer = self.writer or checkpoint.Background()
        self.writer.start(write, contents, self.group)
    else:
        write(contents=contents, group=self.group)
    return Path(path) if storage is None else path


def _contents(session: Session, schedulers: Sequence[Any], position: Any, extra: Any) -> checkpoint.Contents:
    """Return all that this rank writes; CheckpointError for what cannot be saved, or not yet."""
    make_ready(session)
    _check_gradients(session)
    _check_spread(session)
    pieces, group = dict[str, Piece](), session.group
    shapes: dict[str, Any] = {"": rank(group) if session.stages else 0}
    masters = _masters(session)
    for number, (name, value, p) in enumerate(tensors_of(session)):
        shardfiles.check_layout(name, value)
        master = masters.get(id(p), value.detach())
        t = master if isinstance(master, Tensor) else cast(Tensor, p).detach()
        # Buffers may differ over ranks (batch norm): rank 0's, which DDP hands to all, and all of one rank.
        piece, shapes[name] = _piece_of(t, 0 if p is None else number, group), tuple(t.shape)
        if piece is not None:
            pieces[name] = piece if isinstance(master, Tensor) else replace(piece, widen=master)
    manifest = {
        **_manifest(session, pieces, schedulers, extra, group),
        "model": checkpoint.checksum_of(shapes),
    }
    mine = dict[str, Tensor]()
    rank_content = {"random": rng.random_state(), "position": position}
    about = {"own": shardfiles.pack(rank_content, f".rank.{rank(group)}", mine.__setitem__)}
    pieces |= {name: Piece.of(value) for name, value in mine.items()}
    return checkpoint.Contents(pieces, {**about, "ranks": world_size(group)}, manifest)


def _check_gradients(session: Session) -> None:
    """Raise CheckpointError where an optimizer has gradients, not 0, of a loss that it has not stepped on."""
    pending = frozenset[int]().union(*(loss.pending for loss in session.state.losses))
    for index in sorted(pending):
        stepper = session._steppers[index]
        if stepper.releases and stepper.optimizer.release.stats(None) is not None:
            raise CheckpointError(
                "save() between backward() and step(), where released gradients are applied already: call "
                "step() first, which ends that step"
            )
        if has_nonzero(stepper.optimizer):
            raise CheckpointError(
                "save() between backward() and step(): gradients are not saved. Call step() first, or "
                "zero_grad() to drop them"
            )


def _check_spread(session: Session) -> None:
    """Raise CheckpointError for an optimizer that gives its state on one rank alone."""
    for optimizer in session.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise CheckpointError(
                f"save() with {type(optimizer).__name__}, which keeps each state on one rank, and gives all "
                "on one alone: call optimizer.consolidate_state_dict(to=0) on every rank, and save the "
                "state_dict() of model, optimizer and session on rank 0. Or shard with "
                "hs.distributed.shard(model), which save() writes from every rank"
            )


def _writer_of(path: str | Path, storage: Any, keep_last: int | None) -> Callable[..., None]:
    if storage is None:
        return partial(checkpoint.write_folder, checkpoint.local(path), keep_last=keep_last)
    from halfstep.session import dcp

    dcp.check(storage, dcp.StorageWriter, keep_last)
    return partial(dcp.write, str(path), keep_last=keep_last, storage=storage)


def make_ready(session: Session) -> None:
    """Before a save or a load: wait for the save under way; CheckpointError where weights are stand-ins."""
    refuse_reading(session.device, "amp.save() or amp.load()")
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
        if (piece := _piece_of(value, next(numbers), group)) is not None:
            pieces[at] = piece

    shared, of_rank_0 = partial(put, itertools.count(1)), partial(put, itertools.repeat(0))
    optimizers = list[Any]()
    for index, (optimizer, names) in enumerate(zip(session.optimizers, optimizer_names(session))):
        state = undescribed_state(optimizer)
        optimizers.append(
            {
                "algorithm": checkpoint.algorithm_of(optimizer),
                "names": names,
                "sizes": [len(group["params"]) for group in optimizer.param_groups],
                "state": {
                    names[key]: {
                        what: shardfiles.pack(value, f".optimizer.{index}.{names[key]}.{what}", shared)
                        for what, value in entry.items()
                        if what not in _DERIVED
                    }
                    for key, entry in state["state"].items()
                },
                "groups": [
                    shardfiles.pack(
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
        "format": checkpoint.FOLDER_FORMAT,
        "halfstep": sys.modules["halfstep"].__version__,
        "torch": torch.__version__,
        "ranks": world_size(group),
        "threads": torch.get_num_threads(),
        "optimizers": optimizers,
        "rest": shardfiles.pack(rest, ".rest", of_rank_0),
    }
