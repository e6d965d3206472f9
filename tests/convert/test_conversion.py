"""Converting models: what gets which dtype, that they run, and that everything can be undone."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from halfstep.casting import autocast
from halfstep.convert import convert, to_float
from halfstep.errors import ConfigError, PlanError, UnsupportedError
from halfstep.optim import MasterWeights
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule

torch.set_num_threads(1)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LOW = pytest.mark.parametrize("low", [BF16, F16])


class OwnRMSNorm(nn.Module):
    """A norm as users write it: promotes to fp32 if its weight is fp32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def norms():
    return {
        "layer": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        "rms": nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)),
        "own": nn.Sequential(nn.Linear(6, 8), OwnRMSNorm(8), nn.Linear(8, 3)),
        "batch": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "batch-subclass": nn.Sequential(
            nn.Linear(6, 8), type("Mine", (nn.BatchNorm1d,), {})(8), nn.Linear(8, 3)
        ),
        "group": nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
        "instance": nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, affine=True), nn.Flatten()
        ),
    }


@LOW
@pytest.mark.parametrize("kind", norms())
@pytest.mark.parametrize("in_autocast", [False, True])
def test_o2_keeps_norms_in_fp32_and_runs(kind, low, in_autocast):
    torch.manual_seed(0)
    model = norms()[kind]
    convert(model, "O2", low)
    for module in model:
        norm = "Norm" in "".join(base.__name__ for base in type(module).__mro__)
        for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
            assert tensor.dtype == (F32 if norm else low)
    between = []
    for module in model:
        module.register_forward_hook(lambda m, i, o: between.append(o.dtype))
    with autocast("cpu", low, enabled=in_autocast):
        y = model(torch.randn(5, 6))
    assert y.dtype == F32
    data = isinstance(model[0], nn.Unflatten)  # inputs are data: what no 16-bit op has met stays as it is
    assert all(dtype == low for dtype in between[data:-1])
    y.sum().backward()
    for module in model:
        assert all(p.grad.dtype == p.dtype for p in module.parameters())


def test_batch_norm_statistics_stay_fp32_and_counted():
    model = norms()["batch"]
    convert(model, "O2", BF16)
    model(torch.randn(50, 6) + 1)
    assert model[1].running_mean.dtype == F32
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model[1].num_batches_tracked == 1
    assert not torch.equal(model[1].running_mean, model[1].running_mean.bfloat16().float())


@LOW
def test_o3_converts_everything_and_gives_low_outputs(low):
    model = norms()["batch"]
    convert(model, "O3", low)
    assert {p.dtype for p in model.parameters()} == {low}
    assert model[1].running_mean.dtype == low
    assert model(torch.randn(5, 6)).dtype == low


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_levels_without_low_weights_change_nothing(level):
    model = norms()["layer"]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    record = convert(model, level, None if level == "O0" else BF16)
    assert record.changes == ()
    assert all(torch.equal(before[k], v) and v.dtype == F32 for k, v in model.state_dict().items())
    assert not model._forward_pre_hooks
    convert(model, "O2", BF16)


def test_identity_ties_and_gradients_survive():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9, bias=False))
    model[1].weight = model[0].weight
    model(torch.tensor([1, 2])).sum().backward()
    weight, grad = model[0].weight, model[0].weight.grad.clone()
    record = convert(model, "O2", BF16)
    assert model[0].weight is weight
    assert model[1].weight is weight
    assert weight.dtype == weight.grad.dtype == BF16
    assert torch.equal(weight.grad, grad.bfloat16())
    assert [c.what for c in record.changes] == ["parameter weight", "outputs"]
    record.revert()
    assert model[0].weight is weight
    assert weight.dtype == weight.grad.dtype == F32


def test_parameters_that_share_memory_still_share_it():
    whole = torch.randn(8)
    model = nn.Module()
    model.a, model.b = nn.Parameter(whole[:4].view(2, 2)), nn.Parameter(whole[2:])
    convert(model, "O3", BF16)
    with torch.no_grad():
        model.a.fill_(7.0)
    assert model.b[:2].tolist() == [7.0, 7.0]
    assert torch.equal(model.b[2:], whole[4:].bfloat16())


