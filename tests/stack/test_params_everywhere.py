"""The table of sampling fields (``params_table.py``) over HTTP and through LLM."""

import json

import params_table
import pytest
import stack

from quire import LLM, SamplingParams
from quire.proto.structured import StructuredOutputsParams

PROMPT = "One, two, three,"


@pytest.fixture(scope="module")
def server():
    made = stack.Server("--max-logprobs=25", "--no-lenient-types")
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm():
    with LLM(max_logprobs=25) as made:
        yield made


def many(fields):
    """Thousands of sequences: checked, but not worth running here."""
    return max(fields.get("n") or 1, fields.get("best_of") or 1) > 64


def in_json(value):
    """Can JSON say it, and is it not "left out"?"""
    try:
        return value is not None and json.loads(json.dumps(value)) is not None
    except TypeError:
        return False


def http_cells(kind):
    cells = []
    for name, value, *said in params_table.cells(kind):
        fields = params_table.given(name, value)
        if params_table.ROWS[name].http and in_json(fields[name]) and not (kind == "good" and many(fields)):
            cells.append((name, fields, *said))
    return cells


@pytest.mark.parametrize(("name", "fields"), http_cells("good"))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_accepts(server, path, name, fields):
    body = {"max_tokens": 16, **fields}
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    status, answer, _ = server.post(path, body)
    assert status == 200, answer
    assert len(answer["choices"]) == fields.get("n", 1)


@pytest.mark.parametrize(("name", "fields", "said"), http_cells("bad"))
def test_http_refuses(server, name, fields, said):
    status, answer, _ = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 16, **fields})
    assert status == 400, answer
    if not_json(fields):  # NaN and Infinity: the body as a whole is refused
        return
    error = answer["error"]
    assert error["type"] == "BadRequestError"
    assert error["param"] in fields
    assert error["param"] in error["message"]


def not_json(fields):
    text = json.dumps(fields)
    return "NaN" in text or "Infinity" in text


@pytest.mark.parametrize(("name", "value"), params_table.cells("good"))
def test_llm_accepts(llm, name, value):
    fields = params_table.given(name, value)
    params = SamplingParams(**fields)
    if many(fields):
        return
    outputs = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert len(outputs) == params.n
    assert all(output.finish_reason in ("stop", "length") for output in outputs)


@pytest.mark.parametrize(("name", "value", "said"), params_table.cells("bad"))
def test_llm_refuses(llm, name, value, said):
    """Also where the value is put into parameters that have been checked before."""
    fields = params_table.given(name, value)
    with pytest.raises(ValueError) as caught:
        llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    assert said in str(caught.value)
    if isinstance(value, dict) and name == "structured_outputs":
        return  # on a socket it is what it means
    params = SamplingParams()
    for field, given in fields.items():
        setattr(params, field, given)
    with pytest.raises(ValueError) as caught:
        llm.generate(PROMPT, params, use_tqdm=False)
    assert said in str(caught.value) or name in str(caught.value)


# What only the model or its tokenizer can tell, the same through both.
OF_THE_MODEL = [
    ({"stop_token_ids": [100000]}, "stop_token_ids"),
    ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
    ({"logit_bias": {"100000": 1.0}}, "logit_bias"),
    ({"logprobs": 26}, "Requested sample logprobs of 26, which is greater than max allowed: 25"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 26}, "Requested prompt logprobs of 26, which is greater than max allowed: 25"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"logits_processors": ["nowhere:fn"]}, "nowhere:fn"),
]


@pytest.mark.parametrize(("fields", "said"), OF_THE_MODEL)
def test_what_the_model_decides(server, llm, fields, said):
    status, answer, _ = server.post("/v1/completions", {"prompt": PROMPT, **fields})
    assert status == 400, answer
    assert answer["error"]["param"] in fields
    assert said in answer["error"]["message"]
    if "max_tokens" in fields:
        return  # LLM takes it, and ends the output with the context
    with pytest.raises(ValueError) as caught:
        llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    assert said in str(caught.value)


@pytest.mark.parametrize("fields", params_table.STRUCTURED.good)
def test_structured_outputs_through_both(server, llm, fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "structured_outputs": fields}
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 200, answer
    form = StructuredOutputsParams(**fields)
    output = llm.generate(PROMPT, SamplingParams(structured_outputs=form, max_tokens=24), use_tqdm=False)[0].outputs[0]
    for text, finish in [(answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]),
                         (output.text, output.finish_reason)]:  # fmt: skip
        if finish == "stop" and ("json" in fields or "json_object" in fields):
            json.loads(text)
        if finish == "stop" and "choice" in fields:
            assert text in fields["choice"]


@pytest.mark.parametrize(("fields", "said"), params_table.STRUCTURED.bad)
def test_structured_outputs_refused_over_http(server, fields, said):
    status, answer, _ = server.post("/v1/completions", {"prompt": PROMPT, "structured_outputs": fields})
    assert status == 400, answer
    assert answer["error"]["param"] == "structured_outputs"
    assert "structured_outputs" in answer["error"]["message"]
