"""A new accelerator, from `register` to a passing battery, on the Python device.

A process has one PrivateUse1 device and keeps it, so everything here runs in processes of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep as package
from halfstep import devices
from halfstep.cli import main
from halfstep.conformance import run_battery
from halfstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
SOURCE = Path(package.__file__).parents[1]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=cwd, env=env
    )


def halfstep(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run("-c", "from halfstep.cli import main; raise SystemExit(main())", *args, cwd=cwd)


def test_what_holds_on_the_python_device():
    done = run("-m", "pytest", "tests/python_device_checks.py", "-p", "no:cacheprovider", "-x", "--tb=short")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.exhaustive  # the page for vendors takes the same way in the ordinary run
def test_the_command_line_says_that_the_device_conforms():
    done = halfstep("devices", "--check", "pydev", "--module", "tests.python_device")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pydev conforms" in done.stdout
    assert re.search(r"\d{3} pass, \d+ fall back, \d+ absent\n", done.stdout)
    for level in ("O1", "O2"):
        for dtype in ("bf16", "fp16"):
            assert re.search(rf"transformer {level} {dtype} +passes", done.stdout)
    assert done.stderr == ""


def test_a_kernel_that_breaks_a_rule_is_named_and_the_exit_code_is_1():
    check = ("devices", "--check", "pydev", "--module", "tests.broken_device", "--level", "O1", "--dtype")
    done = halfstep(*check, "fp16", "--json")
    assert done.returncode == 1
    failed = [row for row in json.loads(done.stdout) if row["status"] == "fails"]
    assert [(row["group"], row["name"]) for row in failed] == [("casting", "exp fp16")]
    assert failed[0]["detail"] == "the rule is full; computed in fp32, gave bf16"


@pytest.mark.long
def test_two_processes_share_gradients_and_skips_on_the_python_device():
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = run(*launch, "-m", "tests.python_device_ranks")
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = sorted(re.findall(r"rank (\d) (\[.*?\]) (\S+) (\S+)", done.stdout))
    assert [rank for rank, *_ in ranks] == ["0", "1"]
    assert ranks[0][1:] == ranks[1][1:]
    assert ranks[0][1] == "[True, False, True, True]"
    assert float(ranks[0][3]) <= 0.51


DETECT = """
import runpy, sys
import tests.python_device
sys.path.insert(0, {examples!r})
sys.argv = ["detect.py", *{args!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.exhaustive
def test_the_detector_runs_by_two_processes_on_the_python_device(tmp_path):
    args = ["--data", "digits", "--epochs", "1", "--batch-size", "16", "--train-images", "64"]
    args += ["--image-size", "32", "--cfg", "yolov5n.yaml", "--device", "pydev", "--amp"]
    script = tmp_path / "detect_here.py"
    examples = ROOT / "examples"
    script.write_text(DETECT.format(examples=str(examples), args=args, script=str(examples / "detect.py")))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = run(*launch, str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "50% of fp32's gradient traffic" in done.stdout


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_page_for_vendors_leads_to_a_passing_battery(tmp_path):
    page = ROOT / "docs" / "new-accelerator.md"
    (tmp_path / "mychip.py").write_text("\n".join(code_blocks(page, "python")))
    shell = [line for block in code_blocks(page, "sh") for line in block.splitlines() if line]
    assert any("--check mychip" in line for line in shell)
    printed = ""
    for line in shell:
        words = line.split()
        assert words[0] == "halfstep"
        done = halfstep(*words[1:], cwd=tmp_path)
        assert done.returncode == 0, line + done.stdout[-4000:] + done.stderr[-2000:]
        printed += done.stdout
    assert "mychip conforms" in printed


@pytest.mark.long
def test_the_page_for_mlu_users_runs_on_a_device_of_that_name(tmp_path):
    device = code_blocks(ROOT / "docs" / "new-accelerator.md", "python")[:2]
    page = code_blocks(ROOT / "docs" / "migrating-from-mlu.md", "python")
    assert len(page) == 2
    script = tmp_path / "train.py"
    script.write_text("\n".join([*device, *page]).replace('"mychip"', '"mlu"'))
    done = run(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


# --- without the device ------------------------------------------------------------------------------------


def test_the_cpu_passes_the_battery():
    checks = list(run_battery("cpu"))
    assert [c for c in checks if c.status == "fails"] == []
    assert {c.group for c in checks} == {"casting", "numbers", "models", "scaling", "masters", "state"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("--module", "no.such.module"),
            "--module 'no.such.module' cannot be imported: ModuleNotFoundError: No module named 'no'",
        ),
        (("--module", "nowhere.py"), "--module 'nowhere.py': no such file"),
        ((), "unknown device 'pydev'; expected one of cpu"),
    ],
)
def test_what_cannot_be_brought_up_is_wrong_input(args, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["devices", "--check", "pydev", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"halfstep: {says}")


@pytest.mark.parametrize("name", ["cpu", "cuda", "Meta", "a b", ""])
def test_names_that_torch_uses_or_cannot_use_are_refused(name):
    with pytest.raises(ConfigError, match="cannot name a device"):
        devices.register(name)
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


def test_a_refused_registration_declares_nothing():
    with pytest.raises(ConfigError, match="unknown number format 'int8'"):
        devices.register("mychip", dtypes=("int8",))
    assert "mychip" not in devices.available()
