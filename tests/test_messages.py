"""Messages carry data and nothing else, whole, through sockets that take a little at a time."""

from __future__ import annotations

import enum
import io
import socket
import threading
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import BadInput
from runtime.messages import Channel, FrameReader, FrameWriter, decode, encode

numbers = st.integers(-(2**64) + 1, 2**64 - 1)
keys = st.text() | numbers | st.booleans()
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text()
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.sets(numbers),
    max_leaves=8,
)


class Level(enum.IntEnum):
    HIGH = 3


class Calls:
    """Pickled, it calls a function on loading."""

    called: list[str] = []

    def __reduce__(self) -> Any:
        return Calls.called.append, ("yes",)


@given(st.dictionaries(st.text(), data))
def test_data_comes_back_equal(message: dict[str, Any]) -> None:
    assert decode(encode(message)) == message


def test_tensors_come_back_equal_in_shape_type_and_value() -> None:
    message = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "grown": torch.nn.Parameter(torch.ones(2)) * 2,
    }
    back = decode(encode(message))
    for name, tensor in message.items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype, name
        assert not back[name].requires_grad
    meta = decode(encode({"x": torch.empty(2, 3, device="meta")}))["x"]
    assert meta.is_meta and meta.shape == (2, 3)


def test_a_small_view_does_not_take_its_whole_storage_along() -> None:
    assert len(encode({"x": torch.zeros(1_000_000)[:2]})) < 10_000


def test_subclasses_of_plain_types_become_plain() -> None:
    back = decode(
        encode({"level": Level.HIGH, "size": torch.Size([1, 2]), "parameter": torch.nn.Parameter(torch.ones(1))})
    )
    assert [type(value) for value in back.values()] == [int, tuple, torch.Tensor]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (len, "builtin_function_or_method"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (b"raw", "builtins.bytes"),
        (2**64, "65 bits"),
        (numpy.float32(1), "numpy.float32"),
        (torch.eye(2).to_sparse(), "to_dense"),
        ({torch.ones(1): 1}, "key"),
    ],
)
def test_anything_else_is_refused_with_its_place(value: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named) as caught:
        encode({"inputs": [1, {"x": value}]}, "forward")
    assert str(caught.value).startswith("forward['inputs'][1]['x']")


def test_a_pickled_object_is_refused_and_not_run() -> None:
    buffer = io.BytesIO()
    torch.save({"x": Calls()}, buffer)
    with pytest.raises(BadInput, match="something other than data"):
        decode(buffer.getvalue())
    assert Calls.called == []


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -30])
def test_a_cut_payload_is_refused(cut: int) -> None:
    with pytest.raises(BadInput, match="cut short|other than data"):
        decode(encode({"x": torch.ones(100)})[:cut])


def test_frames_cross_a_socket_piece_by_piece() -> None:
    """5 MB through a non-blocking socket whose buffer holds far less, and a second frame right behind."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        payloads = [bytes(range(256)) * 20_000, b""]
        reader, received = FrameReader(), []
        for payload in payloads:
            writer = FrameWriter(payload)
            rounds = 0
            done = False
            while not done or len(received) < payloads.index(payload) + 1:
                done = done or writer.write(ours)
                rounds += 1
                frame = reader.read(theirs)
                if frame is not None:
                    received.append(bytes(frame))
            assert rounds > 1 or not payload
        assert received == payloads


def test_channel_ends_with_eof() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=lambda: (Channel(ours).send({"a": 1}), ours.close()))
        thread.start()
        channel = Channel(theirs)
        assert channel.receive() == {"a": 1}
        with pytest.raises(EOFError):
            channel.receive()
        thread.join()