@LOW
def test_revert_restores_every_bit_of_an_untrained_model(low):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model.register_buffer("table", torch.randn(5))
    model.register_buffer("counts", torch.arange(5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = {name: set(vars(m)) for name, m in model.named_modules()}
    record = convert(model, "O2", low, plan=Plan((PlanRule("table", dtype=low),)))
    assert model.table.dtype == low
    assert model.counts.dtype == torch.int64
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    record.revert()
    record.revert()
    after = model.state_dict()
    assert all(v.dtype == before[k].dtype for k, v in after.items())
    assert all(torch.equal(before[k], v) for k, v in after.items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == hooks
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    convert(model, "O2", low)


def test_the_record_tells_what_changed_and_why():
    model = norms()["batch"]
    record = convert(model, "O2", BF16)
    told = {(c.module, c.what): (c.before, c.after) for c in record.changes}
    assert told["0", "parameter weight"] == (F32, BF16)
    assert told["1", "parameter weight"] == (F32, F32)
    assert told["1", "buffer running_var"] == (F32, F32)
    assert ("", "inputs") not in told
    assert told["", "outputs"] == (None, F32)
    assert ("1", "buffer num_batches_tracked") not in told
    assert all(c.why for c in record.changes)
    assert "1: buffer running_var kept fp32" in str(record)


@dataclass
class Sample:
    values: torch.Tensor
    index: torch.Tensor


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch, *, scale, mask=None):
        assert mask is None or mask.dtype == torch.bool
        y = self.linear(batch["sample"].values) * scale
        return {"y": [y], "sample": Sample(y, batch["sample"].index)}


def test_nested_inputs_and_outputs_are_cast_and_not_altered():
    model = Nested()
    convert(model, "O2", BF16)
    batch = {"sample": Sample(torch.randn(3, 2), torch.arange(3))}
    out = model(batch, scale=torch.ones(()), mask=torch.ones(3, dtype=torch.bool))
    assert out["y"][0].dtype == out["sample"].values.dtype == F32
    assert out["sample"].index.dtype == torch.int64
    assert batch["sample"].values.dtype == F32


@LOW
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_networks(make, low, packed):
    torch.manual_seed(0)
    rnn = make(3, 4, num_layers=2)
    record = convert(rnn, "O2", low)
    x = torch.randn(5, 2, 3)
    x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    output, _ = rnn(x)
    data = output.data if packed else output
    assert data.dtype == F32
    data.sum().backward()
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))
    assert rnn.weight_ih_l0.grad.dtype == low
    with record.suspended():
        assert rnn(torch.randn(5, 2, 3))[0].dtype == F32
    record.revert()
    assert rnn(torch.randn(5, 2, 3))[0].dtype == F32


def test_integer_inputs_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    convert(model, "O2", BF16)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad.dtype == BF16


def test_parametrized_and_double_weights():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)).double()
    convert(model, "O2", BF16)
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert model(torch.randn(3, 4, dtype=torch.float64)).dtype == F32


def test_meta_models_convert_and_lazy_ones_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    convert(model, "O2", BF16)
    assert model[0].weight.dtype == BF16
    with pytest.raises(UnsupportedError, match="one batch"):
        convert(nn.LazyLinear(3), "O2", BF16)


