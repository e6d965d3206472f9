"""Each front door has cures in its own words, and in no other's."""

import re

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.compat.apex import amp as apex
from halfstep.doctor.examiner import scale_of_apex
from halfstep.numerics.cause import Cause
from halfstep.numerics.remedies import Evidence, propose
from halfstep.numerics.remedies.terms import LOOPS, terms_of
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import Node, OpLocation

#: What only one door offers.
OWN = {
    "session": r"amp\.step\(clip_norm|with hs\.autocast|hs\.prepare\(\.\.\.",
    "trainer": r"hs\.Trainer",
    "scaler": r"unscale_|GradScaler",
    "apex": r"amp\.(initialize|master_params|disable_casts)",
}


def plain():
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def of_plain():
    return StepParticipants(None, [*plain()])


def of_scaler():
    return StepParticipants(None, [*plain(), torch.amp.GradScaler("cpu")])


def of_session():
    return StepParticipants(None, [hs.prepare(*plain(), dtype="fp16")])


def of_trainer():
    parts = of_session()
    parts.loop = "/halfstep/trainer/loop.py"
    return parts


def of_apex():
    model, optimizer = apex.initialize(*plain(), opt_level="O1", verbosity=0)
    return StepParticipants(None, [model, optimizer, scale_of_apex()])


MAKE = {
    "plain": of_plain, "scaler": of_scaler, "session": of_session, "trainer": of_trainer, "apex": of_apex,
}  # fmt: skip


@pytest.fixture
def parts(request):
    yield MAKE[request.param]()
    apex.shutdown()


def written(parts, phase, fmt):
    """The code of every cure of an op that left its range, in an autocast region."""
    func = torch.ops.aten.mm.default
    location = OpLocation("", "", torch.matmul, "train.py", 3, in_region=True)
    node = Node(0, func, phase, location, (torch.ones(2, 2), torch.ones(2, 2)))
    return [c.code for c in propose(Evidence(node, Cause("range", "range", 8.0, fmt), parts, 1.0))]


@pytest.mark.parametrize("parts", MAKE, indirect=True)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_cures_speak_of_the_scripts_own_door(parts, phase, fmt, request):
    mine = request.node.callspec.params["parts"]
    codes = written(parts, phase, fmt)
    assert codes
    mixed = {name: code for name, words in OWN.items() for code in codes if re.search(words, code)}
    if mine == "plain":
        mixed.pop("scaler", None)
    allowed = {mine, "session"} if mine == "trainer" else {mine}
    assert set(mixed) <= allowed, mixed


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("plain", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        ("scaler", "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_"),
        ("session", "amp.step(clip_norm=1.0)"),
        ("trainer", "hs.Trainer(..., clip_norm=1.0)"),
        ("apex", "amp.master_params(optimizer)"),
    ],
    indirect=["parts"],
)
def test_clipping_is_written_as_the_door_has_it(parts, words):
    assert words in terms_of(parts).clip


def test_a_device_stands_where_the_cpu_would():
    model = nn.Linear(2, 2, device="meta")
    assert 'torch.autocast("meta"' in terms_of(StepParticipants(None, [model]), in_region=True).wide


def test_the_loops_that_are_known_exist_where_they_are_said_to():
    from halfstep.trainer import loop

    known = [end for end in LOOPS if loop.__file__.replace("\\", "/").endswith(end)]
    assert known == ["/halfstep/trainer/loop.py"]
