"""``python swarm_worker.py '{"llama": "DIR", ...}'``: runs seeds of vLLM with a plant of `swarm_plants`.

Does not: judge what was found; `test_swarm` does.
"""

from swarm_plants import PLANTS

from graphpact_vllm.load.offer import VllmLoad
from planted_runs import serve_plants

if __name__ == "__main__":
    serve_plants(PLANTS, "vllm", VllmLoad())
