"""Entry point of `python -m grassy`, also under torchrun."""

import os
import sys

from grassy.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Under torchrun, threads of gloo outlive their process group. If one of them releases a tensor while the
        # interpreter shuts down, a successful run would end with SIGABRT. So exit without the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
