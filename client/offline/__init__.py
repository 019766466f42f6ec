"""The offline ``LLM``: batches, chat, beams and pooling over an Engine in a thread of its own."""
