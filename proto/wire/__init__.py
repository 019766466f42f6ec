"""How messages cross: sockets, bounds for peers that do not read, keys, addresses."""
