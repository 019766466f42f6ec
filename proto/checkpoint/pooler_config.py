"""Whether a model is served for generation or for pooling, and how it pools: PoolerConfig.

Three places say so: the flags (``--runner``, ``--convert``, ``--pooler-config``), the files of sentence-transformers
in the model's folder (modules.json and what it names, read without that package), and config.json's architecture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ..config import ConfigError, EngineArgs
from ..params import ParamError
from ..pooling import POOLINGS, PoolingParams
from .classifier_tokens import head_rows
from .model_config import AUTO_LENGTH, ModelConfig, read_json, read_json_as

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert")
"""Families whose tokens see those after them too: a prompt is run whole, in one step."""

_LATE = ("HF_ColBERT", "ColBERTModel")  # late interaction over BERT
_GENERATORS = ("ChatGLMModel", "AquilaModel")  # which end like bare models, and are not
_BARE, _CLASSIFIER, _MASKED = "Model", "ForSequenceClassification", "ForMaskedLM"
_FILE_MODES = {
    "cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST", "cls": "CLS", "mean": "MEAN",
}  # fmt: skip
_SETTINGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""``sentence_<one of these>_config.json`` is what sentence-transformers has called one and the same file."""
_OVERRIDES = {
    "task": str, "pooling_type": str, "seq_pooling_type": str, "tok_pooling_type": str,
    "normalize": bool, "dimensions": int, "use_activation": bool,
    "enable_chunked_processing": bool, "max_embed_len": int,
}  # fmt: skip


@dataclass(frozen=True)
class PoolerConfig:
    """How a model pools. ``size`` is the length of its embeddings, ``labels`` the names of its classes.

    ``activation`` is what makes probabilities of a classifier's logits: softmax, sigmoid, or identity (none).
    ``whole``: prompts are never split over steps nor found in a prefix cache, as every token sees all others.
    ``lower``: text is lower-cased before it is tokenized. ``sizes``: the ``dimensions`` that may be asked for; all up
    to ``size`` where it is empty. ``enable_chunked_processing``: over HTTP, a prompt that is too long is embedded in
    chunks, up to ``max_embed_len`` tokens of it. ``head_rows``: of which of the generator's rows a classifier's head is
    made, see ``classifier_tokens``. ``late_interaction``: a linear head makes an embedding of each token, and a score
    is the sum over the query's tokens of the likeness to the document's token that is most alike (ColBERT's MaxSim).
    """

    architecture: str
    convert: str  # embed | classify
    pooling: str
    normalize: bool
    use_activation: bool
    activation: str
    size: int
    labels: tuple[str, ...] = ()
    dimensions: int | None = None
    sizes: tuple[int, ...] = ()
    whole: bool = False
    lower: bool = False
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    head_rows: tuple[tuple[int, ...], ...] = ()
    late_interaction: bool = False
    task: str | None = None  # the only one that the operator lets it do

    @property
    def tasks(self) -> tuple[str, ...]:
        """What may be asked of it."""
        return self._able if self.task is None else (self.task,)

    @property
    def _able(self) -> tuple[str, ...]:
        """What it can do. A score is the one logit of a cross-encoder."""
        if self.late_interaction:
            return ("token_embed",)
        if self.convert == "embed":
            return ("embed", "token_embed")
        return ("classify", "token_classify", *(("score",) if len(self.labels) == 1 else ()))

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """``params`` with nothing left to the model. Raises ParamError where the model cannot do it."""
        if params.task is None:
            params = msgspec.structs.replace(params, task=self.tasks[0])
        if params.task not in self.tasks:
            why, other = "", f"serve a model that ends in {_CLASSIFIER}"
            if params.task == "score" and self.convert == "classify":
                why = f" (a score needs one label, and it has {len(self.labels)})"
            elif params.embeds:
                other = "serve a model of embeddings" if self.whole else "start a server with --convert embed"
            raise ParamError(
                f"task {params.task!r} is not what {self.architecture} can do here{why}; ask for one of "
                f"{list(self.tasks)}, or {other}.",
                "task",
            )
        pooling = "ALL" if params.per_token else params.pooling or self.pooling
        if pooling == "ALL" and not params.per_token:
            raise ParamError(
                f"this server pools ALL, which gives a row for each token; ask for task 'token_{params.task}', or name "
                "a pooling.",
                "pooling",
            )
        if not params.embeds:
            activates = self.use_activation if params.use_activation is None else params.use_activation
            return msgspec.structs.replace(params, pooling=pooling, use_activation=activates)
        dimensions = self.dimensions if params.dimensions is None else params.dimensions
        if dimensions is not None and (dimensions > self.size or (self.sizes and dimensions not in self.sizes)):
            limit = f"one of {list(self.sizes)}" if self.sizes else f"at most {self.size}, the model's own"
            raise ParamError(f"dimensions must be {limit}, got {dimensions}.", "dimensions")
        normal = self.normalize if params.normalize is None else params.normalize
        return msgspec.structs.replace(params, pooling=pooling, normalize=normal, dimensions=dimensions)


