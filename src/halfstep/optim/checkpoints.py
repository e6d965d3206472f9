"""Optimizer states as files hold them, of any master and state format, for optimizers of any other.

A saved entry describes itself: the moments' own dtype, `<name>_exponents` beside 8-bit codes, `master` or
`lacking` for the weight, and `weight`, which 16-bit weight the lacking bits belong to. What the target
holds in the same form is copied bit for bit; anything else goes through fp32. A file is read whole, and
refused by name where it does not fit, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, ConfigError
from halfstep.kernels import codes as L
from halfstep.optim import arguments, entries, shards, split, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.storage import CODES, EXPONENTS

if TYPE_CHECKING:
    from halfstep.optim.base import OnePassOptimizer

Group = dict[str, Any]
Restored = tuple[Group, Tensor | None]
OWN_OPTIONS = ("params", "param_names", "master", "state_dtype", "release", "algorithm")
"""What a group keeps of its own when a checkpoint is loaded."""
MASTERS = "masters"
"""What `MasterWeights` saves: fp32 masters by name."""
PLACES = "master_places"
"""Beside `masters`: which parameter of the optimizer each is of, counted over all groups."""
KEPT = "kept_by_halfstep"
"""Beside an fp32 master: torch's optimizers, which leave a master behind as they train, make it a float."""
WIDE = torch.int32
"""What lacking bits of shards are saved as: no backend gathers 16-bit integers."""
OF_MASTERS = ("master", "lacking", "weight", KEPT)
"""Under which a saved entry holds what a weight has besides its 16 bits."""
_EXACTLY = (L.PLAIN, *storage.EXACT, *storage.WITH_MASTER)
_DTYPES = {L.BF16: torch.bfloat16, L.FP16: torch.float16}


