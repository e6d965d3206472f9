"""A plan by module: fp32 for the modules that are faster in it, casts counted, as rules with their times.

Casts are paid where one module hands a tensor to another, which one forward pass shows. A module's own
functional ops (a residual sum, attention written out) belong to it; a tensor that no other module made or
takes is its container's.

The level stays in force everywhere else, and with it the op table: a loss or an exponential is fp32 whatever
its module's rule, a normalisation runs in the dtype it is given because its row allows that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.formats import dtype_name
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.torch_private import pytree
from halfstep.tuning.engine import clock_of
from halfstep.tuning.op_times import StepTimes, hook_forwards, paths_of

Flow = dict[tuple[str, str], int]
"""Elements handed from one module to another in a forward pass."""

#: Seconds that the hooks of a module with a rule of its own cost a step.
HOOKS = 5e-5

_FULL, _LOW = "\0full", "\0low"

#: A module whose fp32 saves less than this share of a step is left to the level.
LEAST = 0.002


def flow_of(step: Callable[[], Any], models: Sequence[nn.Module], nodes: Iterable[str]) -> Flow:
    """Run `step` once and count the floating elements that pass between modules whose path is in `nodes`."""
    node_set = set(nodes)
    maker_paths: dict[int, str] = {}
    taker_paths: dict[int, list[str]] = defaultdict(list)
    live_tensors: list[Tensor] = []  # while they live, an id names one tensor
    outside: dict[int, str] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _floats((args, kwargs)):
            live_tensors.append(tensor)
            outside.setdefault(id(tensor), paths[module])
            if paths[module] in node_set:
                taker_paths[id(tensor)].append(paths[module])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _floats(output):
            live_tensors.append(tensor)
            if paths[module] in node_set:
                maker_paths.setdefault(id(tensor), paths[module])

    paths = paths_of(models)
    with hook_forwards(paths, before, after):
        step()
    flow: Flow = defaultdict(int)
    for tensor, size in {id(tensor): tensor.numel() for tensor in live_tensors}.items():
        maker = maker_paths.get(tensor) or container_of(outside.get(tensor, ""), node_set)
        takers = [t for t in dict.fromkeys(taker_paths.get(tensor, ())) if t != maker]
        if not takers and tensor in maker_paths:
            container = container_of(maker_paths[tensor], node_set)
            takers = [] if container is None else [container]
        for taker in takers:
            if maker is not None and taker != maker:
                flow[maker, taker] += size
    return dict(flow)


def container_of(path: str, nodes: set[str]) -> str | None:
    """Return the nearest module above `path` that is in `nodes`, or None."""
    while path:
        path = path.rpartition(".")[0]
        if path in nodes:
            return path
    return None


def _floats(tree: Any) -> Iterator[Tensor]:
    return (
        leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def plan_by_module(
    model: nn.Module,
    full: StepTimes,
    low: StepTimes,
    flow: Flow,
    cast_seconds: float,
    level: str,
    dtype: torch.dtype,
) -> Plan:
    """Return the rules that put modules in fp32 where that is cheaper, over a level whose default is `dtype`.

    full, low: the step's times in fp32 and at the level. cast_seconds: of one element there and back. The
    model's own ops, outside its modules, stay as the level has them. Empty where no module gains.
    """
    times = full.by_module(), low.by_module()
    paths = [path for path, _ in model.named_modules() if path and any(path in t for t in times)]
    in_full, in_low = ({path: t.get(path, 0.0) for path in paths} for t in times)
    edges = [(a, b, n * cast_seconds + HOOKS) for (a, b), n in flow.items() if a in in_full and b in in_full]
    chosen, _ = cheapest(in_full, in_low, edges)
    saved = sum(in_low[path] - in_full[path] for path in chosen)
    if saved < LEAST * low.seconds or len(chosen) == len(paths):  # all of them: that is fp32, tried as such
        return Plan.empty()
    return Plan(tuple(_rules(model, chosen, in_full, in_low, level, dtype)))


def cheapest(
    full: Mapping[str, float], low: Mapping[str, float], edges: Iterable[tuple[str, str, float]]
) -> tuple[set[str], float]:
    """The nodes to label fp32, and the cost of the whole labelling: a minimum cut between fp32 and 16 bits.

    (Greig, Porteous and Seheult 1989.) full, low: the cost of each node under either label, with the same
    keys. edges: two nodes and what it costs if their labels differ.
    """
    import networkx

    graph: Any = networkx.Graph()
    graph.add_nodes_from((_FULL, _LOW))
    paid = defaultdict[tuple[str, str], float](float)
    for node, neighbour, cost in edges:
        paid[min(node, neighbour), max(node, neighbour)] += cost
    graph.add_weighted_edges_from(((*pair, cost) for pair, cost in paid.items()), weight="capacity")
    for node, cost in full.items():
        graph.add_edge(node, _LOW, capacity=cost)
        graph.add_edge(node, _FULL, capacity=low[node])
    cost, (_, in_full) = networkx.minimum_cut(graph, _LOW, _FULL)
    return in_full - {_FULL}, cost


def _rules(
    model: nn.Module,
    chosen: Collection[str],
    full: Mapping[str, float],
    low: Mapping[str, float],
    level: str,
    dtype: torch.dtype,
) -> Iterator[PlanRule]:
    """One rule where a module's label differs from what it inherits, from the root down."""
    stored = Plan.for_level(level, dtype).resolve(model)
    labels: dict[str, bool] = {"": False}
    for path, _ in model.named_modules():
        if not path:
            continue
        above = labels[path.rpartition(".")[0]]
        labels[path] = path in chosen if path in full else _all_below(path, chosen, full, above)
        if labels[path] == above:
            continue
        why = _reason(path, full, low, dtype)
        if labels[path]:
            yield PlanRule(path, rule=Rule.FULL, reason=why)
        else:
            rule = stored.get(path)
            yield PlanRule(path, rule=Rule.LOW, dtype=None if rule is None else rule.dtype, reason=why)


def _all_below(path: str, chosen: Collection[str], costs: Mapping[str, float], above: bool) -> bool:
    """Return the label of a module without ops of its own: fp32 where all below is, else what is above."""
    below = [p for p in costs if p.startswith(f"{path}.")]
    return all(p in chosen for p in below) if below else above


def _reason(path: str, full: Mapping[str, float], low: Mapping[str, float], dtype: torch.dtype) -> str:
    below = [p for p in full if p == path or p.startswith(f"{path}.")]
    a, b = (sum(times[p] for p in below) * 1e3 for times in (full, low))
    return f"measured, forward and backward: fp32 {a:.3g} ms, {dtype_name(dtype)} {b:.3g} ms"


def cast_cost(device: torch.device, dtype: torch.dtype, elements: int = 1 << 18) -> float:
    """Return seconds to cast one fp32 element to `dtype` and back, at the size of a usual activation."""
    wide, clock, best = torch.ones(elements, device=device), clock_of(device), float("inf")
    for _ in range(5):
        started = clock()
        wide.to(dtype).float()
        best = min(best, clock() - started)
    return best / elements
