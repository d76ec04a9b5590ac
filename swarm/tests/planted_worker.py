"""``python planted_worker.py '{"llama": "DIR", ...}'``: runs seeds of our engine with a plant of `plants`.

Does not: judge what was found; `test_planted` does.
"""

from plants import PLANTS

from graphpact_engine.load.offer import GraphpactLoad
from planted_runs import serve_plants

if __name__ == "__main__":
    serve_plants(PLANTS, "graphpact", GraphpactLoad())
