"""What public code does to torch's GradScaler: methods of its own, writes into its tensors and its table."""

import copy
import pickle
import sys
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import halfstep as hs
from halfstep.scaling import HeadroomLossScale, StaticLossScale

SCALERS = {"torch": torch.amp.GradScaler, "halfstep": hs.GradScaler}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.125),
    "fused": lambda p: torch.optim.SGD(p, lr=0.125, fused=True),
    "one-pass": lambda p: hs.optim.SGD(p, lr=0.125),
}
kinds = pytest.mark.parametrize("kind", SCALERS)


def rig(kind, optimizer="sgd", **arguments):
    weight = torch.nn.Parameter(torch.ones(3))
    scaler = SCALERS[kind]("cpu", **{"init_scale": 4.0, "growth_interval": 2, **arguments})
    return weight, OPTIMIZERS[optimizer]([weight]), scaler


def backward(weight, scaler, bad=False):
    weight.grad = None
    scaler.scale((weight * torch.tensor([1.0, 2.0, torch.inf if bad else 4.0])).sum()).backward()


def iterate(weight, optimizer, scaler, bad=False):
    backward(weight, scaler, bad)
    scaler.step(optimizer)
    scaler.update()


def overriding(kind):
    """A scaler that zeroes NaN while it unscales, notes what it is asked, and steps by its own rule."""

    class Own(SCALERS[kind]):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.calls = []

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            self.calls.append(("unscale", float(inv_scale), float(found_inf)))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.nan_to_num_(posinf=8.0)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            flags = [float(flag) for flag in optimizer_state["found_inf_per_device"].values()]
            self.calls.append(("step", optimizer_state["stage"], flags))
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    return Own


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_methods_of_a_subclass_are_called_as_torch_calls_them(optimizer):
    seen = {}
    for kind in SCALERS:
        weight = torch.nn.Parameter(torch.ones(3))
        scaler, stepped = overriding(kind)("cpu", init_scale=4.0), OPTIMIZERS[optimizer]([weight])
        for bad in (False, True):
            iterate(weight, stepped, scaler, bad)
        seen[kind] = (scaler.calls, weight.tolist(), scaler.get_scale())
    assert seen["halfstep"] == seen["torch"]
    assert len(seen["halfstep"][0]) >= 2


@kinds
def test_a_method_put_on_the_instance_is_called(kind):
    weight, optimizer, scaler = rig(kind)
    refused = []
    scaler._maybe_opt_step = lambda optimizer, state, *args, **kwargs: refused.append(optimizer)
    iterate(weight, optimizer, scaler)
    assert refused == [optimizer]
    assert weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("optimizer", ["sgd", "one-pass"])
@kinds
def test_flags_reduced_in_place_after_unscaling_skip_the_step(kind, optimizer):
    """As fairscale's ShardedGradScaler does after torch's own `unscale_`."""

    class Sharded(SCALERS[kind]):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.add_(2.0)  # two other ranks found inf

    weight = torch.nn.Parameter(torch.ones(3))
    scaler = Sharded("cpu", init_scale=4.0)
    iterate(weight, OPTIMIZERS[optimizer]([weight]), scaler)
    assert weight.tolist() == [1.0] * 3
    assert scaler.get_scale() == 2.0


def whole(kind):
    """A scaler that does everything itself by the private names, as torch's own for FSDP."""

    class Whole(SCALERS[kind]):
        def unscale_(self, optimizer):
            self._check_scale_growth_tracker("unscale_")
            state = self._per_optimizer_states[id(optimizer)]
            assert state["stage"] is OptState.READY
            inv_scale, found = self._scale.double().reciprocal().float(), torch.zeros(())
            state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, found, True)
            state["stage"] = OptState.UNSCALED

        def update(self, new_scale=None):
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found = sum(flag for state in states for flag in state["found_inf_per_device"].values())
            if found.item() >= 1.0:
                self._scale *= self._backoff_factor
                self._growth_tracker.fill_(0)
            elif tracker + 1 == self._growth_interval:
                scale.mul_(self._growth_factor)
                tracker.fill_(0)
            else:
                self._growth_tracker = tracker + 1
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Whole