def pooler_of(config: ModelConfig, args: EngineArgs) -> PoolerConfig | None:
    """How ``config``'s model is to be pooled; None where it is served for generation.

    Lowers ``config.max_model_len`` to what sentence-transformers' files say, unless the flag was given, and to what
    the table of positions holds. Raises ConfigError.
    """
    architecture = config.architecture
    family, convert = family_of(architecture)
    files = _SentenceFiles(Path(config.path))
    pooling = files.there or convert != ""
    if args.runner == "generate" or (args.runner == "auto" and not pooling and args.convert in ("auto", "none")):
        if family in ENCODERS:
            raise ConfigError(f"{architecture} cannot generate; start with --runner pooling, or leave --runner out.")
        if args.convert in ("embed", "classify"):
            raise ConfigError(f"--convert {args.convert} is for --runner pooling; leave one of the two out.")
        return None
    if args.convert == "none" and convert == "":
        raise ConfigError(f"{architecture} generates, and --convert none keeps it so; use --convert embed or classify.")
    convert = args.convert if args.convert in ("embed", "classify") else convert or "embed"
    if family in ENCODERS and (convert == "classify") != architecture.endswith(_CLASSIFIER):
        raise ConfigError(f"--convert {convert} cannot be done with {architecture}; leave --convert out.")
    if files.dense and architecture not in _LATE:
        raise ConfigError(f"{config.path}/modules.json has a Dense module for each token (PyLate), which is not "
                          "supported; use a ColBERT checkpoint whose head is linear.weight.")  # fmt: skip
    rows = head_rows(config, args) if convert == "classify" else ()
    if rows and family in ENCODERS:
        raise ConfigError(f"{architecture} has no lm_head of which classifier_from_token could make a head; "
                          "leave it out.")  # fmt: skip
    pooler = _by_model(config, family, convert, files, rows)
    _limit_length(config, args, family, files)
    return _overridden(pooler, args.pooler_config) if args.pooler_config else pooler


def family_of(architecture: str) -> tuple[str, str]:
    """An architecture's family, and what it pools to: "classify", "embed", or "" for one that generates."""
    if architecture in _LATE:
        return "Bert", "embed"
    if architecture.endswith(_CLASSIFIER):
        return architecture.removesuffix(_CLASSIFIER), "classify"
    family = architecture.removesuffix(_MASKED)
    if family in ENCODERS:
        return family, "embed"
    if architecture.endswith(_BARE) and not architecture.endswith("LMHeadModel") and architecture not in _GENERATORS:
        return architecture.removesuffix(_BARE), "embed"
    return family, ""


