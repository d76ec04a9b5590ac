"""``python -m graphpact_cli``: the same as the command ``graphpact``."""

import sys

from graphpact_cli import main

sys.exit(main())
