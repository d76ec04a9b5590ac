"""The one door to what is tested: protocols and records, through which experiments see it.

    under_test     `UnderTest`, what is tested in one configuration, and `Subject`, an instance of it
    records        what one step of a subject read and gave
    kv_memory      the KV cache of a subject
    global_state   the state of the process that a plugin must leave as it is
    raised         what a raised error says

Does not: know what is behind the door; a lane is one such thing (`graphpact_conformance.lane`).
"""