def test_a_subclass_that_does_everything_itself_equals_torchs():
    told = {}
    for kind in SCALERS:
        weight = torch.nn.Parameter(torch.ones(3))
        scaler = whole(kind)("cpu", init_scale=4.0, growth_interval=2)
        optimizer = OPTIMIZERS["sgd"]([weight])
        told[kind] = []
        for bad in (False, False, True, False, True, True):
            iterate(weight, optimizer, scaler, bad)
            told[kind].append((weight.tolist(), scaler.get_scale(), int(scaler._growth_tracker)))
            assert not scaler._per_optimizer_states
    assert told["halfstep"] == told["torch"]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torchs_own_subclass_for_fsdp_runs_on_ours_and_equals_torchs(one_rank):
    class Ours(hs.GradScaler):
        process_group = one_rank

    methods = {k: v for k, v in vars(ShardedGradScaler).items() if callable(v) and k != "__init__"}
    for name, method in methods.items():
        setattr(Ours, name, method)
    assert {"scale", "unscale_", "_unscale_grads_", "update"} <= methods.keys()
    told = {}
    for make in (ShardedGradScaler, Ours):
        weight = torch.nn.Parameter(torch.ones(3))
        scaler, optimizer = make("cpu", init_scale=4.0, growth_interval=2), OPTIMIZERS["sgd"]([weight])
        told[make] = []
        for bad in (False, False, True, False, False, True, True):
            iterate(weight, optimizer, scaler, bad)
            told[make].append((weight.tolist(), scaler.get_scale(), int(scaler._growth_tracker)))
    assert told[Ours] == told[ShardedGradScaler]


@pytest.mark.parametrize("ours_first", [True, False])
def test_torchs_scaler_for_fsdp_and_ours_are_joined_by_inheritance(one_rank, ours_first):
    bases = (hs.GradScaler, ShardedGradScaler) if ours_first else (ShardedGradScaler, hs.GradScaler)
    joined = type("Joined", bases, {})
    told = {}
    for make in (ShardedGradScaler, joined):
        weight = torch.nn.Parameter(torch.ones(3))
        scaler, optimizer = make("cpu", init_scale=4.0, growth_interval=2), OPTIMIZERS["sgd"]([weight])
        scaler.process_group = one_rank
        told[make] = []
        for bad in (False, False, True, False, False, True, True):
            iterate(weight, optimizer, scaler, bad)
            told[make].append((weight.tolist(), scaler.get_scale(), int(scaler._growth_tracker)))
    assert told[joined] == told[ShardedGradScaler]


def public(kind):
    """A scaler that adds to each public method and leaves the work to the class above."""

    class Public(SCALERS[kind]):
        calls = ()

        def scale(self, outputs):
            self.calls += ("scale",)
            return super().scale(outputs)

        def unscale_(self, optimizer):
            self.calls += ("unscale_",)
            super().unscale_(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.clamp_(max=2.0)

        def step(self, optimizer, *args, **kwargs):
            self.calls += ("step",)
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale=None):
            self.calls += ("update",)
            super().update(new_scale)
            self._scale.clamp_(min=4.0)

    return Public


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_public_methods_of_a_subclass_add_to_ours_as_to_torchs(optimizer):
    seen = {}
    for kind in SCALERS:
        weight = torch.nn.Parameter(torch.ones(3))
        scaler, stepped = public(kind)("cpu", init_scale=4.0), OPTIMIZERS[optimizer]([weight])
        for bad in (False, True, False):
            iterate(weight, stepped, scaler, bad)
        seen[kind] = (scaler.calls, weight.tolist(), scaler.get_scale())
    assert seen["halfstep"] == seen["torch"]


