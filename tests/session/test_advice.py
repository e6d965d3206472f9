"""What save and load say of what they cannot take, with the advice tried."""

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, PlanError


def nets():
    torch.manual_seed(0)
    return nn.Linear(4, 3), nn.Linear(4, 2)


def session(kinds=(hs.optim.Adam, hs.optim.Adam), order=(0, 1), level="O2"):
    models = nets()
    optimizers = [kind(models[number].parameters(), lr=0.1) for kind, number in zip(kinds, order)]
    return models, optimizers, hs.prepare(models, optimizers, level=level, dtype="bf16", kernels="native")


def train(models, optimizers, amp, steps=2):
    for _ in range(steps):
        with amp.autocast():
            loss = sum(model(torch.ones(5, 4)).float().square().mean() for model in models)
        amp.backward(loss)
        for optimizer in optimizers:
            amp.step(optimizer)


@pytest.mark.parametrize("kinds", [(hs.optim.Adam, hs.optim.Adam), (hs.optim.Adam, hs.optim.SGD)])
def test_optimizers_in_another_order_are_told_by_their_order(tmp_path, kinds):
    """It was said that they hold other parameters, or are other optimizers."""
    run = session(kinds)
    train(*run)
    run[2].save(tmp_path / "a")
    models, optimizers, amp = session(kinds[::-1], (1, 0))
    with pytest.raises(CheckpointError, match=r"in another order .*numbers \[1, 0\]"):
        amp.load(tmp_path / "a")
    amp.revert()
    again = hs.prepare(models, optimizers[::-1], level="O2", dtype="bf16", kernels="native")
    again.load(tmp_path / "a")
    train(*run)
    train(models, optimizers[::-1], again)
    for one, other in zip(run[0], models):
        assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("home", [hs.optim, torch.optim])
def test_the_advice_for_another_optimizer_keeps_its_states(tmp_path, home, level):
    run = session((home.Adam, home.Adam), level=level)
    train(*run)
    run[2].save(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"is of other optimizers: .*Adam.*AdamW.*load_state_dict"):
        session((home.AdamW, home.AdamW), level=level)[2].load(tmp_path / "a")
    models, old, amp = session((home.Adam, home.Adam), level=level)
    amp.load(tmp_path / "a")
    amp.revert()
    new = [home.AdamW(model.parameters(), lr=0.1) for model in models]
    for one, other in zip(new, old):
        one.load_state_dict(other.state_dict())
    amp = hs.prepare(models, new, level=level, dtype="bf16", kernels="native")
    steps = [int(new[0].state_dict()["state"][0]["step"])]
    train(models, new, amp)
    assert [*steps, int(new[0].state_dict()["state"][0]["step"])] == [2, 4]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (object(), r"^extra is of type object"),
        ({"notes": [1, {2}]}, r"^extra\.notes\.1 is of type set"),
        (np.ones(3), r"^extra is of type ndarray.*torch\.from_numpy"),
        ({torch.ones(1): 1}, r"^a key of extra is a tensor"),
        ({frozenset(): 1}, r"^a key of extra is of type frozenset"),
        (torch.ones(2, 2).to_sparse(), r"^extra is a tensor that a checkpoint cannot hold"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_as_it_was_given(tmp_path, extra, says):
    amp = session()[2]
    with pytest.raises(CheckpointError, match=says):
        amp.save(tmp_path / "a", extra=extra)
    with pytest.raises(CheckpointError, match=says.replace("extra", "position")):
        amp.save(tmp_path / "a", position=extra)


def test_another_json_file_is_told_apart_from_a_manifest(tmp_path):
    (tmp_path / "manifest.json").write_text('{"some": 1}')
    with pytest.raises(CheckpointError, match="not a manifest: it has no 'format'"):
        session()[2].load(tmp_path)


def test_a_tied_head_that_is_asked_for_in_fp32_is_sent_to_its_output():
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(PlanError, match=r"one tied tensor.*output='fp32'"):
        hs.convert(model, "O2", "bf16", plan=hs.Plan([hs.PlanRule("head", dtype="fp32", reason="logits")]))
    hs.convert(model, "O2", "bf16", plan=hs.Plan([hs.PlanRule("head", output="fp32", reason="logits")]))
    assert model["head"](torch.ones(1, 4)).dtype == torch.float32
