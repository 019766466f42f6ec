"""``python -m quire.gpu_worker``: one device's worker. Exit codes: 0 asked to end, 78 cannot work as configured."""

import gc
import sys

from .early import set_environment

if __name__ == "__main__":
    gc.disable()  # until all is imported: see proto.process.collect_from_now
    set_environment()
    from .main import main

    sys.exit(main())
