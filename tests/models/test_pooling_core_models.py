"""Models that pool against transformers' own: tiny, with random weights, in float32."""

import json

import numpy as np
import pytest
import torch
import transformers
from pooling_rig import ModelRig
from safetensors.torch import load_file, save_file

from quire.gpu_worker.warmup import worst_case
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import Pooled
from quire.proto.params import ParamError
from quire.proto.pooling import PoolingParams
from quire.proto.work import Pool

VOCAB, LENGTH = 120, 128
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": LENGTH}  # fmt: skip
DISTIL = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
          "max_position_embeddings": LENGTH}  # fmt: skip
PADDED = {**SIZES, "max_position_embeddings": LENGTH + 2, "pad_token_id": 1, "type_vocab_size": 1}
ENCODERS = {
    "Bert": SIZES,
    "Roberta": PADDED,
    "XLMRoberta": PADDED,
    "DistilBert": DISTIL,
}
DECODERS = {
    "Llama": {**SIZES, "num_key_value_heads": 2},
    "Qwen2": {**SIZES, "num_key_value_heads": 2},
    "Qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "OPT": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": SIZES,
    "Gemma3Text": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
}
LENGTHS = (1, 5, 5, 24, 23, 2)


def make(path, family, kind, **config):
    """A model folder of transformers' class ``family + kind``, and the model."""
    torch.manual_seed(3)
    settings = {**ENCODERS, **DECODERS}[family] | config
    made = getattr(transformers, f"{family}Config")(**settings)
    name = family.removesuffix("Text") if kind == "ForCausalLM" else family
    model = getattr(transformers, name + kind)(made).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.02 if weight.dim() == 1 else 0.0, 0.2)  # as large as trained ones, biases not 0
    model.save_pretrained(path)
    return path, model


def prompts(lengths=LENGTHS):
    return [[(7 * n + 11 * i) % (VOCAB - 4) + 4 for i in range(n)] for n in lengths]


@torch.no_grad()
def states(model, prompt, type_start=-1):
    """transformers' last hidden states [tokens, size] of a prompt alone."""
    ids = torch.tensor([prompt])
    more = {}
    if type_start >= 0:
        more["token_type_ids"] = (torch.arange(len(prompt)) >= type_start).long()[None]
    return model(ids, **more).last_hidden_state[0].numpy()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def close(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == np.float32
        assert np.abs(mine - theirs).max() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(tmp_path, family):
    folder, model = make(tmp_path, family, "Model")
    rig, asked = ModelRig(folder), prompts()
    assert rig.max_model_len == LENGTH
    expected = [states(model, prompt) for prompt in asked]
    close(rig.vectors(asked), [unit(x[0]) for x in expected])
    close(rig.vectors(asked, pooling="MEAN", normalize=False), [x.mean(0) for x in expected])
    close(rig.vectors(asked, pooling="LAST", dimensions=8), [unit(x[-1, :8]) for x in expected])
    close(rig.vectors(asked, task="token_embed"), [unit(x) for x in expected])
    assert rig.stores[0].chunks == 0
    alone = [rig.vectors([prompt])[0] for prompt in asked]
    close(rig.vectors(asked), alone, 1e-6)


def test_token_types_of_a_pair(tmp_path):
    folder, model = make(tmp_path, "Bert", "Model")
    rig, asked, type_starts = ModelRig(folder), prompts((9, 4, 6)), [4, -1, 0]
    expected = [states(model, *each) for each in zip(asked, type_starts, strict=True)]
    close(rig.vectors(asked, type_starts=type_starts, task="token_embed", normalize=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_classifiers(tmp_path, family, labels):
    folder, model = make(tmp_path, family, "ForSequenceClassification", num_labels=labels)
    rig, asked = ModelRig(folder), prompts() if family in ENCODERS else prompts((1, 5, 60, 5, 33))
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in asked]
    close(rig.vectors(asked, use_activation=False), [each.numpy() for each in logits])
    expected = [each.sigmoid() if labels == 1 else each.softmax(-1) for each in logits]
    close(rig.vectors(asked), [each.numpy() for each in expected])
    if labels == 1:
        close(rig.vectors(asked, task="score"), [each.numpy() for each in expected])
    rows = rig.vectors(asked, task="token_classify", use_activation=False)
    at = 0 if family in ENCODERS else -1
    close([each[at] for each in rows], [each.numpy() for each in logits])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders(tmp_path, family, kind):
    """In chunks of at most 24 tokens, with and without what is in the prefix cache."""
    kind = "LMHeadModel" if (family, kind) == ("GPT2", "ForCausalLM") else kind
    folder, model = make(tmp_path, family, kind, tie_word_embeddings=family == "Qwen3")
    rig, asked = ModelRig(folder, args=EngineArgs(runner="pooling")), prompts((1, 5, 60, 5, 33, 100))
    expected = [states(model.base_model, prompt) for prompt in asked]
    last = [unit(x[-1]) for x in expected]
    close(rig.vectors(asked), last)
    assert rig.stores[0].chunks > 4
    before = set(rig.started)
    close(rig.vectors(asked), last)
    assert sum(rig.started[uid] for uid in rig.started.keys() - before) == 56 + 32 + 96
    close(rig.vectors(asked, pooling="MEAN"), [unit(x.mean(0)) for x in expected])
    close(rig.vectors(asked, pooling="CLS", normalize=False, dimensions=9), [x[0, :9] for x in expected])
    close(rig.vectors(asked, task="token_embed", normalize=False), expected)


def test_rows_that_change_hands_keep_nothing(tmp_path):
    folder, model = make(tmp_path, "Llama", "Model")
    rig = ModelRig(folder, args=EngineArgs(max_model_len=None))
    given_up = rig.pool(prompts((90,))[0], pooling="MEAN", task="embed", normalize=True)
    rig.step()
    rig.core.abort(given_up, 0)
    asked = prompts((70, 3))
    close(rig.vectors(asked, pooling="MEAN"), [unit(states(model, prompt).mean(0)) for prompt in asked])


def test_a_prompt_that_cannot_be_pooled_fails_alone(tmp_path):
    folder, _ = make(tmp_path, "Bert", "Model")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][9] = float("nan")
    save_file(weights, folder / "model.safetensors")
    rig = ModelRig(folder)
    asked = [[4, 5], [9, 4], [6]]
    for prompt in asked:
        rig.pool(prompt, pooling="CLS", task="embed", normalize=True)
    rig.run()
    assert sum(isinstance(message, Pooled) for message in rig.other) == 2
    failed = rig.failed()
    assert (failed.status, "not finite" in failed.message) == (500, True)


def test_old_names_and_prefixes(tmp_path):
    """BERT's first checkpoints say gamma and beta, and name what is under a head with a prefix."""
    folder, model = make(tmp_path, "Bert", "Model")
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
               for name, tensor in weights.items()}  # fmt: skip
    weights["cls.predictions.bias"] = torch.zeros(VOCAB)
    save_file(weights, folder / "model.safetensors")
    (prompt,) = prompts((7,))
    close(ModelRig(folder).vectors([prompt]), [unit(states(model, prompt)[0])])


