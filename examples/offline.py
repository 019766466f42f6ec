"""Offline batched inference: a list of prompts in, a list of outputs in the same order.

Run it with ``python examples/offline.py``. Without a model name the demo model answers; name a folder or a hub id for
another, as in ``LLM(model="Qwen/Qwen2.5-0.5B-Instruct")``; for pickled weights (``.bin``) with ``load_format="pt"``,
as in ``LLM(model="facebook/opt-125m", load_format="pt")``.
"""

from quire import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model="quire-demo")

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