def _by_model(
    config: ModelConfig, family: str, convert: str, files: _SentenceFiles, rows: tuple[tuple[int, ...], ...]
) -> PoolerConfig:
    hf, encoder = config.hf, family in ENCODERS
    size = hf.get("hidden_size") or hf.get("dim") or hf.get("n_embd") or hf.get("d_model")
    if not isinstance(size, int):
        raise ConfigError(f"{config.path}/config.json has no usable hidden_size (got {size!r}).")
    if late := config.architecture in _LATE:
        size = _late_size(config)
    labels = _labels(hf, len(rows)) if convert == "classify" else ()
    sizes = hf.get("matryoshka_dimensions")
    return PoolerConfig(
        architecture=config.architecture,
        convert=convert,
        pooling=(files.pooling if convert == "embed" else None) or ("CLS" if encoder else "LAST"),
        normalize=files.normalize if files.there else True,
        use_activation=True,
        activation=_activation(config, len(labels)),
        size=size,
        labels=labels,
        sizes=tuple(sizes) if isinstance(sizes, list) else (),
        whole=encoder,
        lower=files.lower,
        head_rows=rows,
        late_interaction=late,
    )


def _late_size(config: ModelConfig) -> int:
    """The length of a token's embedding, by config.json, or by what ColBERT's own library writes beside it."""
    if (kind := config.hf.get("model_type", "bert")) != "bert":
        raise ConfigError(f"{config.architecture} is supported over BERT, and {config.path}/config.json says {kind!r}.")
    beside = read_json(Path(config.path) / "artifact.metadata")
    names = ("colbert_dim", "dim", "projection_dim")
    size = next((config.hf[name] for name in names if name in config.hf), beside.get("dim"))
    if type(size) is not int or size < 1:
        raise ConfigError(f"{config.path}/config.json has no usable colbert_dim (got {size!r}), the rows of "
                          "linear.weight; name it, as in --hf-overrides '{\"colbert_dim\": 128}'.")  # fmt: skip
    return size


def _labels(hf: dict[str, Any], rows: int) -> tuple[str, ...]:
    """The classes' names in the order of their logits; config.json counts two where it names none. ``rows``: how many
    the head has that is made, 0 for one of the checkpoint's own."""
    names = hf.get("id2label")
    if isinstance(names, dict) and rows not in (0, len(names)):
        names = None
    if isinstance(names, dict) and names and all(str(key).isdigit() for key in names):
        return tuple(str(names[key]) for key in sorted(names, key=int))
    count = rows or hf.get("num_labels")
    return tuple(f"LABEL_{i}" for i in range(count if isinstance(count, int) and count > 0 else 2))


def _activation(config: ModelConfig, labels: int) -> str:
    """By the problem that config.json names: sigmoid for a label alone and for several that are independent, softmax
    for one of several, none for a regression. Cross-encoders may name another, as a class of ``torch.nn``."""
    hf = config.hf
    inner = hf.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = named or hf.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        kind = named.rsplit(".", 1)[-1].lower()
        if kind not in ("identity", "sigmoid", "softmax"):
            raise ConfigError(
                f"{config.path}/config.json asks for the activation {named!r}; known are torch.nn's Identity, Sigmoid "
                "and Softmax."
            )
        return kind
    kinds = {"regression": "identity", "multi_label_classification": "sigmoid"}
    return kinds.get(str(hf.get("problem_type")), "sigmoid" if labels == 1 else "softmax")


def _limit_length(config: ModelConfig, args: EngineArgs, family: str, files: _SentenceFiles) -> None:
    asked = args.max_model_len not in (None, AUTO_LENGTH)
    if not asked and files.max_length is not None:
        config.max_model_len = min(config.max_model_len, files.max_length)
    if family not in ENCODERS:
        return
    table = config.hf.get("max_position_embeddings")
    fits = table - position_offset(config.hf, family) if isinstance(table, int) else config.max_model_len
    if asked and config.max_model_len > fits:
        raise ConfigError(f"max_model_len={args.max_model_len} is more than the {fits} positions of {config.path}; "
                          "lower it, or leave it out.")  # fmt: skip
    config.max_model_len = min(config.max_model_len, fits)


def position_offset(hf: dict[str, Any], family: str) -> int:
    """Rows at the beginning of the table of positions that are no token's: RoBERTa counts from behind its padding."""
    return 0 if family in ("Bert", "DistilBert") else int(hf.get("pad_token_id") or 0) + 1


