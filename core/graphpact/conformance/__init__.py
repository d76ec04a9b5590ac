"""The conformance suite: does a backend or a runner keep the pact, on a laptop, without a GPU?"""
