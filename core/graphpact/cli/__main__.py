"""``python -m graphpact.cli``: the same as the command ``graphpact``."""

import sys

from graphpact.cli import main

sys.exit(main())