def test_a_classifiers_states_can_be_embeddings(tmp_path):
    """With --convert embed its head is left in the file."""
    folder, model = make(tmp_path, "Llama", "ForSequenceClassification", num_labels=3)
    (prompt,) = prompts((7,))
    rig = ModelRig(folder, args=EngineArgs(model=str(folder), runner="pooling", convert="embed"))
    close(rig.vectors([prompt]), [unit(states(model.model, prompt)[-1])])


def test_a_generator_has_no_classes(tmp_path):
    folder, _ = make(tmp_path, "Llama", "ForCausalLM")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot classify; use a model that .* or --convert embed"):
        ModelRig(folder, args=EngineArgs(model=str(folder), runner="pooling", convert="classify"))


@pytest.mark.parametrize(
    ("family", "kind", "change", "message"),
    [
        ("Bert", "Model", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("Bert", "Model", {"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ("Bert", "Model", {"hidden_size": 64}, "has shape"),
        ("Bert", "Model", {"architectures": ["BertForSequenceClassification"]}, "the weights lack bert.pooler.dense"),
        ("Llama", "Model", {"architectures": ["LlamaForSequenceClassification"]}, "the weights lack score.weight"),
        ("Llama", "Model", {"architectures": ["MambaModel"]}, "'MambaModel' in config.json is not supported"),
        ("Llama", "Model", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, family, kind, change, message):
    folder, _ = make(tmp_path, family, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "pooler" not in name}, folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        ModelRig(folder)
    assert message in str(error.value)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
@pytest.mark.parametrize("labels", [0, 3])
def test_the_worst_case_that_a_gpu_is_measured_by(tmp_path, family, labels):
    kind, config = ("ForSequenceClassification", {"num_labels": labels}) if labels else ("Model", {})
    rig = ModelRig(make(tmp_path, family, kind, **config)[0])
    runner = rig.stores[0].runner
    every = PoolingParams(task=f"token_{rig.pooler.convert}", pooling="ALL")
    plan = worst_case(runner.state, runner.max_tokens, Pool(rig.pooler.resolve(every)))
    result = runner.launch(plan).result(plan.lease, plan.step)
    assert sum(len(found.data) for found in result.pooled) == 4 * 24 * (labels or 32)


def test_dummy_weights(tmp_path):
    folder, _ = make(tmp_path, "Roberta", "ForSequenceClassification")
    (folder / "model.safetensors").unlink()
    (found,) = ModelRig(folder, load_format="dummy").vectors(prompts((4,)))
    assert abs(found.sum() - 1) < 1e-6


YES, NO, MAYBE = 17, 90, 44
QWEN3_RERANKER = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}


def make_generator(path, family, words, **config):
    """A generator's folder with a vocabulary, whose config.json says to classify by ``words``; and the model."""
    folder, model = make(path, family, "ForCausalLM", **config)
    tokens = {"yes": YES, "no": NO, "maybe": MAYBE}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    changed = {"architectures": [f"{family}ForSequenceClassification"], **words}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changed))
    return folder, model


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_answers_by_yes_and_no(tmp_path, tied):
    """Its head is made of the generator's rows of both, as vLLM makes it of Qwen3-Reranker's checkpoint."""
    folder, model = make_generator(tmp_path, "Qwen3", QWEN3_RERANKER, tie_word_embeddings=tied)
    rig, asked = ModelRig(folder), prompts((1, 5, 60, 33))
    assert (rig.pooler.labels, rig.pooler.tasks) == (("LABEL_0",), ("classify", "token_classify", "score"))
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1, [NO, YES]] for prompt in asked]
    close(rig.vectors(asked, task="score"), [each.softmax(-1)[1:].numpy() for each in logits])
    close(rig.vectors(asked, use_activation=False), [(each[1:] - each[:1]).numpy() for each in logits], 1e-4)


