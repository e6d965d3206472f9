"""Unchanged maths gives identical losses: the first 20 of each recipe, level and dtype (goldens.py)."""

import json

import pytest

from tests.goldens import FILE, cases, in_pinned_process

WANTED = json.loads(FILE.read_text())
#: Largest relative difference to the golden loss on another torch or instruction set, by dtype.
BOUNDS = {"None": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


@pytest.fixture(scope="module")
def found(once):
    return once("goldens", in_pinned_process)


def is_same_machine(found, name: str) -> bool:
    """Whether arithmetic is what the goldens were made with; text-gpt reads the standard library's source."""
    fixed = ("torch", "isa", "python") if name == "text-gpt" else ("torch", "isa")
    return all(found[key] == WANTED[key] for key in fixed)


@pytest.mark.parametrize("case", [" ".join(map(str, case)) for case in cases()])
def test_losses_are_the_golden_ones(found, case):
    name, _, dtype, _ = case.split()
    have, want = found["losses"][case], WANTED["losses"][case]
    if is_same_machine(found, name):
        assert have == want, "if this change is meant to change numbers: python -m tests.goldens --update"
        return
    if name == "text-gpt" and found["python"] != WANTED["python"]:
        pytest.skip("another standard library is another text")
    numbers = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(have, want, strict=True)]
    assert all(abs(a - b) <= BOUNDS[dtype] * abs(b) for a, b in numbers)


def test_every_case_has_its_golden_losses():
    assert set(WANTED["losses"]) == {" ".join(map(str, case)) for case in cases()}
    assert {len(losses) for losses in WANTED["losses"].values()} == {20}