def test_the_kernel_of_torchs_update_writes_through():
    weight, _optimizer, scaler = rig("halfstep")
    backward(weight, scaler)
    torch._amp_update_scale_(scaler._scale, scaler._growth_tracker, torch.zeros(()), 2.0, 0.5, 3)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 1)
    torch._amp_update_scale_(scaler._scale, scaler._growth_tracker, torch.ones(()), 2.0, 0.5, 3)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0, 0)


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s._scale.fill_(16.0),
        lambda s: s._scale.data.fill_(16.0),
        lambda s: s._scale.copy_(torch.tensor(16.0)),
        lambda s: setattr(s, "_scale", torch.tensor(16.0)),
        lambda s: setattr(s, "_scale", s._scale * 4),
    ],
)
@kinds
def test_a_scale_that_was_written_is_the_scale(kind, write):
    weight, optimizer, scaler = rig(kind)
    iterate(weight, optimizer, scaler)
    write(scaler)
    assert scaler.get_scale() == 16.0
    assert float(scaler.scale(torch.ones(()))) == 16.0
    iterate(weight, optimizer, scaler)
    assert weight.tolist() == [0.75, 0.5, 0.0]
    assert scaler.get_scale() == 32.0  # grown after two clean steps
    assert scaler.state_dict()["scale"] == 32.0


@kinds
def test_whoever_holds_the_tensors_sees_what_becomes_of_them(kind):
    weight, optimizer, scaler = rig(kind)
    backward(weight, scaler)
    scale, tracker = scaler._scale, scaler._growth_tracker
    iterate(weight, optimizer, scaler)
    assert (float(scale), int(tracker)) == (4.0, 1)
    iterate(weight, optimizer, scaler, bad=True)
    assert (float(scale), int(tracker)) == (2.0, 0)
    assert scaler._scale is scale


@kinds
def test_what_is_written_and_then_loaded_or_set_is_kept_in_that_order(kind):
    weight, optimizer, scaler = rig(kind)
    iterate(weight, optimizer, scaler)
    scale, tracker = scaler._scale, scaler._growth_tracker
    scale.fill_(16.0)
    scaler.set_growth_factor(3.0)
    assert (float(scale), scaler.get_scale()) == (16.0, 16.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 0})
    assert (float(scale), int(tracker), scaler.get_scale()) == (32.0, 0, 32.0)


@kinds
def test_two_scalers_share_one_scale(kind):
    weight, optimizer, first = rig(kind)
    second = SCALERS[kind]("cpu", init_scale=64.0)
    backward(weight, first)
    second._scale, second._growth_tracker = first._scale, first._growth_tracker
    assert second.get_scale() == 4.0
    iterate(weight, optimizer, first, bad=True)
    assert second.get_scale() == 2.0


@kinds
def test_the_growth_tracker_is_set(kind):
    weight, optimizer, scaler = rig(kind)
    backward(weight, scaler)
    scaler._growth_tracker = torch.tensor(1, dtype=torch.int32)
    assert scaler._growth_tracker == 1
    iterate(weight, optimizer, scaler)
    assert scaler.get_scale() == 8.0


@kinds
def test_the_rates_are_set_by_their_names(kind):
    weight, optimizer, scaler = rig(kind)
    scaler._init_scale, scaler._growth_factor, scaler._backoff_factor = 16.0, 4.0, 0.25
    scaler._growth_interval, scaler._init_growth_tracker = 3, 2
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 2)
    iterate(weight, optimizer, scaler)
    assert (scaler.get_scale(), scaler._init_scale) == (64.0, 16.0)
    iterate(weight, optimizer, scaler, bad=True)
    assert scaler.get_scale() == 16.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        4.0,
        0.25,
        3,
    )


@kinds
def test_a_scaler_made_to_stand_still(kind):
    """What bf16 trainers turn a GradScaler into, so that it only skips."""
    weight, optimizer, scaler = rig(kind)
    scaler._init_scale = scaler._backoff_factor = scaler._growth_factor = 1.0
    scaler._growth_interval = sys.maxsize
    for bad in (False, True, False):
        iterate(weight, optimizer, scaler, bad)
    assert scaler.get_scale() == 1.0
    assert weight.tolist() == [0.75, 0.5, 0.0]


