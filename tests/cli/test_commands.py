import argparse
import os
import platform
import subprocess
import sys
from keyword import iskeyword
from pathlib import Path

import numpy
import pytest
import torch

import grassy
from grassy import cli
from grassy.demo import experiment as demo
from grassy.recipes.files import run_name

DEMO = "pip install 'grassy[demo]'"
COMMANDS = (
    "demo",
    "train",
    "validate",
    "predict",
    "export",
    "transfer",
    "analyze",
    "report",
    "recipes",
    "pack",
    "import",
)


def last_error(capsys):
    """The one line on stderr."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line


def run_module(*arguments):
    source = os.path.dirname(os.path.dirname(grassy.__file__))
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-m", "grassy", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_python_m_grassy_is_the_command_and_its_exit_code_is_the_one_of_main():
    version = run_module("--version")
    assert version.returncode == 0
    first, python, torch_line, *others = version.stdout.splitlines()
    assert first == f"grassy {grassy.__version__}"
    assert python.startswith(f"Python {platform.python_version()}, ")
    assert torch_line.startswith(f"torch {torch.__version__} (")
    assert f"numpy {numpy.__version__}" in others
    mistake = run_module("demo", "--seeds", "many")
    assert (mistake.returncode, mistake.stdout) == (2, "")
    expected = "grassy: error: argument --seeds: invalid int value: 'many' (try grassy demo --help)\n"
    assert mistake.stderr == expected


def test_the_command_loads_nothing_heavier_than_torch_before_it_knows_what_to_do():
    source = os.path.dirname(os.path.dirname(grassy.__file__))
    code = (
        "import sys, grassy.cli; grassy.cli.main(['demo', '--seeds', 'x']); "
        "print({'sklearn', 'matplotlib', 'rich', 'timm'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "set()\n"


def test_the_demo_command_hands_its_options_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(demo, "run", lambda *given: calls.append(given))
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    assert cli.main(["demo", "--output", str(tmp_path), "--seeds", "4", "--quick"]) == 0
    (first_folder, first), (_, second) = calls
    assert first_folder == tmp_path
    assert first == demo.FULL
    assert (second.seeds, second.epochs) == (4, demo.QUICK.epochs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmo"], "there is no command 'dmo', did you mean 'demo'?; the commands are demo, train"),
        (["trian", "finetune"], "there is no command 'trian', did you mean 'train'?"),
        (["train"], "which recipe? `grassy train finetune --data-dir photos` trains on your own photos"),
        (["train", "--resume", "runs/none"], "there is no run runs/none to resume"),
        (["train", "resnet50-grassmann", "k=4"], "a recipe has no field 'k', did you mean 'head.k'?"),
        (["train", "resnet50-linear", "k=4"], "a recipe has no field 'k', did you mean 'head.k'?"),
        (["train", "resnet50-linear", "momentum=0.5"], "no field 'momentum', did you mean 'opt_kwargs.momentum'?"),
        (["train", "resnet18-grassmann"], "`grassy train resnet50-grassmann model=resnet18`"),
        (["train", "resnet50-grasmann"], "there is no recipe 'resnet50-grasmann', did you mean 'resnet50-grassmann'?"),
        (["validate"], "which run? give the folder of a run, or its .safetensors file, as in: grassy validate runs/"),
        (["analyze", "a", "--checkpoint", "b"], "one run is expected, got a and b"),
        (["predict", "photo.jpg"], "which run? give it before the images, as in: grassy predict RUN photo.jpg"),
        (["predict"], "which run, and which images? give both, as in: grassy predict runs/finetune holiday/"),
        (["demo", "--sedes", "3"], "unrecognized arguments: --sedes 3: did you mean --seeds? (try grassy demo --help)"),
        (["train", "finetune", "--k", "16"], "arguments: --k 16: did you mean head.k=16? (try grassy train --help)"),
        (["train", "finetune", "--head.k", "16", "--opt=sgd"], "did you mean head.k=16 and opt=sgd?"),
        (["train", "finetune", "--wholly-else"], "unrecognized arguments: --wholly-else (try grassy train --help)"),
        (
            ["train", "finetune", "--epoch", "3", "--from-scatch"],
            "did you mean --epochs and --from-scratch? (try grassy",
        ),
        (["demo", "--seeds", "0"], "at least 1 seed and 1 epoch, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert cli.main(arguments) == 2
    line = last_error(capsys)
    assert line.startswith("grassy: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--qui"], "unrecognized arguments: --qui"),
        (["demo", "--seed", "3"], "unrecognized arguments: --seed 3"),
        (["train", "digits-grassmann", "--epoch", "1"], "unrecognized arguments: --epoch 1"),
        (["predict", "image.png", "--check", "run"], "unrecognized arguments: --check"),
    ],
)
def test_abbreviated_flags_are_refused(capsys, arguments, message):
    assert cli.main(arguments) == 2
    assert message in last_error(capsys)


@pytest.mark.parametrize("arguments", [["--debug", "demo"], ["demo", "--debug"], ["--debug", "demo", "--debug"]])
def test_debug_shows_the_traceback_before_the_line_and_keeps_the_exit_code(capsys, monkeypatch, arguments):
    monkeypatch.setattr(demo, "run", _raises(ValueError("k must be positive")))
    assert cli.main(arguments) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "grassy: error: k must be positive"


def test_every_command_has_a_file_of_its_own_name_and_shows_its_help(capsys):
    folder = Path(cli.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} == {
        "__init__",
        "parser",
        "versions",
        "which_run",
        *(f"{name}_" if iskeyword(name) else name for name in COMMANDS),
    }
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: grassy {name} [-h] " in capsys.readouterr().out


def test_help_texts_are_phrases_that_name_the_default():
    (commands,) = (action for action in cli.make_parser()._actions if isinstance(action.choices, dict))
    for name, parser in commands.choices.items():
        for action in parser._actions:
            assert action.help, (name, action.dest)
            assert not action.help.endswith("."), (name, action.dest)
            assert not action.help[:2].istitle(), (name, action.dest)
            if action.default not in (None, False, "", [], argparse.SUPPRESS):
                shown = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
                assert action.help.endswith(f"(default: {shown:g})" if action.type is float else f"(default: {shown})")


def test_an_output_that_is_a_file_or_lies_in_one_is_one_line(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for output, reason in ((file, "File exists"), (file / "below", "Not a directory")):
        assert cli.main(["demo", "--output", str(output)]) == 2
        assert last_error(capsys) == f"grassy: error: cannot write into the folder {output}: {reason}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_is_not_writable_is_one_line(capsys, tmp_path):
    tmp_path.chmod(0o500)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert last_error(capsys) == f"grassy: error: cannot write into the folder {tmp_path}: Permission denied"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("k must be\n  positive"), "grassy: error: k must be positive"),
        (TypeError("not a path"), "grassy: error: not a path"),
        (FileNotFoundError(2, "No such file", "x.yaml"), "grassy: error: x.yaml: No such file"),
        (ModuleNotFoundError("no", name="rich"), f"grassy: error: grassy demo needs rich: {DEMO}"),
        (
            ModuleNotFoundError("no", name="datasets.x"),
            "grassy: error: grassy demo needs datasets: pip install datasets",
        ),
    ],
)
def test_errors_of_a_command_are_one_line_and_exit_code_2(capsys, monkeypatch, error, line):
    monkeypatch.setattr(demo, "run", _raises(error))
    assert cli.main(["demo"]) == 2
    assert last_error(capsys) == line


def test_a_missing_package_is_named_together_with_the_extra_that_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # what Python takes for "not installed"
    monkeypatch.delitem(sys.modules, "grassy.demo.experiment")
    monkeypatch.delattr(grassy.demo, "experiment")
    assert cli.main(["demo"]) == 2
    assert last_error(capsys) == f"grassy: error: grassy demo needs scikit-learn: {DEMO}"


def test_a_mistake_inside_grassy_is_not_taken_for_a_missing_package(monkeypatch):
    monkeypatch.setattr(demo, "run", _raises(ModuleNotFoundError("no", name="grassy.misspelt")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


def test_an_interrupt_is_one_line_and_exit_code_130(capsys, monkeypatch):
    monkeypatch.setattr(demo, "run", _raises(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert last_error(capsys) == "grassy: interrupted"


def _raises(error):
    def run(*_):
        raise error

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["recipes", "digits-*"], 0), (["recipes", "no-such-*"], 2)])
def test_a_process_of_torchrun_ends_at_once_with_all_it_said(words, code):
    """It leaves without the interpreter's clean-up, in which threads of gloo may abort it."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "test"}
    command = [sys.executable, "-m", "grassy", *words]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == code
    assert ("digits-grassmann" in run.stdout) == (code == 0)
    assert bool(run.stderr) == (code != 0)


def test_a_setting_that_is_given_as_a_flag_and_as_a_pair_is_refused(capsys):
    assert cli.main(["train", "cifar100-resnet18-linear", "batch_size=4", "--batch-size", "8"]) != 0
    assert "batch_size is given twice, as --batch-size and as batch_size=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("digits-grassmann", "digits-grassmann"),
        ("mine.yaml", "mine"),
        ("runs/first.v2", "first.v2"),
        ("runs/first.v2/args.yaml", "first.v2"),
    ],
)
def test_a_run_is_called_as_its_recipe_or_as_the_run_whose_recipe_it_repeats(recipe, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first.v2").mkdir(parents=True)
    assert run_name(recipe) == name
