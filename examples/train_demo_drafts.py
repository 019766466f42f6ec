"""Train what drafts for quire's demo model: a small draft model, and an EAGLE head, both on its own corpus.

Both learn from the demo model rather than from the corpus: a draft is of use where it says what the demo model would.

    python examples/train_demo_drafts.py                    # demo_model/draft and demo_model/eagle, about 8 minutes
    python examples/train_demo_drafts.py --minutes 1 --out /tmp/d

The draft model is a Llama with the demo model's tokenizer.  The EAGLE head has the published layout of EAGLE-1: ``fc``
makes one vector of the demo model's last hidden state at a position and the embedding of the next token, and one layer
without a norm before its attention makes of it the hidden state of that token.  Embedding and output are the demo
model's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from train_demo_model import batches  # which lies beside this file

README = {
    "draft": """\
# Draft model of the demo model

A Llama of {parameters} parameters with the demo model's tokenizer, which `examples/train_demo_drafts.py` trained to say
what the demo model says:

    quire serve --model demo_model --num-speculative-tokens 4 --speculative-model {folder}

It is made of the same tables and templates as the demo model, and has the same licence (Apache-2.0).
""",
    "eagle": """\
# EAGLE head of the demo model

One layer of {parameters} parameters in the published layout of EAGLE-1, which `examples/train_demo_drafts.py` trained
to continue the demo model's hidden states:

    quire serve --model demo_model --speculative-config \\
        '{{"method": "eagle", "model": "{folder}", "num_speculative_tokens": 4}}'

It is made of the same tables and templates as the demo model, and has the same licence (Apache-2.0).
""",
}


def draft_model(target: Any, layers: int, inner: int) -> Any:
    """The target's first ``layers`` layers, with its embedding and its last norm: a beginning to train from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict(target.config.to_dict())
    config.num_hidden_layers, config.intermediate_size = layers, inner
    model = LlamaForCausalLM(config)
    first = target.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Of a narrower MLP the first rows, or columns.
            parameter.copy_(first[name][tuple(slice(size) for size in parameter.shape)])
    return model


