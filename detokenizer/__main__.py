"""``python -m quire.detokenizer``: load the tokenizer, then serve until told to stop."""

import gc

if __name__ == "__main__":
    gc.disable()  # until all is loaded: see proto.process.collect_from_now
    from .main import main

    main()
