"""``python -m megatron_lrl``."""

import sys

from megatron_lrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
