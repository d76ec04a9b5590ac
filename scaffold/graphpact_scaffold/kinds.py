"""`NewKind`: the kinds of distributions that `graphpact new` writes.

Does not: hold their files; the folder ``template`` does.
"""

import enum

from graphpact.plugins import Kind


class NewKind(enum.StrEnum):
    """What the plugin of a new distribution does.

    Attributes:
        attention_backend: Metadata and kernels of attention.
        runner: Which steps are captured, and how a batch is padded.
        graph_driver: How a region is recorded and replayed.
        observer: A wrapper of hooks.
        speculation: An algorithm of speculative decoding.
        vllm_builder: An attention backend of vLLM with a metadata builder.
        sglang_backend: An attention backend of SGLang.
    """

    attention_backend = "attention-backend"
    runner = "runner"
    graph_driver = "graph-driver"
    observer = "observer"
    speculation = "speculation"
    vllm_builder = "vllm-builder"
    sglang_backend = "sglang-backend"

    @property
    def offers(self) -> Kind:
        """The kind of the plugin by which graphpact finds it."""
        return _OFFERS[self]


_OFFERS: dict[NewKind, Kind] = {
    NewKind.attention_backend: "attention_backend",
    NewKind.runner: "runner",
    NewKind.graph_driver: "graph_driver",
    NewKind.observer: "observer",
    NewKind.speculation: "speculation",
    NewKind.vllm_builder: "adapter",
    NewKind.sglang_backend: "adapter",
}
