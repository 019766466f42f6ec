"""``python -m bench gpu --compile``: every kernel for every card, without one.

`cards.py` has the cards, `launches.py` the launches, `compiler.py` what compiles them, `table.py` the table that they
are held to, `roofline.py` and `pages.py` what follows from it.
"""
