"""Batches as a training loop needs them: a position that can be saved, and steps that can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from halfstep import rng
from halfstep.errors import CheckpointError, DataError
from halfstep.rng import rewinder


class Position:
    """Batches without end from a loader, and where in it training stands.

    A loader with `state_dict` and `load_state_dict` is asked; for any other the random state at the start of
    the pass is kept, and resuming replays the pass up to the batch. The end of a pass is told once: by
    `settle` after its last batch where the loader has a length, else when no further batch comes.
    """

    def __init__(self, loader: Iterable[Any], on_epoch_end: Callable[[], None]) -> None:
        self.loader, self.on_epoch_end = loader, on_epoch_end
        self.own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.served, self.ended = 0, False
        self.start: dict[str, Any] = {}
        self._resumed = False

    def _generator(self) -> torch.Generator | None:
        return getattr(self.loader, "generator", None)

    def _begin(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self.served, self.ended = 0, False
        if self.own:
            return iter(self.loader)
        generator = self._generator()
        if not resumed:
            self.start = rng.random_state()
            if generator is not None:
                self.start["generator"] = generator.get_state()
            return iter(self.loader)
        now = rng.random_state()
        rng.load_random_state(self.start)
        if generator is not None and "generator" in self.start:
            generator.set_state(self.start["generator"].cpu())
        batches = iter(self.loader)
        for _ in range(self.served):
            next(batches)
        rng.load_random_state(now)
        return batches

    def __iter__(self) -> Iterator[Any]:
        empty = 0
        while True:
            empty += 1
            for batch in self._begin():
                empty = 0
                if self.own and self.ended:  # resumed behind the end of a pass: the loader began the next
                    self.served, self.ended = 0, False
                self.served += 1
                yield batch
            if empty > 1:
                raise DataError(
                    "a pass over the loader gave no batches; fit needs at least one in every pass "
                    "(a generator can be read once only: pass a list or a DataLoader)"
                )
            self.end()

    def give_back(self) -> None:
        """The batch just given was not trained on: a resumed run is given it again."""
        self.served -= 1

    def settle(self) -> None:
        """Tell the end of the pass where the batch just trained on was its last."""
        if hasattr(self.loader, "__len__") and self.served == len(cast(Any, self.loader)):
            self.end()

    def end(self) -> None:
        """Tell the end of the pass, unless it was told."""
        if not self.ended:
            self.ended = True
            self.on_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, or how to get to the next batch again."""
        place = {"served": self.served, "ended": self.ended}
        loader: Any = self.loader
        return {"loader": loader.state_dict(), **place} if self.own else {"start": self.start, **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; CheckpointError for the state of another kind of loader."""
        loader: Any = self.loader
        if self.own != ("loader" in state):
            raise CheckpointError("the checkpoint was written with another kind of loader")
        if self.own:
            loader.load_state_dict(state["loader"])
        self.start, self.served, self.ended = (
            dict(state.get("start", {})),
            state.get("served", 0),
            state.get("ended", False),
        )
        self._resumed = True


class MicroBatches:
    """The batches of one step, fetched as the step asks for them; a replay gets the same ones again.

    Random generators are as they were after each fetch then: a loader may have drawn from them.
    """

    def __init__(self, fetch: Callable[[], Any], count: int) -> None:
        self._fetch, self._count = fetch, count
        self._fetched: list[tuple[Any, Callable[[], None]]] = []

    def __iter__(self) -> Iterator[Any]:
        for place in range(self._count):
            if place == len(self._fetched):
                self._fetched.append((self._fetch(), rewinder()))
            else:
                self._fetched[place][1]()
            yield self._fetched[place][0]
