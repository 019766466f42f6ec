"""What processes listen on."""

import ipaddress
import os
import struct
from pathlib import Path

LISTEN = "0A"


def listeners(pids):
    """(address, port) of every TCP socket that these processes listen on."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN and columns[9] in inodes:
                address, port = columns[1].split(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                ip = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
                found.append((getattr(ip, "ipv4_mapped", None) or ip, int(port, 16)))
    return found
