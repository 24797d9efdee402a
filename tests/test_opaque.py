"""Modules that cannot be traced: which are kept whole, as what, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import BadInput, TraceError
from planner.ir.graph import Graph, Node
from planner.ir.program import Program
from planner.trace import Batch, trace
from runtime.opaque import bound, dump_modules, load_modules, states_of
from tests.models import seeded
from tests.opaque_models import Branching, Rounded, dropping, everything, rowwise


def graph_of(model: nn.Module, x: Tensor | None = None, **options: Any) -> Graph:
    inputs = (torch.randn(8, 8) if x is None else x,)
    return trace(model, Batch(inputs, {}), lambda y: y.sum(), **options).graph


def modules(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "module"]


class Around(nn.Module):
    """A layer, ``inner``, a layer; ``use`` says how inner is called."""

    def __init__(self, inner: nn.Module, use: Callable[[Any, Tensor], Tensor] = lambda self, x: self.inner(x)) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.use = nn.Linear(8, 8), inner, nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.first(x)))


class Inner(nn.Module):
    """``forward`` is given; always with a Function that cannot be traced."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.function, self.all = nn.Parameter(torch.randn(8)), function, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, Rounded.apply(x * self.weight))


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_innermost_modules_are_kept_and_told() -> None:
    case = everything()
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    graph = trace(case.model, Batch(case.inputs, {}, case.target), case.loss_fn).graph
    assert [node.args[0] for node in modules(graph)] == ["quantised", "branching", "experts", "hooked", "checkpointed"]
    assert len(graph.notes) == 5 and all("runs as one operator" in note for note in graph.notes)
    ((buffer, value),) = graph.writes
    assert graph.leaf_by_name[buffer].target == "branching.mean" and not graph.values[value].differentiable
    assert graph.leaf_by_name["first_weight"].aliases == ("hooked.weight",)
    assert all(torch.equal(before[name], tensor) for name, tensor in case.model.state_dict().items())
    assert all("_compiled_call_impl" not in vars(module) for module in case.model.modules())


def test_arguments_are_data_in_the_graph_and_python_in_the_text() -> None:
    case = everything()
    made = planner.auto_parallelize(
        case.model, gpus=1, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster="dgx-a100-80gb"
    )
    source = made.source()
    assert re.search(r'self\.opaque\("(itself|quantised)", rng, site', source)
    assert 'options={"factor": 2.0})' in source
    assert Program.from_dict(made.program.to_dict()) == made.program


def test_other_modules_of_the_class_share_its_fate_in_one_more_trace() -> None:
    graph = graph_of(nn.Sequential(*(Inner(lambda self, x: x) for _ in range(30))))
    assert [node.args[0] for node in modules(graph)] == [str(i) for i in range(30)]


