"""Routes whose oracle is the demo model's own arithmetic. A prompt of the embeddings of its tokens is answered as the
tokens are: in chunks, from the cache, over a kill. Generative scores are the probabilities of labels."""

import base64
import os
import signal
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save
from stack import Server
from transformers import AutoModelForCausalLM

DEMO = Path(__file__).resolve().parents[2] / "demo_model"
STORY = "Once upon a time there was a young bear called Mary. " * 16
BODY = {"model": "quire-demo", "max_tokens": 120, "temperature": 1, "seed": 5}


@pytest.fixture(scope="module")
def server():
    server = Server("--enable-prompt-embeds", "--max-num-batched-tokens=96", "--max-num-seqs=32")
    yield server
    server.close()


def test_the_embeddings_of_tokens_are_answered_as_the_tokens_over_a_kill(server):
    ids = server.request("POST", "/tokenize", {"prompt": STORY})[1]["tokens"]
    assert len(ids) > 96  # so that they come in chunks
    embeds = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"][torch.tensor(ids)]
    given = {"prompt_embeds": base64.b64encode(save({"prompt_embeds": embeds})).decode()}
    more = {"extra_body": {**given, "ignore_eos": True}}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=60) as client:
        alone = client.completions.create(prompt=ids, **BODY, extra_body={"ignore_eos": True})
        first, again = (client.completions.create(prompt=None, **BODY, **more) for _ in range(2))
        assert first.choices[0].text == again.choices[0].text == alone.choices[0].text
        assert first.usage.prompt_tokens == len(ids)
        assert first.usage.prompt_tokens_details.cached_tokens == 0  # the same ids' blocks are not theirs
        assert again.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 16 * 16
        (victim,) = [each for each in server.children() if "quire.gpu_worker" in each.cmdline()]
        parts = []
        for chunk in client.completions.create(prompt=None, **BODY, **more, stream=True):
            if not parts:
                os.kill(victim.pid, signal.SIGKILL)
            parts.append(chunk.choices[0].text)
        assert "".join(parts) == alone.choices[0].text


@pytest.mark.parametrize(
    ("more", "kept"), [({}, (281, 326, 300)), ({"apply_softmax": False, "item_first": True}, None)]
)
def test_generative_scores_are_the_probabilities_of_the_first_label(server, more, kept):
    query, items = "Is this a fruit? ", ["An apple.", [300, 301], "A brick, that is"]
    body = {"query": query, "items": items, "label_token_ids": [281, 326, 300], "add_special_tokens": False, **more}
    answer = server.request("POST", "/generative_scoring", body)[1]
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).float().eval()

    def ids_of(side):
        body = {"prompt": side, "add_special_tokens": False}
        return side if isinstance(side, list) else server.request("POST", "/tokenize", body)[1]["tokens"]

    for item, told in zip(items, answer["data"], strict=True):
        first, second = (item, query) if more else (query, item)
        ids = ids_of(first) + ids_of(second)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted = logits[list(kept)].softmax(-1)[0] if kept else logits.softmax(-1)[281]
        assert told["score"] == pytest.approx(float(wanted), rel=0.03, abs=1e-4)


def test_generative_scores_are_refused_by_the_names_of_the_request(server):
    sound = {"query": "a", "items": ["b"], "label_token_ids": [5]}
    for wrong, param in (
        ({"label_token_ids": [10**6]}, "label_token_ids"), ({"label_token_ids": []}, "label_token_ids"),
        ({"items": []}, "items"), ({"items": [{}]}, "items"), ({"query": 5}, "query"),
        ({"query": "", "items": [""]}, "items"),
    ):  # fmt: skip
        status, answer = server.request("POST", "/generative_scoring", {**sound, **wrong})[:2]
        assert status == 400 and answer["error"]["param"] == param, answer
