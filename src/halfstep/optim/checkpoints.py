"""Optimizer checkpoints that load into another master or state format.

A saved entry describes itself: the moments' own dtype, `<name>_exponents` beside 8-bit codes, `master` or
`lacking` for the weight, and `weight`, which 16-bit weight the lacking bits belong to. What the target
holds in the same form is copied bit for bit; anything else goes through fp32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.errors import CheckpointError, ConfigError
from halfstep.kernels import codes as L
from halfstep.optim import entries, split, storage
from halfstep.optim.algorithms import Algorithm

OWN_OPTIONS = ("params", "param_names", "master", "state_dtype", "release", "algorithm")
"""What a group keeps of its own when a checkpoint is loaded."""
CODES = "_codes"
"""Ends the names of 8-bit moments in a file: whoever cannot read codes must not find moments there."""
EXPONENTS = "_exponents"
"""Ends the names of what belongs to 8-bit moments: an exponent a block, rows first."""
UNSUMMED = 1 << 62
"""In the place of a checksum: no rank knows that of a whole weight, of which each has a shard."""
WIDE = torch.int32
"""What lacking bits of shards are saved as: no backend gathers 16-bit integers."""
_OF_ENTRIES = ("step", "master", "lacking", "weight")
_EXACTLY = (L.PLAIN, *storage.EXACT, *storage.WITH_MASTER)
_DTYPES = {L.BF16: torch.bfloat16, L.FP16: torch.float16}


def describe_weight(p: Tensor) -> dict[str, Any]:
    """The format and a checksum of a 16-bit weight, by which its lacking bits know it again.

    Numbers only: torch's own optimizers take a string apart on the way through.
    """
    total = p.detach().view(torch.int16).sum(dtype=torch.int64)
    return {"format": L.BF16 if p.dtype == torch.bfloat16 else L.FP16, "sum": int(total)}


def of_shards(described: Mapping[str, Any]) -> dict[str, Any]:
    """What `describe_weight` says of a shard or of a whole weight that is cut up, as all ranks can say it."""
    return {**described, "sum": UNSUMMED}


def is_described(half: Tensor, known: Mapping[str, Any], came_as: torch.dtype) -> bool:
    """Whether `known` describes the 16-bit weight `half`, as far as it says; `came_as`: the model's dtype."""
    if known["sum"] == UNSUMMED:
        return came_as in (half.dtype, torch.float32)
    return describe_weight(half) == known