def test_a_tensor_left_in_an_attribute_is_a_result() -> None:
    def kept(self: Any, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return x

    model = Around(Inner(kept), lambda self, x: self.inner(x) + self.inner.penalty)
    graph = graph_of(model)
    (node,) = modules(graph)
    assert dict(node.kwargs)["kept"] == (("", "penalty"),)
    assert graph.consumers[node.outputs[1].name]
    assert not hasattr(model.inner, "penalty")


def test_a_buffer_written_only_for_some_values_is_a_result() -> None:
    def sometimes(self: Any, x: Tensor) -> Tensor:
        if x.sum() < 0:
            self.seen += 1
        return x

    with seeded(0):
        graph = graph_of(Around(Inner(sometimes)))
    assert [graph.leaf_by_name[buffer].target for buffer, _ in graph.writes] == ["inner.seen"]


def test_what_is_drawn_is_known() -> None:
    case = dropping()
    (node,) = modules(trace(case.model, Batch(case.inputs, {}, case.target), case.loss_fn).graph)
    assert dict(node.kwargs)["draws"]
    assert not any("draws" in dict(n.kwargs) for n in modules(graph_of(Around(Inner(lambda self, x: x)))))


def test_an_autocast_region_around_the_module_is_part_of_the_call() -> None:
    def cast(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()

    inner = Inner(lambda self, x: x @ torch.ones(8, 8))
    (node,) = modules(graph_of(Around(inner, cast)))
    assert str(dict(node.kwargs)["autocast"]) == "torch.bfloat16"
    assert node.output.dtype == "bfloat16"


@dataclasses.dataclass
class Pair:
    x: Tensor
    scale: float = 2.0


def test_dataclasses_are_looked_into() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(lambda self, x: Pair(x, 3.0))

        def forward(self, pair: Pair) -> Tensor:
            result = self.inner(pair.x * pair.scale)
            return result.x * result.scale

    found = trace(Reads(), Batch((Pair(torch.randn(8, 8)),), {}), lambda y: y.sum())
    assert list(found.input_paths.values()) == ["[0][0].x"]
    assert dict(modules(found.graph)[0].kwargs)["plain"] == ", 3.0"


# --- when the module around it is kept --------------------------------------------------------------------------------


def first_rows(self: Any, x: Tensor) -> Tensor:
    return x[x.sum(1) > 0]


@pytest.mark.parametrize(
    ("inner", "use"),
    [
        (first_rows, lambda self, x: self.inner(x).sum(0).expand(8, 8)),
        (lambda self, x: (x, int(x.argmax())), lambda self, x: self.inner(x)[0]),
        (lambda self, x: None, lambda self, x: x if self.inner(x) is None else 2 * x),
        (lambda self, x: iter((x,)), lambda self, x: next(self.inner(x))),
        (lambda self, x: self.all.append(x) or x, lambda self, x: self.inner(x) + self.inner.all.pop()),
    ],
    ids=["shape", "number", "nothing", "object", "list"],
)
def test_the_module_around_what_cannot_be_one_operator(inner: Any, use: Any) -> None:
    (node,) = modules(graph_of(nn.Sequential(Around(Inner(inner), use))))
    assert node.args[0] == "0"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_result_whose_shape_depends_on_values() -> None:
    with pytest.raises(TraceError, match="cannot be kept as one operator either: what it returns"):
        graph_of(Inner(first_rows))


def test_a_weight_that_is_not_its_own() -> None:
    model = Around(Inner(lambda self, x: x * self.all[0]))
    model.inner.all.append(model.first.bias)
    with pytest.raises(TraceError, match="it uses parameters or buffers that are not its own"):
        graph_of(model)


def test_a_module_that_writes_its_input() -> None:
    with pytest.raises(TraceError, match="it writes into its arguments"):
        graph_of(Writes())


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.layer(x.mul_(2)))


def test_a_module_on_meta_has_no_values_to_run() -> None:
    with torch.device("meta"):
        model = Around(Branching(), lambda self, x: self.inner(x)[0])
    with pytest.raises(TraceError, match="only where the model and example_inputs have values"):
        graph_of(model, torch.empty(8, 8, device="meta"))


def test_one_that_cannot_be_sent_to_the_ranks() -> None:
    model = Around(Inner(lambda self, x: x))
    model.inner.lock = threading.Lock()
    with pytest.raises(BadInput, match=r"module 'inner' .* cannot be sent to them \(TypeError"):
        dump_modules(model, ["inner"])


# --- rows -------------------------------------------------------------------------------------------------------------


def test_samplewise_modules_are_cut_with_the_batch() -> None:
    case = rowwise()
    graph = trace(case.model, Batch(case.inputs, {}, case.target), case.loss_fn, samplewise=["quant*", "experts"]).graph
    assert [re.sub(r"(, _( _)?)+ ->", " ->", node.rule) for node in modules(graph)] == ["r _ -> r _"] * 2
    assert all("samplewise" in note for note in graph.notes)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, x: x - x.mean(0), "what it makes of a row depends on other rows"),
        (lambda self, x: x.sum(), "returns a tensor without a dim of rows|does not run on half"),
        (lambda self, x: x + self.seen.add_(1), "writes buffers"),
    ],
)
def test_a_wrong_promise_is_refused(function: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        graph_of(Around(Inner(function)), samplewise=True)


def test_a_path_that_is_no_module() -> None:
    with pytest.raises(BadInput, match="samplewise names 'inner2', which is no module"):
        graph_of(Around(Inner(lambda self, x: x)), samplewise=("inner2",))


def test_micro_batches_need_the_promise() -> None:
    case = rowwise()
    options = {"gpus": 2, "example_inputs": case.inputs, "loss_fn": case.loss_fn, "cluster": "dgx-a100-80gb"}
    with pytest.raises(BadInput, match="module 'quantised' runs whole on the batch"):
        planner.auto_parallelize(case.model, strategy="pp2 mb=2", **options)
    made = planner.auto_parallelize(case.model, strategy="pp2", **options)
    assert made.plan.micro_batches == 1 and any("samplewise=('quantised',)" in note for note in made.plan.notes)
    assert planner.auto_parallelize(case.model, strategy="pp2", samplewise=True, **options).plan.micro_batches > 1


# --- copies and messages ----------------------------------------------------------------------------------------------


def test_a_copy_holds_the_tensors_it_is_given_and_forgets_what_is_assigned() -> None:
    model = nn.LSTM(4, 4)
    given = {name: torch.zeros_like(tensor) for names, tensor in states_of(model) for name in names}
    assert not bound(model, given)(torch.ones(2, 1, 4))[0].any()
    assert model(torch.ones(2, 1, 4))[0].any()


def test_modules_travel_without_their_numbers_and_with_their_ties() -> None:
    model = everything().model
    (hooked,) = load_modules(dump_modules(model, ["hooked"])).values()
    assert hooked.weight.is_meta and hooked._backward_hooks
    whole = load_modules(dump_modules(model, [""]))[""]
    assert whole.hooked.weight is whole.first.weight and whole.branching.mean.is_meta
