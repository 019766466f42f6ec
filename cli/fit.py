"""``quire fit MODEL``: how much memory a model needs and what it could do there, of its config.json alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from ..gpu_worker.memory import GIB, available_memory
from ..gpu_worker.spec import Shard
from ..proto.checkpoint.model_config import ModelConfig, config_of, demo_model_path, resolve_model
from ..proto.config import ConfigError, EngineArgs, add_flags, from_namespace
from .cards import Sheet, sheet_of
from .roofline import MOST_DEVICES, Load, Plan, plan
from .sizes import ITEMSIZE, Format, Sizes, formats_of, sizes_of

_FLAGS = (
    "max_model_len", "tensor_parallel_size", "kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "hf_overrides", "revision", "download_dir", "hf_token",
)  # fmt: skip
_NO_FIT = 1


def add_parser(subparsers: Any) -> None:
    """The command's flags: those of `quire serve` that memory depends on, and which device."""
    parser = subparsers.add_parser("fit")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; the demo model without")
    add_flags(parser, skip=tuple(f.name for f in dataclasses.fields(EngineArgs) if f.name not in _FLAGS))
    parser.add_argument("--gpu", default="H100", metavar="NAME",
                        help="such as H100 or RTX-4090, or cpu for this machine's memory (default: H100)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=fit, tensor_parallel_size=None)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is known of a model on a device. ``plans`` are by format; None: it does not fit any number of devices."""

    config: ModelConfig
    sizes: Sizes
    sheet: Sheet | None
    memory: int
    load: Load
    limit: int  # tokens that the model itself allows
    plans: dict[Format, Plan | None]

    @property
    def fits(self) -> bool:
        """Whether a request of the length asked for fits in some format."""
        return any(each is not None and each.holds(self.load.length) for each in self.plans.values())


def fit(args: argparse.Namespace) -> int:
    """Print the answer; 1 where nothing fits. Raises ConfigError."""
    devices = args.tensor_parallel_size
    args.tensor_parallel_size = 1 if devices is None else devices
    engine = from_namespace(args)
    sheet = None if args.gpu.lower() == "cpu" else sheet_of(args.gpu)
    found = answer(engine, config_file(engine), sheet, devices)
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 0 if found.fits else _NO_FIT


def config_file(args: EngineArgs) -> str:
    """The folder of the model's config.json; of a hub's model nothing else is fetched. Raises ConfigError."""
    model = args.model or demo_model_path()
    local = os.path.exists(model) or os.path.isabs(model) or model.count("/") != 1 or model.endswith(".gguf")
    if local or os.environ.get("QUIRE_USE_MODELSCOPE"):
        return resolve_model(args.model, args.revision, args.download_dir, weights=False)
    if args.hf_token:
        os.environ["HF_TOKEN"] = args.hf_token
    from huggingface_hub import hf_hub_download

    try:
        return os.path.dirname(
            hf_hub_download(model, "config.json", revision=args.revision, cache_dir=args.download_dir)
        )
    except Exception as error:  # the hub's client raises many kinds; each ends as one line for the user
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"config.json of {model!r} is neither in a local folder nor to be had from the hub: {first}"
        ) from error


def answer(args: EngineArgs, folder: str, sheet: Sheet | None, devices: int | None = None) -> Answer:
    """What fits of the model in ``folder``. ``sheet``: None is this machine's memory. ``devices``: None finds the
    smallest number for each format. Raises ConfigError."""
    config = config_of(args, folder)
    whole = sizes_of(config)
    cache = args.kv_cache_dtype
    load = Load(
        config.max_model_len, args.max_num_seqs, args.token_budget(cpu=sheet is None), args.block_size,
        args.gpu_memory_utilization, ITEMSIZE.get(cache), cache.startswith("int8"),
    )  # fmt: skip
    if load.int8:
        if sheet is not None:
            raise ConfigError(f"kv_cache_dtype={cache} is for CPUs, and the device is a {sheet.name}; use fp8.")
        load = dataclasses.replace(load, cache=1)
    memory = available_memory() if sheet is None else sheet.memory
    plans = {fmt: _smallest(config, whole, fmt, memory, load, sheet, devices) for fmt in formats_of(config)}
    limit = max(load.length, config_of(dataclasses.replace(args, max_model_len=None), folder).max_model_len)
    return Answer(config, whole, sheet, memory, load, limit, plans)


def _smallest(
    config: ModelConfig, whole: Sizes, fmt: Format, memory: int, load: Load, sheet: Sheet | None, devices: int | None
) -> Plan | None:
    """On the fewest devices that hold a request of the length asked for; on ``devices`` where that is given."""
    one = sheet is None or whole.about  # transformers' models know no tensor parallelism
    if whole.about and devices and devices > 1:
        raise ConfigError(
            f"{config.path}: transformers' model of {config.architecture} runs in one process; leave out "
            "--tensor-parallel-size."
        )
    counts = [devices] if devices else [1] if one else [2**n for n in range(MOST_DEVICES.bit_length())]
    for count in counts:
        if whole.spec.heads % count:
            if devices:
                raise ConfigError(
                    f"{whole.spec.heads} attention heads cannot be shared out among tensor_parallel_size {count}; "
                    "use a divisor of them."
                )
            break
        part = whole if count == 1 else sizes_of(config, Shard(count - 1, count))
        found = plan(part, fmt, count, memory, load, sheet)
        if devices or found.holds(load.length):
            return found
    return None


