"""Checkpoints: atomic, checked, fully qualified names, the last k."""

import random

import numpy
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint, rng
from halfstep.checkpoint import CheckpointFolder
from halfstep.errors import CheckpointError, HalfstepWarning


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Wrapped(nn.Module):
    """Names as DDP and torch.compile make them."""

    def __init__(self, inner):
        super().__init__()
        self.module = nn.Module()
        self.module._orig_mod = inner


def test_what_was_saved_is_what_is_loaded(tmp_path):
    state = {"a": torch.arange(5.0), "b": [1, 2.5, "x", None, True], "c": {"d": torch.ones(2).bfloat16()}}
    path = checkpoint.save(tmp_path / "deep" / "a.pt", state)
    found = checkpoint.load(path)
    assert torch.equal(found["a"], state["a"])
    assert found["b"] == state["b"]
    assert torch.equal(found["c"]["d"], state["c"]["d"])
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


def test_plain_torch_reads_it(tmp_path):
    path = checkpoint.save(tmp_path / "a.pt", {"a": torch.ones(3)})
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))


def test_no_altered_byte_goes_unseen(tmp_path):
    """Every byte of the tensor is flipped in turn, and many elsewhere: an error, or the same values."""
    wanted = torch.arange(40, dtype=torch.int16)
    path = checkpoint.save(tmp_path / "a.pt", {"a": wanted})
    whole = path.read_bytes()
    start = whole.index(wanted.numpy().tobytes())
    refused = 0
    for at in [*range(start, start + 80), *range(0, len(whole), 29)]:
        altered = bytearray(whole)
        altered[at] ^= 0x41
        path.write_bytes(altered)
        try:
            assert torch.equal(checkpoint.load(path)["a"], wanted), f"byte {at} changed the values unseen"
        except CheckpointError as error:
            refused += "\n" not in str(error)
    assert refused >= 80


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corrupt or not a checkpoint"),
        (b"hello", "corrupt or not a checkpoint"),
        (None, "no checkpoint at"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"a": Evil()}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match="it holds print, objects that only running its code would make"
    ):
        checkpoint.load(tmp_path / "a.pt")


def test_a_checkpoint_that_is_no_mapping_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds a list, expected a mapping"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = checkpoint.save(tmp_path / "a.pt", {"a": 1})
    with pytest.raises((CheckpointError, AttributeError, TypeError)):
        checkpoint.save(path, {"a": lambda: None})
    assert checkpoint.load(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file" / "a.pt", {"a": 1})


def test_wrapped_and_bare_models_share_checkpoints():
    bare, other = net(), net()
    with torch.no_grad():
        other[0].weight.zero_()
    wrapped = Wrapped(other)
    assert checkpoint.model_state(wrapped).keys() == bare.state_dict().keys()
    checkpoint.load_model_state(wrapped, checkpoint.model_state(bare))
    assert torch.equal(other[0].weight, bare[0].weight)


def test_another_model_is_named_in_the_error():
    with pytest.raises(CheckpointError, match=r"of another model: missing 0.bias.*unexpected weight"):
        checkpoint.load_model_state(net(), {"weight": torch.ones(1), "2.bias": torch.ones(2)})
    misshapen = {**checkpoint.model_state(net()), "2.bias": torch.ones(7)}
    with pytest.raises(CheckpointError, match=r"size mismatch for 2.bias") as caught:
        checkpoint.load_model_state(net(), misshapen)
    assert "\n" not in str(caught.value)


def test_optimizer_state_is_keyed_by_name_and_survives_another_order():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    names = checkpoint.parameter_names(model, optimizer)
    assert names == [name for name, _ in model.named_parameters()]
    state = checkpoint.optimizer_state(optimizer, names)
    assert set(state["state"]) == set(names)

    turned = torch.optim.Adam(list(model.parameters())[::-1], lr=0.1)
    checkpoint.load_optimizer_state(turned, checkpoint.parameter_names(model, turned), state)
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def trained(optimizer, model):
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "of another optimizer: SGD saved it, here is AdamW"),
        (torch.optim.AdamW, torch.optim.SGD, "AdamW saved it, here is SGD"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved, present, message):
    model = net()
    mine = trained(saved(model.parameters(), lr=0.1), model)
    state = checkpoint.optimizer_state(mine, names := checkpoint.parameter_names(model, mine))
    other = present(model.parameters(), lr=0.2)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_optimizer_state(other, names, state)
    assert (other.param_groups[0]["lr"], len(other.state)) == (0.2, 0)


