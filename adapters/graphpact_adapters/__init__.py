"""Attention metadata builders of other engines, unedited, under the conformance suite.

    vllm        builders of vLLM's kind

Does not: import an engine; an adapter knows an engine's objects by protocol.
"""