def test_classes_of_several_tokens(tmp_path):
    words = {"classifier_from_token": ["maybe", "yes", "no"], "method": "no_post_processing"}
    folder, model = make_generator(tmp_path, "Llama", words)
    (prompt,) = prompts((9,))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1, [MAYBE, YES, NO]].softmax(-1)
    close(ModelRig(folder).vectors([prompt]), [expected.numpy()])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"is_original_qwen3_reranker": True}, "must be a list of tokens"),
        ({**QWEN3_RERANKER, "classifier_from_token": ["yes"]}, "takes two tokens"),
        ({**QWEN3_RERANKER, "classifier_from_token": ["no", "never"]}, "names 'never', which is no token of"),
        ({"classifier_from_token": ["yes"], "method": "mean"}, "method 'mean' of classifier_from_token is not known"),
        ({"tie_word_embeddings": False, **QWEN3_RERANKER}, "the weights lack lm_head.weight"),
        ({"architectures": ["BertForSequenceClassification"], **QWEN3_RERANKER}, "has no lm_head"),
    ],
)
def test_tokens_that_make_no_head_are_refused(tmp_path, words, message):
    folder, _ = make_generator(tmp_path, "Qwen3", words, tie_word_embeddings=True)
    with pytest.raises(ConfigError) as error:
        ModelRig(folder)
    assert message in str(error.value)


def make_colbert(path, **config):
    """A folder as ColBERT's library and its successors write it, the encoder, and the head [12, hidden]."""
    folder, model = make(path, "Bert", "Model")
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    head = weights["linear.weight"] = torch.randn(12, SIZES["hidden_size"])
    save_file(weights, folder / "model.safetensors")
    changed = {"architectures": ["HF_ColBERT"], **config}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changed))
    return folder, model, head


@pytest.mark.parametrize("where", ["dim", "artifact.metadata"])
def test_late_interaction(tmp_path, where):
    folder, model, head = make_colbert(tmp_path, **({"dim": 12} if where == "dim" else {}))
    if where != "dim":
        (folder / where).write_text('{"dim": 12, "similarity": "cosine"}')
    rig, asked = ModelRig(folder), prompts()
    assert (rig.pooler.tasks, rig.pooler.size) == (("token_embed",), 12)
    rows = [states(model, prompt) @ head.T.numpy() for prompt in asked]
    close(rig.vectors(asked), [unit(each) for each in rows])
    close(rig.vectors(asked, normalize=False, dimensions=5), [each[:, :5] for each in rows], 1e-4)
    with pytest.raises(ParamError, match=r"ask for one of \['token_embed'\]"):
        rig.vectors(asked, task="embed")


def test_a_head_in_a_module_of_its_own_is_refused(tmp_path):
    folder, _ = make(tmp_path, "Bert", "Model")
    (folder / "modules.json").write_text('[{"type": "pylate.models.Dense.Dense", "path": "1_Dense"}]')
    with pytest.raises(ConfigError, match="has a Dense module for each token"):
        ModelRig(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [({}, "has no usable colbert_dim"), ({"colbert_dim": 13}, "linear.weight has shape"), ({"dim": "a"}, "got 'a'"),
     ({"model_type": "modernbert", "dim": 12}, "supported over BERT")],
)  # fmt: skip
def test_late_interaction_of_another_kind_is_refused(tmp_path, config, message):
    folder, _, _ = make_colbert(tmp_path, **config)
    with pytest.raises(ConfigError) as error:
        ModelRig(folder)
    assert message in str(error.value)
