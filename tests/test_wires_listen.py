"""After start only the HTTP port listens off loopback where the wires are TCP; ``test_stack`` has socket files."""

import ipaddress
import os
import struct
from pathlib import Path

from stack import Server, free_port

from quire.proto.keys import Keys

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


def test_only_the_http_port_listens_off_loopback(tmp_path):
    keys = str(tmp_path / "keys")
    Keys.generate().save(keys)
    server = Server("--host=0.0.0.0", f"--scheduler=tcp://127.0.0.1:{free_port(2)}", f"--keys={keys}")
    try:
        pids = [server.process.pid, *(child.pid for child in server.children())]
        found = listeners(pids)
        port = int(server.url.rpartition(":")[2])
        assert {where for where in found if not where[0].is_loopback} == {(ipaddress.ip_address("0.0.0.0"), port)}
        assert len([where for where in found if where[0].is_loopback]) == 3
    finally:
        server.close()
