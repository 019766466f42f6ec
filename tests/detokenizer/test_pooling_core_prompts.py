"""Pooling requests before they are scheduled: parameters, a model's pooler by its files, pairs, truncation."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quire.detokenizer.pooling import encode
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import TextTokenizer
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.checkpoint.pooler_config import pooler_of
from quire.proto.codec import from_i32, i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.errors import Refused
from quire.proto.messages import Tokenize
from quire.proto.params import ParamError, SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20)), "ab"]


def bert_backend():
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    return tokenizer


def bert_tokenizer():
    backend = bert_backend()
    return TextTokenizer(
        lambda text, special: backend.encode(text, add_special_tokens=special).ids,
        lambda ids, skip, spaces=True: backend.decode(ids, skip_special_tokens=skip),
        backend, {}, backend.token_to_id, {}, backend.id_to_token,
    )  # fmt: skip


def folder(path, architecture="BertModel", files=None, **config):
    base = {"architectures": [architecture], "vocab_size": len(WORDS), "hidden_size": 8, "max_position_embeddings": 16}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**base, **config}))
    for name, content in (files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


def pooler(path, *args, flags=None, **config):
    model = load_model_config(str(folder(path, *args, **config)))
    return pooler_of(model, EngineArgs(**(flags or {}))), model


def sentence_files(mode="mean_tokens", normalize=True, length=12, lower=False):
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]  # fmt: skip
    modules += [{"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}] * normalize
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{mode}": True, "pooling_mode_max": False},
            "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": lower}}  # fmt: skip


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "rank"}, "task must be one of"),
        ({"pooling": "MAX"}, "pooling must be one of ['CLS', 'LAST', 'MEAN', 'ALL'], got 'MAX'."),
        ({"task": "embed", "pooling": "ALL"}, "use task 'token_embed'"),
        ({"task": "token_embed", "pooling": "CLS"}, "use pooling 'ALL'"),
        ({"dimensions": 0}, "dimensions must be at least 1, got 0."),
        ({"dimensions": True}, "dimensions must be an integer, got True."),
        ({"task": "classify", "dimensions": 4}, "dimensions means nothing for task 'classify'"),
        ({"task": "classify", "normalize": True}, "normalize means nothing for task 'classify'"),
        ({"task": "embed", "use_activation": False}, "use_activation means nothing for task 'embed'"),
        ({"normalize": 1}, "normalize must be true or false, got 1."),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be at least 1, got -2"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, got 0"),
    ],
)
def test_bad_parameters_name_value_limit_and_remedy(params, message):
    with pytest.raises(ParamError) as error:
        PoolingParams(**params)
    assert message in str(error.value)


def test_what_is_left_out_is_the_models(tmp_path):
    found, model = pooler(tmp_path, files=sentence_files(), matryoshka_dimensions=[4, 8])
    params = found.resolve(PoolingParams())
    assert (params.task, params.pooling, params.normalize, params.dimensions) == ("embed", "MEAN", True, None)
    assert model.max_model_len == 12
    assert found.resolve(PoolingParams(pooling="CLS", normalize=False, dimensions=4)).dimensions == 4
    assert found.resolve(PoolingParams(task="token_embed")).pooling == "ALL"
    for params, message in (
        (PoolingParams(dimensions=5), "dimensions must be one of [4, 8], got 5."),
        (PoolingParams(task="score"), "task 'score' is not what BertModel can do here"),
    ):
        with pytest.raises(ParamError) as error:
            found.resolve(params)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "task", "remedy"),
    [
        ("BertModel", "classify", "or serve a model that ends in ForSequenceClassification."),
        ("BertForSequenceClassification", "embed", "or serve a model of embeddings."),
        ("LlamaForSequenceClassification", "embed", "or start a server with --convert embed."),
        ("LlamaForSequenceClassification", "score", "(a score needs one label, and it has 2); ask for one of"),
    ],
)
def test_another_task_than_the_models_is_refused_with_what_would_do_it(tmp_path, architecture, task, remedy):
    with pytest.raises(ParamError) as error:
        pooler(tmp_path, architecture)[0].resolve(PoolingParams(task=task))
    assert remedy in str(error.value)


# ---------------------------------------------------------------- a model's pooler


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_older_names_of_sentence_transformers_settings(tmp_path, kind):
    files = sentence_files(lower=True)
    files[f"sentence_{kind}_config.json"] = files.pop("sentence_bert_config.json")
    found, model = pooler(tmp_path, files=files)
    assert (model.max_model_len, found.lower) == (12, True)


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("BertModel", {}, ("embed", "CLS", True, True)),
        ("XLMRobertaModel", {"pad_token_id": 1}, ("embed", "CLS", True, True)),
        ("Qwen3Model", {}, ("embed", "LAST", True, False)),
        ("LlamaForSequenceClassification", {"num_labels": 3}, ("classify", "LAST", True, False)),
        ("RobertaForSequenceClassification", {"id2label": {"1": "b", "0": "a"}}, ("classify", "CLS", True, True)),
    ],
)
def test_architectures_say_what_is_pooled(tmp_path, architecture, config, expected):
    found, model = pooler(tmp_path, architecture, **config)
    assert (found.convert, found.pooling, found.normalize, found.whole) == expected
    assert model.max_model_len == (14 if "XLM" in architecture else 15 if "Roberta" in architecture else 16)
    if found.convert == "classify":
        assert found.labels in (("LABEL_0", "LABEL_1", "LABEL_2"), ("a", "b"))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "ChatGLMModel", "AquilaModel", "QWenLMHeadModel"])
def test_generators_generate_unless_told_otherwise(tmp_path, architecture):
    assert pooler(tmp_path, architecture)[0] is None
    found, _ = pooler(tmp_path, architecture, flags={"runner": "pooling"})
    assert (found.convert, found.pooling) == ("embed", "LAST")
    assert pooler(tmp_path, architecture, flags={"convert": "classify"})[0].tasks == ("classify", "token_classify")


def test_sentence_files_make_a_generator_pool(tmp_path):
    found, _ = pooler(tmp_path, "Qwen3ForCausalLM", files=sentence_files("lasttoken", normalize=False))
    assert (found.pooling, found.normalize, found.whole) == ("LAST", False, False)
    files = sentence_files()
    files["1_Pooling/config.json"] = {"pooling_mode": "cls"}
    assert pooler(tmp_path / "new", files=files)[0].pooling == "CLS"


@pytest.mark.parametrize(
    ("config", "activation", "tasks"),
    [
        ({"num_labels": 1}, "sigmoid", 3),
        ({"num_labels": 1, "problem_type": "regression"}, "identity", 3),
        ({"num_labels": 4}, "softmax", 2),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, "sigmoid", 2),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity", 3),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid", 2),
    ],
)
def test_classifiers_say_their_activation(tmp_path, config, activation, tasks):
    found, _ = pooler(tmp_path, "BertForSequenceClassification", **config)
    assert (found.activation, len(found.tasks)) == (activation, tasks)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"runner": "generate"}, "BertModel cannot generate"),
        ({"convert": "classify"}, "--convert classify cannot be done with BertModel"),
        ({"pooler_config": "{"}, "is not JSON"),
        ({"pooler_config": '{"pool": 1}'}, "has no 'pool'; its keys are"),
        ({"pooler_config": '{"pooling_type": "max"}'}, "pooling_type must be one of"),
        ({"pooler_config": '{"seq_pooling_type": "all"}'}, "seq_pooling_type must be one of"),
        ({"pooler_config": '{"tok_pooling_type": "STEP"}'}, "tok_pooling_type must be one of"),
        ({"pooler_config": '{"pooling_type": "CLS", "seq_pooling_type": "CLS"}'}, "say the same"),
        ({"pooler_config": '{"task": "classify"}'}, "task must be one of ['embed', 'token_embed']"),
        ({"pooler_config": '{"normalize": 1}'}, "normalize must be of type bool, got 1."),
        ({"pooler_config": '{"max_embed_len": 0}'}, "max_embed_len must be at least 1, got 0."),
        ({"pooler_config": '{"dimensions": 9}'}, "dimensions must be in 1 to 8, got 9."),
    ],
)
def test_flags_that_cannot_work_are_refused(tmp_path, flags, message):
    with pytest.raises(ConfigError) as error:
        pooler(tmp_path, flags=flags)
    assert message in str(error.value)


def test_pooler_config_is_over_the_models_own(tmp_path):
    text = '{"pooling_type": "mean", "normalize": false, "dimensions": 4}'
    found, _ = pooler(tmp_path, flags={"pooler_config": text})
    assert (found.pooling, found.normalize, found.resolve(PoolingParams()).dimensions) == ("MEAN", False, 4)


def test_an_operator_may_name_the_only_task(tmp_path):
    text = '{"task": "token_embed", "seq_pooling_type": "mean", "tok_pooling_type": "ALL"}'
    found, _ = pooler(tmp_path, flags={"pooler_config": text})
    assert (found.tasks, found.pooling) == (("token_embed",), "MEAN")
    assert found.resolve(PoolingParams()).task == "token_embed"
    with pytest.raises(ParamError, match="'embed'"):
        found.resolve(PoolingParams(task="embed"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by ['max_tokens']"),
        ("modules.json", [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense"}], "module 'x.Dense'"),
        ("modules.json", [{"type": "x.Pooling", "path": "../1_Pooling"}], "which is outside its folder"),
        ("modules.json", {}, "holds dict where a JSON list is needed"),
    ],
)
def test_files_that_ask_for_more_are_refused(tmp_path, name, content, message):
    with pytest.raises(ConfigError) as error:
        pooler(tmp_path, files={**sentence_files(), name: content})
    assert message in str(error.value)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("keep", [None, 3, 4, 5, 6, 9, 12, 30])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 9), (9, 2), (8, 8), (7, 8)])
def test_pairs_are_encoded_and_cut_as_the_tokenizer_does_it(keep, lengths):
    first, second = (" ".join(f"w{(i * 7 + n) % 20}" for i in range(n)) for n in lengths)
    oracle = bert_backend()
    if keep is not None:
        oracle.enable_truncation(keep, strategy="longest_first")
    one, two = oracle.encode(first), oracle.encode(first, second)
    assert encode(bert_tokenizer(), [first], True, keep).ids == one.ids
    found = encode(bert_tokenizer(), [first, second], True, keep)
    assert found.ids == two.ids
    assert [int(i >= found.token_type_start >= 0) for i in range(len(found.ids))] == two.type_ids


def prepare(preparer, limit=16, params=None, pair=None, **message):
    given = Tokenize(1, 0, Pool(PoolingParams(**(params or {})), pair), 0.0, **message)
    return preparer.prepare(given, 4, limit)


def test_the_side_that_is_cut_and_the_limit_of_documents():
    backend, tokenizer = bert_backend(), bert_tokenizer()
    text = "w1 w2 w3 w4 w5"
    words = backend.encode(text, add_special_tokens=False).ids
    assert encode(tokenizer, [text], True, 5, "left").ids == [2, *words[-3:], 3]
    assert encode(tokenizer, [text], True, 5).ids == [2, *words[:3], 3]
    assert encode(tokenizer, [text], False, None, "right", 2).ids == words[:2]
    first = backend.encode("w9 w8", add_special_tokens=False).ids
    assert encode(tokenizer, ["w9 w8", text], True, None, "right", 2).ids == [2, *first, 3, *words[:2], 3]
    assert encode(tokenizer, ["w9 w8", text], True, 7, "left", 3).ids == [2, *first, 3, *words[1:3], 3]


def test_prompts_are_prepared(tmp_path):
    found, model = pooler(tmp_path, files=sentence_files(lower=True, length=8))
    preparer = Preparer(bert_tokenizer(), model, pooler=found)
    prepared = prepare(preparer, prompt="AB W3")
    assert from_i32(prepared.ids) == [2, WORDS.index("ab"), WORDS.index("w3"), 3]
    assert (prepared.prompt, prepared.work.token_type_start, len(prepared.hashes)) == ("AB W3", -1, 16)
    assert prepared.work.params.pooling == "MEAN"
    assert from_i32(prepare(preparer, prompt="").ids) == [2, 3]
    assert from_i32(prepare(preparer, prompt="ab", add_special_tokens=False).ids) == [WORDS.index("ab")]
    assert prepare(preparer, prompt="ab", pair="w1").work.token_type_start == 3
    assert len(prepare(preparer, prompt="ab " * 50, params={"truncate_prompt_tokens": -1}).ids) == 4 * 16
    assert from_i32(prepare(preparer, ids=i32(range(9)), params={"truncate_prompt_tokens": 3}).ids) == [0, 1, 2]


@pytest.mark.parametrize(
    ("message", "params", "text"),
    [
        ({"prompt": "ab " * 15}, {}, "maximum context length is 16 tokens. However, your prompt contains 17 input"),
        ({"prompt": "ab"}, {"truncate_prompt_tokens": 17}, "cannot be greater than max_model_len=16"),
        ({"prompt": "ab"}, {"truncate_prompt_tokens": 1}, "leaves no room: the tokenizer adds 2 tokens"),
        ({"ids": i32([99])}, {}, "Token id 99 is out of vocabulary"),
        ({"ids": b""}, {}, "prompt must not be empty"),
        ({"prompt": "ab"}, {"task": "classify"}, "task 'classify' is not what BertModel can do here"),
    ],
)
def test_prompts_that_cannot_be_pooled_are_refused(tmp_path, message, params, text):
    found, model = pooler(tmp_path)
    with pytest.raises(Refused) as refused:
        prepare(Preparer(bert_tokenizer(), model, pooler=found), params=params, **message)
    assert refused.value.status == 400
    assert text in refused.value.message


def test_each_kind_of_server_refuses_the_other_kind_of_request(tmp_path):
    found, model = pooler(tmp_path)
    with pytest.raises(Refused, match="this server generates with BertModel and does not pool"):
        prepare(Preparer(bert_tokenizer(), model), prompt="ab")
    with pytest.raises(Refused, match=r"this server pools with BertModel .* and does not generate"):
        Preparer(bert_tokenizer(), model, pooler=found).prepare(
            Tokenize(1, 0, Generate(SamplingParams(), 0), 0.0, prompt="ab"), 4, 16
        )


def test_an_answer_must_fit_a_frame(tmp_path):
    found, model = pooler(tmp_path, hidden_size=2**23)
    preparer = Preparer(bert_tokenizer(), model, pooler=found)
    with pytest.raises(Refused, match="5 tokens with 8388608 values each are more than one answer holds, which is"):
        prepare(preparer, prompt="ab w1 w2", params={"task": "token_embed"})
    prepare(preparer, prompt="ab w1 w2")