def pack(entry: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return an entry of the state as a checkpoint holds it."""
    weight, packed = local_of(p), {key: value for key, value in entry.items() if key != "weight"}
    if "master" in packed:
        packed[KEPT] = torch.zeros((), dtype=WIDE, device="cpu")
    if "lacking" not in packed:
        return packed
    if weight.dtype not in _DTYPES.values():  # made wider since the last step, which ended its master
        del packed["lacking"]
        return packed
    packed["weight"] = split.describe_weight(weight, whole=weight is p)
    if weight is not p:
        packed["lacking"] = packed["lacking"].to(WIDE)
    return packed


def _unpack(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Undo `pack`."""
    entry: dict[str, Any] = {}
    for key, value in saved.items():
        if key.endswith(CODES):
            if value.dtype != torch.uint8:
                raise CheckpointError(
                    f"the saved {key} of {name} are {value.dtype}, expected uint8: another optimizer has "
                    "cast these 8-bit states; save with state_dtype='fp32' to go through it"
                )
            key = key.removesuffix(CODES)
        entry[key] = value.to(torch.int16) if key == "lacking" and value.dtype == WIDE else value
    return entry


@torch.no_grad()
def restore(
    name: str,
    saved: Mapping[str, Any],
    p: Tensor,
    formats: tuple[Algorithm, int, int],
    present: Callable[[], Tensor] | None = None,
    dry: bool = False,
) -> Restored:
    """Return the state entry of `p` from a saved one of any format, and the value of `p` by its master.

    `formats`: algorithm, format of the weight and of its states; `present` gives the fp32 value of `p`, where
    the optimizer that loads keeps more of it than its 16 bits. `dry`: check it all, and make tensors on meta.
    """
    algorithm, kind, state_kind = formats
    saved = _unpack(saved, name)
    _check_entry(name, saved, p, algorithm)
    keys = ("step", *algorithm.states, *(key + EXPONENTS for key in algorithm.states))
    saved_values = {key: saved[key] for key in keys if saved.get(key) is not None}
    like, state = torch.empty_like(p, device="meta") if dry else p, dict[str, Any]()
    for key, value in saved_values.items():
        held = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        state[key] = held.to("meta") if dry and held.dim() else held.clone()
    trains, lacking, value = p.requires_grad or bool(state), saved.get("lacking"), None
    if not has_master(saved):
        value = None if present is None else local_of(present())
    elif kind not in _EXACTLY and "master" not in saved and _dtype_of(saved, p) != p.dtype:
        pass  # there is no place for them, and the weight is the model's
    elif kind in storage.EXACT and lacking is not None and _dtype_of(saved, p) == p.dtype:
        state["lacking"] = torch.empty_like(like, dtype=torch.int16).copy_(lacking)
        state["weight"] = saved.get("weight") or split.describe_weight(p, whole=False)  # may come after them
    else:
        value = master_value(name, saved, p, present, must_match=kind in (L.PLAIN, *storage.EXACT))
    value = None if dry else value
    weight = None if value is None else p.detach().clone()
    if value is not None and kind in storage.WITH_MASTER and value is not saved.get("master"):
        state["master"] = value  # which has its memory then
    try:
        target = like if weight is None else weight
        if trains:
            entries.normalize_entry(state, target, algorithm, kind, state_kind, name, value)
        else:
            entries.normalize_master(state, target, kind, value)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint does not fit: {error}") from error
    return state, weight


def has_master(saved: Mapping[str, Any]) -> bool:
    """Whether a saved entry says which fp32 weight it belongs to.

    Not where one of torch's optimizers, which train the weight alone, has had it since: they cast integers.
    """
    marker = saved.get(KEPT) if "master" in saved else saved.get("lacking")
    return marker.dtype in (torch.int16, WIDE) if marker is not None else "master" in saved


def _check_entry(name: str, saved: Mapping[str, Any], p: Tensor, algorithm: Algorithm) -> None:
    keys = {"step", *OF_MASTERS, *algorithm.states, *(key + EXPONENTS for key in algorithm.states)}
    if not algorithm.states:
        keys.update(("momentum_buffer", "momentum_buffer" + EXPONENTS))  # SGD without momentum leaves them
    strange = [key for key, value in saved.items() if key not in keys and isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(
            f"the saved state of {name} has {', '.join(map(repr, strange))}, which {algorithm.name} does not "
            "keep: it is another optimizer's (or has amsgrad, and this one has not)"
        )
    for key in (*algorithm.states, "master", "lacking"):
        if isinstance(saved.get(key), Tensor) and saved[key].shape != p.shape:
            raise CheckpointError(
                f"the saved {key} of {name} has shape {list(saved[key].shape)}, the parameter {list(p.shape)}"
            )


def _dtype_of(saved: Mapping[str, Any], p: Tensor) -> torch.dtype:
    description = saved.get("weight")
    return _DTYPES[description["format"]] if description else p.dtype


def master_value(
    name: str,
    saved: Mapping[str, Any],
    p: Tensor,
    present: Callable[[], Tensor] | None = None,
    *,
    must_match: bool = True,
) -> Tensor | None:
    """Return the fp32 weight of the saved entry, or None where it holds none; `present` as for `restore`.

    CheckpointError for one of another weight; for a whole master only where the weight `must_match`: nothing
    beside it keeps the master until the weight comes, or only the bits of another rounding.
    """
    if not has_master(saved):
        return None
    values = (local_of(make()) for make in (present, p.detach) if make is not None)  # the exact one first
    if "master" in saved:
        value = cast(Tensor, saved["master"]).to(p.device)
        if not must_match or any(_of_one_weight(weight, value) for weight in values):
            return value
    else:
        dtype, description = _dtype_of(saved, p), saved.get("weight")
        for half in (weight.detach().to(dtype) for weight in values):
            if description is None or split.is_described(half, description, p.dtype):
                return split.join(half, torch.empty_like(p, dtype=torch.int16).copy_(saved["lacking"]))
    raise CheckpointError(
        f"the saved state of {name} holds an fp32 master, and the weight it belongs to is not in the "
        "model: load the model's weights before the optimizer's, both after prepare() where it was saved "
        "with other 16 bits"
    )


def into_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each of its `masters` in its parameter's entry, as `halfstep.optim` saves it.

    CheckpointError where the state does not say which parameter a master is of.
    """
    rest = {key: value for key, value in state.items() if key not in (MASTERS, PLACES)}
    masters = state.get(MASTERS)
    if masters is None:
        return rest
    if not isinstance(masters, Mapping) or not all(isinstance(value, Tensor) for value in masters.values()):
        raise CheckpointError(f"saved masters are tensors by name, got {masters!r:.60}")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = state.get(PLACES, range(len(numbers)))
    if len(places) != len(masters) or any(place not in range(len(numbers)) for place in places):
        raise CheckpointError(
            f"the saved optimizer has {len(numbers)} parameters and {len(masters)} fp32 masters, and does "
            "not say whose they are: load it at the level and into the kind of optimizer that saved it, and "
            "save anew"
        )
    states = dict(state["state"])
    for place, value in zip(places, masters.values()):
        states[numbers[place]] = {**states.get(numbers[place], {}), "master": value}
    return {**rest, "state": states}


@torch.no_grad()
def _of_one_weight(weight: Tensor, value: Tensor) -> bool:
    """Whether a weight (fp32 or 16-bit) and an fp32 master can be of one 16-bit weight, in every element."""
    return all(_alike(*part) for part in split.parts(weight, value.to(weight.device)))


def _alike(own: Tensor, value: Tensor) -> bool:
    own, value = own.float(), value.float()
    half = value.half()
    same = (own == value) | (own.isnan() & value.isnan())
    same |= (own == half.float()) | (own == half.bfloat16().float()) | (own.half() == half)
    for rounded in (split.round_away, Tensor.bfloat16):
        low = rounded(value)
        same |= (own == low.float()) | (own == low.half().float()) | (rounded(own) == low)
    return bool(same.all())


# ---- reading a file ----------------------------------------------------------------------------------------


def read(
    optimizer: OnePassOptimizer, state_dict: Mapping[str, Any], local: bool = False
) -> tuple[list[Group], dict[Tensor, partial[Restored]]]:
    """Return the state of an optimizer after it loads `state_dict`; CheckpointError where that does not fit.

    The options of each group, and for each parameter what makes this rank's state and, where a master says
    so, its part of the weight. `local`: a state without masters, of this rank's tensors or ones on meta.
    """
    saved_groups = state_dict["param_groups"]
    sources = match_groups(optimizer.param_groups, saved_groups)
    stays = {*OWN_OPTIONS, *optimizer._fixed_options}
    groups = [
        _options(optimizer, group, saved, stays) for group, saved in zip(optimizer.param_groups, saved_groups)
    ]
    saved_states: dict[Tensor, partial[Restored]] = {}
    for p, _, place in optimizer._places():
        saved, group = state_dict["state"].get(sources[place]), groups[place[0]]
        keeps = any(key in optimizer.state.get(p, {}) for key in storage.MASTER_KEYS)
        if saved is None and (p.requires_grad or not keeps):  # a frozen one has no state but its master
            continue
        present = partial(optimizer.master_of, p) if keeps and not local else None
        restore_here = partial(
            optimizer._restore, arguments.name_of(group, place), group=group, present=present
        )
        saved_states[p] = partial(_restore_entry, p, saved or {}, restore_here, local)
        saved_states[p](dry=True)
    return [{k: v for k, v in group.items() if k != "params"} for group in groups], saved_states


def _restore_entry(
    p: Tensor, saved: Mapping[str, Any], restore_here: Any, local: bool, dry: bool = False
) -> Restored:
    own = saved if local else {key: shards.local_part(key, value, p) for key, value in saved.items()}
    return restore_here(saved=own, weight=local_of(p), dry=dry)


def _options(
    optimizer: OnePassOptimizer, group: Group, saved: Mapping[str, Any], stays: Collection[str]
) -> Group:
    options = {**group, **{k: v for k, v in saved.items() if k not in stays}}
    if "param_names" in saved:
        options.setdefault("param_names", saved["param_names"])
    optimizer._check_group(options)
    return options


def match_groups(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, int], Any]:
    """Return the saved parameter's key of each (group, position); CheckpointError where they do not fit."""
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
        raise CheckpointError(
            f"the saved optimizer has groups of {[len(g['params']) for g in saved]} parameters, "
            f"this one of {[len(g['params']) for g in groups]}"
        )
    sources: dict[tuple[int, int], Any] = {}
    for g, (ours, theirs) in enumerate(zip(groups, saved)):
        order = list(theirs["params"])
        names, saved_names = ours.get("param_names"), theirs.get("param_names")
        if names and saved_names:
            by_name = dict(zip(saved_names, order))
            missing = [name for name in names if name not in by_name]
            if missing:
                raise CheckpointError(f"the saved optimizer has no state for {', '.join(missing[:5])}")
            order = [by_name[name] for name in names]
        sources.update({(g, i): key for i, key in enumerate(order)})
    return sources
