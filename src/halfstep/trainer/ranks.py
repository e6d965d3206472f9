"""What the ranks of a Trainer find out together: whether they end alike, and means over all samples.

Every function is a collective: every rank calls it. With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from halfstep.distributed import gather
from halfstep.errors import ConfigError, DataError


def check_even(last: int) -> None:
    """Raise DataError on all ranks where they would end at different steps; `last` is this rank's."""
    everyones = gather(last)
    if len(set(everyones)) > 1:
        ends = ", ".join(f"rank {number} after {end}" for number, end in enumerate(everyones))
        raise DataError(
            f"ranks would run out of batches at different steps ({ends}), and a step needs all of them: give "
            "every rank as many (a DistributedSampler does), or fit the same steps= on all, which begins "
            "another pass where one ends"
        )


def check_passes(loader: Iterable[Any]) -> None:
    """Raise ConfigError on all ranks where passes over their loaders may end at different steps."""
    lengths = gather(len(cast(Any, loader)) if hasattr(loader, "__len__") else None)
    if len(lengths) > 1 and (None in lengths or len(set(lengths)) > 1):
        shown = ", ".join("unknown" if length is None else str(length) for length in lengths)
        raise ConfigError(
            f"EarlyStopping at the end of each pass, whose lengths on the ranks are {shown}: all evaluate "
            "together, so give it every=, the steps from one evaluation to the next"
        )


def means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Means over the samples of all ranks, the same on each, from this rank's sums."""
    parts = [(own, samples) for own, samples in gather((dict(sums), count)) if samples]
    if not parts:
        raise DataError("the loader gave no batches; evaluate needs at least one")
    whole = sum(samples for _, samples in parts)
    return {name: sum(own[name] for own, _ in parts) / whole for name in parts[0][0]}
