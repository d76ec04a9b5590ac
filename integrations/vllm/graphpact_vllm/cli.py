"""``graphpact vllm``: vLLM's engine on a laptop, eagerly and on a tape, and what its releases changed.

Does not: import vLLM; each run is a process of its own, and releases are only read.
"""

from graphpact_cli.engine_runs import LaptopEngine, engine_app
from graphpact_cli.releases.command import add_diff
from graphpact_vllm.offer import VllmOffer
from graphpact_vllm.runs import GRAPHS, LAPTOP
from graphpact_vllm.surface import RELEASES

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
add_diff(vllm, RELEASES)
