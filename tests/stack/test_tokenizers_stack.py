"""A ChatGLM folder as its repository ships it, through the real processes: nothing in it says how except its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny_models
import tiny_remote
from vocabularies import make_pieces, model_bytes, write

from quire import LLM, SamplingParams
from quire.proto.structured import StructuredOutputsParams

VOCAB = 512
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["fox", "狐 a", 22]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "Hi"}]


def chatglm(folder: Path) -> Path:
    """A tiny ChatGLM3 with the files of its kind alone."""
    config = {"padded_vocab_size": VOCAB, "eos_token_id": 2}
    row = tiny_remote.renamed(
        "Glm", {"head_dim": 8, "vocab_size": VOCAB, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        "ChatGLMModel", tiny_remote.chatglm, lambda values: {**tiny_remote.chatglm_config(values), **config},
    )  # fmt: skip
    tiny_models.write(row[0], folder, 3, {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    auto = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}
    names = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": auto, "name_or_path": "THUDM/chatglm3-6b"}
    return write(folder, {"tokenizer.model": model_bytes(make_pieces()), "tokenizer_config.json": names})


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = chatglm(tmp_path_factory.mktemp("chatglm"))
    with LLM(str(folder), dtype="float32", max_num_seqs=8, num_gpu_blocks_override=200) as made:
        yield made


def test_forms_are_kept_beside_free_requests(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    (alone,) = llm.generate("The quick fox", free, use_tqdm=False)
    forms: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": "[a-f]{3} 你好😀!"}, {"choice": ["yes", "no way"]}]
    params = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=250, structured_outputs=StructuredOutputsParams(**form))
        for form in forms * 2
    ]
    outputs = llm.generate(["The quick fox", *["Say: "] * 6], [free, *params], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert outputs[0].outputs[0].text == alone.outputs[0].text
    for n, output in enumerate(outputs[1:]):
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop", text
        if n % 3 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif n % 3 == 1:
            assert text[:3].strip("abcdef") == "" and text[3:] == " 你好😀!"
        else:
            assert text in ("yes", "no way")


def test_get_tokenizer_is_what_the_server_uses(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<s>", "</s>", 2)
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    stopped = SamplingParams(temperature=0, max_tokens=4, logit_bias={end: 100.0})
    (output,) = llm.generate("people 你好", stopped, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode("people 你好")
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True) == "people 你好"
    child = output.outputs[0]
    assert (child.token_ids, child.text, child.finish_reason, child.stop_reason) == ([end], "", "stop", end)
    (chat,) = llm.chat(CHAT, SamplingParams(max_tokens=1), use_tqdm=False)
    written = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert written == "[gMASK]<sop><|user|>\n Hi<|assistant|>"
    assert chat.prompt_token_ids == tokenizer.encode(written, add_special_tokens=False)
    (again,) = llm.chat(CHAT, SamplingParams(max_tokens=1), chat_template="<|user|>{{ messages[0].content }}",
                        use_tqdm=False)  # fmt: skip
    assert again.prompt_token_ids == tokenizer.encode("<|user|>Hi", add_special_tokens=False)
