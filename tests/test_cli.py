"""The command line: what is printed where, exit codes, what is imported. A fake api stands in for searches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner import errors
from planner.cli import cli
from planner.ir.plan import Plan
from planner.report import ComparisonRow, Verification, plan_figures, plan_text, summary
from tests.plan_examples import example_plan

MODEL = """
import torch

def build(global_batch=4, sequence_length=None):
    x = torch.zeros(global_batch, sequence_length or 3)
    return torch.nn.Linear(x.shape[1], 2), (x,), {}, None
"""


class FakeApi(ModuleType):
    """Stands for planner.api: writes its calls down and answers with the example plan."""

    def __init__(self) -> None:
        super().__init__("planner.api")
        self.calls: list[dict[str, Any]] = []
        self.closed = 0
        self.fail: Exception | None = None
        self.plan = example_plan()
        self.outcomes: dict[str, str] = {}

    def _enter(self, model: Any, progress: Callable[..., None], **options: Any) -> None:
        progress("tracing the model")
        progress("searching", 1, 3)
        progress("searching", 2, 3)
        self.calls.append({"model": model, **options})
        if self.fail:
            raise self.fail

    def auto_parallelize(self, model: Any, **options: Any) -> Any:
        self._enter(model, **options)
        return SimpleNamespace(plan=self.plan, close=self._close, train=self._train)

    def compare(self, model: Any, **options: Any) -> tuple[ComparisonRow, ...]:
        self._enter(model, **options)
        return ComparisonRow("auto", self.plan), ComparisonRow("tp", None, "12 heads cannot be cut 8 ways")

    def verify_each(self, model: Any, **options: Any) -> Iterator[Verification]:
        self._enter(model, **options)
        for strategy in options["strategies"]:
            yield Verification("Linear", strategy, self.outcomes.get(strategy, "equal"), reason="as it is")

    def _close(self) -> None:
        self.closed += 1

    def _train(self, batches: list[Any], optimizer: Any, steps: int, trace: Path | None) -> list[float]:
        assert len(batches) == steps and trace is None
        assert all(isinstance(batch, tuple) and batch[0].shape == (64, 3) for batch in batches)
        return [1.0 / (step + 1) for step in range(steps)]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "planner.api", fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a plan and a model in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    example_plan().save(tmp_path / "made.json")
    (tmp_path / "small_model.py").write_text(MODEL)
    return tmp_path


def planner(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "80"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_inspect(folder: Path) -> None:
    result = planner("inspect", "made.json")
    assert [line.rstrip() for line in result.stdout.splitlines()] == plan_text(example_plan(), 80).splitlines()
    assert result.stderr == ""
    assert json.loads(planner("inspect", "made.json", "--json").stdout) == json.loads(
        json.dumps(plan_figures(example_plan()))
    )
    assert planner("inspect", "made.json", "--summary").stdout == summary(example_plan()) + "\n"


def test_inspect_imports_neither_torch_nor_a_solver(folder: Path) -> None:
    code = (
        "import sys; from planner.cli import cli; cli(['inspect', 'made.json'], standalone_mode=False);"
        "print([name for name in ('torch', 'ortools', 'numpy', 'networkx', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_dash_m(folder: Path) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "planner", "inspect", "missing.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(root), "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == errors.InvalidPlan.exit_code
    assert done.stdout == ""
    assert done.stderr == "planner: cannot read plan missing.json: No such file or directory\n"
    command[-1] = "made.json"
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(root), "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda text: text[:200], "is not a plan: not valid JSON"),
        (lambda text: text.replace('"version": 2', '"version": 7'), "is a plan of version 7"),
        (
            lambda text: text.replace('"micro_batches": 4', '"micro_batches": 99'),
            "cannot be cut into 2 data shards x 99",
        ),
    ],
)
def test_inspect_refuses_in_one_message(folder: Path, edit: Callable[[str], str], told: str) -> None:
    (folder / "bad.json").write_text(edit((folder / "made.json").read_text()))
    result = planner("inspect", "bad.json", code=4)
    assert result.stdout == ""
    assert told in result.stderr and len(result.stderr.splitlines()) == 1


def test_plan_prints_and_writes(folder: Path, api: FakeApi) -> None:
    result = planner("plan", "small_model:build", "--gpus", "8", "--cluster", "a100-40gb", "--memory-limit", "40GB")
    assert "181 ms a step" in result.stdout
    assert result.stderr.splitlines() == [
        "loading the model ...", "tracing the model ...", "searching ...", "plan written to plan.json",
    ]  # fmt: skip
    assert Plan.load(folder / "plan.json") == example_plan()
    call = api.calls[0]
    assert (call["gpus"], call["cluster"], call["memory_limit"], call["strategy"]) == (
        8,
        "a100-40gb",
        40 * 10**9,
        "auto",
    )
    assert call["example_inputs"][0].shape == (4, 3)
    assert api.closed == 1


def test_plan_hands_every_option_on(folder: Path, api: FakeApi) -> None:
    planner(
        "plan", "small_model.py:build", "--gpus", "2", "--strategy", "pp2 mb=4", "--global-batch", "16",
        "--sequence-length", "5", "--precision", "fp32", "--time-limit", "2.5", "--seed", "3", "--output", "x.json",
        "--samplewise", "blocks.*", "--samplewise", "head", "--not-batched", "mask",
    )  # fmt: skip
    call = api.calls[0]
    assert call.pop("model").in_features == 5
    assert call.pop("example_inputs")[0].shape == (16, 5)
    assert call == {
        "gpus": 2, "strategy": "pp2 mb=4", "global_batch": 16, "precision": "fp32", "time_limit": 2.5, "seed": 3,
        "samplewise": ("blocks.*", "head"), "not_batched": ("mask",), "memory_limit": None,
        "cluster": "auto", "example_kwargs": {}, "loss_fn": None,
    }  # fmt: skip
    assert Plan.load(folder / "x.json") == example_plan()


def test_plan_json_is_the_plan_and_nothing_else(folder: Path, api: FakeApi) -> None:
    result = planner("plan", "small_model:build", "--gpus", "8", "--json")
    assert Plan.from_json(result.stdout) == example_plan()
    assert not (folder / "plan.json").exists()


def test_nothing_is_searched_for_a_place_that_cannot_be_written(folder: Path, api: FakeApi) -> None:
    result = planner("plan", "small_model:build", "--gpus", "8", "--output", "no/such/plan.json", code=2)
    assert "there is no folder no/such" in result.stderr
    assert not api.calls


@pytest.mark.parametrize(
    "error",
    [errors.BadInput, errors.TraceError, errors.Infeasible, errors.OutOfTime, errors.RankFailed, errors.InvalidPlan],
)
def test_every_error_is_one_message_and_its_code(
    folder: Path, api: FakeApi, error: type[errors.MeshwrightError]
) -> None:
    api.fail = error("what, where, and what to do")
    result = planner("plan", "small_model:build", "--gpus", "8", code=error.exit_code)
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "planner: what, where, and what to do"
    assert "Traceback" not in result.output
    assert not (folder / "plan.json").exists()


def test_exit_codes_tell_errors_apart() -> None:
    kinds = errors.MeshwrightError.__subclasses__()
    assert len({kind.exit_code for kind in kinds} | {0, 1}) == len(kinds) + 2


def test_a_defect_keeps_its_traceback_and_an_interrupt_its_code(folder: Path, api: FakeApi) -> None:
    api.fail = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        planner("plan", "small_model:build", "--gpus", "8")
    api.fail = KeyboardInterrupt()  # type: ignore[assignment]
    assert "interrupted" in planner("plan", "small_model:build", "--gpus", "8", code=130).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", "small_model:build"), "Missing option '--gpus'"),
        (("plan", "small_model:build", "--gpus", "0"), "0 is not in the range x>=1"),
        (("plan", "small_model:build", "--gpus", "2", "--memory-limit", "40 bananas"), "write for example 40GB, 24GiB"),
        (("plan", "small_model:build", "--gpus", "2", "--precision", "fp12"), "unknown precision 'fp12'"),
        (("plan", "small_model", "--gpus", "2"), "'small_model' names no model"),
        (("plan", "no_such_module:build", "--gpus", "2"), "there is no module 'no_such_module'"),
        (("plan", "no_such_file.py:build", "--gpus", "2"), "there is no file no_such_file.py"),
        (("plan", "small_model:biuld", "--gpus", "2"), "small_model has no callable 'biuld'; it has build"),
        (("compare", "small_model:build", "--gpus", "2", "--strategies", "ddp,,tp"), "holds an empty name"),
        (("run", "small_model:build"), "give --gpus N, or --plan"),
        (("run", "small_model:build", "--gpus", "4", "--plan", "made.json"), "made.json is for 8 devices, not 4"),
    ],
)
def test_bad_arguments(folder: Path, api: FakeApi, arguments: tuple[str, ...], told: str) -> None:
    result = planner(*arguments, code=2)
    assert told in " ".join(result.stderr.split())
    assert not api.calls


def test_compare(folder: Path, api: FakeApi) -> None:
    result = planner("compare", "small_model:build", "--gpus", "8", "--strategies", "auto, tp", "--measure")
    assert "12 heads cannot be cut 8 ways" in result.stdout
    assert "strategies" in api.calls[0] and api.calls[0]["strategies"] == ("auto", "tp")
    assert api.calls[0]["measure"] is True
    rows = json.loads(planner("compare", "small_model:build", "--gpus", "8", "--json").stdout)
    assert [row["name"] for row in rows] == ["auto", "tp"]
    assert "strategies" not in api.calls[1]


def test_run_with_a_plan(folder: Path, api: FakeApi) -> None:
    result = planner("run", "small_model:build", "--plan", "made.json", "--steps", "30")
    call = api.calls[0]
    assert call["plan"] == example_plan()
    assert (call["gpus"], call["global_batch"], call["precision"]) == (8, 64, "bf16")
    lines = result.stdout.splitlines()
    assert lines[0] == summary(example_plan())
    assert len(lines) == 1 + 12
    assert (lines[1], lines[-1]) == ("step  1  loss 1", "step 30  loss 0.0333333")
    assert api.closed == 1


def test_run_makes_a_plan(folder: Path, api: FakeApi) -> None:
    result = planner(
        "run", "small_model:build", "--gpus", "8", "--global-batch", "64", "--steps", "2", "--strategy", "ddp", "--json"
    )
    assert json.loads(result.stdout) == {"configuration": example_plan().configuration, "losses": [1.0, 0.5]}
    assert api.calls[0]["strategy"] == "ddp" and "plan" not in api.calls[0]


def test_only_rank_0_of_torchrun_prints(folder: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert planner("run", "small_model:build", "--plan", "made.json").stdout == ""


def test_an_illegal_plan_is_never_run(folder: Path, api: FakeApi) -> None:
    replace(example_plan(), zero=4).save(folder / "bad.json")
    assert "ZeRO stage 4" in planner("run", "small_model:build", "--plan", "bad.json", code=4).stderr
    assert not api.calls


def test_the_package_is_lazy(api: FakeApi) -> None:
    import planner as package

    assert package.Plan is Plan
    assert package.compare == api.compare
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
    assert {"Plan", "auto_parallelize", "compare"} <= set(dir(package))


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ({}, 0),
        ({"tp": "refused"}, 2),
        ({"tp": "failed"}, 7),
        ({"tp": "unequal"}, 1),
        ({"ddp": "refused", "tp": "unequal"}, 1),
        ({"ddp": "refused", "tp": "failed"}, 7),
    ],
)
def test_the_exit_code_of_verify_is_that_of_the_worst_strategy(
    api: FakeApi, folder: Path, outcomes: dict[str, str], code: int
) -> None:
    api.outcomes = outcomes
    done = planner("verify", "small_model:build", "--gpus", "2", "--strategy", "ddp, tp", "--steps", "2", code=code)
    assert "Linear under ddp: " in done.stdout and "Linear under tp: " in done.stdout
    (call,) = api.calls
    assert (call["strategies"], call["steps"], call["gpus"]) == (("ddp", "tp"), 2, 2)
    assert call["precision"] is None


def test_verify_prints_json(api: FakeApi, folder: Path) -> None:
    done = planner("verify", "small_model:build", "--gpus", "2", "--json", "--precision", "fp64")
    (row,) = json.loads(done.stdout)
    assert (row["strategy"], row["outcome"]) == ("auto", "equal")
    assert api.calls[0]["precision"] == "fp64"


def test_verify_wants_names_of_strategies(api: FakeApi, folder: Path) -> None:
    done = planner("verify", "small_model:build", "--gpus", "2", "--strategy", "ddp,", code=2)
    assert "empty name" in done.stderr
