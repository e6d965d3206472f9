"""Batches as a training loop needs them: a position that can be saved, and steps that can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from halfstep import rng
from halfstep.errors import CheckpointError, DataError

#: What a Position gives between two passes.
END = object()


class Position:
    """Batches without end from a loader, and where in it training stands.

    A loader with `state_dict` and `load_state_dict` is asked; for any other the random state at the start of
    the pass is kept, and resuming replays the pass up to the batch. `on_epoch_end` is called once for a pass:
    by `trained` after its last batch where the loader has a length, else when no further batch comes.
    """

    def __init__(self, loader: Any, on_epoch_end: Callable[[], None]) -> None:
        self.loader, self.on_epoch_end = loader, on_epoch_end
        self.own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.served, self.ended, self._resumed = 0, False, False
        self.start: dict[str, Any] = {}

    def _begin(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self.served, self.ended = 0, False
        if self.own:
            return iter(self.loader)
        now, generator = rng.random_state(), getattr(self.loader, "generator", None)
        if not resumed:
            self.start = now if generator is None else {**now, "generator": generator.get_state()}
            return iter(self.loader)
        rng.load_random_state(self.start)
        if generator is not None and "generator" in self.start:
            generator.set_state(self.start["generator"].cpu())
        batches = iter(self.loader)
        for _ in islice(batches, self.served):
            pass
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
            yield END

    def give_back(self) -> None:
        """The batch just given was not trained on: a resumed run is given it again."""
        self.served -= 1

    def trained(self) -> None:
        """End the pass where the batch just trained on was its last."""
        if hasattr(self.loader, "__len__") and self.served == len(self.loader):
            self.end()

    def end(self) -> None:
        """End the pass, unless it has ended."""
        if not self.ended:
            self.ended = True
            self.on_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, or how to get to the next batch again."""
        how = {"loader": self.loader.state_dict()} if self.own else {"start": self.start}
        return {**how, "served": self.served, "ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; CheckpointError for the state of another kind of loader."""
        if self.own != ("loader" in state):
            raise CheckpointError("the checkpoint was written with another kind of loader")
        if self.own:
            self.loader.load_state_dict(state["loader"])
        self.start = dict(state.get("start", {}))
        self.served, self.ended, self._resumed = state.get("served", 0), state.get("ended", False), True


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
                self._fetched.append((self._fetch(), rng.rewinder()))
            else:
                self._fetched[place][1]()
            yield self._fetched[place][0]
