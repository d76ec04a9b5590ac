"""`need_extra`: what a command needs beyond its own distribution.

Does not: import what it looks for.
"""

from importlib.util import find_spec

from graphpact.errors import UsageError


def need_extra(extra: str, *packages: str, of: str = "graphpact") -> None:
    """See that what an extra of graphpact brings is there.

    Args:
        extra: Its name.
        packages: Those of its packages that are needed now.
        of: The distribution that has the extra.

    Raises:
        UsageError: One is missing.
    """
    for package in packages:
        if find_spec(package) is None:
            raise UsageError(
                f"this needs {package}, which is not installed",
                hint=f'pip install "{of}[{extra}]"',
            )
