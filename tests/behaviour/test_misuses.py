"""Sixty wrong calls that a user makes, each answered by an error or a warning with the right words."""

import re
import warnings

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import cli


def net(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, *(sizes or (1,))))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def amp(level: str = "O1", dtype: str = "bf16", **options) -> hs.Session:
    model = net()
    return hs.prepare(model, sgd(model), level=level, dtype=dtype, **options)


def loss(session: hs.Session) -> torch.Tensor:
    with session.autocast():
        return session.model(torch.ones(2, 4)).float().square().mean()


def trainer(**options) -> hs.Trainer:
    model = net()
    return hs.Trainer(model, sgd(model), nn.functional.mse_loss, dtype="bf16", **options)


def prepared_twice():
    model = net()
    optimizer = sgd(model)
    hs.prepare(model, optimizer, level="O2", dtype="bf16")
    hs.prepare(model, optimizer, level="O2", dtype="bf16")


def optimizer_of_another():
    hs.prepare(net(), sgd(net()))


def optimizer_first():
    model = net()
    hs.prepare(sgd(model), model)


def no_backward():
    amp().step()


def plain_backward():
    session = amp(dtype="fp16")
    loss(session).backward()
    session.step()


def direct_step():
    session = amp(dtype="fp16")
    session.backward(loss(session))
    session.optimizers[0].step()


def zeroed_between():
    session = amp()
    session.backward(loss(session))
    session.optimizers[0].zero_grad()
    session.step()


def outside_the_region():
    session = amp()
    session.backward(session.model(torch.ones(2, 4)).square().mean())
    session.step()


def backward_twice():
    session = amp()
    value = loss(session)
    session.backward(value)
    session.backward(value)


def loss_of_several():
    session = amp()
    with session.autocast():
        out = session.model(torch.ones(2, 4))
    session.backward(out)


def without_optimizer():
    session = hs.prepare(net(), level="O2", dtype="bf16")
    session.backward(loss(session))


def by_hand_then_o1():
    model = net().bfloat16()
    session = hs.prepare(model, sgd(model), level="O1", dtype="bf16")
    session.backward(loss(session))
    session.step()


def lbfgs_at_o2():
    model = net()
    hs.prepare(model, torch.optim.LBFGS(model.parameters()), level="O2", dtype="bf16")


def banned():
    with hs.autocast("cpu", torch.float16):
        nn.functional.binary_cross_entropy(torch.rand(3, 3) @ torch.eye(3), torch.ones(3, 3))


def without_brackets():
    with amp().autocast:
        pass


def nan_batch():
    trainer().fit([(torch.full((2, 4), float("nan")), torch.ones(2, 1))], steps=1)


def other_model_checkpoint(folder):
    session = amp("O2")
    session.save(folder / "saved")
    model = net(3)
    hs.prepare(model, sgd(model), level="O2", dtype="bf16").load(folder / "saved")


