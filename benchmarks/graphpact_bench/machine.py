"""The hardware and the versions that a report names.

Does not: measure anything.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from graphpact_bench.report import Machine
from graphpact_cli.distributions import installed_versions

_OTHERS = ("torch", "transformers")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe_machine(device: torch.device) -> Machine:
    """Return what this process runs on.

    Args:
        device: The device of the models.
    """
    cache = cache_bytes()
    cpu = cpu_name()
    return Machine(
        cpu=cpu,
        cores=usable_cores(),
        cache_mib=None if cache is None else cache / 2**20,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        threads=torch.get_num_threads(),
        versions={**_versions_of_others(), **installed_versions()},
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def cache_bytes() -> int | None:
    """Return the size of the last-level cache, or None where the system does not say it."""
    sizes = []
    for file in _CACHES.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        factor = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        if digits.isdecimal():
            sizes.append(int(digits) * factor)
    return max(sizes, default=None)


def _versions_of_others() -> dict[str, str]:
    found = {}
    for name in _OTHERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
