"""One rank: a process forked by the helper that joins the process group and serves the parent's calls.

The first message on its channel says what to be (``hello``: rank, world size, device, class, ...); after
``init_process_group`` it answers with the names that may be called, then serves calls until the channel closes:

    {"method": name, "arguments": {...}}   ->   {"result": value}   or   {"error": text, ...} and exit code 1

After an exception the process ends at once, without destructors, so that peers blocked in a collective see their
connection close instead of waiting for its timeout.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from planner.errors import BadInput
from runtime.messages import Channel

_LAST_LINES = 24


def run_rank(stream: socket.socket, liveness: io.RawIOBase, directory: str) -> NoReturn:
    """Serve calls on ``stream`` until it closes, then end the process.

    ``liveness`` is at its end when the helper is dead. ``directory`` is private to the session; the store lies there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_helper, args=(liveness, os.getppid()), daemon=True).start()
    faulthandler.enable(all_threads=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Channel(stream)
    code = 0
    try:
        _serve(channel, directory)
    except EOFError:
        pass  # the parent closed the session
    except BaseException as error:
        code = 1
        _report(channel, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(channel: Channel, directory: str) -> None:
    hello = channel.receive()
    _take_over_settings(hello)
    device = _join(hello, directory)
    rank_class = load_class(hello["rank_class"])
    own = {name: hello[name] for name in ("rank", "world_size", "timeout_s")}
    instance = rank_class(**own, device=device, **hello["arguments"])
    remote = frozenset(rank_class.REMOTE)
    channel.send({"result": {"remote": sorted(remote), "pid": os.getpid(), "directory": directory}})
    while True:
        call = channel.receive()
        if call["method"] not in remote:
            raise BadInput(f"{call['method']!r} is not one of the methods {hello['rank_class']} allows to call")
        channel.send({"result": getattr(instance, call["method"])(**call["arguments"])})


def load_class(name: str) -> Any:
    """The class ``module:Class``. Raises BadInput when it isn't there."""
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"cannot load the rank class {name!r}: {error}") from error


def _take_over_settings(hello: Mapping[str, Any]) -> None:
    """The helper may have been started long ago: environment, folder, import path and threads are the parent's now."""
    os.environ.clear()
    os.environ.update(hello["environment"])
    sys.path[:] = hello["import_path"]
    os.chdir(hello["working_directory"])
    torch.set_num_threads(hello["threads"])


def _join(hello: Mapping[str, Any], directory: str) -> torch.device:
    rank, world_size = hello["rank"], hello["world_size"]
    timeout = timedelta(seconds=hello["timeout_s"])
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    store.set_timeout(timeout)
    device = torch.device("cuda", rank) if hello["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def _report(channel: Channel, error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(error.with_traceback(trace))).rstrip().splitlines()
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        channel.send({"error": summary, "traceback": "\n".join(lines[-_LAST_LINES:]), "time_s": time.monotonic()})
    except OSError:
        pass  # the parent is gone


def _die_with_helper(liveness: io.RawIOBase, helper_pid: int) -> None:
    while os.getppid() == helper_pid:
        if select.select([liveness], [], [], 1.0)[0]:
            break
    os.killpg(0, signal.SIGKILL)
