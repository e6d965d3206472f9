"""The command line: what it prints, and one line with exit code 2 for wrong input."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import halfstep_command
from halfstep import cli
from halfstep.cli import formats as formats_command
from halfstep.cli._output import console, table
from halfstep.errors import UnsupportedError
from halfstep.recipes import optimizer_race


@pytest.fixture
def halfstep(capsys):
    """Runs the command line in this process: (exit code, standard output, standard error)."""

    def call(*args):
        code = cli.main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_every_listed_command_exists_and_every_module_is_listed():
    folder = Path(cli.__file__).parent
    modules = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")}
    assert set(cli.COMMANDS) == modules
    for name in cli.COMMANDS:
        assert callable(importlib.import_module(f"halfstep.cli.{name}").run)


def test_help_lists_the_commands(halfstep):
    code, out, _ = halfstep("--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_has_help(halfstep, name):
    code, out, err = halfstep(name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: halfstep {name}" in out
    assert "None" not in out


def test_version(halfstep):
    code, out, _ = halfstep("--version")
    assert code == 0
    assert out.startswith("halfstep 0.")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no command given; expected one of"),
        (("formts",), "unknown command 'formts'; expected one of"),
        (("formts",), "did you mean formats?"),
        (("formats", "abc"), "'abc' is not a number; expected one like 0.1"),
        (("formats", "1/0"), "'1/0' is not a number"),
        (("formats", "0x1p99999999"), "'0x1p99999999' is not a number"),
        (("formats", "1e999999999"), "give an exponent within 5000"),
        (
            ("formats", "--jsn"),
            "Unrecognized options: --jsn; perhaps you meant --json (halfstep formats --help)",
        ),
        (("devices", "tpu9"), "unknown device 'tpu9'; expected one of cpu"),
        (("devices", "cpu", "too", "many"), "too"),
        (("devices", "cpu", "--device", "cuda"), "two devices were given, cpu and --device cuda"),
        (("devices", "--device", "tpu9"), "unknown device 'tpu9'; expected one of cpu"),
        (("train",), "issing"),
        (("train", "digits-mlp", "--seeds", "x"), "--seeds 'x': expected a whole number"),
        (("bench", "step", "--rounds", "1.5"), "--rounds '1.5': expected a whole number"),
        (("bench", "step", "--parameters", "x"), "--parameters 'x': expected a number"),
        (("bench", "step", "--parameters", "inf"), "--parameters inf: expected 1000 to"),
        (("bench", "step", "--parameters", "1e30"), "--parameters 1e+30: expected 1000 to"),
        (("bench", "step", "--device", "meta"), "device 'meta' has no values to compute with"),
        (("bench", "step", "--device", "nope"), "unknown device 'nope'; expected one of cpu"),
        (("doctor", "digits-mlp", "--device", "meta"), "device 'meta' has no values to compute with"),
        (("doctor", "digits-mlp", "--report", "."), "is a folder; give a file name"),
        (("doctor", "digits-mlp", "--report", "/no/such/r.html"), "cannot write into /no/such"),
        (("devices", "--module", "/no/such.py"), "no such file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(halfstep, args, says):
    code, out, err = halfstep(*args)
    assert (code, out) == (2, "")
    assert err.startswith("halfstep: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("text", ["import torch\nx = (", "raise OSError('a\\nb')", "import nowhere"])
@pytest.mark.parametrize("name", ["mychip.py", "mychip"])
def test_a_module_that_fails_as_it_is_imported_is_told_in_one_line(
    halfstep, monkeypatch, tmp_path, text, name
):
    (tmp_path / "mychip.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = halfstep("devices", "--module", name)
    sys.modules.pop("mychip", None)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"halfstep: --module '{name}' cannot be imported: ")


def test_a_module_given_by_its_file_finds_the_files_beside_it(halfstep, monkeypatch, tmp_path):
    (tmp_path / "mychip.py").write_text("import mychip_kernels, numbers\nnumbers.Integral")
    (tmp_path / "mychip_kernels.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, _, err = halfstep("devices", "cpu", "--json", "--module", str(tmp_path / "mychip.py"))
    for name in ("mychip", "mychip_kernels"):
        sys.modules.pop(name, None)
    assert (code, err) == (0, "")
    assert sys.path[-1] == str(tmp_path), "first while it is imported, last from then on"


def test_an_error_message_of_several_lines_becomes_one(halfstep, monkeypatch):
    def fail(**_):
        raise UnsupportedError("first\n  second")

    monkeypatch.setattr(formats_command, "_print_formats", fail)
    monkeypatch.setattr(formats_command, "run", lambda: fail())
    assert halfstep("formats") == (2, "", "halfstep: first second\n")


def test_an_interrupt_ends_in_one_line(halfstep, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(formats_command, "run", interrupt)
    assert halfstep("formats") == (130, "", "halfstep: interrupted\n")


def test_an_interrupt_while_the_command_loads_ends_in_one_line(tmp_path):
    package = tmp_path / "halfstep"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    [None for _ in range(10**6)]\n"
        "except BaseException as error:\n    raise ImportError('swallowed') from error\n"
    )
    path = f"{tmp_path}{os.pathsep}{Path(halfstep_command.__file__).parent}"
    program = "import sys, halfstep_command; sys.exit(halfstep_command.main())"
    command = [sys.executable, "-c", program, "formats"]
    done = subprocess.run(
        command, env={"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "halfstep: interrupted\n")


def test_the_command_that_is_installed_loads_nothing_before_it_listens(monkeypatch):
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"halfstep": "halfstep_command:main"}
    code = "import sys, halfstep_command; print('halfstep' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(cli, "main", lambda: 7)
    monkeypatch.setattr(sys, "argv", ["halfstep", "formats"])
    assert halfstep_command.main() == 7
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("argument", "code", "says"),
    [
        ("--version", 0, "halfstep 0."),
        ("--help", 0, "usage: halfstep COMMAND"),
        ("trian", 2, "did you mean train?"),
        ("doctor missing.py", 2, "no script missing.py; expected"),
        ("doctor --steps 3 missing.py -- own.py", 2, "no script missing.py; expected"),
    ],
)
def test_what_needs_no_torch_is_answered_without_it(argument, code, says):
    program = (
        f"import sys, halfstep_command\nsys.argv[1:] = {argument.split()}\n"
        "code = halfstep_command.main()\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def test_the_exit_code_of_a_command_is_passed_on(halfstep, monkeypatch):
    monkeypatch.setattr(formats_command, "run", lambda: 1)
    assert halfstep("formats")[0] == 1


def test_formats_table(halfstep):
    code, out, _ = halfstep("formats")
    assert code == 0
    for word in ("fp64", "tf32", "65504", "5.96046e-08", "1s 8e 7m", "e4m3fn", "57344"):
        assert word in out


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("0.00006666666", ["6.663799285888672e-05", "0 00001 0001011110", "underflow", "5.96e-08"]),
        ("0.11111111", ["0.111083984375", "0.111328125", "0 01111011 1100100"]),
        ("65519", ["65504.0", "65536.0", "overflow: beyond 448", "no infinity"]),
        ("65520", ["inf", "overflow: beyond 65504"]),
        ("1e-8", ["underflow: zero up to 2.98e-08"]),
        ("1e-7", ["subnormal: below 6.1e-05"]),
        ("nan", ["not a number", "1111111111"]),
        ("-inf", ["-inf", "1 11111 0000000000"]),
        ("-0", ["-0.0", "1 00000 0000000000"]),
        ("-1/3", ["-0.333251953125"]),
        ("0x1p-24", ["5.960464477539063e-08"]),
        ("1e400", ["overflow: beyond 1.79769e+308"]),
    ],
)
def test_formats_shows_how_each_stores_a_number(halfstep, number, words):
    code, out, err = halfstep("formats", number)
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


def test_bits_are_coloured_on_a_terminal():
    from rich.console import Console

    drawn = Console(force_terminal=True, color_system="standard", file=None)
    with drawn.capture() as captured:
        drawn.print(formats_command._color_fields(("0", "01111", "0000000000")))
    assert len({part for part in captured.get().split("\x1b[") if "m" in part}) >= 3


def test_formats_as_json(halfstep):
    rows = json.loads(halfstep("formats", "--json")[1])
    assert {row["name"]: row["max"] for row in rows}["fp16"] == 65504.0
    first, second = json.loads(halfstep("formats", "0.1", "inf", "--json")[1])
    assert first["given"] == "0.1"
    assert first["formats"]["fp16"]["value"] == 0.0999755859375
    assert second["formats"]["fp16"]["value"] == "inf"
    assert second["formats"]["e4m3fn"]["status"] == "overflow"


def test_devices_table_and_json(halfstep):
    code, out, _ = halfstep("devices", "cpu")
    assert code == 0
    for word in ("cpu", "bf16", "fp16", "native", "use bf16, for", "matmul precision", "--kernels"):
        assert word in out
    assert len(out.splitlines()) <= 20
    assert "By which kernels" in halfstep("devices", "cpu", "--kernels")[1]
    assert "What a region does" in halfstep("devices", "cpu", "--ops")[1]
    (facts,) = json.loads(halfstep("devices", "--device", "cpu", "--json")[1])
    assert facts["device"] == "cpu"
    assert facts["default_dtype"] == "bf16"
    assert facts["dtypes"]["fp32"]["time_over_fp32"] == 1.0


def test_only_the_module_asked_for_is_imported():
    code = (
        "import sys; from halfstep import cli; cli.main(['formats', '1'])\n"
        "print(sorted(m[13:] for m in sys.modules if m.startswith('halfstep.cli.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "['_options', '_output', 'formats']"


def test_a_reader_that_leaves_early_is_no_error():
    code = "from halfstep.cli import main; raise SystemExit(main(['formats', *map(str, range(3000))]))"
    command = f'"{sys.executable}" -c "{code}" | head -c 100 > /dev/null; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_devices_shows_every_op_of_the_policy_that_was_named(halfstep):
    code, out, err = halfstep("devices", "cpu", "--policy", "paper", "--dtype", "fp16")
    assert (code, err) == (0, "")
    assert "fp32 arithmetic, rounded" in out or "agrees" in out
    (facts,) = json.loads(halfstep("devices", "cpu", "--policy", "mlu", "--json")[1])
    rules = {row["op"]: row["rule"] for row in facts["ops"]}
    assert rules["softmax"] == "full"
    code, _, err = halfstep("devices", "cpu", "--policy", "mluu")
    assert code == 2
    assert err.startswith("halfstep: unknown policy 'mluu'")


@pytest.mark.parametrize("width", range(60, 121))
def test_no_table_breaks_a_word_at_any_width(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    names = [
        "level",
        "test loss",
        "from O0",
        "ms/step",
        "samples/s",
        "peak MB",
        "saved MB",
        "skipped",
        "scale",
    ]
    rows = [
        ["O1 bf16", "2.722 ± 0.0062", "+0.004453", "43.71 ± 3 %", "366", "55.7", "42.0", "0", "65,536"]
    ] * 2
    console().print(table("", names, rows, right=",".join(names[1:])))
    lines = capsys.readouterr().out.splitlines()
    assert all(
        any(cell in line for line in lines) for cell in (*rows[0][0].split(), *names[1:], *rows[0][1:])
    )
    assert max(map(len, lines)) <= width


def test_a_terminal_too_narrow_for_all_columns_gets_two_tables(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    names = ["level", "test accuracy %", "ms/step", "peak MB", "scale"]
    console().print(
        table("digits", names, [["O1 bf16", "93.30 ± 2.12", "4.13", "8.4", "none"]] * 2, "peak MB")
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    heads = [line for line in lines if line[0] == "level"]
    assert [len([line for line in lines if line[0] == "O1"]), len(heads)] == [4, 2]
    assert heads[1][-1] == "scale"


class Installed(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, lr=lr)


def test_bench_step_runs_the_packages_that_are_installed(halfstep, monkeypatch):
    for name, kind in (("optimi", "AdamW"), ("bitsandbytes.optim", "AdamW8bit")):
        module = types.ModuleType(name)
        setattr(module, kind, Installed)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setattr(optimizer_race, "contestants", lambda: [optimizer_race.torch_adamw()])
    given = ("bench", "step", "--parameters", "1e3", "--rounds", "1", "--no-movement", "--json")
    code, out, err = halfstep(*given, "--against", "optimi, bitsandbytes,torchao")
    names = [result["name"] for result in json.loads(out)["results"]]
    assert (code, names[1:]) == (0, ["torch-optimi AdamW, Kahan", "bitsandbytes AdamW8bit"])
    assert "torchao is left out: import of torchao.optim halted" in err
    code, _, err = halfstep(*given, "--against", "optimi,apex")
    assert code == 2
    assert "--against apex: expected one of bitsandbytes, optimi" in err


@pytest.mark.long
def test_the_baseline_of_bench_step_is_1(halfstep):
    given = ("bench", "step", "--parameters", "1e3", "--rounds", "2", "--no-movement")
    code, out, _ = halfstep(*given, "--json")
    baseline = json.loads(out)["results"][0]
    assert (code, baseline["update_share"], baseline["step_share"]) == (0, 1.0, 1.0)


def test_words_stay_whole_where_a_long_text_stands_beside_them(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    rows = [["linear", "2d narrow-pointwise", "because " * 30]]
    console().print(table("", ("op", "kind", "why"), rows))
    assert "narrow-pointwise" in capsys.readouterr().out


def test_what_names_a_row_stays_on_one_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    heads = ("level", "samples/s", "peak MB", "saved MB", "skipped", "scale")
    console().print(table("", heads, [["O1 fp16 (slow here)", "8,112", "8.4", "0.5", "0", "none"]], "scale"))
    assert capsys.readouterr().out.count("O1 fp16 (slow here)") == 2
