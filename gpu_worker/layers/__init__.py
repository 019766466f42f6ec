"""The parts of a decoder layer. Each chooses the Triton kernel on a GPU and torch operations on a CPU."""
