"""Every way in which torch cuts a model up trains as one process does, or is refused; four gloo ranks."""

import copy
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.numerics.replayable import Replayable
from tests.ranks import run

WORLD, STEPS = 4, 3
BF16 = {"level": "O2", "dtype": "bf16"}
WHOLE = StateDictOptions(full_state_dict=True)


class Checkpointed(nn.Module):
    """Computes its inner module's forward again in backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def net(wrap=lambda module: module):
    torch.manual_seed(3)
    middle = nn.Sequential(nn.Linear(32, 20), nn.GELU(), nn.Linear(20, 32))
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), wrap(middle), nn.Linear(32, 4))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 4, generator=generator)


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def train(model, state="fp32", called=None, data=None, **prepared):
    """Masters after some steps; `data`: which rank's batches, None for all of them one after the other."""
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype=state)
    amp = hs.prepare(model, optimizer, **(BF16 | prepared))
    ranks = range(WORLD) if data is None else [data]
    for step in range(STEPS):
        for rank in ranks:
            x, y = batch(step, rank)
            with amp.autocast():
                loss = nn.functional.mse_loss((called or model)(x), y) / len(ranks)
            amp.backward(loss)
        amp.step(clip_norm=1.0)
    return [whole(value) for value in optimizer.masters().values()]


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except hs.HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stays_gathered(rank):
    return train(hs.distributed.shard(net(), ordered=True, reshard_after_forward=False), data=rank)


def recomputes(rank):
    return train(hs.distributed.shard(net(Checkpointed), ordered=True), data=rank)


def compiles(rank):
    model = hs.distributed.shard(net(), ordered=True)
    return train(model, called=torch.compile(model, backend="eager"), data=rank)


def starts_on_meta(rank):
    source = net()
    with torch.device("meta"):
        model = net()
    hs.distributed.shard(model, ordered=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), source.parameters()):
            p.copy_(torch.distributed.tensor.distribute_tensor(q, p.device_mesh, p.placements))
    return train(model, data=rank)


def is_offloaded(rank):
    policy = CPUOffloadPolicy(pin_memory=False)
    return train(hs.distributed.shard(net(), ordered=True, offload_policy=policy), data=rank)


def in_columns(p):
    return Shard(1) if p.dim() == 2 and p.shape[1] % WORLD == 0 else None


def is_cut_in_columns(rank):
    return train(hs.distributed.shard(net(), ordered=True, shard_placement_fn=in_columns), data=rank)


def has_8_bit_states(rank):
    return train(hs.distributed.shard(net(), ordered=True), "8bit", data=rank)


EXACT = [
    stays_gathered, recomputes, compiles, starts_on_meta, is_offloaded, is_cut_in_columns, has_8_bit_states
]  # fmt: skip


def replicas_of_shards(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train(hs.distributed.shard(net(), mesh=mesh), data=rank)


def replicas_of_8_bit_shards(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train(hs.distributed.shard(net(), mesh=mesh), "8bit", data=rank)


def tensor_parallel(rank):
    model = net()
    plan = {"2.0": ColwiseParallel(), "2.2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    return train(model)  # all ranks see all batches


BOUNDED = [replicas_of_shards, replicas_of_8_bit_shards, tensor_parallel]


def refusals(rank):
    """What is said of each, by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    columns = hs.distributed.shard(net(), shard_placement_fn=in_columns)
    model = hs.distributed.shard(net())
    optimizer = hs.optim.AdamW(model.parameters())
    amp = hs.prepare(model, optimizer, **BF16)
    x, y = batch(0, rank)
    with amp.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    amp.backward(loss)
    amp.step()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    other = fully_shard(nn.Linear(4, 4), mp_policy=policy)
    return {
        "8 bits in columns": error_of(hs.optim.AdamW, columns.parameters(), state_dtype="8bit"),
        "ordered replicas": error_of(hs.distributed.shard, net(), mesh=mesh, ordered=True),
        "evaluating": error_of(amp.evaluating().__enter__),
        "revert": error_of(amp.revert),
        "policy": error_of(hs.prepare, other, hs.optim.AdamW(other.parameters()), **BF16),
        "twice": error_of(hs.distributed.shard, model),
        "released": error_of(hs.optim.AdamW, model.parameters(), release_gradients=True),
        "accumulated": error_of(hs.optim.AdamW, model.parameters(), accumulate="fp32"),
    }


def is_watched(rank):
    """Masters with and without a watch and a bad step's replay; what the watch saw; what the replay says."""
    plain = train(hs.distributed.shard(net()), data=rank)
    model = hs.distributed.shard(net())
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, **BF16, skip_nonfinite=True)
    seen = hs.watch(model, amp, every=1)

    def step(x, y):
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        return amp.step(clip_norm=1.0)

    replay = Replayable(amp, warn=False)
    for number in range(STEPS):
        x, y = batch(number, rank)
        if number == 1:
            replay.run(step, x * (1e30 if rank == 1 else 1), y)
        replay.run(step, x, y)
    masters = [whole(value) for value in optimizer.masters().values()]
    keys = {(kind, name) for kind, name in seen.headrooms()}
    seen.close()
    return plain, masters, keys, [(number, trace.bad.phase, trace.bad.op) for number, trace in replay.traces]


def saved_by_torch(rank):
    """Masters after training on from what torch's own checkpoint functions saved, and without a break."""
    found = []
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)
        for again in (False, True):
            model = hs.distributed.shard(net())
            optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, state_dtype="8bit")
            amp = hs.prepare(model, optimizer, **BF16)
            for step in range(STEPS):
                if step == STEPS - 1 and again:
                    weights, states = get_state_dict(model, optimizer)
                    dcp.load({"weights": weights, "states": states}, checkpoint_id=folder[0])
                    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
                elif step == STEPS - 1:
                    weights, states = get_state_dict(model, optimizer)
                    dcp.save({"weights": weights, "states": states}, checkpoint_id=folder[0])
                x, y = batch(step + (10 if again and step < STEPS - 1 else 0), rank)
                with amp.autocast():
                    loss = nn.functional.mse_loss(model(x), y)
                amp.backward(loss)
                amp.step()
            found.append([whole(value) for value in optimizer.masters().values()])
        torch.distributed.barrier()
    return found


