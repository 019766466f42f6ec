"""The packed parameters of a row: int32 [COLUMNS], one layout for the host, the twins and the kernels.

The Triton files repeat the numbers they use as ``constexpr``; a test compares them.
"""

COLUMNS = 16

INV_T, LOG_MIN_P, TOP_P = 0, 1, 2
"""float32 bits. INV_T is 1 / temperature; 0 marks a greedy row."""
TOP_K, SEED_LOW, SEED_HIGH = 3, 4, 5
"""Integers. top_k 0 keeps all; the seed's two halves are the Philox key."""
REPETITION, FREQUENCY, PRESENCE = 6, 7, 8
"""float32 bits of the penalties."""
USES, PROMPT_LEN, MIN_TOKENS, LOGPROBS = 9, 10, 11, 12
"""Integers: the bits below; tokens of the prompt; the least number of outputs; logprobs asked for, -1 for none."""

RANDOM, BY_TOP_K, BY_TOP_P, BY_MIN_P = 1, 2, 4, 8
ALLOWED, EDITS, WAITS, WORDS = 16, 32, 64, 128
PENALTIES, COUNTED, WITH_LOGPROBS, BEAM = 256, 512, 1024, 2048
"""Bits of USES, what the row makes use of: a list of allowed tokens; fixed bans and biases; min_tokens; bad words of
several tokens; penalties; penalties whose counts follow the row's own draws (a beam's follow what is appended)."""
