"""``python -m quire.cli`` is ``quire``."""

from .main import main

main()
