"""`python -m grassy`, which is also what torchrun starts."""

import os
import sys

from grassy.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # One process of several. The threads of gloo outlive their group once a model has been wrapped for it, and one
        # that lets go of a tensor while the interpreter shuts down aborts it: a good run would end with SIGABRT.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
