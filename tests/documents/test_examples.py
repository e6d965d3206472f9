"""Every example runs from its command line as its first lines say, and is listed."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(capsys, monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def run_apart(name, *arguments):
    """In a process of its own: it keeps the device that the example brings up."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


WRONG = [
    ("torch_cnn_autocast_gradscaler.py", "--epochs", "-1"),
    ("mlu_training_loop.py", "--batch-size", "0"),
    ("mlu_training_loop.py", "--plugin", "nowhere.at.all"),
    ("mindspore_tutorial.py", "--data", "/no/such/folder"),
    ("paper_method.py", "--steps", "0"),
    ("paper_method.py", "--scale", "nan"),
    ("apex_dcgan.py", "--inject-overflow", "G20"),
    ("apex_dcgan.py", "--opt-level", "01"),
    ("apex_levels.py", "--opt-level", "O7"),
    ("apex_levels.py", "--steps", "-1"),
    ("detect.py", "--epochs", "0"),
    ("detect.py", "--data", "/no/such/folder"),
    ("detect.py", "--weights", "/no/such/file"),
    ("detect.py", "--save", "/no/such/folder/x.pt"),
    ("detect.py", "--device", "nope"),
    ("detect.py", "--train-images", "0"),
]


@pytest.mark.parametrize("case", WRONG, ids=" ".join)
def test_wrong_arguments_end_in_one_line_and_code_2(case, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [*case])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / case[0]), run_name="__main__")
    assert end.value.code == 2
    shown, told = capsys.readouterr()
    said = [line for line in told.splitlines() if not line.startswith(("usage:", " "))]
    assert (shown, len(said)) == ("", 1), told


def test_the_papers_method_by_hand_gives_the_same_weights(run):
    printed = run("paper_method.py", "--steps", "60")
    hand, ours, difference = printed.splitlines()
    assert hand.removeprefix("by hand") == ours.removeprefix("halfstep")
    assert int(re.search(r"(\d+) steps skipped", ours)[1]) > 0
    assert float(re.search(r"accuracy ([\d.]+)", ours)[1]) > 0.85
    assert float(difference.split()[-1]) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ((), "float32"),
        (("--pyamp",), "bfloat16"),
        pytest.param(
            ("--pyamp", "--device", "pydev", "--plugin", "tests.python_device"),
            "bfloat16",
            marks=pytest.mark.long,
        ),
    ],
    ids=["off", "cpu", "pydev"],
)
def test_the_accelerator_courses_loop(arguments, dtype, run):
    start = run_apart if "--plugin" in arguments else run
    printed = start("mlu_training_loop.py", "--epochs", "2", *arguments)
    first, second = (float(x) for x in re.findall(r"loss ([\d.]+)", printed))
    assert second < first / 1.5
    assert f"output in torch.{dtype}" in printed
    assert f"scale {65536 if arguments else 1}:" in printed


def test_apex_levels_prints_a_row_for_the_level_asked_for(run):
    printed = run("apex_levels.py", "--steps", "3", "--opt-level", "O2", "--loss-scale", "128.0")
    assert "128.0" in printed
    assert printed.count("O2") == 1


def test_apex_dcgan_tells_which_optimizer_stepped(run):
    printed = run("apex_dcgan.py", "--steps", "4", "--inject-overflow", "G@2")
    assert "overflow of G at step 2: D stepped: True, G stepped: False" in printed


def test_the_list_has_every_example():
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_has_a_test_here_or_beside(name):
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert re.search(
        rf'"{name}"|example\("{name.removesuffix(".py")}"\)|import {name.removesuffix(".py")}\b', here
    )
