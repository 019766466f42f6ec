"""Two network namespaces and a wire between them that can be cut, slow and lossy. Needs root and iproute2.

The wire is a veth pair, or two tun devices with ``relay.py`` between them: that one can be cut without either side
being told, and can delay and lose packets in kernels that have no netem.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

HERE, THERE = "192.0.2.1", "192.0.2.2"
RELAY = Path(__file__).with_name("relay.py")


def missing():
    """Why namespaces cannot be had on this machine, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's `ip`"
    name = f"quire-try-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None if os.path.exists("/dev/net/tun") else "a lossy wire needs /dev/net/tun"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Net:
    """``here`` and ``there``, with a folder for the logs of what runs in them. Leaves nothing behind."""

    def __init__(self, folder, delay_ms=None, loss=0.0):
        """A veth pair; with ``delay_ms`` (one way) a relay, which loses a share ``loss`` of the packets."""
        token = uuid.uuid4().hex[:6]
        self.here, self.there = f"quire-{token}-a", f"quire-{token}-b"
        self.folder, self.processes, self._relay = Path(folder), [], None
        try:
            for space in (self.here, self.there):
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            device = f"q{token}"
            if delay_ms is None:
                ip(
                    "link",
                    "add",
                    device,
                    "netns",
                    self.here,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    device,
                    "netns",
                    self.there,
                )
            else:
                command = [sys.executable, str(RELAY), self.here, self.there, device, str(delay_ms), str(loss)]
                self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert self._relay.stdout.readline() == "ready\n"
            for space, address in ((self.here, HERE), (self.there, THERE)):
                ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", space, "link", "set", device, "up")
            self._device = device
        except BaseException:
            self.close()
            raise

    def start(self, space, *command, **kwargs):
        """A process in a namespace; its output goes to a log unless ``stdout`` is given."""
        with open(self.folder / f"{len(self.processes)}.log", "w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, "-P", *command],
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.folder)},  # a lock on an address knows no namespaces
                **{"stdout": log, "stderr": log, **kwargs},
            )
        process.log = Path(log.name)
        self.processes.append(process)
        return process

    def service(self, space, name, *flags):
        return self.start(space, "-m", f"quire.{name}", *flags)

    def cut(self):
        """From now on nothing passes."""
        if self._relay is None:
            ip("-n", self.there, "link", "set", self._device, "down")
        else:
            self._relay.send_signal(signal.SIGUSR1)

    def mend(self):
        """It does again."""
        if self._relay is None:
            ip("-n", self.there, "link", "set", self._device, "up")
        else:
            self._relay.send_signal(signal.SIGUSR2)

    def logs(self):
        return "\n".join(f"== {p.args[5:8]}\n{p.log.read_text()[-4000:]}" for p in self.processes)

    def close(self):
        """End every process and remove both namespaces, whatever has happened."""
        every = [*self.processes, *([self._relay] if self._relay else [])]
        for process in every:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 5
        for process in every:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for space in (self.here, self.there):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
