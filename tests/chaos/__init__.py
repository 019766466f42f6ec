"""Any process may be killed, stopped or cut off at any moment: the tools that do it, and what must hold then.

``cluster`` starts the processes and puts others in the place of those that end, ``proxy`` stands in their connections,
``asks`` are the requests and their answers, ``faults`` is what goes wrong, ``storm`` puts all of it together.
"""