# ---------------------------------------------------------------- what is printed


def as_json(found: Answer) -> dict[str, Any]:
    """Bytes, tokens and tokens a second; ``formats`` are in the order of the table."""
    sizes, item = found.sizes, found.load.cache or 2
    return {
        "model": found.config.path,
        "architecture": found.config.architecture,
        "exact": not sizes.about,
        "parameters": sizes.parameters,
        "active_parameters": sizes.active,
        "kv_bytes_per_token": sizes.token_bytes(item, found.load.int8),
        "max_model_len": found.load.length,
        "gpu": found.sheet.name if found.sheet else "cpu",
        "memory_bytes": found.memory,
        "fits": found.fits,
        "formats": [
            {
                "format": fmt.name,
                "how": fmt.how,
                "weights_bytes": sizes.weight_bytes(fmt),
                "fits": each is not None and each.holds(found.load.length),
                "smallest": None if each is None else dataclasses.asdict(each),
            }
            for fmt, each in found.plans.items()
        ],
    }


def as_text(found: Answer) -> str:
    """A few lines about the model, and a table of its formats."""
    sizes, load = found.sizes, found.load
    active = f", {_billions(sizes.active)} of them active for a token" if sizes.active < sizes.parameters else ""
    about = "about " if sizes.about else ""
    item = load.cache or 2
    kept = f"{sizes.token_bytes(item, load.int8) / 1024:.1f} KiB ({'--kv-cache-dtype' if load.cache else '16 bits'})"
    lines = [
        f"{found.config.path} ({found.config.architecture})",
        f"  parameters         {about}{_billions(sizes.parameters)}{active}",
        f"  KV cache           {kept} a token",
        f"  max_model_len      {load.length} tokens: {_size(load.length * sizes.token_bytes(item, load.int8))}",
        f"  device             {found.sheet.name if found.sheet else 'cpu'}, {found.memory / GIB:.1f} GiB, of which "
        f"{load.utilization:g} is used",
    ]
    if sizes.about:
        lines.append("  transformers runs this architecture, so sizes are estimates and it cannot be shared out")
    lines += ["", _row(*_HEAD), *(_line(found, fmt, each) for fmt, each in found.plans.items()), ""]
    lines.append(_closing(found))
    return "\n".join(lines)


_HEAD = ("format", "weights", "devices", "context", "rows", "1 row", "full", "prefill", "how")


def _row(*cells: str) -> str:
    widths = (11, 11, 8, 10, 8, 10, 10, 11)
    return "  " + "".join(f"{cell + ' ':<{w}}" for cell, w in zip(cells, widths, strict=False)) + cells[-1]


def _line(found: Answer, fmt: Format, each: Plan | None) -> str:
    weights = _size(found.sizes.weight_bytes(fmt))
    if each is None or not each.holds(found.load.length):
        longest = 0 if each is None else each.longest
        why = f"{longest} tokens fit" if longest else "does not fit"
        return _row(fmt.name, weights, str(each.devices) if each else "-", why, "", "", "", "", fmt.how)
    speeds = [f"{speed:,.0f}" if speed else "-" for speed in (each.decode_one, each.decode_full, each.prefill)]
    longest = min(each.longest, found.limit)
    return _row(fmt.name, weights, str(each.devices), str(longest), str(each.rows), *speeds, fmt.how)


def _closing(found: Answer) -> str:
    """What the columns mean, or what to do where nothing fits."""
    if not found.fits:
        return f"  Nothing fits {found.load.length} tokens: {_remedy(found)}."
    return (
        "  devices: the smallest --tensor-parallel-size. rows: requests of max_model_len tokens at once. 1 row, full, "
        "prefill:\n  tokens/s at best (the roofline, half-filled contexts), of all devices; real ones are lower."
        if found.sheet
        else "  rows: requests of max_model_len tokens at once."
    )


def _remedy(found: Answer) -> str:
    """What to do where nothing fits. A model that cannot be shared out is not told to be."""
    memory = "a larger --gpu" if found.sheet else "more memory"
    if found.sheet is None or found.sizes.about:
        if min(map(found.sizes.weight_bytes, found.plans)) > found.load.utilization * found.memory:
            return f"the weights alone are larger; use {memory}, or a checkpoint of fewer bits"
        return f"lower --max-model-len, use --kv-cache-dtype fp8, or {memory}"
    return f"lower --max-model-len, use --kv-cache-dtype fp8, {memory}, or a larger --tensor-parallel-size"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"
