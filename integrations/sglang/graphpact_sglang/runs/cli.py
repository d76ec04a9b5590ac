"""``graphpact sglang``: SGLang's engine on a laptop, eagerly and on a tape, and what its releases changed.

Does not: import SGLang; each run is a process of its own, and releases are only read.
"""

from graphpact_cli.engine_runs import LaptopEngine, engine_app
from graphpact_cli.releases.command import add_diff
from graphpact_sglang.arguments import GRAPHS, LAPTOP
from graphpact_sglang.runs.offer import SglangOffer
from graphpact_sglang.runs.surface import RELEASES

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
add_diff(sglang, RELEASES)