def eagle_head(target: Any, inner: int) -> Any:
    """``fc`` and one layer; ``forward(embedded, hidden)``, [B, T, h] each, gives the next hidden states [B, T, h]."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig.from_dict(target.config.to_dict())
    config.num_hidden_layers, config.intermediate_size, config.vocab_size = 1, inner, 1

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            body = LlamaModel(config)
            body.layers[0].input_layernorm = nn.Identity()
            body.norm = nn.Identity()
            self.body, self.config = body, config

        def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            x = self.fc(torch.cat((embedded, hidden), -1))
            return self.body(inputs_embeds=x, use_cache=False).last_hidden_state

    return Head()


def train(
    parts: Iterable[Any],
    loss_of: Callable[[Any, Any], Any],
    stream: Any,
    steps: int,
    minutes: float,
    peak: float,
    bf16: bool,
) -> None:
    """Muon for matrices, AdamW for the rest, as the demo model was trained; ends by steps or by the clock."""
    import torch

    parameters = [(n, p) for part in parts for n, p in part.named_parameters() if p.requires_grad]
    matrices = [p for n, p in parameters if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in parameters if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    begin, seen, told = time.monotonic(), 0, {}
    while (done := max(seen / steps, (time.monotonic() - begin) / (60 * minutes))) < 1:
        lr = peak * min(1.0, (seen + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            losses = loss_of(*next(stream))
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in parameters], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += 1
        for name, loss in losses.items():
            told[name] = 0.95 * told.get(name, loss.item()) + 0.05 * loss.item()
        if seen % 50 == 0:
            line = ", ".join(f"{name} {value:.4f}" for name, value in told.items())
            print(
                f"step {seen} done {done:.3f} {line} lr {lr:.2e} {(time.monotonic() - begin) / 60:.1f} min", flush=True
            )


def with_states(target: Any, stream: Iterator[tuple], uses: int, bf16: bool) -> Iterator[tuple]:
    """Batches of ids, weights and the target's last hidden states, which take longest to make: each is used ``uses``
    times, with others between."""
    import torch

    rng, kept = random.Random(1), []
    while True:
        if len(kept) < 8 or rng.random() < 1 / uses:
            rows, weights = next(stream)
            ids = rows[:, :-1]
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
            kept.append((ids, weights[:, 1:], hidden))
            del kept[:-256]
            yield kept[-1]
        else:
            yield rng.choice(kept)


def losses_of(target: Any, draft: Any, head: Any, share: float = 0.25) -> Callable[..., dict[str, Any]]:
    """What a batch costs each of them: the Kullback-Leibler divergence of the next tokens from the target's in nats,
    for the head at a ``share`` of the positions, and how far its hidden states are from the target's."""
    import torch
    import torch.nn.functional as F

    embed, output = target.get_input_embeddings().weight, target.lm_head.weight

    def divergence(logits: torch.Tensor, after: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of [N, V] from what the target says behind hidden states [N, hidden]."""
        wanted = F.softmax(F.linear(after, output).float(), -1)
        losses = F.kl_div(F.log_softmax(logits.float(), -1), wanted, reduction="none").sum(-1)
        return (losses * weights).sum() / weights.sum()

    def loss_of(ids: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        if draft is not None:
            logits = draft(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            found["draft"] = divergence(logits, hidden.flatten(0, 1), weights.flatten())
        if head is not None:
            # From the token behind a position and its hidden state to the hidden state of that token.
            embedded, before, after = F.embedding(ids[:, 1:], embed), hidden[:, :-1], hidden[:, 1:].flatten(0, 1)
            for turn in range(2):  # the head goes on from its own states when it drafts more than one token
                made = head(embedded, before)
                flat, scales = made.flatten(0, 1), weights[:, 1:].flatten()
                some = torch.randperm(len(flat))[: int(share * len(flat))]
                logits = F.linear(flat[some], output)
                found[f"eagle {turn + 1}"] = divergence(logits, after[some], scales[some])
                found[f"state {turn + 1}"] = 0.3 * F.smooth_l1_loss(flat.float(), after.float())
                before = torch.cat((hidden[:, :1], made[:, :-1].to(hidden.dtype)), 1)
        return found

    return loss_of


def save_head(head: Any, target: Any, out: Path) -> None:
    """In the published layout: the tensors' names begin at fc and layers.0."""
    import torch
    from safetensors.torch import save_file

    table = {"fc.weight": head.fc.weight}
    table |= {n: p for n, p in head.body.named_parameters() if n.startswith("layers.")}
    out.mkdir(parents=True, exist_ok=True)
    save_file({n: p.detach().to(torch.bfloat16).contiguous() for n, p in table.items()}, out / "model.safetensors")
    config = head.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "vocab_size": target.config.vocab_size}
    config = {key: value for key, value in config.items() if not key.startswith("_")} | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def finish(kind: str, model: Any, out: Path) -> None:
    """The README, and files that everybody may read."""
    count = f"{sum(p.numel() for p in model.parameters()):,}"
    (out / "README.md").write_text(README[kind].format(parameters=count, folder=f"demo_model/{kind}"))
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors are written for the owner alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("demo_model"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="where draft/ and eagle/ are written (default: the target's folder)")
    parser.add_argument("--start", type=Path, help="a draft model to go on from")
    parser.add_argument("--only", choices=("draft", "eagle"), help="default: both")
    parser.add_argument(
        "--minutes", type=float, default=8, help="stop by the clock at the latest (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3000, help="steps to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024, help="tokens in a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--float32", action="store_true", help="multiply in float32, for processors slow at bfloat16")
    parser.add_argument("--layers", type=int, default=1, help="of the draft model (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=320, help="intermediate_size of both (default: %(default)s)")
    options = parser.parse_args()

    # Threads that wait must sleep, not spin: on a busy machine spinning takes the time from the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    out = options.out or options.target
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).requires_grad_(False).eval()
    draft = None if options.only == "eagle" else draft_model(target, options.layers, options.inner)
    if draft is not None and options.start is not None:
        draft = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    head = None if options.only == "draft" else eagle_head(target, options.inner)
    # A batch that is shorter than the longest rows is empty in their turn.
    stream = (pair for pair in batches(options.seed + 7, tokenizer, options.batch) if pair[0].ndim == 2)
    parts = [part for part in (draft, head) if part is not None]
    stream, losses = with_states(target, stream, 4, not options.float32), losses_of(target, draft, head)
    train(parts, losses, stream, options.steps, options.minutes, options.lr, not options.float32)
    if draft is not None:
        draft.generation_config = target.generation_config
        draft.to(torch.bfloat16).save_pretrained(out / "draft", safe_serialization=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(options.target / name, out / "draft" / name)
        finish("draft", draft, out / "draft")
    if head is not None:
        save_head(head, target, out / "eagle")
        finish("eagle", head, out / "eagle")


if __name__ == "__main__":
    main()
