"""Options of the optimizers: what there is none of is refused by name."""

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
        "algorithm", "init_states", "master_of", "masters", "measure", "measure_on_host", "one_pass",
        "seed_masters",
    }  # fmt: skip


@pytest.mark.parametrize("option", [{"accumulate": "fp32"}, {"release_gradients": True}, {"seed": 3}])
def test_an_option_of_the_whole_optimizer_in_a_group_is_refused(option):
    with pytest.raises(hs.ConfigError, match="an option of the whole optimizer"):
        hs.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))], **option}], lr=0.1)