def test_a_checkpoint_in_fp32_loads_and_masters_start_exact():
    torch.manual_seed(0)
    model = norms()["layer"]
    exact = {k: v.clone() for k, v in model.state_dict().items()}
    record = convert(model, "O2", BF16)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model, initial=record.originals)
    record.forget_originals()
    for name, master in masters.named():
        assert torch.equal(master, exact[name])
    wider = {k: v + 2.0**-12 for k, v in exact.items()}
    model.load_state_dict(wider)
    for name, master in masters.named():
        assert torch.equal(master, wider[name])
    record.revert()
    masters.revert()
    assert all(torch.equal(v, wider[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("masters_first", [True, False])
def test_evaluating_with_masters_equals_an_fp32_model(masters_first):
    torch.manual_seed(0)
    model = nn.Sequential(*norms()["batch"], nn.Unflatten(1, (1, 3)), nn.LSTM(3, 2))
    twin = copy.deepcopy(model)
    record = convert(model, "O2", BF16)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model, initial=record.originals)
    x = torch.randn(5, 6)
    model.eval(), twin.eval()
    inside = [masters.swap(), record.suspended()]
    first, second = inside if masters_first else inside[::-1]
    weights = list(model.parameters())
    with first, second, torch.no_grad():
        assert torch.equal(model(x)[0], twin(x)[0])
        average = copy.deepcopy(model)
    assert torch.equal(average(x)[0], twin(x)[0])
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert model[0].weight.dtype == BF16
    assert model(x)[0].dtype == F32
    assert not torch.equal(model(x)[0], twin(x)[0])


def test_copies_and_pickles_behave_alike():
    model = norms()["own"]
    record = convert(model, "O2", BF16)
    x = torch.randn(2, 6)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        with record.suspended():
            assert twin(x).dtype == F32
        with pytest.raises(ConfigError, match="copy of a converted"):
            convert(twin, "O3", BF16)


def test_compiled_models_are_looked_into():
    model = norms()["layer"]
    compiled = torch.compile(model, backend="eager")
    record = convert(compiled, "O2", BF16)
    assert model[0].weight.dtype == BF16
    assert record.changes[0].module == "0"
    assert compiled(torch.randn(2, 6)).dtype == F32
    compiled(torch.randn(2, 6)).sum().backward()


def test_a_plan_gives_dtypes_by_path_with_casts_at_the_edges():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))
    plan = Plan((PlanRule("1", dtype=BF16, reason="the wide part"),))
    record = convert(model, plan)
    seen = []
    model[1][0].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    assert model(torch.randn(2, 6)).dtype == F32
    assert seen == [BF16]
    assert [c.what for c in record.changes] == ["parameter weight", "parameter bias", "outputs"]


@pytest.mark.parametrize("rule", [PlanRule("2", dtype=F32), PlanRule("2", rule=Rule.FULL)])
def test_a_plan_on_top_of_a_level(rule):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    convert(model, "O2", BF16, plan=Plan((rule,)))
    seen = []
    model[2].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    assert model[2].weight.dtype == F32
    assert model(torch.randn(2, 6)).dtype == F32


def test_module_rules_hold_inside_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    plan = Plan(
        (
            PlanRule("1", rule=Rule.FULL),
            PlanRule("2", rule=Rule.FULL),
            PlanRule("3", ops={"linear": Rule.FULL}),
        )
    )
    record = convert(model, "O1", BF16, plan=plan)
    seen = []
    for module in model:
        module.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    x = torch.randn(2, 4)
    with autocast("cpu", BF16):
        model(x)
        assert seen == [BF16, F32, F32, F32]
        assert (x @ x.T).dtype == BF16
    record.revert()
    seen.clear()
    with autocast("cpu", BF16):
        model(x)
    assert seen[1] == seen[3] == BF16


def test_a_kept_module_runs_in_what_it_is_given():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    convert(model, "O1", BF16, plan=Plan((PlanRule("1", rule=Rule.KEEP, reason="as given"),)))
    seen = []
    model[1].register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype, m.weight.dtype)))
    with autocast("cpu", BF16):
        model(torch.randn(2, 4)).sum().backward()
        model[1](torch.randn(2, 4))
    model[1](torch.randn(2, 4, dtype=F16))
    assert seen == [(BF16, BF16, F32), (F32, F32, F32), (F16, F16, F32)]
    assert model[1].weight.grad.dtype == F32