def set_from_outside(rank):
    """An fp32 checkpoint of the whole model, what it left in the masters, and a filled weight's values."""
    model = hs.distributed.shard(net())
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, **BF16)

    def step():
        x, y = batch(0, rank)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        amp.step()

    step()
    given = {name: torch.randn_like(p) for name, p in net().state_dict().items()}
    set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True))
    loaded = {name: whole(optimizer.master_of(p)) for name, p in model.named_parameters()}
    step()
    first = next(model.parameters())
    with torch.no_grad():
        first.fill_(0.5)
    return given, loaded, whole(optimizer.master_of(first)).unique().tolist()


class OneOutput(nn.Module):
    """A head with fewer rows than there are ranks, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head, self.spare = nn.Linear(16, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x))


def headed(kind="shards", **options):
    model = OneOutput()
    if kind == "shards":
        hs.distributed.shard(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01, **options)
    return model, optimizer, hs.prepare(model, optimizer, **BF16)


def head_steps(model, amp, rank, first, count):
    for step in range(first, first + count):
        with amp.autocast():
            loss = model(batch(step, rank)[0]).square().mean()
        amp.backward(loss)
        amp.step()
    model = getattr(model, "module", model)
    return {n: whole(p) for n, p in hs.optim.fp32_state_dict(model, amp.optimizers).items()}


def counts_of(optimizer):
    return [int(entry["step"]) for entry in optimizer.state.values()]


def counts_without_rows(rank):
    """Step counts on this rank, trained and resumed, and weights of both."""
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    model, optimizer, amp = headed()
    head_steps(model, amp, rank, 0, 3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(found_inf=True)
    optimizer.zero_grad()
    trained = counts_of(optimizer)
    amp.save(f"{folder[0]}/saved")
    undisturbed = head_steps(model, amp, rank, 3, 2)
    model, optimizer, amp = headed()
    amp.load(f"{folder[0]}/saved")
    resumed = counts_of(optimizer), head_steps(model, amp, rank, 3, 2)
    torch.distributed.barrier()
    return trained, undisturbed, resumed


def all_of(model, optimizer):
    """The whole fp32 weights, moments and step counts by name."""
    model = getattr(model, "module", model)
    found = {n: whole(p) for n, p in hs.optim.fp32_state_dict(model, optimizer).items()}
    for name, p in model.named_parameters():
        entry = optimizer.state.get(p, {})
        found |= {
            f"{name} {key}": whole(entry[key]) for key in ("exp_avg", "exp_avg_sq", "step") if key in entry
        }
    return found


def between_wraps(rank):
    """What torch's functions saved of shards or DDP, and what loading it gives in the same or the other.

    Not what either then trains: of four gradients DDP takes the sum in another order than shards do.
    """
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    found = {}
    ways = {"shards": (("ddp", "dcp"), ("ddp", "whole"), ("shards", "whole")), "ddp": (("shards", "dcp"),)}
    for source in ways:
        model, optimizer, amp = headed(source)
        wrapped = DDP(model, find_unused_parameters=True) if source == "ddp" else model
        head_steps(wrapped, amp, rank, 0, 3)
        saved = get_state_dict(wrapped, optimizer)
        dcp.save(dict(zip(("weights", "states"), saved)), checkpoint_id=f"{folder[0]}/{source}")
        whole_dicts = copy.deepcopy(get_state_dict(wrapped, optimizer, options=WHOLE))
        found[source] = all_of(wrapped, optimizer)
        for target, way in ways[source]:
            model, optimizer, amp = headed(target)
            wrapped = DDP(model, find_unused_parameters=True) if target == "ddp" else model
            head_steps(wrapped, amp, rank, 20, 1)
            given, options = copy.deepcopy(whole_dicts), WHOLE
            if way == "dcp":
                given, options = get_state_dict(wrapped, optimizer), None
                dcp.load(dict(zip(("weights", "states"), given)), checkpoint_id=f"{folder[0]}/{source}")
            set_state_dict(
                wrapped, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options
            )
            found[source, target, way] = all_of(wrapped, optimizer)
    torch.distributed.barrier()
    return found


def everything(rank):
    exact = {case.__name__: case(rank) for case in EXACT}
    return (
        exact,
        {case.__name__: case(rank) for case in BOUNDED},
        refusals(rank),
        set_from_outside(rank),
        saved_by_torch(rank),
        is_watched(rank),
        counts_without_rows(rank),
        between_wraps(rank),
    )


@pytest.fixture(scope="module")
def ranks(once):
    return once("sharded", lambda: run(everything, WORLD, seconds=400.0))


@pytest.mark.parametrize("name", [case.__name__ for case in EXACT])
def test_it_trains_as_one_process(ranks, name):
    alone = train(net(), "8bit" if "8_bit" in name else "fp32")
    for exact, *_ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(exact[name], alone, strict=True))


@pytest.mark.parametrize("name", [case.__name__ for case in BOUNDED])
def test_other_orders_of_sums_stay_near_one_process(ranks, name):
    """Sums of four bf16 gradients in another order: an ulp of bf16, of which Adam makes steps of up to lr."""
    alone = train(net(), "8bit" if "8_bit" in name else "fp32")
    first = ranks[0][1][name]
    for _, bounded, *_ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(bounded[name], first, strict=True))
    for a, b in zip(first, alone, strict=True):
        assert float((a - b).abs().mean()) < 0.01 * STEPS / 20
        assert float((a - b).abs().max()) <= 2 * 0.01 * STEPS


def test_what_cannot_be_right_is_refused_by_name(ranks):
    expected = {
        "8 bits in columns": ("UnsupportedError", "cut between rows"),
        "ordered replicas": ("UnsupportedError", "a mesh of one dimension"),
        "evaluating": ("UnsupportedError", "no_grad"),
        "revert": ("UnsupportedError", "sharded"),
        "policy": ("ConfigError", "contradicts the level"),
        "twice": ("ConfigError", "sharded already"),
        "released": ("UnsupportedError", "release_gradients"),
        "accumulated": ("UnsupportedError", "accumulate"),
    }
    for _, _, told, *_ in ranks:
        for name, (kind, words) in expected.items():
            assert told[name].startswith(kind), (name, told[name])
            assert words in told[name], (name, told[name])


def test_masters_of_shards_take_what_is_loaded_and_set_by_hand(ranks):
    given, loaded, filled = ranks[0][3]
    assert loaded.keys() == given.keys()
    assert all(torch.equal(loaded[name], value) for name, value in given.items())
    assert all(abs(value - 0.5) <= 2**-9 for value in filled)  # half a unit above 0.5


def test_torch_s_own_checkpoint_functions_lose_no_bit_of_8_bit_shards(ranks):
    for *_, (without, after), _, _, _ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(without, after, strict=True))


def test_watched_shards_train_the_same_and_a_bad_step_is_not_replayed(ranks):
    for *_, (plain, masters, keys, told), _, _ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(plain, masters, strict=True))
        assert {("activation", "0"), ("gradient", "0.weight"), ("weight", "0.weight")} <= keys
        assert told == []


def test_shards_without_rows_count_as_the_others_and_resume_to_the_bit(ranks):
    for *_, (trained, undisturbed, resumed), _ in ranks:
        assert trained == [3, 3, 3, 3, 0, 0]  # the spare head never had a gradient
        counts, after = resumed
        assert counts == [3, 3, 3, 3, 0, 0]
        assert all(torch.equal(after[name], value) for name, value in undisturbed.items())


def test_torch_s_checkpoints_of_shards_load_into_ddp_and_back(ranks):
    for *_, found in ranks:
        for way, after in ((key, v) for key, v in found.items() if isinstance(key, tuple)):
            assert after.keys() == found[way[0]].keys()
            for name, value in found[way[0]].items():
                assert torch.equal(after[name], value), (way, name)
