"""From logits to tokens: the sampler, its rows' state, and what follows the tokens on the host."""
