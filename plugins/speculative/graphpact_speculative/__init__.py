"""Speculative decoding: runners that record drafts, and the algorithms that use them.

    algorithms  which lanes run in which order, and their batches
    runners     what the graphs of drafts and of draft extends record
    tree        the drafts of a request as a tree, and the choice of the best ones

Does not: contain a draft model, verify drafts, or sample tokens; engines do.
"""

from graphpact_speculative.algorithms import Eagle, FrozenKvMtp
from graphpact_speculative.runners import EagleDraftExtendRunner, EagleDraftRunner, FrozenKvMtpRunner

__all__ = ["Eagle", "EagleDraftExtendRunner", "EagleDraftRunner", "FrozenKvMtp", "FrozenKvMtpRunner"]
