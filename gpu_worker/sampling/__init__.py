"""From logits to tokens: the sampler, its rows' state, and what has to see the tokens on the host."""
