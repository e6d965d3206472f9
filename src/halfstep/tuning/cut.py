"""Which modules to run in fp32 and which in 16 bits, from measured times: a minimum cut.

Each module has a time in either precision, each edge between two modules a cost that is paid where they
differ (the casts, forward and backward). The cheapest labelling of such a graph is a minimum cut between a
source (fp32) and a sink (16 bits): Greig, Porteous and Seheult 1989, by augmenting paths (Edmonds and Karp
1972). Pure numbers; nothing here measures or knows of modules.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

Edge = tuple[str, str, float]
"""Two nodes and what it costs if their labels differ."""

_FULL, _LOW = "\0full", "\0low"


def cheapest(
    full: Mapping[str, float], low: Mapping[str, float], edges: Iterable[Edge], pinned: Iterable[str] = ()
) -> tuple[frozenset[str], float]:
    """The nodes to label fp32, and the cost of the whole labelling.

    full, low: the cost of each node under either label, with the same keys. pinned: nodes that must be fp32.
    """
    capacity: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, cost in full.items():
        capacity[node][_LOW] += cost  # cut where the node stays with the source: it is fp32
        capacity[_FULL][node] += low[node]
    for node in pinned:
        capacity[_FULL][node] = float("inf")
    for one, other, cost in edges:
        capacity[one][other] += cost
        capacity[other][one] += cost
    total = _saturate(capacity)
    reached = _reachable(capacity)
    return frozenset(node for node in full if node in reached), total


def _saturate(capacity: dict[str, dict[str, float]]) -> float:
    """Push flow along shortest paths until none is left; `capacity` becomes what remains."""
    total = 0.0
    while (path := _path(capacity)) is not None:
        pushed = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= pushed
            capacity[b][a] += pushed
        total += pushed
    return total


def _search(capacity: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Who was reached from whom, over edges with something left (rounding apart)."""
    came: dict[str, str] = {_FULL: _FULL}
    queue = deque([_FULL])
    while queue:
        node = queue.popleft()
        for other, left in list(capacity[node].items()):
            if left > 1e-12 and other not in came:
                came[other] = node
                queue.append(other)
    return came


def _path(capacity: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]] | None:
    came = _search(capacity)
    if _LOW not in came:
        return None
    path = [(came[_LOW], _LOW)]
    while path[-1][0] != _FULL:
        path.append((came[path[-1][0]], path[-1][0]))
    return path


def _reachable(capacity: Mapping[str, Mapping[str, float]]) -> frozenset[str]:
    return frozenset(_search(capacity)) - {_FULL, _LOW}
