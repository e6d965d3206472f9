"""Runs tests on the false CUDA device, each group in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.falsecuda import build, selection

NO_DEVICE = build.missing()


def run(*arguments: str) -> str:
    """What pytest says of `arguments` in a process, and its children, that have the device."""
    command = (
        sys.executable,
        "-m",
        "tests.falsecuda",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for name in [name for name in env if name.startswith("PYTEST_")]:
        del env[name]  # a worker of a parallel run says that it is one
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=560, env=env, cwd=build.ROOT
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_what_is_written_for_the_device():
    files = (
        "tests/gpu/test_numbers.py",
        "tests/optim/test_foreach_reference.py",
        "tests/session/test_graphs.py",
    )
    run("tests/falsecuda/inside", *files, "-m", "not exhaustive and not long", "-k", "not each_alone")


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_all_random_programs_and_waits():
    run("tests/falsecuda/inside", "-m", "exhaustive")


@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
@pytest.mark.parametrize(
    "group", ["steps", *(pytest.param(g, marks=pytest.mark.long) for g in ("observation", "training"))]
)
def test_ordinary_tests_pass_with_their_tensors_on_the_device(group: str):
    run("--default-device", "cuda", "-m", "not exhaustive and not long", *selection.GROUPS[group])


@pytest.mark.long
@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_more_of_what_is_written_for_the_device():
    run("tests/falsecuda/inside", "-m", "long and not exhaustive")


@pytest.mark.long
@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_every_page_runs_with_its_tensors_on_the_device():
    run("--default-device", "cuda", "README.md", "docs")
