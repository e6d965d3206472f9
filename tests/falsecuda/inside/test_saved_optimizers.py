"""Optimizers whose counts of steps lie on the device are saved and loaded as those of a CPU are."""

import random
from pathlib import Path

import pytest
import torch

from tests.session.test_saved_optimizers import check, draw

KINDS = ("Adam", "AdamW", "NAdam", "RMSprop", "Rprop", "Adadelta", "Adamax", "ASGD")
WAYS = ({"capturable": True}, {"capturable": True, "foreach": False}, {"capturable": True, "fused": True})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.exhaustive)])
def test_capturable_optimizers_go_on_bit_for_bit_or_are_refused_unchanged(seeds: range, tmp_path: Path):
    for seed in seeds:
        choose = random.Random(seed)
        way = choose.choice(WAYS)
        kind = choose.choice(KINDS[:2] if "fused" in way else KINDS)
        case = {**draw(seed), "optimizer": ("torch", kind, {}), "way": way}
        try:
            with torch.device("cuda"):
                check(case, tmp_path / str(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error
