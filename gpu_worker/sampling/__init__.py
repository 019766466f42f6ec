"""From logits to tokens: the sampler, its rows' state, and the followers, which need them on the host."""
