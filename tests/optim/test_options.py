"""Options of the optimizers: what there is none of is refused by name."""

import inspect
import pydoc

import pytest
import torch
from torch import nn

import halfstep as hs


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"states": "8bit"}, TypeError, "hs.optim.AdamW has no option 'states'; did you mean state_dtype"),
        ({"release_gradient": True}, TypeError, "did you mean release_gradients"),
        ({"qwerty": True}, TypeError, "docs/api.md"),
        ({"seed": "a"}, hs.ConfigError, "seed='a': expected a whole number"),
        ({"seed": -1}, hs.ConfigError, "seed=-1"),
        ({"release_gradients": "no"}, hs.ConfigError, "release_gradients='no': expected True or False"),
    ],
)
def test_options_that_there_are_none_of_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        hs.optim.AdamW(nn.Linear(2, 2).parameters(), **options)


def test_stochastic_rounding_of_fp16_names_what_to_take():
    with pytest.raises(hs.UnsupportedError, match="these are fp16: take master='exact'"):
        hs.optim.AdamW(nn.Linear(2, 2).half().parameters(), master="stochastic")


def test_an_optimizer_shows_what_users_call_and_no_more():
    shown = {name for name in dir(hs.optim.AdamW) if not name.startswith("_")}
    assert shown - set(dir(torch.optim.Optimizer)) == {
        "algorithm", "init_states", "master_of", "masters", "measure", "one_pass", "seed_masters",
    }  # fmt: skip


@pytest.mark.parametrize("option", [{"accumulate": "fp32"}, {"release_gradients": True}, {"seed": 3}])
def test_an_option_of_the_whole_optimizer_in_a_group_is_refused(option):
    with pytest.raises(hs.ConfigError, match="an option of the whole optimizer"):
        hs.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))], **option}], lr=0.1)


@pytest.mark.parametrize("kind", [hs.optim.Adam, hs.optim.AdamW, hs.optim.SGD, hs.optim.Lion])
def test_help_shows_every_option_with_its_default(kind):
    shown = inspect.signature(kind).parameters
    assert {"lr", "weight_decay", "master", "state_dtype", "clip_norm", "seed"} <= shown.keys()
    assert (shown["master"].default, shown["state_dtype"].default) == ("exact", "fp32")
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    assert "clip_norm" in pydoc.render_doc(kind)


def test_the_dtype_of_states_may_be_torchs():
    optimizer = hs.optim.AdamW([torch.nn.Parameter(torch.ones(4, 32))], state_dtype=torch.bfloat16)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "state_dtype": torch.float32})
    assert [group["state_dtype"] for group in optimizer.param_groups] == ["bf16", "fp32"]
    with pytest.raises(hs.errors.ConfigError, match="state_dtype='fp16': choose one of 'fp32', 'bf16'"):
        hs.optim.AdamW([torch.nn.Parameter(torch.ones(4))], state_dtype=torch.float16)
