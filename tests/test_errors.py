"""A warning points at the line of the user's program that led to it."""

import warnings

import pytest
import torch

import halfstep as hs


def unscaled_step():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, level="O1", dtype="fp16")
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()  # the warning comes from a hook that torch calls
    return amp


def skips_in_a_row():
    model = torch.nn.Linear(4, 2)
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1", dtype="fp16")
    for _ in range(8):
        with amp.autocast():
            loss = model(torch.full((3, 4), float("nan"))).sum()
        amp.backward(loss)
        amp.step()


def coarse_weights():
    model = torch.nn.Linear(4, 2).to(torch.bfloat16)
    optimizer = hs.optim.AdamW(model.parameters(), lr=1e-6, master=None)
    hs.optim.resolution(optimizer)


@pytest.mark.parametrize("program", [unscaled_step, skips_in_a_row, coarse_weights])
def test_a_warning_names_the_users_line(program):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program()
    lines = {
        (one.filename, program.__code__.co_firstlineno < one.lineno < program.__code__.co_firstlineno + 12)
        for one in told
        if issubclass(one.category, hs.errors.HalfstepWarning)
    }
    assert lines == {(__file__, True)}