def _overridden(pooler: PoolerConfig, text: str) -> PoolerConfig:
    """``--pooler-config``: a JSON object of what is to differ."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--pooler-config {text!r} is not JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--pooler-config must be a JSON object, got {text!r}.")
    for name, value in given.items():
        kind = _OVERRIDES.get(name)
        if kind is None:
            raise ConfigError(f"--pooler-config has no {name!r}; its keys are {sorted(_OVERRIDES)}.")
        if type(value) is not kind:
            raise ConfigError(f"--pooler-config: {name} must be of type {kind.__name__}, got {value!r}.")
    if (task := given.get("task")) is not None and task not in pooler.tasks:
        raise ConfigError(f"--pooler-config: task must be one of {list(pooler.tasks)}, which {pooler.architecture} can "
                          f"do here, got {task!r}.")  # fmt: skip
    _name_pooling(given)
    if not 1 <= given.get("dimensions", 1) <= pooler.size:
        raise ConfigError(f"--pooler-config: dimensions must be in 1 to {pooler.size}, got {given['dimensions']}.")
    if given.get("max_embed_len", 1) < 1:
        raise ConfigError(f"--pooler-config: max_embed_len must be at least 1, got {given['max_embed_len']}.")
    return replace(pooler, **given)


def _name_pooling(given: dict[str, Any]) -> None:
    """One field for the three names that vLLM has had for the way of pooling. Raises ConfigError."""
    allowed = {
        "pooling_type": POOLINGS, "seq_pooling_type": tuple(each for each in POOLINGS if each != "ALL"),
        "tok_pooling_type": ("ALL",),  # vectors of tokens are all told, so it changes nothing
    }  # fmt: skip
    if "pooling_type" in given and "seq_pooling_type" in given:
        raise ConfigError("--pooler-config: pooling_type and seq_pooling_type say the same; leave one of them out.")
    for name, kinds in allowed.items():
        if (pooling := given.pop(name, None)) is None:
            continue
        if pooling.upper() not in kinds:
            raise ConfigError(f"--pooler-config: {name} must be one of {list(kinds)}, got {pooling!r}.")
        if name != "tok_pooling_type":
            given["pooling"] = pooling.upper()


class _SentenceFiles:
    """What sentence-transformers keeps in a model's folder. ``there``: it does."""

    def __init__(self, folder: Path):
        self.pooling: str | None = None
        self.normalize = self.lower = self.dense = False
        self.max_length: int | None = None
        modules = read_json_as(folder / "modules.json", list)
        self.there = bool(modules) and any(_kind(module) == "Pooling" for module in modules)
        if not self.there:
            self.dense = any(_kind(module) == "Dense" for module in modules or ())
            return
        for module in modules:
            kind = _kind(module)
            if kind == "Pooling":
                place = Path(str(module.get("path", "")))
                if place.is_absolute() or ".." in place.parts:
                    raise ConfigError(f"{folder / 'modules.json'} names {str(place)!r}, which is outside its folder.")
                file = folder / place / "config.json"
                self.pooling = _file_pooling(file, read_json(file))
            elif kind == "Normalize":
                self.normalize = True
            elif kind != "Transformer":
                raise ConfigError(f"{folder / 'modules.json'} has the module {module.get('type')!r}, which is not "
                                  "supported; Transformer, Pooling and Normalize are.")  # fmt: skip
        found = (read_json(folder / f"sentence_{kind}_config.json") for kind in _SETTINGS)
        settings = next(filter(None, found), {})
        self.lower = settings.get("do_lower_case") is True
        longest = settings.get("max_seq_length")
        self.max_length = longest if type(longest) is int and longest > 0 else None


def _kind(module: Any) -> str:
    return str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else ""


def _file_pooling(file: Path, settings: dict[str, Any]) -> str:
    """The pooling of a ``1_Pooling/config.json``, in its older spelling (a flag for each) or the newer."""
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in settings.items() if name.startswith(prefix) and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _FILE_MODES:
        raise ConfigError(f"{file} pools by {modes or 'nothing'}; supported is one of {sorted(_FILE_MODES)}.")
    return _FILE_MODES[modes[0]]
