"""docs/scaling.md: its model of the collectives equals what 2 and 4 gloo ranks really hand to them."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 64


def load_model():
    spec = importlib.util.spec_from_file_location("generate_scaling", DOCS / "generate_scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MODEL = load_model()


class Counting:
    """The collectives of torch.distributed, counted: how many, and the bytes of the whole."""

    # Newer versions of torch call the first two all_gather_single and reduce_scatter_single.
    NAMES = tuple(
        name
        for name in (
            "all_gather_into_tensor",
            "all_gather_single",
            "reduce_scatter_tensor",
            "reduce_scatter_single",
            "all_reduce",
        )
        if hasattr(dist, name)
    )

    def __init__(self):
        self.found = Counter()

    def __enter__(self):
        self.before = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self._counted(name))
        return self

    def __exit__(self, *_):
        for name, function in self.before.items():
            setattr(dist, name, function)

    def _counted(self, name):
        def counted(*args, **kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            whole = max(t.numel() * t.element_size() for t in tensors)
            kind = name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
            self.found[kind] += 1
            self.found[f"{kind} bytes"] += whole
            return self.before[name](*args, **kwargs)

        return counted


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def one_step(rank, model, wrapped, **options):
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16", **options)
    outer = wrapped(model)
    for step in range(2):
        with Counting() as counting:
            amp.backward(outer(torch.ones(2, WIDTH)).float().sum())
            if step == 0:  # the root learns in its first step which groups stay gathered
                amp.step()
                continue
            training = dict(counting.found)
            amp.step(clip_norm=1.0)
    return training, {k: v - training.get(k, 0) for k, v in counting.found.items()}


def ranks(rank):
    found = {}
    world = dist.get_world_size()
    meshes = {"fsdp": None}
    if world == 4:
        meshes["hsdp"] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for way, mesh in meshes.items():
        model = net()
        hs.distributed.shard(model, mesh=mesh)
        found[way] = one_step(rank, model, lambda m: m)
    seen = []

    def wrapped(model):
        ddp = DDP(model)

        def count(state, bucket):
            seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        count.__annotations__ = {}
        ddp.register_comm_hook(None, count)
        return ddp

    one_step(rank, net(), wrapped)
    found["ddp"] = seen[len(seen) // 2 :]
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_counts_are_those_of_the_model(world):
    elements = WIDTH * WIDTH
    for found in run(ranks, world):
        for way in sorted(found.keys() - {"ddp"}):
            layout = MODEL.Layout(world, 2 if way == "hsdp" else world)
            told = MODEL.collectives([MODEL.Group(elements)] * 4, layout)
            training, step = found[way]
            assert told["all_gather"] == both(training, "all_gather")
            assert told["reduce_scatter"] == both(training, "reduce_scatter")
            assert told["all_reduce"] == both(training, "all_reduce")
            assert both(step, "all_gather") == (1, MODEL.NORM_BYTES * layout.shards)
            assert both(step, "all_reduce") in ((0, 0), (1, MODEL.FLAG_BYTES))
        buckets, size = MODEL.ddp(4 * elements * 2)["all_reduce"]
        assert (buckets, size) == (len(found["ddp"]), sum(found["ddp"]))


def both(found, name):
    return found.get(name, 0), found.get(name + " bytes", 0)


def test_the_page_is_what_its_generator_writes():
    assert (DOCS / "scaling.md").read_text(encoding="utf-8") == MODEL.page()


def test_shares_of_memory_and_of_a_ring():
    assert MODEL.held(70e9, 14, 64) == 14 * 70e9 / 64
    layout = MODEL.Layout(4, 4)
    assert MODEL.sent({"all_gather": (1, 400)}, layout) == 300
    assert MODEL.sent({"all_reduce": (1, 400)}, MODEL.Layout(4, 1)) == 600
