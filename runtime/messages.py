"""Messages between processes: data only, framed on a stream socket.

    frame     8 bytes, big-endian length of the payload in bytes, then the payload
    payload   ``torch.save`` of a dict; read with ``torch.load(weights_only=True)``, so no foreign code is unpickled

A message is a dict of None, bool, int (64 bits), float, str, torch.dtype, torch.device, plain tensors, and lists,
tuples, sets and dicts of these. Anything else (functions, modules, dataclasses, NumPy arrays, tensor subclasses, bytes:
send a uint8 tensor) is refused with the place it stands at. Tensors travel by value: they arrive on the CPU, without
gradient history.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any

import torch

from planner.errors import BadInput

_LENGTH = struct.Struct("!Q")


def encode(message: Mapping[str, Any], where: str = "message") -> bytes:
    """The payload of ``message``. Raises BadInput naming the first value that isn't data; ``where`` heads that name."""
    buffer = io.BytesIO()
    torch.save(_plain(message, where), buffer)
    return buffer.getvalue()


def decode(payload: bytes | bytearray) -> dict[str, Any]:
    """The message of ``payload``. Raises BadInput when it holds anything but data or is cut short."""
    try:
        message = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInput("a message between processes was refused: it holds something other than data") from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInput("a message between processes was refused: it is damaged or cut short") from error
    if not isinstance(message, dict):
        raise BadInput(f"a message between processes was refused: it is a {type(message).__name__}, not a dict")
    return message


def _plain(value: Any, where: str) -> Any:
    """``value`` rebuilt of built-in types, so that subclasses (enums, ``torch.Size``, ``Parameter``) lose theirs."""
    if value is None or isinstance(value, torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, where)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 64:
            raise BadInput(f"{where} is a whole number of {value.bit_length()} bits; at most 64 can be sent")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return {_plain_key(item, where) for item in value}
    raise BadInput(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; processes exchange only numbers, text, "
        "tensors, and lists, tuples, sets and dicts of these"
    )


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, torch.Tensor | Mapping | list | set):
        raise BadInput(f"{where} has a {type(key).__name__} as a key; use numbers, text or tuples of these")
    return _plain(key, f"key of {where}")


def _plain_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise BadInput(f"{where} is a {type(tensor).__qualname__}; pass a plain torch.Tensor (its local part)")
    if tensor.layout is not torch.strided:
        raise BadInput(f"{where} is a tensor of layout {tensor.layout}; pass tensor.to_dense()")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type not in ("cpu", "meta"):
        plain = plain.cpu()
    if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
        plain = plain.clone(memory_format=torch.contiguous_format)  # torch.save would write the whole storage of a view
    return plain


def frame(payload: bytes) -> bytes:
    """The length that goes before ``payload`` on the stream."""
    return _LENGTH.pack(len(payload))


class FrameReader:
    """Collects frames from a stream socket, blocking or not."""

    def __init__(self) -> None:
        self._buffer = bytearray(_LENGTH.size)
        self._filled_bytes = 0
        self._in_payload = False

    def read(self, stream: socket.socket) -> bytearray | None:
        """Read what is there; the payload once it is whole, None until then (only of a non-blocking socket).

        Raises EOFError when the other end is closed.
        """
        while True:
            while self._filled_bytes < len(self._buffer):
                try:
                    count = stream.recv_into(memoryview(self._buffer)[self._filled_bytes :])
                except BlockingIOError:
                    return None
                except ConnectionError as error:
                    raise EOFError("the other end is gone") from error
                if count == 0:
                    raise EOFError("the other end is closed")
                self._filled_bytes += count
            done, self._filled_bytes = self._buffer, 0
            if self._in_payload:
                self._buffer, self._in_payload = bytearray(_LENGTH.size), False
                return done
            self._buffer, self._in_payload = bytearray(_LENGTH.unpack(done)[0]), True


class FrameWriter:
    """One payload on its way through a non-blocking stream socket."""

    def __init__(self, payload: bytes) -> None:
        self._pieces = [memoryview(frame(payload)), memoryview(payload)]

    def write(self, stream: socket.socket) -> bool:
        """Write what fits; True once everything is written. Raises ConnectionError when the other end is gone."""
        while self._pieces:
            try:
                count = stream.send(self._pieces[0])
            except BlockingIOError:
                return False
            self._pieces[0] = self._pieces[0][count:]
            if not self._pieces[0]:
                del self._pieces[0]
        return True


class Channel:
    """A blocking stream socket that sends and receives whole messages."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._reader = FrameReader()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises BadInput when ``message`` is not data; nothing is sent then."""
        payload = encode(message)
        self._stream.sendall(frame(payload))
        self._stream.sendall(payload)

    def receive(self) -> dict[str, Any]:
        """The next message. Raises EOFError when the other end is closed."""
        payload = None
        while payload is None:
            payload = self._reader.read(self._stream)
        return decode(payload)
