"""``graphpact vllm``: vLLM's engine on a laptop, eagerly and on a tape, and what differs.

Does not: import vLLM; each run is a process of its own.
"""

from graphpact_cli.engine_runs import LaptopEngine, engine_app
from graphpact_vllm.offer import VllmOffer
from graphpact_vllm.runs import GRAPHS, LAPTOP

vllm = engine_app(
    LaptopEngine(
        offer=VllmOffer(),
        checkpoint="model",
        laptop=LAPTOP,
        graphs=GRAPHS,
        eager={"enforce_eager": True},
        left_out=("compilation_config", "attention_backend", "speculative"),
    )
)
