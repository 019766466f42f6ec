"""``python -m quire.scheduler``: one scheduler, the only one at its address."""

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: see proto.process.collect_from_now
    from .main import main

    main()
