"""Weight formats: how a linear layer's weight lies in a checkpoint and in memory, and how it is multiplied.

One file a format. ``base.py`` has the words, ``dense.py`` chooses among the formats of float weights, and
``registry.py`` finds the format that a config.json names.
"""
