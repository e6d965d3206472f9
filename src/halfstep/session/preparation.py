"""What `prepare` made of models and optimizers, and the way back; nothing of steps.

A session and each converted model share it. So it refers to no model strongly, and what a model holds ends
with the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.convert.compiled import Compiled
from halfstep.convert.conversion import Conversion
from halfstep.convert.layout import Relayout
from halfstep.errors import ConfigError
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.loading import MasterHolder
from halfstep.optim.master_link import Link, Master, narrow_state
from halfstep.optim.masters import MasterWeights, holder_of, holders_of
from halfstep.session.precision import Precision


class MastersByNumber(dict[int, MasterWeights]):
    """The `MasterWeights` of torch optimizers by the optimizer's number; ConfigError for another number."""

    def __missing__(self, number: int) -> MasterWeights:
        raise ConfigError(
            f"masters[{number}]: optimizer {number} has no MasterWeights. Torch's optimizers have them at "
            "O2; one of hs.optim keeps its masters itself: optimizer.masters(), optimizer.seed_masters(...)"
        )


class Preparation:
    """The conversions, masters, layout, compilation and hooks of one `prepare`; `revert` undoes them."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        precision: Precision,
        layout: Relayout,
        compiled: Compiled,
        conversions: list[Conversion],
        masters: dict[int, MasterWeights],
    ) -> None:
        self.optimizers, self.precision = optimizers, precision
        self.layout, self.compiled = layout, compiled
        self.conversions, self.masters = conversions, masters
        self.handles: list[RemovableHandle] = []
        """Of hooks on models and optimizers."""
        self.reverted = False

    @property
    def holders(self) -> list[MasterHolder]:
        """What holds the exact fp32 value of 16-bit weights; nothing at a level without masters."""
        return holders_of(self.optimizers) if self.precision.masters else []

    def exact(self) -> dict[Tensor, Tensor]:
        """Return the fp32 value of every weight that has a master."""
        return {w: value for holder in self.holders for w, value in holder.masters().items()}

    def remove_hooks(self) -> None:
        """Remove what was hung on models and optimizers for loads and direct steps."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def revert(self) -> None:
        """Give fp32 weights back, exact where there are masters, and optimizers as they were."""
        low = self.precision.stores_low
        keeper = OwnMasters(self.optimizers if low else ())
        for conversion in self.conversions:
            conversion.revert(keeper)
        for masters in self.masters.values():
            masters.revert()
        if self.conversions:
            fit_states(self.precision, self.optimizers)
        self.layout.revert()
        self.compiled.revert()
        self.conversions, self.masters, self.reverted = [], {}, True
        self.remove_hooks()


class OwnMasters:
    """What the optimizers of `halfstep.optim` know of their weights, given and taken one by one.

    Those of others with `MasterWeights` give theirs, whose memory the weights take over.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._places: dict[Tensor, list[tuple[OnePassOptimizer, Any, Any]]] = {}
        links = [one for one in holders_of(optimizers) if isinstance(one, Link)]
        for link in links:
            link.sync()
        self._links = {w: link for link in links for w in link.pairs}
        for optimizer in (o for o in optimizers if isinstance(o, OnePassOptimizer)):
            for p, group, place in optimizer._places():
                self._places.setdefault(p, []).append((optimizer, group, place))

    def take(self, parameter: Tensor, value: Tensor) -> bool:
        """Set the masters of a weight; whether one of them gives it back as it was."""
        places = self._places.get(parameter, ())
        exact_flags = [optimizer._seed(parameter, group, place, value) for optimizer, group, place in places]
        if (link := self._links.get(parameter)) is not None:
            link.seed_masters({parameter: value})
        return any(exact_flags)

    def knows(self, parameter: Tensor) -> bool:
        """Whether one of the optimizers updates it."""
        return parameter in self._places or parameter in self._links

    def exact(self, parameter: Tensor) -> Tensor | None:
        """Return the fp32 value of a weight, in memory that it may have; None where no master is kept."""
        if (link := self._links.get(parameter)) is not None:
            return link.pairs[parameter].detach()
        values = (
            optimizer._read_master(parameter, group)
            for optimizer, group, _ in self._places.get(parameter, ())
        )
        return next((value for value in values if value is not None), None)


def fit_states(precision: Precision, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the states of torch optimizers without masters their weights' dtype, as torch's loading does."""
    if precision.masters or not precision.stores_low:
        return
    for optimizer in (o for o in optimizers if holder_of(o) is None):
        for p, state in optimizer.state.items():
            if isinstance(p, Tensor) and p.is_floating_point():
                optimizer.state[p] = narrow_state(state, p.dtype)


def check_states(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError where torch's optimizers have states on another device than the weights.

    Masters bring theirs along, and optimizers of `halfstep.optim` too.
    """
    for optimizer in optimizers:
        for p, state in () if isinstance(optimizer, MasterHolder) else optimizer.state.items():
            if not isinstance(p, Tensor) or isinstance(p, Master) or not isinstance(state, Mapping):
                continue
            strays = [t for t in state.values() if isinstance(t, Tensor) and t.dim() and t.device != p.device]
            if strays:
                kind = type(optimizer).__name__
                raise ConfigError(
                    f"the model was moved to {p.device} after steps of {kind}, whose states are on "
                    f"{strays[0].device}: call optimizer.load_state_dict(optimizer.state_dict()), which "
                    "moves them, or move the model before prepare()"
                )


class Prepared:
    """A hook that does no work, by which a converted model keeps what undoes its preparation."""

    def __init__(self, preparation: Preparation | None = None) -> None:
        self.preparation = preparation

    def __call__(self, module: nn.Module, keys: Any) -> None:
        """Do nothing; torch calls it at the end of `load_state_dict`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return Prepared()

    def __reduce__(self) -> tuple[type[Prepared], tuple[()]]:
        return Prepared, ()
