"""Every family, one row a variant: the real scheduler and runner give what the family's reference gives.

A row is (prefix, values): transformers' class, and what differs from ``tiny_models.BASE``; or (make, values), where
``make(folder, seed, **values)`` writes the folder; and where transformers has no such class a third entry,
``reference(folder)``: a callable that gives ``.logits`` [B, T, vocab] of ids [B, T].
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from family_rig import FamilyRig

from quire.gpu_worker.models.families import FAMILIES
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

MODULES = ("tiny_models", "tiny_gpt", "tiny_modern", "tiny_moe", "tiny_remote")
ROWS: dict[str, Any] = {}
for module in MODULES:
    if importlib.util.find_spec(module):
        ROWS |= importlib.import_module(module).ROWS

NEW = 48
# Where the usual seed's weights bring two best tokens within 7e-5 of each other: a processor that adds in another order
# might take the other.
SEEDS: dict[str, int] = {
    "qwen3": 4, "gpt-neox-sequential": 5, "mpt-clipped": 5, "mpt-old": 4, "opt-350m": 8, "starcoder2-no-bias": 5,
    "glm-no-bias": 5, "cohere2": 4, "qwen2-moe": 4,
}  # fmt: skip
NEAR = 2e-5


def sixteen_prompts() -> list[list[int]]:
    """Of mixed lengths, several with a long beginning in common."""
    prompts = tiny_models.random_prompts(11, seed=7, longest=90)
    shared = prompts[0] + prompts[1] + prompts[2]
    return [*prompts, *(shared[:length] + prompts[-1][:3] for length in (33, 40, 47, 70)), shared[:64]]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_family_equals_its_reference(row: str, tmp_path: Path) -> None:
    """48 greedy tokens of 16 prompts at once, and the logits of whole sequences, chunked and with cached prefixes."""
    torch.set_num_threads(1)
    kind, values, *own = ROWS[row]
    seed = SEEDS.get(row, 3)
    folder = tiny_models.write(kind, tmp_path, seed, values)
    prompts = sixteen_prompts()
    rig = FamilyRig(folder)
    outputs = rig.greedy(prompts, NEW)
    assert rig.worker.chunks > 0 and rig.hits > 0
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    logits = rig.prompt_logits(whole[::4])

    reference = own[0](folder) if own else tiny_models.reference(folder)
    # Causal models do not see what is behind a token: one pass gives what decoding token by token would.
    ids = torch.tensor([tokens + [0] * (max(map(len, whole)) - len(tokens)) for tokens in whole])
    with torch.inference_mode():
        wanted = reference(ids).logits
    for prompt, output, want in zip(prompts, outputs, wanted, strict=True):
        want = want[len(prompt) - 1 :][:NEW]
        assert len(output) == NEW
        assert output == want.argmax(-1).tolist()
        best = want.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > NEAR, "two best tokens are nearly equal: give the row another seed"
    for got, want in zip(logits, wanted[::4], strict=True):
        assert want.std() > 0.1
        torch.testing.assert_close(got, want[: len(got)], atol=1e-4, rtol=0)


def test_rows_of_baichuan2s_head_have_length_one(tmp_path: Path) -> None:
    from tiny_remote import drawn

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (125696, 8), "lm_head.weight": (125696, 8), "model.norm.weight": (8,),
    }  # fmt: skip
    layer = {"self_attn.W_pack": (24, 8), "self_attn.o_proj": (8, 8), "mlp.gate_proj": (8, 8), "mlp.up_proj": (8, 8),
             "mlp.down_proj": (8, 8), "input_layernorm": (8,), "post_attention_layernorm": (8,)}  # fmt: skip
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    folder = drawn(tmp_path, 1, shapes, {
        "architectures": ["BaichuanForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 125696, "model_max_length": 64,
    })  # fmt: skip
    model = load_model(load_model_config(str(folder)), torch.float32, torch.device("cpu"))
    head = model.logits(torch.eye(8))  # columns are the head's rows
    torch.testing.assert_close(head.norm(dim=0), torch.ones(125696))


def test_the_page_of_models_lists_every_architecture_and_no_other() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    listed = set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|Model))`", page))
    assert listed == set(FAMILIES)


def test_the_page_of_models_names_every_row_and_no_other() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    cells = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ") and line.count("|") == 4]
    named = [name for cell in cells for name in re.findall(r"`([\w*-]+)`", cell)]
    assert [name for name in named if not fnmatch.filter(ROWS, name)] == []
    assert [row for row in ROWS if not any(fnmatch.fnmatch(row, name) for name in named)] == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention True"),
    ("GPTJForCausalLM", {"rotary_dim": 64}, "64 dims of each head would turn"),
    ("GPTNeoXForCausalLM", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("FalconForCausalLM", {"rope_scaling": {"type": "bent"}}, "bent"),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 3}, "multiple of num_key_value_heads 3"),
    ("MPTForCausalLM", {"attn_config": {"prefix_lm": True}}, "prefix_lm True"),
    ("MPTForCausalLM", {"attn_config": {"rope": True}}, "rope True"),
    ("MptForCausalLM", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
    ("MptForCausalLM", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type 'mptglu'"),
    ("MptForCausalLM", {"logit_scale": "sqrt"}, "logit_scale must be a positive number, got 'sqrt'"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 0}, "word_embed_proj_dim must be a positive integer, got 0"),
    ("StableLmForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "3 dims of each head would turn"),
    ("CohereForCausalLM", {"logit_scale": 0}, "logit_scale must be a positive number"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
     "rope type 'yarn' cannot be computed from {'factor': 4.0, 'original_max_position_embeddings': 0}"),
    ("OLMoForCausalLM", {"scale_logits": True}, "scale_logits True"),
    ("InternLMForCausalLM", {"rotary": {"base": 5000, "type": "dynamic"}}, "base 5000"),
    ("JAISLMHeadModel", {"alibi_scaling": {"train_seq_len": 32}}, "alibi_scaling {'train_seq_len': 32}"),
    ("JAISLMHeadModel", {"alibi_scaling": {"type": "linear", "factor": 2.0}}, "alibi_scaling {'type': 'linear'"),
    ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": "8"}, "sliding_window must be a positive inte"),
    ("Gemma2ForCausalLM", {"head_dim": 16, "layer_types": ["chunked_attention"]}, "layer_types 'chunked_attention'"),
    ("Gemma2ForCausalLM", {"head_dim": 16, "attn_logit_softcapping": -3.0}, "attn_logit_softcapping must be a posit"),
    ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 3}, "each token goes to 3 experts of 2"),
    ("DeciLMForCausalLM", {"num_key_value_heads_per_layer": [3]}, "num_attention_heads is not a multiple of 3 key h"),
    ("LlamaForCausalLM", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    ("FalconForCausalLM", {"parallel_attn": 0}, "parallel_attn must be true or false, got 0"),
    ("MPTForCausalLM", {"attn_config": {"alibi": "no"}}, "alibi must be true or false, got 'no'"),
    ("LlamaForCausalLM", {"num_attention_heads": 10**30}, "num_attention_heads must be a positive integer"),
    ("LlamaForCausalLM", {"vocab_size": 2**40}, "vocab_size must be a positive integer of at most 2147483647, got 109"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "values", "said"), REFUSED)
def test_what_would_change_results_and_is_not_supported_is_refused(
    architecture: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "max_position_embeddings": 64, "intermediate_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "architectures": [architecture], **values}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_model(load_model_config(str(tmp_path)), torch.float32, torch.device("cpu"), "dummy")
