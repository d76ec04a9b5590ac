"""`need_extra`: checks that the packages of an extra are installed.

Does not: import them.
"""

from importlib.util import find_spec

from graphpact.errors import UsageError


def need_extra(extra: str, *packages: str, of: str = "graphpact") -> None:
    """Check that packages of an extra are installed.

    Args:
        extra: The name of the extra.
        packages: The packages that are needed.
        of: The distribution that has the extra.

    Raises:
        UsageError: A package is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            what = f"this needs {package}, which is not installed"
            raise UsageError(what, hint=f'pip install "{of}[{extra}]"')