def cut_short(folder):
    session = amp("O2")
    session.save(folder / "saved")
    file = next((folder / "saved").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    session.load(folder / "saved")


def scaler_twice():
    model = net()
    optimizer, scaler = sgd(model), hs.GradScaler()
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def scaler_update_first():
    hs.GradScaler().update()


def scaler_over_session():
    session = amp(dtype="fp16")
    scaler = hs.GradScaler()
    scaler.scale(loss(session)).backward()
    scaler.step(session.optimizers[0])


def collapsing():
    session = amp(dtype="fp16", max_skips=3)
    for _ in range(9):
        session.backward(loss(session) * float("inf"))
        session.step()


def wrong_plan():
    plan = hs.Plan([hs.PlanRule("decoder.*", dtype="fp32", reason="x")])
    amp("O2", plan=plan)


def unknown_loss_id():
    session = amp(dtype="fp16", loss_scale=["dynamic", 8.0])
    session.backward(loss(session), loss_id=2)


PYTHON = {
    "level O4": (lambda: amp("O4"), r"unknown level 'O4': expected one of O0, O1, O2, O3"),
    "level 2": (lambda: amp(2), r"level.*2.*'O2'"),
    "level of letters": (lambda: amp("02"), r"unknown level '02'.*O2"),
    "dtype float61": (lambda: amp(dtype="float61"), r"'float61'.*dtype=.*did you mean float16"),
    "dtype fp8": (lambda: amp(dtype="fp8"), r"fp16 or bf16"),
    "dtype int8": (lambda: amp(dtype=torch.int8), r"int8.*(fp16|bf16)"),
    "dtype fp32 at O2": (lambda: amp("O2", "fp32"), r"fp32.*(bf16|O0)"),
    "argument levl": (lambda: hs.prepare(net(), levl="O1"), r"prepare\(\).* unexpected .*argument 'levl'"),
    "fourth positional": (lambda: hs.prepare(net(), None, "O2", "bf16"), r"3 positional arguments but 4"),
    "optimizer first": (optimizer_first, r"got SGD as a model: expected prepare\(model, optimizer\)"),
    "optimizer of another model": (
        optimizer_of_another,
        r"of this SGD are not the model's.*build the optimizer from the model",
    ),
    "a model twice": (prepared_twice, r"already"),
    "a model as a dict": (lambda: hs.prepare({"a": net()}), r"got dict as a model: expected"),
    "a model class": (lambda: hs.prepare(nn.Linear), r"the class Linear as a model: expected"),
    "no parameters": (
        lambda: hs.prepare(nn.ReLU(), level="O2", dtype="bf16"),
        r"without parameters|no parameters",
    ),
    "loss scale word": (
        lambda: amp(loss_scale="auto"),
        r"unknown loss scale 'auto': expected a number, 'dynamic'",
    ),
    "loss scale -1": (lambda: amp(loss_scale=-1.0), r"-1"),
    "kernels": (lambda: amp(kernels="fast"), r"'fast'.*measured"),
    "policy": (lambda: amp(policy="full=sofmax"), r"sofmax.*softmax"),
    "plan file": (lambda: amp(plan="no-such.toml"), r"no-such\.toml"),
    "plan that matches nothing": (wrong_plan, r"'decoder\.\*'.*match"),
    "layout": (lambda: amp(layout="nhwc"), r"layout='nhwc'.*channels_last"),
    "on_nonfinite": (lambda: amp(on_nonfinite="stop"), r"on_nonfinite='stop'.*raise"),
    "max_skips 0": (lambda: amp(max_skips=0), r"max_skips must be an integer of at least 1, got 0"),
    "auto without step": (lambda: hs.prepare(net(), level="auto"), r"step="),
    "step without backward": (no_backward, r"found no gradients"),
    "loss.backward": (plain_backward, r"not scaled.*amp\.backward\(loss\)"),
    "optimizer.step": (direct_step, r"carry the session's loss scale.*amp\.step\(\)"),
    "zero_grad between": (zeroed_between, r"found no gradients.*zero_grad"),
    "outside the region": (outside_the_region, r"no op ran in bf16.*autocast"),
    "backward twice": (backward_twice, r"second time|retain_graph"),
    "a loss of several values": (loss_of_several, r"loss.*(scalar|one value|mean|0-d)"),
    "a float as the loss": (lambda: amp().backward(1.0), r"backward.*1\.0"),
    "backward without optimizer": (without_optimizer, r"without an optimizer"),
    "step by position": (lambda: amp().step(1.0), r"got 1\.0 as the optimizer.*clip_norm=1\.0"),
    "clip_norm -1": (lambda: amp().step(clip_norm=-1), r"clip_norm=-1.*above 0"),
    "a cast model at O1": (by_hand_then_o1, r"O1 keeps fp32 weights.*bf16"),
    "LBFGS at O2": (lbfgs_at_o2, r"LBFGS cannot have master weights.*O1"),
    "a banned op": (banned, r"binary_cross_entropy_with_logits"),
    "autocast without brackets": (without_brackets, r"context manager"),
    "region of a device": (lambda: hs.autocast("gpu", "bf16").__enter__(), r"device.*'gpu'"),
    "NaN in the batch": (nan_batch, r"NaN|not finite"),
    "checkpoint of another model": (other_model_checkpoint, r"2\.(weight|bias)|shape"),
    "checkpoint cut short": (cut_short, r"checksum|SHA-256|cut|damaged|size|bytes"),
    "checkpoint that is not there": (lambda: amp("O2").load("no/such/folder"), r"no/such/folder"),
    "checkpoint_every alone": (lambda: trainer(checkpoint_every=5), r"without a folder"),
    "level auto in a Trainer": (lambda: trainer(level="auto"), r"hs\.tune"),
    "steps and nothing": (lambda: trainer().fit([], steps=3), r"batch|empty"),
    "unscale twice": (scaler_twice, r"already|unscale_"),
    "update before step": (scaler_update_first, r"update|step"),
    "a GradScaler over a session": (scaler_over_session, r"did not come through the session"),
    "a collapsing scale": (collapsing, r"3 steps in a row were skipped.*doctor"),
    "loss_id": (unknown_loss_id, r"loss_id=?\s?2"),
    "master": (lambda: hs.optim.AdamW(net().parameters(), master="kahan"), r"master='kahan'.*exact"),
    "state_dtype": (
        lambda: hs.optim.AdamW(net().parameters(), state_dtype="fp8"),
        r"state_dtype='fp8'.*8bit",
    ),
    "Muon of all": (lambda: hs.optim.Muon(net().parameters()), r"shape \[4\]: put it.*muon_groups\(model\)"),
    "compact of L-BFGS": (
        lambda: hs.optim.compact(torch.optim.LBFGS, net().parameters()),
        r"compact\(LBFGS\): its step computes the loss by a closure.*on fp32 weights",
    ),
    "an empty optimizer": (lambda: hs.optim.SGD([]), r"empty"),
    "lr -1": (lambda: hs.optim.SGD(net().parameters(), lr=-1), r"lr=?.*-1|learning rate"),
    "lint of a number": (lambda: hs.lint(3), r"expected a function"),
    "unpacked": (lambda: (lambda pair: pair[0])(amp()), r"returns one Session"),
}
COMMANDS = {
    "no command": ("", r"no command given; expected one of"),
    "unknown command": ("trian digits-mlp", r"did you mean train\?"),
    "unknown recipe": ("train digit-mlp", r"did you mean digits-mlp\?"),
    "unknown option": ("train digits-mlp --lvel O1", r"--lvel.*perhaps you meant --level"),
    "missing script": ("doctor --steps 3 no-such.py", r"no script no-such\.py"),
    "notebook": ("doctor a.ipynb", r"notebook, expected a script.*nbconvert"),
    "steps -1": ("doctor digits-mlp --steps -1", r"--steps -1: expected"),
    "report folder": ("train digits-mlp --report /no/such/r.html", r"cannot write into /no/such"),
    "options of the script": ("doctor tests/behaviour/test_misuses.py --epochs 3", r"go after --"),
    "cuda": ("train digits-mlp --device cuda", r"device 'cuda' is not usable here"),
}


def answer(call, folder) -> str:
    """What an error or, where there is none, a warning says."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call(folder) if call in (other_model_checkpoint, cut_short) else call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return " ".join(str(one.message) for one in told)


@pytest.mark.parametrize("name", PYTHON)
def test_a_wrong_call_is_answered(name, tmp_path):
    call, words = PYTHON[name]
    said = answer(call, tmp_path)
    assert re.search(words, said, re.DOTALL), said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_answered_in_one_line(name, capsys):
    given, words = COMMANDS[name]
    assert cli.main(given.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(words, said), said


def test_there_are_sixty():
    assert len(PYTHON) + len(COMMANDS) >= 60
