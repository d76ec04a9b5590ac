"""`KNOWN`: bugs of vLLM 0.32 that generated load finds, and that were looked into.

Does not: cover what is not vLLM's own.
"""

from graphpact.engines import KnownFinding

KNOWN = (
    KnownFinding(
        kind="process",
        text="rank ?: the process took more than 60 s, and was killed",
        choice={"parallel": ("tp2",)},
        reason="ranks on CPUs add up in shared memory, and wait without a limit for a rank that was killed"
        " (torch.ops._C.shm_allreduce, in device_communicators/cpu_communicator.py)",
    ),
    KnownFinding(
        kind="raised",
        text="AssertionError*",
        choice={"runner": ("V2",), "parallel": ("dp2",), "drafts": ("draft_model:1", "draft_model:3")},
        reason="the drafter of the model runner V2 runs one token more of each request than the number of"
        " tokens that it gives to the other ranks (an assertion in DPMetadata.make)",
    ),
)
"""The findings. Only a run with a killed rank has the limit of 60 s."""