@kinds
def test_a_disabled_scaler_takes_the_names_and_does_nothing(kind):
    weight, optimizer, scaler = rig(kind, enabled=False)
    scaler._init_scale = scaler._backoff_factor = scaler._growth_factor = 1.0
    scaler._scale, scaler._growth_tracker, scaler._growth_interval = torch.tensor(8.0), None, 7
    scaler.set_growth_factor(3.0)
    iterate(weight, optimizer, scaler)
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    assert weight.tolist() == [0.875, 0.75, 0.5]


@kinds
def test_setting_the_scale_to_none_begins_anew(kind):
    weight, optimizer, scaler = rig(kind)
    iterate(weight, optimizer, scaler, bad=True)
    scaler._scale = scaler._growth_tracker = None
    assert scaler._scale is None
    assert scaler.get_scale() == 4.0
    iterate(weight, optimizer, scaler)
    assert scaler.get_scale() == 4.0


@kinds
def test_switched_off_for_a_while(kind):
    weight, optimizer, scaler = rig(kind)
    iterate(weight, optimizer, scaler, bad=True)
    scaler._enabled = False
    assert (scaler.get_scale(), scaler.is_enabled()) == (1.0, False)
    scaler._enabled = True
    assert (scaler.get_scale(), scaler.is_enabled()) == (2.0, True)


@kinds
def test_a_look_without_unscaling_leaves_the_unscaling_to_step(kind):
    weight, optimizer, scaler = rig(kind)
    backward(weight, scaler)
    scaler._check_inf_per_device(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == [0.875, 0.75, 0.5]


@kinds
def test_a_fused_optimizers_own_grad_scale_is_divided_out_too(kind):
    weight, optimizer, scaler = rig(kind, "fused")
    optimizer.grad_scale = torch.tensor(2.0)
    backward(weight, scaler)
    scaler.step(optimizer)
    assert weight.tolist() == [0.9375, 0.875, 0.75]


@kinds
def test_an_optimizer_whose_step_asks_for_the_scaler_gets_it(kind):
    class Asking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            found = grad_scaler._check_inf_per_device(self)
            self.heard = (float(grad_scaler._get_scale_async()), [float(flag) for flag in found.values()])
            return "stepped"

    weight, _, scaler = rig(kind)
    optimizer = Asking([weight], lr=1.0)
    backward(weight, scaler, bad=True)
    with pytest.warns(FutureWarning):
        result = scaler.step(optimizer)
    assert (result if kind == "torch" else result.result) == "stepped"
    scaler.update()
    assert optimizer.heard == (4.0, [1.0])
    assert scaler.get_scale() == 2.0


@kinds
def test_copies_do_not_share_the_tensors_that_were_handed_out(kind):
    weight, optimizer, scaler = rig(kind)
    iterate(weight, optimizer, scaler)
    scaler._scale.fill_(32.0)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.get_scale() == 32.0
        twin.scale(torch.ones(()))  # from here on a copy has tensors
        twin._scale.fill_(8.0)
        assert (twin.get_scale(), scaler.get_scale()) == (8.0, 32.0)


def test_a_constant_scale_stays_whatever_torchs_numbers_say():
    weight, optimizer, scaler = rig("halfstep", loss_scale=StaticLossScale(8.0))
    for bad in (False, True, False, False):
        iterate(weight, optimizer, scaler, bad)
        assert (scaler.get_scale(), int(scaler._growth_tracker)) == (8.0, 0)
    assert scaler.skips.total == 1


def test_a_headroom_scale_is_written_through_too():
    scaler = hs.GradScaler(loss_scale=HeadroomLossScale())
    scaler.scale(torch.ones(()))
    scaler._scale.fill_(64.0)
    assert scaler.get_scale() == 64.0


def test_off_the_cpu_what_is_written_is_taken_up_unread():
    scaler = hs.GradScaler(init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("meta"))  # to read a meta tensor is an error
    assert [t.device.type for t in (scaler._scale, scaler._growth_tracker)] == ["meta", "meta"]
    scaler._scale.fill_(8.0)
    scaler._growth_tracker.zero_()
    taken = scaler.loss_scale
    assert [t.device.type for t in (taken.current, taken.clean)] == ["meta", "meta"]
    assert taken.adjust(torch.ones((), dtype=torch.bool, device="meta")).current.device.type == "meta"
