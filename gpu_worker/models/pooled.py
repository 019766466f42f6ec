"""The spec and weight names of a model that is served for pooling: an encoder, or a decoder with another head or none.

A decoder's checkpoint may be of the bare model ("Qwen3Model", its names without a prefix), of a classifier
("LlamaForSequenceClassification", whose head is ``score``), or of the generator, whose head is then not read, or of
which the classifier's is made.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ...proto.checkpoint.pooler_config import PoolerConfig
from ...proto.config import ConfigError
from ..spec import DecoderSpec, WeightNames
from .encoder import find_encoder
from .families import FAMILIES, find_family
from .families.common import Config

_HEAD = "score"


def find_pooled(hf: Config, pooler: PoolerConfig) -> tuple[DecoderSpec, WeightNames]:
    """As ``find_family``, for ``pooler``. Raises ConfigError."""
    labels = len(pooler.labels)
    if pooler.whole:
        return find_encoder(hf, labels, pooler.size if pooler.late_interaction else 0)
    for key, plain in (("use_bidirectional_attention", False), ("is_causal", True)):
        if hf.get(key) not in (None, plain):
            raise ConfigError(
                f"config.json: {key} {hf[key]!r} is not supported for {pooler.architecture}: its tokens see only "
                "those before them here."
            )
    spec, names = find_family({**hf, "architectures": [_generator(pooler.architecture)]})
    head_of = (names.embed if spec.tied else names.lm_head) if pooler.head_rows else ""
    spec = replace(
        spec, architecture=pooler.architecture, outputs=labels, tied=False, lm_head_bias=False, logit_scale=1.0,
        logit_softcap=0.0,
    )  # fmt: skip
    prefix = names.prefix or (names.embed.partition(".")[0] + ".")
    heads = rf"({re.escape(names.lm_head)}|{_HEAD})\.(weight|bias)"  # a classifier's own has its place all the same
    return spec, replace(names, lm_head=_HEAD, prefix=prefix, skip=(*names.skip, heads), head_of=head_of)


def _generator(architecture: str) -> str:
    """The architecture in the table whose layers this one has."""
    base = architecture.removesuffix("ForSequenceClassification").removesuffix("Model")
    for name in (architecture, base + "ForCausalLM", base + "LMHeadModel", base.removesuffix("Text") + "ForCausalLM"):
        if name in FAMILIES:
            return name
    raise ConfigError(
        f"architecture {architecture!r} in config.json is not supported for pooling; supported are encoders (BERT, "
        f"RoBERTa, XLM-RoBERTa, DistilBERT) and the models, bare, classifying or generating, of {sorted(FAMILIES)}."
    )
