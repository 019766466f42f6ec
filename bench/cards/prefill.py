"""Prefill: paged attention beside torch's attention of the same lengths, and whole steps of a Llama-3-8B shape."""

from __future__ import annotations

from collections.abc import Iterator

from quire.gpu_worker.kernels import attention

from .card import Card, Row
from .floor import prefill_flops, product_weights
from .steps import Steps, loaded
from .timing import seconds_each


def rows(card: Card) -> Iterator[Row]:
    """The kernel, then steps of 512 and 2,048 tokens of one prompt."""
    for prompts, tokens in card.few(((2, 20),), ((1, 1024), (1, 4096), (1, 16384), (8, 1024))):
        yield _attention(card, prompts, tokens)
    heads, _, dim = card.heads
    layers = card.config["num_hidden_layers"]
    with loaded(card, card.config) as model:
        for tokens in card.few((24,), (512, 2048)):
            seconds = Steps(card, model, 0, 0, tokens).seconds(card.few(12, 24))
            flops = 2 * tokens * product_weights(card.config) + layers * prefill_flops(tokens, heads, dim)
            labels, values = card.row("model step", f"1 x {tokens} tokens", seconds, flops=flops)
            yield labels, values | {"tokens_per_s": tokens / seconds}


def prefill_case(card: Card, prompts: int, tokens: int) -> tuple[tuple, float]:
    """Arguments of paged attention for whole prompts, and the operations they take."""
    heads, _, dim = card.heads
    batch, blocks = card.batch(prompts, tokens, tokens)
    q = card.randn(prompts * tokens, heads, dim)
    case = (q, *card.caches(blocks), batch, attention.Scores(dim**-0.5))
    return case, prompts * prefill_flops(tokens, heads, dim)


def _attention(card: Card, prompts: int, tokens: int) -> Row:
    case, flops = prefill_case(card, prompts, tokens)
    seconds = seconds_each([lambda: attention.paged_attention(*case)], card.device)
    others = dict(_sdpa(card, prompts, tokens))
    more = {f"{name.lower()}_us": each * 1e6 for name, each in others.items()}
    best = min(others.values(), default=None)
    if best:
        more["share_of_best_sdpa"] = best / seconds
    return card.row("prefill attention", f"{prompts} x {tokens} tokens", seconds, flops=flops, **more)


def _sdpa(card: Card, prompts: int, tokens: int) -> Iterator[tuple[str, float]]:
    """torch's attention over keys that are not paged and have as many heads as the queries."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    heads, _, dim = card.heads
    q, k, v = (card.randn(prompts, heads, tokens, dim) for _ in range(3))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                call = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                yield backend.name, seconds_each([call], card.device)
        except RuntimeError as error:
            print(f"  {backend.name} does not run here: {str(error).splitlines()[0]}")
