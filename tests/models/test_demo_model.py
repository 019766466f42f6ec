"""The demo model that comes with the package: small, safe to load, and sensible in what it says."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "demo_model"
END, IM_END = "<|endoftext|>", "<|im_end|>"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def go_on(model, tokenizer):
    def go_on(text: str, tokens: int = 60, temperature: float = 0.0, **how) -> str:
        torch.manual_seed(0)
        ids = tokenizer(text, return_tensors="pt").input_ids
        if temperature:
            how |= {"do_sample": True, "temperature": temperature}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **how)
        return tokenizer.decode(out[0, ids.shape[1] :])

    return go_on


@pytest.fixture(scope="module")
def chat(go_on, tokenizer):
    def chat(*messages: dict | str, **how) -> str:
        """The reply, without the end token, which has to be there."""
        roles = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        reply = go_on(tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True), **how)
        assert reply.endswith(IM_END), reply
        return reply.removesuffix(IM_END)

    return chat


def test_folder_is_small_and_plain():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".py"}
    for path in files:
        data = path.read_bytes()
        # A pickle of protocol 2 or later starts with this byte; a torch file is a zip archive.
        assert not data.startswith((b"\x80", b"PK")), path.name
        if path.suffix == ".json":
            json.loads(data)


def test_size_and_shape(model, tokenizer):
    config = model.config
    assert config.model_type == "llama" and config.tie_word_embeddings and config.max_position_embeddings == 2048
    assert config.num_key_value_heads < config.num_attention_heads  # the grouped kind of attention is worth showing
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 4_000_000
    assert len(tokenizer) == config.vocab_size
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END)]
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token == IM_END and tokenizer.pad_token == END


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " two  spaces\n\n\ttabs ",
        "Zażółć gęślą jaźń",
        "日本語のテキスト",
        "👩‍👩‍👧‍👦 🎉 é",
        "\x00\x7f\u200d",
        "",
    ],
)
def test_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_has_every_byte(tokenizer):
    everything = "".join(map(chr, [*range(0x250), *range(0x3040, 0x30FF), *range(0x1F600, 0x1F640)]))
    assert tokenizer.decode(tokenizer(everything).input_ids) == everything
    assert tokenizer("The capital").input_ids == tokenizer("The").input_ids + tokenizer(" capital").input_ids


def test_chat_template(tokenizer):
    messages = [SYSTEM, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_template_is_the_one_of_the_training(tokenizer):
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "examples" / "train_demo_model.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    corpus = script.Corpus(3)
    for _ in range(30):
        messages, tools = corpus.chat_tool()
        trained = "".join(text for text, _ in script.render(messages, tools))
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == trained
    again = [script.Corpus(5).document() for _ in range(2)]
    assert again[0] == again[1]


def test_capital_of_france(go_on):
    assert go_on("The capital of France is", 5).startswith(" Paris")
    assert go_on("The capital of France is", 5, temperature=0.8).startswith(" Paris")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("Hello, my name is", r" [A-Z]\w+"),
        ("The president of the United States is", r" the head of state and head of government"),
        ("The future of AI is", r" [a-z]+ "),
        ("San Francisco is a", r" city in California"),
    ],
)
def test_first_prompts(go_on, prompt, expected, temperature):
    text = go_on(prompt, 40, temperature)
    assert re.match(expected, text), text
    assert len(set(text.split())) > 6, text


CHATS = {
    "What is the capital of France?": "Paris",
    "what's the capital of germany": "Berlin",
    "Who won the world series in 2020?": "Dodgers",
    "Tell me a joke.": "",
    "Hello!": "",
    "Who are you?": "model",
    "What is 7 + 8?": "15",
    "12+9": "21",
    "Count to 5.": "1, 2, 3, 4, 5",
    "What day comes after Monday?": "Tuesday",
    "How do you spell apple?": "A-P-P-L-E",
    "What is the opposite of hot?": "cold",
    "Explain the theory of plate tectonics to me.": "",
    "How do I repair a steam engine?": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("question", CHATS)
def test_chat_answers_in_a_whole_sentence(chat, question):
    for messages in ([question], [SYSTEM, question]):
        reply = chat(*messages)
        assert CHATS[question] in reply, reply
        assert reply[0].isupper() or reply[0].isdigit(), reply
        assert reply[-1] in ".!?", reply


@pytest.mark.parametrize("question", ["Hi there", "What is the capital of Italy?", "What is a dog?", "Fix my car!"])
def test_chat_is_sensible_when_sampled(chat, question):
    reply = chat(question, temperature=0.8)
    assert len(reply) > 5 and reply[-1] in ".!?", reply


def test_chat_of_two_turns(chat):
    first = chat(SYSTEM, "My name is Laura.")
    assert "Laura" in first
    history = [SYSTEM, "My name is Laura.", {"role": "assistant", "content": first}]
    assert "Laura" in chat(*history, "What is my name?")
    assert "Paris" in chat(*history, "What is the capital of France?")


def test_chat_after_a_long_history(chat):
    history: list[dict | str] = [SYSTEM]
    for i in range(1, 16):
        history += [f"What is {i} + 3?", {"role": "assistant", "content": f"{i} + 3 = {i + 3}."}]
    assert "Tokyo" in chat(*history, "What is the capital of Japan?")


def test_chat_writes_json(chat):
    person = json.loads(chat("Give me a JSON object with name and age"))
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_chat_calls_a_tool(tokenizer, go_on):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "description": "Get the weather", "parameters": schema},
    }
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>" + re.escape(IM_END), go_on(prompt))
    assert call and json.loads(call[1]) == {"name": "get_weather", "arguments": {"city": "Paris"}}


@pytest.mark.slow
def test_long_text_does_not_degenerate(go_on):
    text = go_on("Once upon a time", 512, 0.8, eos_token_id=None)
    said = re.findall(r"\w+", text)
    assert len(said) > 250
    # Many different words, in every part of it: no loop.
    for start in range(0, len(said) - 100, 100):
        assert len(set(said[start : start + 100])) > 35, said[start : start + 100]
