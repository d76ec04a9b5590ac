"""``graphpact sglang``: SGLang's engine on a laptop, eagerly and on a tape, and what differs.

Does not: import SGLang; each run is a process of its own.
"""

from graphpact_cli.engine_runs import LaptopEngine, engine_app
from graphpact_sglang.offer import SglangOffer
from graphpact_sglang.runs import GRAPHS, LAPTOP

sglang = engine_app(
    LaptopEngine(
        offer=SglangOffer(),
        checkpoint="model_path",
        laptop=LAPTOP,
        graphs=GRAPHS,
        eager={"attention_backend": "torch_native"},
        left_out=("cuda_graph", "attention_backend", "speculative"),
    )
)
