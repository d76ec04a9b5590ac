"""Write contract_next.json.

Does not: write a released version's file; docs/reference/versions.md says how one is made.
"""

import sys

from versions.contract import main

sys.exit(main())
