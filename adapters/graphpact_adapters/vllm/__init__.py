"""Builders of vLLM's kind: constructed with a KV cache spec, layer names, a configuration and a device.

    given       the plain spec and configuration that the suite gives to any author's builder

Does not: import vLLM.
"""
