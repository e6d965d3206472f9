"""The minimum cut against every labelling there is."""

import itertools
import random

import pytest

from halfstep.tuning.modules import cheapest

Edge = tuple[str, str, float]


def cost(chosen: set[str], full: dict[str, float], low: dict[str, float], edges: list[Edge]) -> float:
    own = sum(full[n] if n in chosen else low[n] for n in full)
    return own + sum(c for a, b, c in edges if (a in chosen) != (b in chosen))


@pytest.mark.parametrize("seed", range(60))
def test_no_labelling_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [str(i) for i in range(draw.randint(1, 8))]
    full, low = ({n: draw.random() for n in nodes} for _ in range(2))
    edges = [(a, b, draw.random() / 2) for a in nodes for b in nodes if a < b and draw.random() < 0.4]
    chosen, total = cheapest(full, low, edges)
    every = (set(itertools.compress(nodes, bits)) for bits in itertools.product((0, 1), repeat=len(nodes)))
    least = min(cost(one, full, low, edges) for one in every)
    assert cost(set(chosen), full, low, edges) == pytest.approx(least, abs=1e-9)
    assert total == pytest.approx(least, abs=1e-9)


def test_dear_casts_keep_neighbours_together() -> None:
    full, low = {"norm": 1.0, "linear": 5.0}, {"norm": 1.5, "linear": 3.0}
    assert cheapest(full, low, [("norm", "linear", 0.1)])[0] == {"norm"}
    assert cheapest(full, low, [("norm", "linear", 0.6)])[0] == set()
