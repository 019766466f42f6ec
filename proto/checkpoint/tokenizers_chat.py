"""Chat templates of families that write chats in code; each gives the text that the family's code gives.

System messages go first, as text, where the family's code knows none. A tool's answer is ChatGLM's observation.
"""

from __future__ import annotations

import json

QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATGLM2 = (
    "{% set count = namespace(rounds=0) %}"
    "{{ '[gMASK]<sop>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{% set count.rounds = count.rounds + 1 %}"
    "{{ '[Round ' ~ count.rounds ~ ']\n\n问：' ~ message['content'] ~ '\n\n答：' }}"
    "{% else %}"
    "{{ message['content'] ~ '\n\n' }}"
    "{% endif %}"
    "{% endfor %}"
)

_GLM = (
    "{{ '[gMASK]<sop>' }}"
    "{%% for message in messages %%}"
    "{{ '<|' ~ ('observation' if message['role'] == 'tool' else message['role']) ~ '|>' }}"
    "{{ (message['metadata'] or '') ~ '\n%s' ~ message['content'] }}"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|assistant|>' }}{%% endif %%}"
)
CHATGLM3 = _GLM % " "
"""The blank stands for the one that SentencePiece puts before the content, which the code encodes by itself."""
GLM4 = _GLM % ""

INTERNLM = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|System|>:' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>:' + message['content'] + '\n' }}"
    "{% else %}{{ '<|Bot|>:' + message['content'] + '<eoa>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Bot|>:' }}{% endif %}"
)

ORION = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'Human: ' + message['content'] + '\n\nAssistant: ' + eos_token }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
)


def internlm2(start: str, end: str) -> str:
    """ChatML with the names that the vocabulary has for its marks; BOS first."""
    return (
        "{{ bos_token }}"
        "{% for message in messages %}"
        f"{{{{ {_text(start)} + message['role'] + '\n' + message['content'] + {_text(end)} + '\n' }}}}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {_text(start)} + 'assistant\n' }}}}{{% endif %}}"
    )


def baichuan(user: str, assistant: str, closed: bool) -> str:
    """A reserved token before each message; ``closed``: EOS after each of the model's."""
    end = "{{ eos_token }}" if closed else ""
    return (
        "{% for message in messages %}"
        f"{{% if message['role'] == 'user' %}}{{{{ {_text(user)} + message['content'] }}}}"
        f"{{% elif message['role'] == 'assistant' %}}{{{{ {_text(assistant)} + message['content'] }}}}{end}"
        "{% else %}{{ message['content'] }}"
        "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}"
        f"{{{{ {_text(assistant)} }}}}"
        "{% endif %}"
    )


def _text(token: str) -> str:
    """A token as a literal of jinja."""
    return json.dumps(token, ensure_ascii=False)