def pack(entry: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """An entry of the state as a checkpoint holds it."""
    codes = {key for key in entry if key + EXPONENTS in entry}
    packed = {key + CODES if key in codes else key: value for key, value in entry.items()}
    if "lacking" not in entry:
        return packed
    weight, awaited = local_of(p), packed.pop("weight", None)
    if weight.dtype not in _DTYPES.values():  # made wider since the last step, which ended its master
        del packed["lacking"]
        return packed
    if awaited is None or is_described(weight, awaited, weight.dtype):
        packed["weight"] = describe_weight(weight)
    else:
        packed["weight"] = awaited
    if weight is not p:
        packed.update(weight=of_shards(packed["weight"]), lacking=packed["lacking"].to(WIDE))
    return packed


def _unpack(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`pack` undone."""
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
    present: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor | None]:
    """The state entry of `p` from a saved one of any format, and what `p` then is where a master says so.

    `formats`: algorithm, format of the weight and of its states; `present`: the fp32 value of `p`, where the
    optimizer that loads knows more of it than its 16 bits.
    """
    algorithm, kind, state_kind = formats
    if any(isinstance(saved.get(key), Mapping) for key in algorithm.states):
        raise CheckpointError(
            f"the saved 8-bit states of {name} lost their codes: torch's flattened form cannot carry them; "
            "save with flatten_optimizer_state_dict=False, or with Session.save"
        )
    saved = _unpack(saved, name)
    _check_entry(name, saved, p, algorithm)
    state: dict[str, Any] = {}
    if saved.get("step") is not None:
        state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).clone().to(p.device)
    for index, key in enumerate(algorithm.states):
        if saved.get(key) is not None:
            given = (saved[key], saved.get(key + EXPONENTS))
            state.update(entries.moment(key, index, *given, p, state_kind))
    lacking, value = saved.get("lacking"), None
    if lacking is not None and lacking.dtype != torch.int16:
        pass  # torch's optimizers cast these bits, and do not keep them in step with the weight
    elif kind not in _EXACTLY and is_of_other_dtype(saved, p):
        pass  # there is no place for them, and the weight is the model's
    elif kind in storage.EXACT and lacking is not None and _dtype_of(saved, p) == p.dtype:
        state["lacking"] = torch.empty_like(p, dtype=torch.int16).copy_(lacking)
        known = saved.get("weight") or of_shards({"format": L.BF16 if p.dtype == torch.bfloat16 else L.FP16})
        if known["sum"] == UNSUMMED or not is_described(p, known, p.dtype):
            state["weight"] = known  # which may come after its bits
    else:
        value = master_value(name, saved, p, present)
    weight = None if value is None else p.detach().clone()
    try:
        own = p if weight is None else weight
        if p.requires_grad or any(saved.get(key) is not None for key in ("step", *algorithm.states)):
            entries.settle(state, own, algorithm, kind, state_kind, name, value)
        else:
            entries.settle_master(state, own, kind, value)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint does not fit: {error}") from error
    return state, weight


def has_master(saved: Mapping[str, Any]) -> bool:
    """Whether a saved entry says which fp32 weight it belongs to."""
    lacking = saved.get("lacking")
    return "master" in saved or (lacking is not None and lacking.dtype in (torch.int16, WIDE))


def _check_entry(name: str, saved: Mapping[str, Any], p: Tensor, algorithm: Algorithm) -> None:
    known = {*_OF_ENTRIES, *algorithm.states, *(key + EXPONENTS for key in algorithm.states)}
    if not algorithm.states:
        known.update(("momentum_buffer", "momentum_buffer" + EXPONENTS))  # SGD without momentum leaves them
    strange = [key for key, value in saved.items() if key not in known and isinstance(value, Tensor)]
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
    known = saved.get("weight")
    return _DTYPES[known["format"]] if known else p.dtype


def is_of_other_dtype(saved: Mapping[str, Any], p: Tensor) -> bool:
    """Whether a saved entry holds the bits that a 16-bit weight of another dtype than `p`'s lacked."""
    return "master" not in saved and has_master(saved) and _dtype_of(saved, p) != p.dtype


def master_value(
    name: str, saved: Mapping[str, Any], p: Tensor, present: Tensor | None = None
) -> Tensor | None:
    """The fp32 weight the saved entry speaks of, or None where it holds none; `present` as for `restore`."""
    if "master" in saved:
        return cast(Tensor, saved["master"]).to(p.device)
    if not has_master(saved):
        return None
    dtype, known = _dtype_of(saved, p), saved.get("weight")
    halves = [own.detach().to(dtype) for own in (p, present) if own is not None]
    fitting = [half for half in halves if known is None or is_described(half, known, p.dtype)]
    if not fitting:
        raise CheckpointError(
            f"the saved state of {name} holds the bits its {_word(dtype)} weight lacked, and that weight "
            "is not in the model: load the model's weights before the optimizer's" + _hint(dtype, p.dtype)
        )
    return split.join(fitting[0], torch.empty_like(p, dtype=torch.int16).copy_(saved["lacking"]))


def _word(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp16"


def _hint(saved: torch.dtype, here: torch.dtype) -> str:
    if here in (saved, torch.float32):
        return ""
    return (
        f", both after prepare() at O2, where its master holds the {_word(saved)} values: a "
        f"{_word(here)} parameter alone cannot"
    )


def check_kind(saved: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError where a saved group is of another algorithm than `name`, ours.

    A file of ours says which it is; torch's are known by the hyperparameters of their groups.
    """
    theirs = [saved["algorithm"]] if "algorithm" in saved else _kinds_of(saved)
    if name not in theirs:
        raise CheckpointError(
            f"the saved optimizer is {' or '.join(theirs)}, this one {name}: their states mean different "
            f"things; load it into its own kind, or start {name} anew"
        )


def _kinds_of(group: Mapping[str, Any]) -> list[str]:
    if "betas" in group and "eps" in group:
        if "momentum_decay" in group or ("decoupled_weight_decay" in group and "amsgrad" not in group):
            return ["another of Adam's kin"]  # NAdam, RAdam
        decoupled = group.get("decoupled_weight_decay")
        return ["Adam", "AdamW"] if decoupled is None else ["AdamW" if decoupled else "Adam"]
    if "betas" in group:
        return ["Lion"]
    if "momentum" in group and "dampening" in group:
        return ["SGD"]
    return [f"one with {', '.join(sorted(set(group) - {'params', 'param_names', 'lr'})) or 'nothing'}"]


def match_groups(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, int], Any]:
    """For each (group, position) of ours the saved parameter's key; CheckpointError where they do not fit."""
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
        raise CheckpointError(
            f"the saved optimizer has groups of {[len(g['params']) for g in saved]} parameters, "
            f"this one of {[len(g['params']) for g in groups]}"
        )
    found: dict[tuple[int, int], Any] = {}
    for g, (ours, theirs) in enumerate(zip(groups, saved)):
        order = list(theirs["params"])
        names, saved_names = ours.get("param_names"), theirs.get("param_names")
        if names and saved_names:
            by_name = dict(zip(saved_names, order))
            missing = [name for name in names if name not in by_name]
            if missing:
                raise CheckpointError(f"the saved optimizer has no state for {', '.join(missing[:5])}")
            order = [by_name[name] for name in names]
        found.update({(g, i): key for i, key in enumerate(order)})
    return found
