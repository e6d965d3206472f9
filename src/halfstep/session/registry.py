"""Which session a model was prepared by: for `revert(model)`, and for preparing it again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.convert.conversion import is_converted
from halfstep.convert.strays import undo_copy
from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.names import unwrap
from halfstep.torch_private import hooks_after_load

if TYPE_CHECKING:
    from halfstep.session.session import Session

_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()
_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Session]] = (
    weakref.WeakKeyDictionary()
)

#: Called with every session that is made.
made: list[Callable[[Session], None]] = []
#: Called with each session whose region is asked for, before its policy is read.
opened: list[Callable[[Any], None]] = []


class Prepared:
    """A hook that does no work, by which a converted model keeps the session that can undo it."""

    def __init__(self, session: Session | None = None) -> None:
        self.session = session

    def __call__(self, module: nn.Module, keys: Any) -> None:
        """Do nothing; torch calls it at the end of `load_state_dict`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return Prepared()

    def __reduce__(self) -> tuple[type[Prepared], tuple[()]]:
        return Prepared, ()


def remember(session: Session) -> list[Any]:
    """Note what a session prepared; an earlier one of the same optimizer no longer watches it.

    Returns the handles of hooks on converted models, for `revert` to remove.
    """
    for optimizer in session.optimizers:
        earlier = _optimizers.get(optimizer)
        before = None if earlier is None else earlier()
        if before is not None and before is not session:
            before.stop_watching()
        _optimizers[optimizer] = weakref.ref(session)
    for model in session.models:
        _models[unwrap(model)] = weakref.ref(session)
    for listener in made:
        listener(session)
    changed = [c.model for c in session.conversions if c.changes]
    return [model.register_load_state_dict_post_hook(Prepared(session)) for model in changed]


def session_of(model: nn.Module) -> Session | None:
    """The session that prepared this model last, None where there is none or it is gone."""
    inner = unwrap(model)
    held = [h.session for h in hooks_after_load(inner).values() if isinstance(h, Prepared)]
    found = next((session for session in reversed(held) if session is not None), None)
    known = _models.get(inner)
    return found or (None if known is None else known())


def forget(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Drop what was noted of them."""
    for model in models:
        _models.pop(unwrap(model), None)
    for optimizer in optimizers:
        _optimizers.pop(optimizer, None)


def revert(model: nn.Module) -> None:
    """Undo `prepare` for a model whose session is not at hand: weights, optimizers and hooks as before.

    A copy with casts of its own (`torch.load` of a whole model) becomes fp32, with the 16-bit values that it
    has and a HalfstepWarning. ConfigError for a model that was not prepared, or that nothing is left to undo
    for.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"revert takes the model that was prepared, not {type(model).__name__}")
    session = session_of(model)
    if session is None and not is_converted(unwrap(model)) and undo_copy(unwrap(model)):
        warnings.warn(
            f"this {type(model).__name__} was a copy of a prepared one: it is fp32 again, with the 16-bit "
            "values that it had, since masters stay with the original. Where they matter load the "
            "original's: hs.optim.fp32_state_dict(model, optimizer), or what Session.save wrote",
            HalfstepWarning,
            stacklevel=2,
        )
        return
    if session is None:
        raise ConfigError(
            f"this {type(model).__name__} is not prepared: revert takes the model that was given to prepare()"
        )
    session.revert()
