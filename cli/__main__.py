"""``python -m quire.cli`` is ``quire``."""

from .main import main

if __name__ == "__main__":
    main()
