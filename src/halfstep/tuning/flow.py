"""Which module hands a tensor to which, from one forward pass: the edges on which casts would be paid.

A module's own functional ops (a residual sum, attention written out) belong to it; a tensor that no other
module made or takes is its container's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.torch_private import pytree
from halfstep.tuning.op_times import hooked, paths_of

Flow = dict[tuple[str, str], int]
"""Elements handed from one module to another in a forward pass."""


def flow_of(step: Callable[[], Any], models: Sequence[nn.Module], nodes: Iterable[str]) -> Flow:
    """Run `step` once and count the floating elements that pass between modules whose path is in `nodes`."""
    wanted = set(nodes)
    made: dict[int, str] = {}
    taken: dict[int, list[str]] = defaultdict(list)
    kept: list[Tensor] = []  # while they live, an id names one tensor
    outside: dict[int, str] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _floats((args, kwargs)):
            kept.append(tensor)
            outside.setdefault(id(tensor), paths[module])
            if paths[module] in wanted:
                taken[id(tensor)].append(paths[module])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _floats(output):
            kept.append(tensor)
            if paths[module] in wanted:
                made.setdefault(id(tensor), paths[module])

    paths = paths_of(models)
    with hooked(paths, before, after):
        step()
    flow: Flow = defaultdict(int)
    for tensor, size in {id(tensor): tensor.numel() for tensor in kept}.items():
        maker = made.get(tensor) or container_of(outside.get(tensor, ""), wanted)
        takers = [t for t in dict.fromkeys(taken.get(tensor, ())) if t != maker]
        if not takers and tensor in made:
            container = container_of(made[tensor], wanted)
            takers = [] if container is None else [container]
        for taker in takers:
            if maker is not None and taker != maker:
                flow[maker, taker] += size
    return dict(flow)


def container_of(path: str, wanted: set[str]) -> str | None:
    """The nearest module above `path` that is in `wanted`, or None."""
    while path:
        path = path.rpartition(".")[0]
        if path in wanted:
            return path
    return None


def _floats(tree: Any) -> Iterator[Tensor]:
    return (
        leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
