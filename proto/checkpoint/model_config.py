"""A model's folder as every process reads it: config.json and generation_config.json, with no torch.

The folder itself comes from a path, the Hugging Face hub, or ModelScope (``resolve_model``); the demo model is part
of the package.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..config import ConfigError, EngineArgs
from ..flag_words import json_object
from ..process import shows_bars
from ..readable import is_file, is_folder, unreadable
from .config_numbers import check_layer_lists, check_numbers
from .gguf import gguf_file
from .gguf_config import gguf_config, in_keys
from .quantization import quantization_of

log = logging.getLogger(__name__)

T = TypeVar("T")

DEMO_MODEL = "quire-demo"
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_DEFAULT_LENGTH = 2048
AUTO_LENGTH = -1
"""A max_model_len that is what config.json allows, or as much of it as fits the device."""
_PATTERNS = ["*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt", "artifact.metadata"]
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
}
"""What some families call the values that every decoder has; the usual name counts where both are there."""
# What transformers leaves out where it writes a text model's config into a larger one's: its class's defaults.
_UNWRITTEN: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
}  # fmt: skip


@dataclass
class ModelConfig:
    """What config.json says, and what follows from it. Lengths are tokens."""

    path: str
    hf: dict[str, Any]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    # Of the flags: whether the folder's own code may run, of which revision, and whose model runs.
    trust_remote_code: bool = False
    code_revision: str | None = None
    model_impl: str = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures."""
        return (self.hf.get("architectures") or [""])[0]


def demo_model_path() -> str:
    """The folder of the model that is part of the package."""
    return str(Path(__file__).resolve().parents[2] / "demo_model")


def model_folder(args: EngineArgs, weights: bool = False) -> str:
    """The folder of the model that ``args`` name, with its weight files only where asked for. Raises ConfigError."""
    if args.hf_token:
        os.environ["HF_TOKEN"] = args.hf_token  # where the hub's client looks, and children
    return resolve_model(
        args.model, args.revision, args.download_dir, weights, args.load_format, code=args.trust_remote_code
    )


def tokenizer_folder(args: EngineArgs, folder: str) -> str:
    """The folder whose tokenizer is used: ``--tokenizer``'s, or ``folder``, the model's. Raises ConfigError."""
    if args.tokenizer is None and args.tokenizer_revision is None:
        return folder
    revision = args.tokenizer_revision or (args.revision if args.tokenizer is None else None)
    model = args.tokenizer or args.model
    return resolve_model(model, revision, args.download_dir, weights=False, code=args.trust_remote_code)


def resolve_model(
    model: str | None,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    load_format: str = "auto",
    code: bool = False,
) -> str:
    """The local folder of ``model``: a path as it is, a hub id downloaded (or found in the hub's cache). A GGUF file
    stands for a folder.

    ``None`` and ``quire-demo`` are the demo model. ``weights=False`` leaves the weight files where they are; which
    kind there is to fetch is ``load_format``'s to say. ``code`` fetches the repository's Python files too.
    With QUIRE_USE_MODELSCOPE=True hub ids are ModelScope's. Raises ConfigError.
    """
    if model is None or model == DEMO_MODEL:
        return demo_model_path()
    if is_folder(model) or (model.endswith(".gguf") and is_file(model)):
        return model
    if model.endswith(".gguf"):
        raise ConfigError(f"model file {model!r} does not exist.")
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model folder {model!r} does not exist.")
    kinds = {"pt": ["*.bin", "*.pt"], "dummy": []}.get(load_format, ["*.safetensors"]) if weights else []
    patterns = _PATTERNS + kinds + (["*.py"] if code else [])
    if os.environ.get("QUIRE_USE_MODELSCOPE", "").lower() in ("true", "1"):
        return _from_modelscope(model, revision, download_dir, patterns)
    return _from_hub(model, revision, download_dir, patterns)


