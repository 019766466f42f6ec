"""``python -m quire.frontend``: listen, and answer until told to stop."""

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: see proto.process.collect_from_now
    from .main import main

    main()
