"""How a look at a script ends is said: at its end, after as many steps as were asked for, or by Ctrl-C."""

import json
import sys

import pytest

from halfstep.cli import main
from halfstep.doctor import script as _script
from tests.doctor.test_zoo import run_here

LOOP = """
import sys, torch
w = torch.nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([w], lr=0.01)
for i in range(6):
    opt.zero_grad()
    w.square().sum().backward()
    opt.step()
    MORE
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Runs the command on the loop in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(_script, "run_in_process", run_here)

    def call(more, *args):
        path = tmp_path / "train.py"
        path.write_text(LOOP.replace("MORE", more))
        code = main(["doctor", str(path), *args])
        return code, *capsys.readouterr()

    return call


def test_a_look_that_ended_before_the_script_says_how_to_go_on(doctor):
    code, out, _ = doctor("pass", "--steps", "4")
    assert code == 0
    said = "healthy over 4 steps, as many as were asked for; --steps 0 follows the script to its end"
    assert f"train.py: {said}" in out
    assert json.loads(doctor("pass", "--steps", "4", "--json")[1])["ended_by"] == "steps"


def test_no_steps_follow_the_script_to_its_end(doctor):
    _, out, _ = doctor("pass", "--steps", "0")
    assert "train.py: healthy over 6 steps\n" in out
    assert json.loads(doctor("pass", "--json")[1])["ended_by"] == "script"


def test_a_fault_beyond_the_first_steps_is_found_on_the_way_to_the_end(doctor):
    more = "w.data.fill_(float('nan') if i == 4 else 1.0)"
    assert doctor(more, "--steps", "3")[0] == 0
    code, out, _ = doctor(more, "--steps", "0")
    assert code == 1
    assert "step 6" in out


def test_ctrl_c_in_the_script_tells_what_was_seen(doctor):
    more = "if i == 3: raise KeyboardInterrupt"
    code, out, _ = doctor(more)
    assert code == 130
    assert "train.py: healthy over 4 steps, then it was interrupted" in out
    assert json.loads(doctor(more, "--json")[1])["ended_by"] == "interrupt"


def test_ctrl_c_before_the_first_step_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    assert main(["doctor", str(tmp_path / "train.py")]) == 130
    assert capsys.readouterr().err == "halfstep: interrupted\n"


def test_an_error_of_the_script_is_answered_with_file_and_line(doctor):
    code, out, _ = doctor("if i == 3: {}['batch']")
    assert code == 1
    assert out.startswith("train.py: not healthy: KeyError after 4 steps: 'batch' (train.py:9)")
    assert "deterministic" not in out


@pytest.mark.parametrize(("status", "words"), [("'disk is full'", "disk is full"), ("3", "3")])
def test_a_script_that_ends_with_an_error_status_is_not_healthy(doctor, status, words):
    code, out, _ = doctor(f"if i == 3: sys.exit({status})")
    assert code == 1
    assert out.startswith(f"train.py: not healthy: SystemExit after 4 steps: {words} (train.py:9)")
    assert out.count("SystemExit") == 1
    assert doctor("if i == 3: sys.exit(0)")[0] == 0


def test_options_without_dashes_before_are_answered_with_what_to_write(doctor):
    code, _, err = doctor("pass", "--lr", "0.1")
    assert code == 2
    assert "train.py itself go after --: halfstep doctor " in err
    assert err.endswith("train.py -- --lr 0.1\n")


@pytest.mark.long
def test_options_that_a_script_lacks_are_answered_with_what_to_write(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.cli.doctor.can_copy", lambda: False)  # pytest keeps what a copy says
    path = tmp_path / "train.py"
    path.write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\n"
                    "p.parse_args()\n")  # fmt: skip
    assert main(["doctor", str(path)]) == 2
    err = capsys.readouterr().err
    assert "the following arguments are required: --lr" in err
    assert f"its own options go after --: halfstep doctor {path} -- ..." in err


def test_a_notebook_is_answered_with_what_to_write(capsys):
    assert main(["doctor", "train.ipynb"]) == 2
    assert "`jupyter nbconvert --to script train.ipynb` writes one" in capsys.readouterr().err


def test_a_recipe_has_no_end(capsys):
    assert main(["doctor", "digits-mlp", "--steps", "0"]) == 2
    assert "a recipe, which trains without end" in capsys.readouterr().err


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules find each other by relative imports; the current folder holds it."""
    monkeypatch.setattr(_script, "run_in_process", run_here)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "of_doctor_tests"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "weights.py").write_text("import torch\nw = torch.nn.Parameter(torch.ones(3))\n")
    text = LOOP.replace("w = torch.nn.Parameter(torch.ones(3))", "from .weights import w").replace("MORE", "")
    (folder / "train.py").write_text(text)
    (folder / "__main__.py").write_text(text)
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["{}.train", "{}", "{}.__main__"])
def test_a_module_runs_by_its_name(package, name, capsys):
    assert main(["doctor", "-m", name.format(package), "--steps", "0"]) == 0
    assert "healthy over 6 steps" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:can't resolve package:ImportWarning")
def test_a_file_of_a_package_is_answered_with_the_way_to_run_it(package, capsys):
    assert main(["doctor", f"{package}/train.py"]) == 2
    assert "halfstep doctor -m package.module" in capsys.readouterr().err
    assert main(["doctor", "-m", f"{package}.nothing"]) == 2
    assert "expected a module, as for python -m" in capsys.readouterr().err


def test_a_fault_can_end_with_code_zero(doctor):
    more = "w.data.fill_(float('nan') if i == 3 else 1.0)"
    assert doctor(more)[0] == 1
    assert doctor(more, "--exit-zero")[0] == 0
