"""Real processes with one socket each, told what to do by lines: what the simulated network is compared with.

Started once; each line ``PATH KIND ENDPOINT IDENTITY`` forks a process that connects to the control socket PATH. There
it gets commands, and writes what comes to its socket. Heartbeats are short here, so that a test need not wait for them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

import msgspec

from quire.proto.wire import sockets, wire


class Note(msgspec.Struct, tag="note"):
    """What the processes send: a number, and bytes to make it longer."""

    number: int
    filling: bytes = b""


def shorten() -> None:
    """Twentieths of the product's times, and frames of a mebibyte at most."""
    wire.HEARTBEAT_MS, wire.HEARTBEAT_TIMEOUT_MS, wire.CONNECT_TIMEOUT_MS = 100, 500, 150
    sockets.MAX_FRAME = wire.MAX_FRAME = 2**20


class Process:
    """One process: its socket, and the control connection."""

    def __init__(self, path: str, kind: str, endpoint: str, identity: str):
        self.control = socket.socket(socket.AF_UNIX)
        self.control.connect(path)
        self.commands = self.control.makefile("r")
        self.hangs = False
        self.wire: Any = (
            sockets.Router(Note, endpoint) if kind == "router" else sockets.Dealer(Note, endpoint, identity)
        )
        self.monitor = self.wire.monitor()
        self.say("begun", os.getpid())

    def say(self, kind: str, *values: Any) -> None:
        """One line to whoever tests."""
        self.control.sendall(json.dumps([kind, *values]).encode() + b"\n")

    def run(self) -> None:
        """Until it is told to end, or the control connection does."""
        poll = select.poll()
        for number in (wire.descriptor(self.wire.socket), wire.descriptor(self.monitor), self.control.fileno()):
            poll.register(number, select.POLLIN)
        while True:
            waits = not self.hangs and self.wire.waits()
            ready = dict(poll.poll(0 if waits else 20))
            if self.control.fileno() in ready and not self.command():
                return
            if not self.hangs:
                self.read()

    def read(self) -> None:
        """What has come."""
        while self.wire.waits():
            if (got := self.wire.recv()) is not None:
                peer, note = got if isinstance(got, tuple) else ("", got)
                self.say("got", peer if peer.isprintable() else "nobody", note.number)
        while (event := self.wire.next_event()) is not None:
            self.say("event", event)

    def command(self) -> bool:
        """Do what the next line says. False at the end."""
        line = self.commands.readline()
        if not line:
            return False
        what, *values = json.loads(line)
        if what == "hang":
            self.hangs = True
            self.say("done", None)
        elif what == "go on":
            self.hangs = False
            self.say("done", None)
        elif what == "raw":
            self.wire._put_frame(bytes.fromhex(values[0]), wire.NOBLOCK)
            self.say("done", None)
        elif what == "bad frames":
            self.say("done", self.wire.bad_frames)
        else:
            peer, numbers, size = values
            to = (peer,) if peer else ()
            self.say("done", [self.wire.send(*to, Note(number, bytes(size))) for number in numbers])
        return True


def main() -> None:
    """Fork what the lines of standard input ask for; end with it."""
    shorten()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        if os.fork() == 0:
            sys.stdin.close()
            path, kind, endpoint, identity = line.split()
            Process(path, kind, endpoint, identity).run()
            os._exit(0)


if __name__ == "__main__":
    main()
