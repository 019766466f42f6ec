"""After start only the HTTP port listens off loopback where the wires are TCP; ``test_stack`` has socket files."""

import ipaddress

from listeners import listeners
from stack import Server, free_port

from quire.proto.wire.keys import Keys


def test_only_the_http_port_listens_off_loopback(tmp_path):
    keys = str(tmp_path / "keys")
    Keys.generate().save(keys)
    server = Server("--host=0.0.0.0", f"--scheduler=tcp://127.0.0.1:{free_port(2)}", f"--keys={keys}")
    try:
        pids = [server.process.pid, *(child.pid for child in server.children())]
        found = listeners(pids)
        port = int(server.url.rpartition(":")[2])
        assert {where for where in found if not where[0].is_loopback} == {(ipaddress.ip_address("0.0.0.0"), port)}
        # The scheduler's two, the detokenizer's, and where the worker is given pages of others.
        assert len([where for where in found if where[0].is_loopback]) == 4
    finally:
        server.close()
