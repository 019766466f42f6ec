"""Flags of llama.cpp, SGLang and text-generation-inference, and Ollama's commands: what to write for each here."""

from __future__ import annotations

_MODEL = "name the model without a flag, `quire serve MODEL`: a folder, a GGUF file or a name on the hub"
_TABLE = {
    _MODEL: "-m -hf -hfr --hf-repo -hff --hf-file -mu --model-url --model-path --model-id",
    "use --max-model-len, which is of one sequence": "-c --ctx-size --context-length --max-total-tokens",
    "use --device; all layers are on the GPU where there is one": "-ngl --gpu-layers --n-gpu-layers",
    "use --cpu-threads": "-t --threads -tb --threads-batch",
    "use --max-num-batched-tokens, tokens of one step": "-b --batch-size -ub --ubatch-size --chunked-prefill-size",
    "use --max-num-seqs, sequences that run at once": "-np --parallel --max-running-requests --max-concurrent-requests",
    "use --tensor-parallel-size": "-ts --tensor-split -sm --split-mode --tp --tp-size --num-shard",
    "use --attention-backend": "-fa --flash-attn",
    "use --kv-cache-dtype, which is of keys and values alike": "-ctk --cache-type-k -ctv --cache-type-v",
    "use --speculative-config": "-md --model-draft --draft --draft-max --draft-min",
    "use --enable-lora and --lora-modules": "--lora --lora-paths",
    "use --runner pooling": "--embedding --embeddings --rerank --reranking --is-embedding",
    "use --chat-template": "--chat-template-file",
    "use --served-model-name": "-a --alias",
    "use --host": "--hostname",
    "use --data-parallel-size": "--dp --dp-size",
    "use --gpu-memory-utilization": "--mem-fraction-static --cuda-memory-fraction",
    "use --no-enable-prefix-caching": "--disable-radix-cache",
    "use --enforce-eager": "--disable-cuda-graph",
    "use --quantization": "--quantize",
}
FOREIGN = {flag: said for said, flags in _TABLE.items() for flag in flags.split()}
"""Flag -> what to write in its place."""

COMMANDS = {
    "run": "`quire serve MODEL` starts a server, and `quire chat` talks to it",
    "pull": "`quire serve MODEL` fetches a model of the hub by itself",
    "list": "`/model` in `quire chat` lists a server's models, `quire workers list` its workers",
    "ps": "`quire workers list` lists a server's workers, and `quire top` watches it",
    "show": "`quire fit MODEL` tells what a model needs",
    "rm": "quire keeps no models of its own: delete the model's folder",
}
"""Commands of Ollama, and what does the same here."""