@pytest.mark.parametrize("with_masters", [True, False])
def test_masters_are_neither_dropped_nor_made_up(with_masters):
    model = net().bfloat16()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    names = checkpoint.parameter_names(model, one)
    plain = checkpoint.optimizer_state(one, names)
    kept = hs.MasterWeights(one, model)
    state = checkpoint.optimizer_state(one, names)
    assert "masters" in state
    other = hs.optim.SGD(net().bfloat16().parameters(), lr=0.1)
    target, given = (other, state) if with_masters else (one, plain)
    with pytest.raises(CheckpointError, match="fp32 masters from MasterWeights"):
        checkpoint.load_optimizer_state(target, names, given)
    kept.revert()


def test_a_model_of_another_shape_copies_nothing():
    model = net()
    before = checkpoint.model_state(model)
    before = {name: value.clone() for name, value in before.items()}
    state = {name: value + 1 for name, value in before.items()} | {"2.bias": torch.ones(7)}
    with pytest.raises(CheckpointError, match=r"size mismatch for 2.bias, \[7\] and here \[2\]"):
        checkpoint.load_model_state(model, state)
    assert all(torch.equal(value, before[name]) for name, value in checkpoint.model_state(model).items())


def test_parameters_of_no_model_go_by_place_and_others_are_refused():
    model, stranger = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [stranger]}], lr=0.1)
    assert checkpoint.parameter_names(model, optimizer) == ["0.weight", "1.0"]
    state = checkpoint.optimizer_state(optimizer, ["0.weight", "1.0"])
    with pytest.raises(
        CheckpointError, match=r"holds other parameters or other groups: missing 0.bias, unexpected 1.0"
    ):
        checkpoint.load_optimizer_state(optimizer, ["0.weight", "0.bias"], state)


def test_every_generator_comes_back(tmp_path):
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    path = checkpoint.save(tmp_path / "a.pt", rng.random_state())
    wanted = (random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1))
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    rng.load_random_state(checkpoint.load(path))
    assert (random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1)) == wanted


def files(folder, *steps):
    """A folder of checkpoints as earlier versions wrote them, in one file each."""
    return [checkpoint.save(folder / f"step-{step:08d}.pt", {"step": step}) for step in steps]


def read(folder):
    """What the folder goes on from."""
    found = []
    folder.read_latest(lambda path: found.append(checkpoint.load(path)))
    return found


def test_a_folder_goes_on_from_its_newest(tmp_path):
    assert read(CheckpointFolder(tmp_path)) == []
    files(tmp_path, 5, 100, 15)
    assert [p.name for p in CheckpointFolder(tmp_path).paths()][-1] == "step-00000100.pt"
    assert read(CheckpointFolder(tmp_path)) == [{"step": 100}]


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_taken(tmp_path):
    _, second, third = files(tmp_path, 1, 2, 3)
    third.write_bytes(b"rubbish")
    second.write_bytes(b"")
    folder = CheckpointFolder(tmp_path, keep=1)
    with pytest.warns(
        HalfstepWarning, match=r"step-0000000[23].pt is corrupt.*going on from step-00000001.pt"
    ):
        assert read(folder) == [{"step": 1}]
    assert (folder.has(1), folder.has(2)) == (True, False)
    names = ["step-00000001.pt", "step-00000002.pt.damaged", "step-00000003.pt.damaged"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_where_all_are_damaged_the_folder_is_left_as_it_is(tmp_path):
    (path,) = files(tmp_path, 2)
    path.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"step-00000002.pt is corrupt.*no earlier checkpoint.*afresh"):
        read(CheckpointFolder(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002.pt"]


def test_a_folder_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointFolder(tmp_path, keep=0)
