"""A whole cluster in one process, on a simulated clock and network, from one seed.

The scheduler, the detokenizers, the Engines and the supervisor's policy are the real objects; workers are the fake
one, whose page store knows what every token must be. ``timeline.py`` has the clock, ``host.py`` a process that can be
killed and stopped, ``network.py`` links that behave as ZeroMQ's do, ``world.py`` the processes; ``asks.py`` what users
want, ``faults.py`` what goes wrong.
"""
