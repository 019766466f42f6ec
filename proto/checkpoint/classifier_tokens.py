"""Classifiers whose head is made of a generator's: of the rows of its lm_head for a few tokens, as for reranking by yes
and no. config.json, or ``--hf-overrides``, says so by vLLM's names: ``classifier_from_token`` and ``method``, or
``is_original_qwen3_reranker``.
"""

from __future__ import annotations

from pathlib import Path

from ..config import ConfigError, EngineArgs
from ..readable import is_file
from .model_config import ModelConfig, read_json, tokenizer_folder

_DIFFERENCE, _ROWS = "from_2_way_softmax", "no_post_processing"


def token_ids(folder: Path) -> dict[str, int]:
    """Token -> id, of the tokenizer.json of ``folder``; empty where there is none. Raises ConfigError."""
    if not is_file(file := folder / "tokenizer.json"):
        return {}
    tokenizer = read_json(file)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    found: dict[str, int] = {}
    if isinstance(model, dict) and isinstance(vocab := model.get("vocab"), dict):
        found |= vocab
    elif isinstance(model, dict) and isinstance(vocab, list):  # Unigram: pairs of a token and its score
        found |= {str(pair[0]): number for number, pair in enumerate(vocab)}
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and isinstance(each.get("id"), int):
            found[str(each.get("content"))] = each["id"]
    return found


def head_rows(config: ModelConfig, args: EngineArgs) -> tuple[tuple[int, ...], ...]:
    """Of each label the tokens whose rows of the lm_head make its row of the classifier's head: one, (token,), or the
    second's minus the first's, (false, true). Empty where the checkpoint has a head of its own. Raises ConfigError.
    """
    hf = config.hf
    qwen = hf.get("is_original_qwen3_reranker") is True
    method, tokens = hf.get("method"), hf.get("classifier_from_token")
    if not qwen and (tokens is None or method is None):
        return ()
    if qwen:
        method = _DIFFERENCE  # softmax over two logits is the sigmoid of their difference
    if method not in (_DIFFERENCE, _ROWS):
        raise ConfigError(f"method {method!r} of classifier_from_token is not known; use {_DIFFERENCE!r} or {_ROWS!r}.")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(each, str) for each in tokens):
        raise ConfigError(f'classifier_from_token must be a list of tokens, such as ["no", "yes"], got {tokens!r}.')
    if method == _DIFFERENCE and len(tokens) != 2:
        raise ConfigError(f"method {_DIFFERENCE!r} takes two tokens in classifier_from_token, false and true, got "
                          f"{tokens!r}.")  # fmt: skip
    folder = tokenizer_folder(args, config.path)
    known = token_ids(Path(folder))
    if unknown := [token for token in tokens if token not in known]:
        raise ConfigError(f"classifier_from_token names {unknown[0]!r}, which is no token of {folder}/tokenizer.json; "
                          "name tokens as they are spelled there.")  # fmt: skip
    ids = [known[token] for token in tokens]
    return (tuple(ids),) if method == _DIFFERENCE else tuple((number,) for number in ids)
