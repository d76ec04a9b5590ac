"""`WatchedHooks`: the observer of a lane that charges changes of the process's state to hooks.

Does not: know the state; see `graphpact_conformance.records.global_state`.
"""

from collections.abc import Generator
from typing import Any

from graphpact.hookspecs import hookimpl
from graphpact_conformance.records.global_state import Call, StateWatch


class WatchedHooks:
    """An observer that charges changes to the hooks in which they happen.

    Args:
        watch: The watch.
    """

    def __init__(self, watch: StateWatch) -> None:
        self._watch = watch

    @hookimpl(wrapper=True, trylast=True)
    def populate(self) -> Generator[None, Any, Any]:
        """Watch the state during this hook."""
        return (yield from self._around("populate"))

    @hookimpl(wrapper=True, trylast=True)
    def prepare_replay(self) -> Generator[None, Any, Any]:
        """Watch the state during this hook."""
        return (yield from self._around("prepare_replay"))

    @hookimpl(wrapper=True, trylast=True)
    def init_metadata_capture(self) -> Generator[None, Any, Any]:
        """Watch the state during this hook."""
        return (yield from self._around("init_metadata_capture"))

    @hookimpl(wrapper=True, trylast=True)
    def init_metadata_replay(self) -> Generator[None, Any, Any]:
        """Watch the state during this hook."""
        return (yield from self._around("init_metadata_replay"))

    def _around(self, hook: str) -> Generator[None, Any, Any]:
        with self._watch.during(Call(f"`{hook}`", hook)):
            return (yield)
