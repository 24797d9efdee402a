"""A hand-written program on several ranks against the same model on one device, in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from planner.errors import BadInput, InvalidPlan
from planner.ir.mesh import Mesh
from planner.ir.program import Program
from runtime.batch import check_batch
from runtime.launch import LocalRanks
from runtime.optimizer import describe_optimizer
from runtime.state import left_whole
from runtime.worker import Rank
from tests.hand_program import batch, hand_program, initial_state, reference_loss, reference_parameters
from tests.ranks import run_ranks

CLIP = 0.5


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.05, betas=(0.8, 0.95))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.1e}"


def check_gradients(rank: Rank, parameters: dict[str, torch.nn.Parameter], what: str) -> None:
    found = rank.gather_over_stages(rank.gradients())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    assert set(found) - {"head.weight"} == set(trainable), what
    for name, p in trainable.items():
        assert (found[name] is None) == (p.grad is None), f"{what}: {name}"
        if p.grad is not None:
            close(found[name], p.grad, 1e-12, f"{what}: gradient of {name}")


def check_parameters(rank: Rank, parameters: dict[str, torch.nn.Parameter], what: str) -> None:
    found = rank.gather_over_stages(rank.state())
    assert torch.equal(found["head.weight"], found["embed.weight"])
    for name, p in parameters.items():
        close(found[name], p.detach(), 1e-10, f"{what}: {name}")


def check_training(rank: Rank, program: Program, what: str) -> None:
    """Loss and gradients, accumulation over two calls, clipping, three AdamW steps, and the buffer."""
    rank.load(program.to_dict(), initial_state())
    parameters = reference_parameters()
    for number in range(2):
        expected = reference_loss(parameters, batch(number))
        expected.backward()
        loss = rank.forward_backward(batch(number))
        close(torch.tensor(loss, dtype=torch.float64), expected.detach(), 1e-12, f"{what}: loss {number}")
        check_gradients(rank, parameters, f"{what} after {number + 1} calls")
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    close(torch.tensor(rank.clip_grad_norm(CLIP), dtype=torch.float64), norm, 1e-12, f"{what}: gradient norm")
    assert norm > CLIP
    check_gradients(rank, parameters, f"{what} clipped")
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    optimizer = adamw(list(trainable.values()))
    rank.optimizer(describe_optimizer(adamw, trainable))
    for number in range(3):
        optimizer.zero_grad()
        expected = reference_loss(parameters, batch(number))
        expected.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        loss = rank.train_step(batch(number), number, max_norm=CLIP)
        close(torch.tensor(loss, dtype=torch.float64), expected.detach(), 1e-10, f"{what}: loss of step {number}")
    check_parameters(rank, parameters, what)
    seen = rank.gather_over_stages(rank.state())
    assert all(seen[f"seen{i}"].item() == 5 * program.micro_batches for i in range(program.mesh.pp)), what


def on_two_ranks(index: int, size: int) -> None:
    rank = Rank(index, size, 60.0, "cpu")
    for mesh, zero, schedule, micro_batches, recompute in (
        ("dp2", 0, "gpipe", 2, "none"),
        ("dp2", 1, "gpipe", 2, "none"),
        ("dp2", 2, "gpipe", 4, "none"),
        ("dp2", 3, "gpipe", 2, "full"),
        ("tp2", 0, "gpipe", 2, "full"),
        ("pp2", 0, "gpipe", 4, "none"),
        ("pp2", 0, "1f1b", 4, "full"),
        ("pp2", 0, "1f1b", 1, "none"),
    ):
        program = hand_program(Mesh.parse(mesh), micro_batches, zero, schedule, recompute)
        check_training(rank, program, f"{mesh} zero {zero} {schedule} {micro_batches}")
        sharded = [name for name, p in rank.named_parameters().items() if isinstance(p, DTensor)]
        assert ("blocks.0.up_weight" in sharded) == (zero > 0)
        assert "blocks.0.scale" not in sharded and ("blocks.0.unused" in sharded) == (zero in (1, 2))
    with pytest.raises(BadInput, match="2 processes run"):
        rank.load(hand_program(Mesh(dp=4)), initial_state())


def on_four_ranks(index: int, size: int, folder: str) -> None:
    rank = Rank(index, size, 60.0, "cpu")
    for mesh, zero, schedule in (
        ("pp2.dp2", 0, "1f1b"),
        ("pp2.dp2", 2, "1f1b"),
        ("pp2.dp2", 3, "1f1b"),
        ("pp2.tp2", 0, "gpipe"),
        ("dp2.tp2", 1, "gpipe"),
        ("dp2.tp2", 3, "gpipe"),
    ):
        check_training(rank, hand_program(Mesh.parse(mesh), 2, zero, schedule), f"{mesh} zero {zero} {schedule}")
    check_checkpoint(rank, folder)


def check_checkpoint(rank: Rank, folder: str) -> None:
    """Three steps in one go equal two steps, a checkpoint into another mesh and ZeRO stage, and one step there."""
    spec = describe_optimizer(adamw, {n: p for n, p in reference_parameters().items() if p.requires_grad})

    def steps(program: Program, first: int, end: int, load: str = "", save: str = "") -> dict[str, torch.Tensor | None]:
        rank.load(program, initial_state())
        rank.optimizer(spec)
        if load:
            rank.load_checkpoint(load)
        for number in range(first, end):
            rank.train_step(batch(number), number)
        if save:
            rank.save(save)
        return rank.gather_over_stages(rank.state())

    path = str(Path(folder) / "checkpoint")
    staged, sharded = hand_program(Mesh(pp=2, tp=2), 2), hand_program(Mesh(dp=2, pp=2), 2, zero=3)
    straight = steps(staged, 0, 3)
    steps(staged, 0, 1, save=path)  # replaced by the next
    steps(staged, 0, 1, save=path + "0")
    steps(staged, 0, 2, save=path)
    resumed = steps(sharded, 2, 3, load=path, save=path + "2")
    again = steps(hand_program(Mesh(dp=4), 2), 3, 3, load=path + "2")
    shards = steps(hand_program(Mesh(dp=2, pp=2), 2, zero=2), 1, 2, load=path + "0", save=path + "0")
    shards = steps(hand_program(Mesh(dp=4), 2, zero=1), 2, 3, load=path + "0")
    for name, value in straight.items():
        if not name.startswith("seen"):
            close(resumed[name], value, 1e-12, f"resumed: {name}")
            close(shards[name], value, 1e-12, f"resumed on shards: {name}")
            assert torch.equal(again[name], resumed[name])
    assert resumed["seen1"].item() == 6


@pytest.mark.gloo
def test_two_ranks_train_as_one_device() -> None:
    run_ranks(on_two_ranks, 2)


@pytest.mark.gloo
def test_four_ranks_train_as_one_device_and_resume_elsewhere(tmp_path: Path) -> None:
    run_ranks(on_four_ranks, 4, str(tmp_path))
    wholes = initial_state()
    del wholes["seen1"]  # the last writer has one stage
    before = {name: value.clone() for name, value in wholes.items()}
    moments = {
        f"optimizer.exp_avg.{n}": torch.zeros(p.shape, dtype=p.dtype)
        for n, p in reference_parameters().items()
        if "scale" in n
    }
    dcp.load(wholes | moments, checkpoint_id=tmp_path / "checkpoint2", no_dist=True)
    changed = [name for name, value in wholes.items() if not torch.equal(value, before[name])]
    assert "embed.weight" in changed and "blocks.1.scale" in changed and "blocks.0.down_bias" not in changed
    assert all(value.abs() > 0 for value in moments.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoint0", "checkpoint2"]


@pytest.mark.gloo
def test_a_controlling_process_drives_the_ranks_with_plain_data(tmp_path: Path) -> None:
    torch.save(initial_state(), tmp_path / "weights.pt")
    trainable = {n: p for n, p in reference_parameters().items() if p.requires_grad}
    parameters = reference_parameters()
    with LocalRanks.start(2) as ranks:
        program = hand_program(Mesh(pp=2), 2, schedule="1f1b").to_dict()
        ranks.call("load", {"program": program, "state": str(tmp_path / "weights.pt")})
        ranks.call("optimizer", {"spec": describe_optimizer(adamw, trainable)})
        loss = ranks.call("train_step", {"batch": batch(), "step": 0})
        gradients = {name: g for part in ranks.call("gradients", {}) for name, g in part.items()}
        assert all(seconds > 0 for part in ranks.call("measure", {"batch": batch(), "steps": 1}) for seconds in part)
    expected = reference_loss(parameters, batch())
    expected.backward()
    assert loss[0] == loss[1] == pytest.approx(expected.item(), rel=1e-12)
    close(gradients["embed.weight"], parameters["embed.weight"].grad, 1e-12, "embed.weight")
    assert gradients["blocks.1.unused"] is None and set(gradients) == set(trainable)


def test_zero_3_leaves_scalars_other_dtypes_and_shared_states_whole() -> None:
    scalars = {f"blocks.{i}.{name}" for i in range(2) for name in ("scale", "unused")}
    assert left_whole(hand_program(Mesh(pp=2))) == scalars | {"seen0", "seen1"}
    assert left_whole(hand_program(Mesh())) == scalars | {"seen0", "embed.weight"}


def test_one_rank_needs_no_process_group(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    rank = Rank()
    check_training(rank, hand_program(Mesh(), 4, recompute="full"), "single")
    before = rank.state()
    rank.save(str(tmp_path / "c"))
    rank.load(hand_program(Mesh(), 1), initial_state())
    rank.load_checkpoint(str(tmp_path / "c"))
    assert all(torch.equal(value, before[name]) for name, value in rank.state().items())
    assert len(rank.measure(batch(), 2)) == 2 and rank.peak_memory_bytes() > 0


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    torch.save(initial_state(), tmp_path / "weights.pt")
    rank = Rank()
    rank.load(hand_program(Mesh()), str(tmp_path / "weights.pt"))
    assert torch.equal(rank.state()["embed.weight"], initial_state()["embed.weight"])


def test_recomputation_draws_the_same_dropout() -> None:
    rank = Rank()
    results = []
    for recompute in ("none", "full"):
        rank.load(hand_program(Mesh(), 2, dropout=0.5, recompute=recompute), initial_state())
        losses = [rank.forward_backward(batch(), step) for step in (0, 1)]
        results.append((losses, rank.gradients()))
    (losses, gradients), (again, gradients_again) = results
    assert losses == again and losses[0] != losses[1]
    for name, gradient in gradients.items():
        assert gradient is None and gradients_again[name] is None or torch.equal(gradient, gradients_again[name])


def test_a_program_survives_its_plain_form() -> None:
    program = hand_program(Mesh(pp=2, dp=2, tp=2), 2, 3, "1f1b")
    data = program.to_dict()
    assert Program.from_dict(data) == program
    assert data["mesh"] == "pp2.dp2.tp2" and data["stages"][0]["states"][0]["placement"] == "S(0)"
    for change, message in (
        ({"zero": "3"}, "program.zero must be int"),
        ({"zero": True}, "program.zero must be int"),
        ({"mesh": "pp2"}, None),
        ({"mesh": "xx"}, "is not a mesh"),
        ({"mesh": "dp2"}, "2 stages for a mesh of dp2"),
        ({"stages": data["stages"][:1] + [{}]}, r"program.stages\[1\] must be the fields"),
    ):
        if message is None:
            Program.from_dict({**data, **change})
        else:
            with pytest.raises(InvalidPlan, match=message):
                Program.from_dict({**data, **change})


def test_wrong_input_is_named() -> None:
    rank = Rank()
    with pytest.raises(BadInput, match="no program is loaded"):
        rank.state()
    state = initial_state()
    rank.load(hand_program(Mesh()), state)
    with pytest.raises(BadInput, match="no optimizer is set"):
        rank.step()
    with pytest.raises(BadInput, match="lacks positional input 1"):
        rank.forward_backward({"ids": batch()["ids"]})
    with pytest.raises(BadInput, match=r"torch.int64 \[4, 3\]; the plan is for torch.int64 \[8, 3\]"):
        rank.forward_backward({name: x[:4] for name, x in batch().items()})
    with pytest.raises(BadInput, match="positional input 0 is torch.int32"):
        check_batch(rank.program, {name: x.int() for name, x in batch().items()})
    check_batch(rank.program, batch())
    with pytest.raises(BadInput, match="hold no blocks.1.scale"):
        rank.load(hand_program(Mesh()), {n: x for n, x in state.items() if n != "blocks.1.scale"})
    with pytest.raises(BadInput, match=r"embed.weight has shape \[3\]"):
        rank.load(hand_program(Mesh()), {**state, "embed.weight": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(BadInput, match="no program is loaded"):
        rank.state()


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    rank = Rank()
    rank.load(hand_program(Mesh()), initial_state())
    with pytest.raises(BadInput, match="not a complete checkpoint"):
        rank.load_checkpoint(str(tmp_path / "nothing"))
    dcp.save({"other": torch.zeros(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(BadInput, match=r"holds no embed.weight"):
        rank.load_checkpoint(str(tmp_path / "other"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        rank.save(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam"])
def test_any_element_wise_optimizer_is_described_and_rebuilt(name: str) -> None:
    parameters = {n: p for n, p in reference_parameters().items() if p.requires_grad}
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    spec = describe_optimizer(lambda ps: getattr(torch.optim, name)(ps, **options), parameters)
    rank = Rank()
    rank.load(hand_program(Mesh(), 1), initial_state())
    rank.optimizer(spec)
    optimizer = getattr(torch.optim, name)(parameters.values(), **options)
    for number in range(2):
        optimizer.zero_grad()
        reference_loss(parameters | frozen(), batch(number)).backward()
        optimizer.step()
        rank.train_step(batch(number), number)
    for key, p in parameters.items():
        close(rank.state()[key], p.detach(), 1e-10, f"{name}: {key}")


def frozen() -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in reference_parameters().items() if not p.requires_grad}


def test_optimizers_that_cannot_be_sent_or_sharded_are_refused() -> None:
    class Local(torch.optim.SGD):
        pass

    p = {"w": torch.zeros(3)}
    with pytest.raises(BadInput, match="Local is defined in the running script"):
        describe_optimizer(lambda ps: Local(ps, lr=0.1), p)
    with pytest.raises(BadInput, match="LBFGS does not treat every element"):
        describe_optimizer(lambda ps: torch.optim.LBFGS(ps), p)
    with pytest.raises(BadInput, match="returned int, not a torch.optim.Optimizer"):
        describe_optimizer(lambda ps: 3, p)
    with pytest.raises(BadInput, match="the optimizer factory failed: ValueError: Invalid learning rate"):
        describe_optimizer(lambda ps: torch.optim.SGD(ps, lr=-1.0), p)
    with pytest.raises(BadInput, match=r"shape \[4\] that is no parameter of the model"):
        describe_optimizer(lambda ps: torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1), p)
    big = {"w": torch.empty(10**6, 10**6, device="meta")}
    spec = describe_optimizer(lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.5), fused=True), big)
    assert spec["groups"][0]["names"] == ["w"] and spec["groups"][0]["options"]["lr"] == 0.5
