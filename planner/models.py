"""Models named on the command line.

    package.module:build        a callable of an installed or local module
    path/to/file.py:build       a callable of a file
    path/to/config.json         a Hugging Face config (or the folder it lies in)

A callable returns a model, or ``(model, example_inputs, example_kwargs, loss_fn)`` with any of the last ones left out.
It is called with those of ``global_batch``, ``sequence_length`` and ``precision`` that it has parameters for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import BadInput

if TYPE_CHECKING:
    import torch

PRECISIONS = {
    "fp64": "float64", "float64": "float64", "fp32": "float32", "float32": "float32",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
}  # fmt: skip
DEFAULT_CONFIG_PRECISION = "bf16"
DEFAULT_CONFIG_BATCH = 64
LONGEST_DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True)
class LoadedModel:
    """A model with one global batch. ``example_inputs`` is None and ``example_kwargs`` empty where none were given."""

    model: torch.nn.Module
    example_inputs: tuple[Any, ...] | None = None
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    name: str = "model"


def load_model(
    spec: str,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    device: str = "meta",
) -> LoadedModel:
    """The model ``spec`` names. ``device``: where a model from a config and its batch are; 'meta' takes no memory.

    Raises BadInput when there is no such module, file or callable, or when what it returns is not a model.
    """
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(f"unknown precision {precision!r}; write one of fp32, bf16, fp16, fp64")
    path = Path(spec)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path, global_batch, sequence_length, precision, device)
    options = {"global_batch": global_batch, "sequence_length": sequence_length, "precision": precision}
    return _from_callable(spec, options)


def _from_callable(spec: str, options: Mapping[str, Any]) -> LoadedModel:
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name:
        raise BadInput(
            f"{spec!r} names no model; write module:callable, path/to/file.py:callable or path/to/config.json"
        )
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    build = module
    for part in name.split("."):
        build = getattr(build, part, None)
    if not callable(build):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise BadInput(f"{where} has no callable {name!r}; it has {', '.join(sorted(known)[:10]) or 'none'}")
    accepted = _parameters(build)
    given = {key: value for key, value in options.items() if value is not None}
    if "sequence_length" in given and "sequence_length" not in accepted:
        raise BadInput(f"{spec} takes no sequence_length; leave --sequence-length out, or give {name} that parameter")
    return _read_result(spec, build(**{key: value for key, value in given.items() if key in accepted}))


def _parameters(build: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(build).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _read_result(spec: str, result: Any) -> LoadedModel:
    import torch

    parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    model, inputs, kwargs, loss_fn = (parts + (None,) * 4)[:4]
    if len(parts) > 4 or not isinstance(model, torch.nn.Module):
        raise BadInput(
            f"{spec} returned {_kind(result)}; it must return an nn.Module, or a tuple of "
            "(model, example_inputs, example_kwargs, loss_fn) with any of the last ones left out"
        )
    if inputs is not None and not isinstance(inputs, tuple):
        inputs = tuple(inputs) if isinstance(inputs, list) else (inputs,)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise BadInput(
            f"example_kwargs returned by {spec} is {_kind(kwargs)}; it must be a mapping of names to tensors"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise BadInput(f"loss_fn returned by {spec} is {_kind(loss_fn)}; it must be callable")
    return LoadedModel(model, inputs, kwargs or {}, loss_fn, type(model).__name__)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _load_module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        hint = "run from its folder or install it" if name.startswith(missing) else f"{name} needs it: install it"
        raise BadInput(f"there is no module {missing!r}; {hint}") from None


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; write path/to/file.py:callable")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} cannot be read as a Python file")
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.setdefault(path.stem, module)  # classes of the file look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if known is module:
            del sys.modules[path.stem]
        if isinstance(error, SyntaxError | ModuleNotFoundError):
            raise BadInput(f"{path} cannot be loaded: {error}") from None
        raise
    return module


def _from_config(
    path: Path, global_batch: int | None, sequence_length: int | None, precision: str | None, device: str
) -> LoadedModel:
    """A Hugging Face model from its config, weights random (or none on 'meta'), with a random batch."""
    data = _read_config(path)
    try:
        import torch
        import transformers
    except ImportError:
        raise BadInput(
            f"{path} is a Hugging Face config, which needs transformers: pip install 'meshwright[hf]'"
        ) from None
    mapping = transformers.CONFIG_MAPPING
    if data["model_type"] not in mapping:
        version = transformers.__version__
        raise BadInput(f"{path}: transformers {version} knows no model_type {data['model_type']!r}; is it newer?")
    try:
        config = mapping[data["model_type"]].from_dict(data)
    except Exception as error:  # each config class validates in its own way
        raise BadInput(f"{path} is not a legal {data['model_type']} config: {error}") from None
    architecture = _architecture(path, data, transformers)
    config.use_cache = False
    dtype = getattr(torch, PRECISIONS[precision or DEFAULT_CONFIG_PRECISION])
    with torch.device(device):
        try:
            model = architecture._from_config(config, dtype=dtype, attn_implementation="sdpa")
        except ValueError:  # this architecture has no such attention
            model = architecture._from_config(config, dtype=dtype, attn_implementation="eager")
    size = global_batch or DEFAULT_CONFIG_BATCH
    batch = _example_batch(path, architecture.__name__, config, size, sequence_length, dtype)
    batch = {name: value.to(device) for name, value in batch.items()}
    return LoadedModel(model, (), batch, None, data.get("_name_or_path") or _config_name(path))


def _config_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a Hugging Face config: not valid JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise BadInput(f"{path} is not a Hugging Face config: it has no model_type")
    return data


_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def _architecture(path: Path, data: Mapping[str, Any], transformers: Any) -> Any:
    """The class with a loss: the first architecture of the config, else its model type with a language-model head."""
    names = data.get("architectures") or ()
    if names:
        found = getattr(transformers, str(names[0]), None)
        if found is None:
            raise BadInput(f"{path}: transformers {transformers.__version__} has no architecture {names[0]!r}")
        if "For" in found.__name__ or found.__name__.endswith("LMHeadModel"):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        config_class = transformers.CONFIG_MAPPING[data["model_type"]]
        if config_class in auto._model_mapping:
            found = auto._model_mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    raise BadInput(
        f"{path}: model type {data['model_type']!r} has no language-model head; "
        'name a class that returns a loss, "architectures": ["...For..."]'
    )


def _example_batch(
    path: Path, architecture: str, config: Any, batch: int, sequence_length: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Random inputs and labels; ``[batch, sequence]`` token ids, or ``[batch, channels, height, width]`` images."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def integers(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    if architecture.endswith("ForImageClassification"):
        if sequence_length is not None:
            raise BadInput(f"{path}: {architecture} takes images; leave --sequence-length out")
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.randn(batch, config.num_channels, height, width, generator=generator).to(dtype)
        return {"pixel_values": pixels, "labels": integers(config.num_labels, batch)}
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if sequence_length is not None and longest and sequence_length > longest:
        raise BadInput(f"{path} allows sequences of at most {longest} tokens, not {sequence_length}")
    length = sequence_length or min(longest or LONGEST_DEFAULT_SEQUENCE, LONGEST_DEFAULT_SEQUENCE)
    tokens = integers(text.vocab_size, batch, length)
    if architecture.endswith(_TOKEN_HEADS):
        return {"input_ids": tokens, "labels": integers(text.vocab_size, batch, length)}
    if architecture.endswith("ForTokenClassification"):
        return {"input_ids": tokens, "labels": integers(config.num_labels, batch, length)}
    if architecture.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": integers(config.num_labels, batch)}
    raise BadInput(
        f"{path}: no example batch is known for {architecture}; "
        "write a callable that returns (model, example_inputs, example_kwargs) and give module:callable"
    )


def example_batch(loaded: LoadedModel) -> Any:
    """The example batch as training takes it: a tuple of inputs, a mapping of keywords, or both as a ``Batch``."""
    if not loaded.example_kwargs:
        return loaded.example_inputs or ()
    if not loaded.example_inputs:
        return dict(loaded.example_kwargs)
    from planner.trace import Batch

    return Batch(loaded.example_inputs, loaded.example_kwargs)