@pytest.mark.parametrize("kind", ["layer", "own", "batch"])
def test_converted_models_compile_without_breaks(kind):
    model = norms()[kind]
    convert(model, "O2", BF16)
    x = torch.randn(5, 6)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_to_float_survives_copies():
    model = to_float(nn.Sequential(nn.Linear(4, 4)), BF16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(torch.randn(2, 4)).dtype == BF16
        assert to_float(twin, None)(torch.randn(2, 4)).dtype == F32
    assert model(torch.randn(2, 4)).dtype == BF16


def test_a_rule_survives_an_exception_inside():
    class Broken(nn.Linear):
        def forward(self, x):
            assert self.weight.dtype == BF16
            raise ValueError("inside")

    model = nn.Sequential(Broken(4, 4))
    convert(model, Plan((PlanRule("0", rule=Rule.LOW),)), BF16)
    with autocast("cpu", BF16):
        with pytest.raises(ValueError, match="inside"):
            model(torch.randn(2, 4))
        assert torch.is_autocast_enabled("cpu")
    assert type(model[0].weight) is nn.Parameter


def test_tied_weights_with_two_dtypes_are_refused_and_nothing_changes():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(PlanError, match="tied"):
        convert(model, Plan((PlanRule("0", dtype=BF16), PlanRule("1", dtype=F16))))
    assert model[0].weight.dtype == F32
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_wrong_use_is_told():
    with pytest.raises(ConfigError, match="no parameters"):
        convert(nn.ReLU(), "O2", BF16)
    model = nn.Linear(2, 2)
    record = convert(model, "O2", BF16)
    with pytest.raises(ConfigError, match="O2 in bf16"):
        convert(nn.Sequential(model), "O2", BF16)
    record.revert()
    parallel = type("DistributedDataParallel", (nn.Module,), {})()
    parallel.module = model
    with pytest.raises(ConfigError, match="then wrap it"):
        convert(parallel, "O2", BF16)
    with pytest.raises(ConfigError, match=r"nn\.Module"):
        convert([model], "O2", BF16)  # type: ignore[arg-type]


# --- to_float ---------------------------------------------------------------------------------------------


@LOW
@pytest.mark.parametrize("in_autocast", [False, True])
def test_to_float_computes_low_and_stores_fp32(low, in_autocast):
    torch.manual_seed(0)
    model = to_float(nn.Linear(4, 4), low)
    x = torch.randn(3, 4)
    with autocast("cpu", F16 if low == BF16 else BF16, enabled=in_autocast):
        y = model(x)
    assert y.dtype == low
    expected = nn.functional.linear(x.to(low), model.weight.to(low), model.bias.to(low))
    assert torch.equal(y, expected)
    y.sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == F32


def test_to_float_is_recursive_and_the_last_call_wins():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    for module in model:
        module.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    to_float(model[1], F32)
    to_float(model, BF16)
    model(torch.randn(2, 4))
    to_float(model[1], "fp32")
    assert model(torch.randn(2, 4)).dtype == BF16
    to_float(model, None)
    assert model(torch.randn(2, 4)).dtype == F32
    assert seen == [BF16, BF16, BF16, F32, F32, F32]


def test_to_float_reaches_recurrent_weights_buffers_and_norms():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4), "norm": nn.BatchNorm1d(3)})
    to_float(model, BF16)
    output, _ = model["rnn"](torch.randn(2, 1, 3))
    assert output.dtype == BF16
    output.sum().backward()
    assert model["rnn"].weight_hh_l0.grad.dtype == F32
    assert model["norm"](torch.randn(8, 3)).dtype == BF16
    assert model["norm"].running_mean.dtype == F32
    assert model["norm"].running_mean.abs().sum() > 0


def test_convert_respects_to_float():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    to_float(model[1], F32)
    convert(model, "O2", BF16)
    seen = []
    model[1][0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model[2].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    assert model(torch.randn(2, 4)).dtype == F32
    assert seen == [F32, BF16]
    assert model[1][0].weight.dtype == F32
