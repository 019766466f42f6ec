"""Loading tokenizers, chat templates and checks of prompts, held against transformers."""

from __future__ import annotations

import contextlib
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from quire.detokenizer import template_limits
from quire.detokenizer.template import ChatTemplate
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.checkpoint.model_config import ModelConfig, demo_model_path
from quire.proto.codec import i32
from quire.proto.config import ConfigError
from quire.proto.errors import Refused
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Finish, Resume, Tokenize
from quire.proto.params import SamplingParams
from quire.proto.work import Generate, Text

CORPUS = ["Hello world, this is a test of chat templates. user assistant system", "num 123 ünï 你好 😀"] * 4
TEXTS = ["Hello world", " two  spaces ", "<s>literal</s> <|im_end|>", "ünï 你好 😀\n\n", "<extra> x<pad>"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}\n{% if add_generation_prompt %}\n{{ '<|im_start|>assistant\\n' }}\n{% endif %}"
)
BUSY = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{{ bos_token }}{% set ns = namespace(n=0) %}
{% for message in messages %}
    {% if loop.index0 == 5 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {% else %}[{{ message.role | upper }}] {{ message.content }} {% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{{ ns.n }}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""
CHAT = [
    {"role": "system", "content": "Be <brief> & \"kind\"."},
    {"role": "user", "content": "Hi 😀", "name": None},
    {"role": "assistant", "content": "  Hello there  "},
    {"role": "user", "content": "More?"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]


def make(folder: Path, config: dict[str, Any], special_map: dict[str, Any] | None = None, bos: bool = False) -> Path:
    """A byte-level tokenizer's folder with this tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=names, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(max_length=7)
    tokenizer.enable_padding(length=9, pad_token="<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    if special_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "plain": ({"bos_token": "<s>", "eos_token": "</s>"}, None, False),
    "post_processor": ({"bos_token": "<s>", "eos_token": "</s>"}, None, True),
    "add_bos": ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}, None, False),
    "add_both": ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, None, True),
    "no_bos": ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, None, True),
    "bos_unknown": ({"eos_token": "</s>", "add_bos_token": True}, None, True),
    "eos_only": ({"eos_token": "</s>", "add_eos_token": True}, None, False),
    "map": ({}, {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<|im_end|>"}, False),
    "extra": ({"eos_token": "</s>", "additional_special_tokens": ["<extra>"], "pad_token": "<pad>"}, None, False),
    "decoder": (
        {
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "350": {"content": "<extra>", "lstrip": False, "rstrip": False, "normalized": False,
                        "single_word": False, "special": True},
            },
        },
        None,
        False,
    ),
}  # fmt: skip


def by_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_ids_equal_transformers(name: str, tmp_path: Path) -> None:
    config, special_map, bos = CONFIGS[name]
    folder = make(tmp_path, config, special_map, bos)
    ours, theirs = load_tokenizer(str(folder)), by_transformers(folder)
    for text in [*TEXTS, " ".join(TEXTS)]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special, truncation=False, padding=False)
            assert ours.encode(text, special) == ids
            assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    named = {"pad_token": "<pad>", **ours.special}  # transformers takes it from the padding settings too
    assert named == {"pad_token": "<pad>", **theirs.special_tokens_map}


def test_a_token_of_the_vocabulary_named_by_the_config_becomes_special(tmp_path: Path) -> None:
    folder = make(tmp_path, {"eos_token": "<end>"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ours, theirs = load_tokenizer(str(folder)), by_transformers(folder)
    ids = ours.encode("Hello<end>", False)
    assert ids == theirs.encode("Hello<end>", add_special_tokens=False, truncation=False)
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True) == "Hello"


def test_the_slow_way_gives_the_same(tmp_path: Path) -> None:
    config, special_map, bos = CONFIGS["post_processor"]
    folder = make(tmp_path, config, special_map, bos)
    fast, slow = load_tokenizer(str(folder)), load_tokenizer(str(folder), mode="slow")
    assert slow.backend is None and slow.encode("Hello <s> world", True)[:3] == fast.encode("Hello <s> world", True)[:3]
    assert slow.decode([40, 41, 10**6], True) == fast.decode([40, 41, 10**6], True)
    assert (slow.bos_id, slow.eos_id) == (fast.bos_id, fast.eos_id)
    assert slow.special == {**fast.special, "pad_token": "<pad>"}


def test_class_4_a_tokenizer_runs_no_code_of_its_folder(tmp_path: Path) -> None:
    trap = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    folder = make(tmp_path, {**CONFIGS["post_processor"][0], **trap})
    (folder / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Trap: pass\n")
    assert load_tokenizer(str(folder)).encode("Hello", False)
    with contextlib.suppress(ConfigError):
        load_tokenizer(str(folder), mode="slow")
    assert not (tmp_path / "ran").exists()


def test_faults_of_the_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer.*--tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    code = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "custom"}))
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))


# ---------------------------------------------------------------- chat templates


@pytest.mark.parametrize("source", [CHATML, BUSY], ids=["chatml", "busy"])
def test_rendering_equals_transformers(source: str, tmp_path: Path) -> None:
    folder = make(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": source})
    theirs, tokenizer = by_transformers(folder), load_tokenizer(str(folder))
    ours = ChatTemplate(tokenizer.templates, tokenizer.special)
    ours.tells_tools = False  # transformers tells a model of no tools where its template does not
    for count in range(1, len(CHAT) + 1):
        for options in (
            {},
            {"add_generation_prompt": False},
            {"tools": TOOLS},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            flags: dict[str, Any] = {"add_generation_prompt": True, **options}
            flags.update(flags.pop("chat_template_kwargs", {}))
            assert ours.render(CHAT[:count], options) == theirs.apply_chat_template(
                CHAT[:count], tokenize=False, **flags
            )


def test_templates_come_from_files_too(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = make(tmp_path, {"chat_template": listed})
    tokenizer = load_tokenizer(str(folder))
    assert ChatTemplate(tokenizer.templates, {}).render(CHAT, {"tools": TOOLS}) == "T"
    assert ChatTemplate(tokenizer.templates, {}).render(CHAT, None) == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(str(folder)).templates == {"default": "J"}
    (tmp_path / "own.jinja").write_text("O")
    assert load_tokenizer(str(folder), chat_template=str(tmp_path / "own.jinja")).templates == {"default": "O"}
    assert load_tokenizer(str(folder), chat_template="{{ x }}").templates == {"default": "{{ x }}"}
    with pytest.raises(ConfigError, match="neither a readable file nor a template"):
        load_tokenizer(str(folder), chat_template="missing.jinja")


def test_contents_may_be_given_to_templates_in_one_form() -> None:
    shows = "{% for m in messages %}{{ m.content is string }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    for form, shown in (("string", "TrueTrue"), ("openai", "FalseFalse")):
        chat = ChatTemplate({"default": shows}, {})
        chat.form = form
        assert chat.render(messages, None) == shown
    chat = ChatTemplate({"default": CHATML}, {})
    chat.form = "openai"  # the operator's word, though this template reads texts
    with pytest.raises(Refused, match="cannot render these messages"):
        chat.render(messages[:1], None)


def test_content_parts_are_joined_and_others_refused() -> None:
    chat = ChatTemplate({"default": CHATML}, {})
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert "a\nb\nc<|im_end|>" in chat.render([{"role": "user", "content": parts}], None)
    assert chat.render([{"role": "user", "content": None}], None).startswith("<|im_start|>user\n<|im_end|>")
    for content in ([{"type": "image_url", "image_url": {}}], [{"type": "text"}], [None], 5, {"type": "text"}):
        with pytest.raises(Refused) as refused:
            chat.render([{"role": "user", "content": content}], None)
        assert (refused.value.status, refused.value.param) == (400, "messages")


def test_tool_arguments_become_objects() -> None:
    chat = ChatTemplate({"default": "{{ messages[0].tool_calls[0].function.arguments.city }}"}, {})
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    assert chat.render([{"role": "assistant", "content": None, "tool_calls": [call]}], None) == "Rome"


@pytest.mark.parametrize("arguments", ['{"city": "O', "{'b': False}", "[1]", "5", '{"a": NaN}', '{"a":' * 5000])
def test_arguments_of_the_past_are_opaque(arguments: str) -> None:
    """A call that was cut off is told to its model as it stands, and always as an object, which templates walk over."""
    walk = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert ChatTemplate({"default": walk}, {}).render([{"role": "assistant", "tool_calls": [call]}], None) == (
        f"_raw={arguments}"
    )
    for none in ({"name": "f"}, {"name": "f", "arguments": None}, {"name": "f", "arguments": ""}):
        call["function"] = none
        assert ChatTemplate({"default": walk}, {}).render([{"role": "assistant", "tool_calls": [call]}], None) == ""


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], None, "messages"),
        (["hi"], None, "messages"),
        ([{"content": "x"}], None, "messages"),
        (CHAT, {"nonsense": 1}, "nonsense"),
        (CHAT, {"add_generation_prompt": "yes"}, "add_generation_prompt"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"tools": "f"}, "tools"),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ([{"role": "user"}], {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_bad_chats_name_the_field(messages: Any, options: Any, param: str) -> None:
    with pytest.raises(Refused) as refused:
        ChatTemplate({"default": CHATML}, {}).render(messages, options)
    assert refused.value.param == param and refused.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ (messages|string).__init__.__globals__ }}",
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set y = messages[0].role %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ undefined_thing.attribute }}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set b %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = b %}{% endfor %}{{ n.s|length }}",
        "{{ ([ 'a' * 9999999 ] * 1000)|join|length }}",
        "{% set n = namespace(x=2**32) %}{% for i in range(30) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{{ ([[1] * 1000] * 90000)|sum(start=[])|length }}",
        "{{ ([[1] * 1000] * 90000)|sum(None, [])|length }}",
        "{{ 'a'.ljust(10**12)|length }}",
        "{{ 'a'|center(10**12)|length }}",
        "{{ ('a\n' * 40000)|indent(90000)|length }}",
        "{{ '%99999999d'|format(1)|length }}",
        "{{ ('%99999999d' % 1)|length }}",
        "{{ ('%*d' % (99999999, 1))|length }}",
        "{{ '{:>99999999}'.format('x')|length }}",
        "{{ ('a' * 50000).replace('a', 'b' * 50000)|length }}",
        "{{ ('a' * 50000)|replace('a', 'b' * 50000)|length }}",
        "{{ ('a' * 50000).join('b' * 50000)|length }}",
        "{{ range(50000)|join('b' * 50000)|length }}",
        "{{ range(90000)|map('center', 50000)|list|length }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        *[
            "{% set n = namespace(s=['a']) %}{% for i in range(60) %}{% set n.s = " + twice + " %}{% endfor %}" + shown
            for twice in (
                "[n.s, n.s]",
                "(n.s, n.s)",
                "{'a': n.s, 'b': n.s}",
                "dict(a=n.s, b=n.s)",
                "[n.s] + [n.s]",
                "[n.s] * 2",
                "([n.s] * 2)|list",
                "[messages, n.s, n.s][1:]",
            )
            for shown in ("{{ n.s|tojson|length }}", "{{ n.s }}", "{{ n.s == [n.s] }}")
        ],
    ],
)
def test_bad_templates_are_refused_in_bounded_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(template_limits, "MAX_RENDERED", 100_000)
    with pytest.raises(Refused) as refused:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}], None)
    assert refused.value.param == "messages"


LOOP = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] | list %}"
    "{% if part['type'] == 'text' %}[{{ part['text'] }}|{{ part.lang }}]{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message.content is string %}({{ message.content }}){% else %}"
    "{% set content = message.content %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def test_content_takes_the_form_that_the_template_reads(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a", "lang": "en"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    only, either = (ChatTemplate({"default": source}, {}) for source in (LOOP, EITHER))
    assert only.render(chat, None) == "<user>[a|en][b|]<assistant>[c|]"
    assert either.render(chat, None) == "[a][b](c)"
    theirs = by_transformers(make(tmp_path, {"chat_template": EITHER}))
    assert theirs.apply_chat_template(chat, tokenize=False) == "[a][b](c)"
    assert ChatTemplate({"default": CHATML}, {}).render(chat[:1], {"add_generation_prompt": False}) == (
        "<|im_start|>user\na\nb<|im_end|>\n"
    )
    go_on = {"continue_final_message": True}
    assert only.render(chat, go_on) == "<user>[a|en][b|]<assistant>[c"
    assert either.render(chat[:1], go_on) == "[a][b"
    for content in ([], [{"type": "text", "text": ""}], None):
        with pytest.raises(Refused, match="needs a last message with content"):
            only.render([{"role": "user", "content": content}], go_on)


def test_every_message_has_the_form_that_its_place_in_the_template_reads() -> None:
    """Templates that treat messages differently: the form is found for each by trying."""
    demo = ChatTemplate(load_tokenizer(demo_model_path()).templates, {})
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Always."}]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
    plain = [{"role": "system", "content": "Be brief.\nAlways."}, {"role": "user", "content": "Hi."}]
    assert demo.render(chat, None) == demo.render(plain, None)
    assert demo.render(chat, {"tools": TOOLS}) == demo.render(plain, {"tools": TOOLS})
    shown = "{{ messages[0].content }}|{% for part in messages[1].content %}[{{ part.text }}]{% endfor %}"
    for system in ("{{ messages[0].content }}", "{{ 'x' ~ messages[0].content }}", "{{ messages[0].content|trim }}",
                   "{{ 'x' + messages[0].content }}", "{{ messages[0].content.strip() }}",
                   "{{ '%s' % messages[0].content }}",
                   "{% if 'x' in messages[0].content %}{% endif %}{{ messages[0].content }}"):  # fmt: skip
        mixed = ChatTemplate({"default": shown.replace("{{ messages[0].content }}", system)}, {})
        for content in (parts, "Be brief.\nAlways."):
            for said in ("Hi.", [{"type": "text", "text": "Hi."}]):
                chat = [{"role": "system", "content": content}, {"role": "user", "content": said}]
                assert mixed.render(chat, None).removeprefix("x") == "Be brief.\nAlways.|[Hi.]", system
    many = [{"role": role, "content": parts} for _ in range(40) for role in ("user", "assistant")]
    source = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}{% for p in [] %}{{ p.content }}{% endfor %}"
    source += "{% if false %}{% for x in messages[0].content %}{% endfor %}{% endif %}"
    told = ChatTemplate({"default": source}, {})
    assert told.render(many, None) == "Be brief.\nAlways.." * 80


def test_a_template_outside_its_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    folder = make(tmp_path / "model", {})
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja leads out of its folder"):
        load_tokenizer(str(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    (tmp_path / "tool_use.jinja").write_text("a key")
    with pytest.raises(ConfigError, match="leads out of its folder"):
        load_tokenizer(str(folder))
    (folder / "additional_chat_templates").unlink()
    (folder / "own").write_text("fine")
    (folder / "chat_template.jinja").symlink_to("own")
    assert load_tokenizer(str(folder)).templates == {"default": "fine"}


def test_the_links_of_the_hubs_cache_are_good(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_text("J")
    folder = make(repository / "snapshots" / "main", {})
    (folder / "chat_template.jinja").symlink_to("../../blobs/abc")
    assert load_tokenizer(str(folder)).templates == {"default": "J"}


def test_no_template_names_the_remedy() -> None:
    with pytest.raises(Refused, match="--chat-template"):
        ChatTemplate({}, {}).render(CHAT, None)


# ---------------------------------------------------------------- prompts


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    folder = make(tmp_path_factory.mktemp("model"), config, bos=True)
    return Preparer(load_tokenizer(str(folder)), ModelConfig(str(folder), {}, 64, 340, eos_token_ids=[3]))


def ask(**fields: Any) -> Tokenize:
    params = fields.pop("params", None) or SamplingParams(**fields.pop("sampling", {}))
    return Tokenize(uid=1, attempt=1, work=Generate(params, 0), arrival=0.0, **fields)


def test_prompt_in_every_form(preparer: Preparer) -> None:
    message = ask(prompt="Hello world", sampling={"max_tokens": None})
    prepared = preparer.prepare(message, 4, 64)
    ids = array("i", prepared.ids).tolist()
    assert ids[0] == 0 and preparer.tokenizer.decode(ids, True) == prepared.prompt == "Hello world"
    assert message.work.params.max_tokens == 64 - len(ids)
    assert prepared.hashes == b"".join(hash_blocks(prepared.ids, 4)) and len(prepared.hashes) == len(ids) // 4 * 16
    assert prepared.work.eos == [1] and message.work.params.stop_token_ids == [3] and list(prepared.sequences) == [0]
    assert preparer.prepare(ask(prompt="Hello world", add_special_tokens=False), 4, 64).ids == i32(ids[1:])
    given = preparer.prepare(ask(ids=i32(ids), sampling={"n": 3, "ignore_eos": True}), 4, 64)
    assert (given.ids, given.prompt, given.work.eos, list(given.sequences)) == (i32(ids), None, [], [0, 1, 2])
    chat = preparer.prepare(ask(messages=[{"role": "user", "content": "Hi"}]), 4, 64)
    assert chat.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n"
    assert array("i", chat.ids)[0] == 2  # a template writes its own first token
    template = {"add_special_tokens": True}
    more = preparer.prepare(ask(messages=[{"role": "user", "content": "Hi"}], template=template), 4, 64)
    assert (more.prompt, more.ids) == (chat.prompt, i32([0]) + chat.ids)
    with pytest.raises(Refused, match="add_special_tokens must be true or false"):
        preparer.prepare(ask(messages=[{"role": "user", "content": "Hi"}], template={"add_special_tokens": 1}), 4, 64)


def test_a_first_token_written_by_hand_is_not_doubled(preparer: Preparer, caplog: pytest.LogCaptureFixture) -> None:
    want = preparer.prepare(ask(prompt="Hello world"), 4, 64).ids
    assert not caplog.records
    written = preparer.prepare(ask(prompt="<s>Hello world", echo=True), 4, 64)
    assert (written.ids, written.prompt) == (want, "<s>Hello world")
    (said,) = (record.getMessage() for record in caplog.records)
    assert "begins with <s>" in said and "add_special_tokens: false" in said
    cut = {"truncate_prompt_tokens": 3}
    ends = [preparer.prepare(ask(prompt=text, sampling=cut), 4, 64).ids for text in ("Hello world", "<s>Hello world")]
    assert ends[0] == ends[1]
    assert preparer.prepare(ask(prompt="<s>"), 4, 64).ids == i32([0])
    bare = preparer.prepare(ask(prompt="<s>Hello world", add_special_tokens=False), 4, 64)
    assert array("i", bare.ids).tolist().count(0) == 1
    assert preparer.prepare(ask(prompt="Hello <s>"), 4, 64).ids.count(i32([0])) == 2  # only the first is ours
    for work in (Text(), Text(["<s>Hello world"])):
        given = {"prompt": "<s>Hello world"} if work.parts is None else {}
        told = Tokenize(uid=1, attempt=1, work=work, arrival=0.0, **given)
        assert preparer.prepare(told, 4, 64).ids == want
    assert len(caplog.records) == 1  # within a minute


def test_max_tokens_and_truncation_are_resolved(preparer: Preparer) -> None:
    message = ask(ids=i32(range(10, 60)), sampling={"max_tokens": 60})
    preparer.prepare(message, 16, 64)
    assert message.work.params.max_tokens == 14
    message = ask(ids=i32(range(10, 110)), sampling={"truncate_prompt_tokens": 5})
    assert preparer.prepare(message, 16, 64).ids == i32(range(105, 110))
    long = "Hello world " * 100_000
    cut = preparer.prepare(ask(prompt=long, sampling={"truncate_prompt_tokens": 8}), 16, 64)
    assert array("i", cut.ids).tolist() == [0, *preparer.tokenizer.encode("Hello world " * 20, False)[-7:]]
    right = {"truncate_prompt_tokens": 8, "truncation_side": "right"}
    begin = array("i", preparer.prepare(ask(prompt=long, sampling=right), 16, 64).ids).tolist()
    assert begin == [0, *preparer.tokenizer.encode("Hello world " * 20, False)[:7]]
    plain = ask(prompt=long, add_special_tokens=False, sampling={"truncate_prompt_tokens": 8})
    end = preparer.tokenizer.encode("Hello world " * 20, False)[-8:]
    assert array("i", preparer.prepare(plain, 16, 64).ids).tolist() == end


@pytest.mark.parametrize("around", ["<s> $A", "$A </s>", "<s> $A <pad> </s>", "$A"])
def test_a_text_that_is_cut_keeps_its_special_tokens(around: str, tmp_path: Path) -> None:
    folder = make(tmp_path, {"bos_token": "<s>", "eos_token": "</s>"})
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [(name, whole.token_to_id(name)) for name in ("<s>", "</s>", "<pad>")]
    whole.post_processor = processors.TemplateProcessing(single=around, special_tokens=names)
    whole.save(str(folder / "tokenizer.json"))
    theirs, ours = by_transformers(folder), Preparer(load_tokenizer(str(folder)), ModelConfig(str(folder), {}, 64, 350))
    theirs.truncation_side = "left"
    text = "Hello <s>world, hello again</s>"
    for keep in range(4, 20):
        cut = ours.prepare(ask(prompt=text, sampling={"truncate_prompt_tokens": keep}), 16, 64)
        assert array("i", cut.ids).tolist() == theirs.encode(text, truncation=True, max_length=keep)
    short = ours.prepare(ask(prompt=text, sampling={"truncate_prompt_tokens": 1}), 16, 64)  # no room for both
    assert short.ids == i32(theirs.encode(text)[-1:])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "prompt must not be empty"),
        ({"ids": b""}, "prompt", "prompt must not be empty"),
        ({}, "prompt", "exactly one of"),
        ({"prompt": "a", "ids": i32([1])}, "prompt", "exactly one of"),
        ({"ids": b"abc"}, "prompt", "whole number"),
        ({"ids": i32([5, 340])}, "prompt", "Token id 340 is out of vocabulary"),
        ({"ids": i32([-1])}, "prompt", "Token id -1 is out of vocabulary"),
        ({"ids": i32([5] * 100)}, "input_tokens", "maximum context length is 64 tokens.*100 input tokens"),
        ({"ids": i32([5] * 64)}, "input_tokens", "64 input tokens, which leaves no room"),
        ({"prompt": "Hello " * 10**6}, "input_text", "6000000 characters .more than .* the upper bound for 64 input"),
        (
            {"prompt": "a", "sampling": {"max_tokens": 65}},
            "max_tokens",
            "max_tokens=65 cannot be greater than max_model_len=64",
        ),
        ({"prompt": "a", "sampling": {"stop": ["x" * 5000]}}, "stop", "more than 4096 characters"),
    ],
)
def test_bad_prompts_name_the_field(preparer: Preparer, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        preparer.prepare(ask(**fields), 16, 64)
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_encoded_ids_beyond_the_model_are_refused(preparer: Preparer) -> None:
    small = Preparer(preparer.tokenizer, ModelConfig("", {}, 64, 100))
    with pytest.raises(Refused, match=r"out of vocabulary \(0 to 99"):
        small.prepare(ask(prompt="Hello world"), 16, 64)


def test_resumed_children_end_by_what_they_already_have(preparer: Preparer) -> None:
    ids = preparer.tokenizer.encode("Hello world STOP more", False)
    resumes = [
        Resume(0, i32(ids[:2]), 0),  # goes on
        Resume(1, i32([*ids[:2], 1]), 2),  # EOS was sampled
        Resume(2, i32(ids), 0),  # the stop string is in it
        Resume(3, i32(ids[:2] + [5] * 8), 0),  # max_tokens reached
    ]
    message = ask(prompt="x", resume=resumes, params=SamplingParams(n=4, max_tokens=10, stop="STOP", temperature=1.0))
    prepared = preparer.prepare(message, 16, 64)
    assert list(prepared.sequences) == [0] and [c.index for c in prepared.children] == [0]
    assert prepared.sequences[0].count == 2
    news = {index: news for index, _, news in prepared.replayed}
    text = preparer.tokenizer.decode(ids[:2], True)
    assert (news[1].finish, news[1].reason, news[1].text, news[1].length) == (Finish.STOP, None, text[2:], 3)
    assert (news[2].finish, news[2].reason, news[2].text) == (Finish.STOP, "STOP", "Hello world ")
    assert (news[3].finish, news[3].length) == (Finish.LENGTH, 10)
    assert news[0].text == text and news[0].length == -1


@pytest.mark.parametrize(
    "text", ["\x00", "\ufffe\uffff", "‮‮", "<s>" * 20, "a" * 63, " " * 200, "\U0010ffff", "<|im_start|>" * 9]
)
def test_odd_prompts_end_in_ids_or_a_refusal(preparer: Preparer, text: str) -> None:
    for fields in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        try:
            assert preparer.prepare(ask(**fields), 16, 64).ids
        except Refused as refused:
            assert refused.status == 400
