"""explain, size and prove on the command line: exit codes, JSON, and what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import errors
from planner.report.difference import difference
from tests.plan_examples import example_plan, interleaved_plan
from tests.test_cli import planner
from tests.test_report import text_of

ROOT = str(Path(__file__).parent.parent)
MODEL = """
import torch

def build(global_batch=8):
    layers = [torch.nn.Linear(16, 16) for _ in range(2)]
    return torch.nn.Sequential(*layers), (torch.zeros(global_batch, 16),), {}, lambda y: y.square().mean()
"""
ON = ("--cluster", "dgx-a100-80gb")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "asked_model.py").write_text(MODEL)
    example_plan().save(tmp_path / "first.json")
    interleaved_plan().save(tmp_path / "second.json")
    return tmp_path


def test_what_needs_no_model_imports_neither_torch_nor_a_solver(folder: Path) -> None:
    planner("plan", "asked_model.py:build", "--gpus", "2", *ON, "--output", "made.json")
    for arguments in (["prove", "made.json", "--list"], ["explain", "--diff", "first.json", "second.json"]):
        code = (
            "import sys\nfrom planner.cli import cli\n"
            f"try:\n    cli({arguments})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
            "print([name for name in ('torch', 'ortools', 'numpy', 'networkx', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ROOT})
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"


def test_prove_says_by_its_exit_code_whether_the_proof_holds(folder: Path) -> None:
    planner("plan", "asked_model.py:build", "--gpus", "2", *ON, "--output", "made.json")
    assert "The proof holds." in planner("prove", "made.json").stdout
    shown = planner("prove", "made.json", "--list").stdout
    assert "Configurations searched:" in shown
    against = json.loads(planner("prove", "made.json", "--model", "asked_model.py:build", "--json").stdout)
    assert against["holds"] and "model: prices" in {check["name"] for check in against["checks"]}
    text = Path("made.json").read_text()
    data = json.loads(text)
    data["bound_s"] = 2 * data["estimate"]["step_time_s"]
    Path("false.json").write_text(json.dumps(data))
    false = json.loads(planner("prove", "false.json", "--json", code=1).stdout)
    assert not false["holds"] and [check["name"] for check in false["checks"] if not check["ok"]] == ["legal: bound"]
    Path("cut.json").write_text(text[:100])
    assert "not valid JSON" in planner("prove", "cut.json", code=errors.InvalidPlan.exit_code).stderr
    data = json.loads(text) | {"cluster": "my-own"}
    Path("own.json").write_text(json.dumps(data))
    told = planner("prove", "own.json", "--model", "asked_model.py:build", code=2).stderr
    assert "no preset" in told
    planner("prove", "own.json", "--model", "asked_model.py:build", *ON)


def test_explain_prints_a_report_or_data(folder: Path) -> None:
    shown = planner("explain", "asked_model.py:build", "--gpus", "2", *ON, "--no-changes").stdout
    assert "The best plan of each family" in shown and "What binds" in shown
    planner("plan", "asked_model.py:build", "--gpus", "2", *ON, "--strategy", "tp", "--output", "tp.json")
    done = planner(
        "explain", "asked_model.py:build", "--plan", "tp.json", *ON, "--no-changes", "--operator", "1", "--json"
    )
    figures = json.loads(done.stdout)
    assert figures["plan"]["configuration"].startswith("tp2") and not figures["changes"]
    assert [row["module"] for row in figures["operators"]] == ["1"]
    assert {row["name"] for row in figures["families"]} == {
        "data parallel", "data parallel, ZeRO", "tensor", "pipeline",
    }  # fmt: skip


def test_explain_tells_two_plans_apart(folder: Path) -> None:
    shown = planner("explain", "--diff", "first.json", "second.json").stdout
    expected = text_of(difference(example_plan(), interleaved_plan()))
    assert [line.rstrip() for line in shown.splitlines()] == expected.splitlines()
    figures = json.loads(planner("explain", "--diff", "first.json", "first.json", "--json").stdout)
    assert figures["same"] and not figures["decisions"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("explain",), "give a MODEL"),
        (("explain", "asked_model.py:build"), "give --gpus N, or --plan"),
        (("explain", "first.json", "--gpus", "2"), "planner explain MODEL --plan first.json"),
        (("explain", "asked_model.py:build", "--diff", "first.json", "second.json"), "takes two plans and no MODEL"),
        (("size", "asked_model.py:build", "--clusters", "l4,"), "holds an empty name"),
        (("size", "asked_model.py:build", "--price", "l4"), "is no price"),
    ],
)
def test_what_cannot_be_asked(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in planner(*arguments, code=2).stderr


def test_an_illegal_plan_is_not_explained(folder: Path) -> None:
    replace(example_plan(), zero=9).save(folder / "bad.json")
    assert "ZeRO stage 9" in planner("explain", "--diff", "bad.json", "first.json", code=4).stderr


def test_size_prints_a_table_or_data(folder: Path) -> None:
    asked = ("size", "asked_model.py:build", "--clusters", "l4,dgx-h100", "--most-gpus", "2", "--price", "l4=0.8")
    shown = planner(*asked, "--steps", "1000", "--within", "1h").stdout
    assert "smallest" in shown and "cheapest" in shown and "dgx-h100" in shown
    figures = json.loads(planner(*asked, "--step-time", "1s", "--global-batch", "4", "--json").stdout)
    assert (figures["global_batch"], figures["step_limit_s"]) == (4, 1.0)
    assert figures["cheapest"]["cluster"] == "l4"


def test_what_does_not_fit_is_told_as_data_too(folder: Path) -> None:
    done = planner(
        "plan", "asked_model.py:build", "--gpus", "2", *ON, "--memory-limit", "2kB", "--json",
        code=errors.Infeasible.exit_code,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["error"] == "infeasible" and figures["shortage"]["missing_bytes"] > 0
    assert {row["kind"] for row in figures["ways_out"]} >= {"more memory", "more devices", "smaller batch"}
    assert figures["message"] in done.stderr