def _from_hub(model: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> str:
    if not shows_bars():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by what comes next
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except Exception as error:  # the hub's client raises many kinds; each ends as one line for the user
        where = f"{model}@{revision}" if revision else model
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model {where!r} is neither a local folder nor to be had from the hub: {first}") from error


def _from_modelscope(model: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ConfigError("QUIRE_USE_MODELSCOPE needs ModelScope's client: pip install 'quire[modelscope]'") from None
    try:
        return snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except Exception as error:
        raise ConfigError(f"model {model!r} is not to be had from ModelScope: {error}") from error


def config_of(args: EngineArgs, folder: str) -> ModelConfig:
    """The config of the model in ``folder`` by ``args``. Raises ConfigError."""
    overrides = json_object("hf_overrides", args.hf_overrides)
    if args.rope_scaling is not None:
        overrides["rope_scaling"] = json_object("rope_scaling", args.rope_scaling)
    if args.rope_theta is not None:
        overrides["rope_theta"] = args.rope_theta
    config = load_model_config(folder, args.max_model_len, overrides, args.quantization)
    config.trust_remote_code, config.code_revision = args.trust_remote_code, args.code_revision
    config.model_impl = args.model_impl
    if args.disable_sliding_window:
        _cap_at_window(config, args.max_model_len)
    return config


def _cap_at_window(config: ModelConfig, asked: int | None) -> None:
    """Let no sequence be longer than the model's sliding window: then every token sees all before it."""
    window = config.hf.get("sliding_window")
    if not isinstance(window, int) or config.hf.get("use_sliding_window") is False:
        return
    if asked is not None and asked > window:
        raise ConfigError(
            f"max_model_len ({asked}) is over the model's sliding window ({window}), which --disable-sliding-window "
            "makes the limit; lower the first, or leave the flag out."
        )
    config.max_model_len = min(config.max_model_len, window)


def load_model_config(
    path: str,
    max_model_len: int | None = None,
    overrides: dict[str, Any] | None = None,
    quantization: str | None = None,
) -> ModelConfig:
    """Read a model folder; ``overrides`` replace values of its config.json, ``quantization`` is the flag's. Raises
    ConfigError that names the file and the remedy."""
    try:
        return _load(path, max_model_len, overrides or {}, quantization)
    except ConfigError as error:
        if gguf_file(path) is None or "/config.json" not in (text := str(error)):
            raise
        raise ConfigError(in_keys(path, text, overrides or {})) from error


def _load(path: str, max_model_len: int | None, overrides: dict[str, Any], quantization: str | None) -> ModelConfig:
    gguf = gguf_file(path)
    hf = read_json(file := Path(path) / "config.json") if gguf is None else gguf_config(gguf)
    if not hf and not is_file(file):
        raise ConfigError(
            f"{file} does not exist; a model is a Hugging Face folder with a config.json, or a GGUF file."
        )
    text = hf.get("text_config")
    if isinstance(text, dict):
        if isinstance(inner := overrides.get("text_config"), dict):  # the text's values are the model's from here on
            overrides = {**{key: value for key, value in overrides.items() if key != "text_config"}, **inner}
        names = hf.get("architectures") or text.get("architectures")  # the whole model's say how its weights are named
        whole, quantized = hf.get("tie_word_embeddings"), hf.get("quantization_config")
        unwritten = _UNWRITTEN.get(str(text.get("model_type")), {})
        hf = {
            **unwritten,
            **hf,
            **{key: value for key, value in text.items() if value is not None or hf.get(key) is None},
        }
        hf["architectures"] = names
        if whole is True:  # the text's own value is then its class's default, and the files have one table
            hf["tie_word_embeddings"] = True
        if quantized:  # the whole model's comes first
            hf["quantization_config"] = quantized
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(value := {**hf, **overrides}.get(key), dict | None):
            raise ConfigError(f"{path}/config.json: {key} must be an object, got {value!r}; correct it.")
    hf = _overridden(hf, overrides)
    check_numbers(f"{path}/config.json", hf)  # before anything is made of one
    hf = with_usual_names(hf, OTHER_NAMES)
    check_layer_lists(f"{path}/config.json", hf)
    if (quantized := quantization_of(path, hf, quantization)) is not None:
        hf["quantization_config"] = quantized
    generation = read_json(Path(path) / "generation_config.json")
    vocab, names = hf.get("vocab_size"), hf.get("architectures") or []
    if type(vocab) is not int or vocab < 1:
        raise ConfigError(
            f"{path}/config.json has no usable vocab_size (got {vocab!r}); correct it, or download it again."
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}/config.json: architectures must be a list of names, got {names!r}.")
    return ModelConfig(
        path=path,
        hf=hf,
        max_model_len=_max_len(path, hf, max_model_len),
        vocab_size=vocab,
        eos_token_ids=_eos(path, generation) or _eos(path, hf),
        generation=generation,
        overrides=overrides,
    )


def _overridden(hf: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    rope = dict(overrides.get("rope_parameters") or hf.get("rope_parameters") or {})
    if rope and "rope_scaling" in overrides:  # the older spelling counts, where it is the one the user wrote
        theta = rope.get("rope_theta")
        rope = {**({} if theta is None else {"rope_theta": theta}), **(overrides["rope_scaling"] or {})}
    if rope and "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    return {**hf, **overrides, **({"rope_parameters": rope} if rope else {})}


def with_usual_names(hf: dict[str, Any], others: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """``hf`` with the usual names of what it holds under ``others``."""
    found = dict(hf)
    for name, spellings in others.items():
        value = next((hf[each] for each in spellings if hf.get(each) is not None), None)
        if found.get(name) is None and value is not None:
            found[name] = value
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ConfigError that names it where it holds another."""
    return read_json_as(path, dict)


def read_json_as(path: Path, kind: type[T]) -> T:
    """``read_json`` for a file that may hold something else than an object."""
    there = is_file(path)
    try:
        if not there and path.exists():
            raise ConfigError(f"{path} is no plain file; put the model's own in its place.")
        data = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file stands where a folder might
        return kind()
    except PermissionError as error:
        raise unreadable(path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(data, kind):
        wanted = "object" if kind is dict else kind.__name__
        raise ConfigError(f"{path} holds {type(data).__name__} where a JSON {wanted} is needed; download it again.")
    return data


def _eos(path: str, config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(v) is int for v in values):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}.")
    return values


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """Rope settings in one form: transformers 5 writes ``rope_parameters``, older files ``rope_scaling``."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = hf.get("rope_theta", 10000.0)
    return rope


def _max_len(path: str, hf: dict[str, Any], asked: int | None) -> int:
    if asked == AUTO_LENGTH:
        asked = None
    if asked is not None and asked < 2:
        raise ConfigError(f"max_model_len must be at least 2 (a token in and a token out), got {asked}.")
    lengths = [v for key in _LENGTH_KEYS if type(v := hf.get(key)) is int and v > 0]
    if not lengths:
        log.warning("%s/config.json names no maximum length; using %d", path, asked or _DEFAULT_LENGTH)
        return asked or _DEFAULT_LENGTH
    derived = _scaled(path, hf, min(lengths))
    if asked is None:
        return derived
    longer = hf.get("model_max_length")  # Command-R's, beside a shorter length that is its default
    if type(longer) is int and asked <= longer:
        return asked
    if asked > derived and os.environ.get("QUIRE_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise ConfigError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len ({derived}) of "
            f"{path}/config.json; lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model can go further."
        )
    return asked


def _scaled(path: str, hf: dict[str, Any], length: int) -> int:
    """``length`` stretched by the rope scaling; Gemma 3 and the types not named here count it in already."""
    rope = rope_parameters(hf)
    scalings = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # Gemma 3 has one a layer type
    for each in scalings if "gemma3" not in str(hf.get("model_type")) else []:
        kind = each.get("rope_type", each.get("type"))
        if kind not in ("linear", "dynamic", "yarn"):
            continue
        factor, original = each.get("factor") or 1.0, each.get("original_max_position_embeddings")
        original = (original if kind == "yarn" else None) or length
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in (factor, original)):
            raise ConfigError(
                f"{path}/config.json: rope scaling {kind!r} needs a factor above 0 and lengths that are numbers, got "
                f"{factor!r} and {original!r}."
            )
        return int(original * factor)
    return length
