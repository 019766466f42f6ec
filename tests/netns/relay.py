"""``relay.py NAMESPACE NAMESPACE DEVICE DELAY_MS LOSS``: a wire between two tun devices, slow and lossy as asked.

SIGUSR1 cuts it: neither side is told. SIGUSR2 mends it.
"""

import collections
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


def tun(namespace, device):
    """A tun device in ``namespace``: packets sent there are read here, and those written here arrive there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def main(first, second, device, delay_ms, loss):
    one, two = tun(first, device), tun(second, device)
    other = {one: two, two: one}
    delay, lost, rng = float(delay_ms) / 1000, float(loss), random.Random(0)
    under_way = collections.deque()  # (due, descriptor, packet), in order: all are as slow
    is_cut = [False]
    signal.signal(signal.SIGUSR1, lambda *_: is_cut.__setitem__(0, True))
    signal.signal(signal.SIGUSR2, lambda *_: is_cut.__setitem__(0, False))
    print("ready", flush=True)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for fd in select.select([one, two], [], [], wait)[0]:
            packet = os.read(fd, 65536)
            if not is_cut[0] and rng.random() >= lost:
                under_way.append((time.monotonic() + delay, other[fd], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, fd, packet = under_way.popleft()
            if not is_cut[0]:
                try:
                    os.write(fd, packet)
                except OSError:
                    pass  # the device is down: a lost packet like others


if __name__ == "__main__":
    main(*sys.argv[1:])
