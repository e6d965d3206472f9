"""What goes wrong is said in words of ours, with what was given and what was expected."""

import re

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hs.lint(3), "lint got a int as the step, expected a function"),
        (lambda: hs.lint(nn.Linear(2, 1)), r"lint got a Linear as the step.*lint\(model=...\)"),
        (lambda: hs.watch(nn.Linear(2, 1), every=-1), r"every=-1\): expected a whole number, 0 or more"),
        (lambda: hs.watch(nn.Linear(2, 1), every=2.5), r"every=2.5\): expected a whole number"),
        (lambda: hs.watch(nn.Linear(2, 1), every=True), r"every=True\): expected a whole number"),
        (lambda: hs.watch(nn.Linear(2, 1), keep="all"), r"keep='all'\): expected a whole number, 1 or more"),
        (lambda: hs.GradScaler("foo"), "GradScaler: unknown device 'foo'"),
    ],
)
def test_a_wrong_argument_is_refused_in_our_words(call, message):
    with pytest.raises(hs.ConfigError, match=message):
        call()


def test_an_object_that_prints_as_a_page_is_named_by_its_class():
    model = nn.Linear(2, 1)
    with pytest.raises(hs.ConfigError) as caught:
        hs.Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()))  # the wrong way round
    assert str(caught.value) == "loss_fn=an object of class SGD; expected a function (output, target) -> loss"


class Own:
    pass


def test_a_file_of_objects_is_refused_without_torchs_advice(tmp_path):
    path = tmp_path / "own.pt"
    torch.save({"model": Own()}, path)
    with pytest.raises(hs.CheckpointError) as caught:
        checkpoint.load(path)
    said = str(caught.value)
    assert "objects that only running its code would make" in said
    assert not re.search(r"[\x00-\x1f]", said)
    assert "weights_only" not in said
