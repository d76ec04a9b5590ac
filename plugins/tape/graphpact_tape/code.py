"""Straight-line code: how a fast tape becomes one Python function.

A replay that loops over the recorded operations looks up each operation, unpacks its arguments, and parses
them against the schema. The generated function has one statement for each step instead, with every object
bound to a name:

    mm(t7, t8, out=t9)
    t11.index_copy_(0, t12, t13)

Four passes make the statements from the steps of a recording. Each pass keeps the results of the loop bit for
bit; ``plugins/tape/tests/test_code.py`` compares them.

1. `graphpact_tape.nodes` chooses the operation that repeats a recorded call into its memory.
2. `graphpact_tape.rewrites` replaces steps by cheaper ones.
3. `graphpact_tape.reuse` gives intermediates the memory of other ones that are no longer needed.
4. An operation is called through torch's binding (``torch.mul``), whose parser is compiled for that
   operation, if a trial call dispatches exactly that operation with those arguments. Otherwise it is called
   through its overload.

Does not: change what a kernel computes, fuse kernels, or run on another thread.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.nodes import Node
from graphpact_tape.trees import leaves_of, tensors_of

__tracebackhide__ = True

_aten = torch.ops.aten

_NAMESPACES = ("_VariableFunctions", "_nn", "_linalg", "_special")
_BINDINGS = tuple(getattr(torch._C, name) for name in _NAMESPACES)  # noqa: SLF001  no public names
"""The functions of torch, without the Python wrappers that some of them have."""

_LITERALS = (bool, int, str, type(None))


class Code:
    """The generated function of a tape.

    Args:
        nodes: The nodes of a tape, whose operations are overloads, and its eager calls.

    Attributes:
        source: The source code of the function.
        names: The objects by their names in the source code.
        run: The function. It takes and returns nothing.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        names = _Names()
        with _Trial() as trial:
            statements = [_statement(node, names, trial) for node in nodes]
        body = "".join(f"\n            {statement}" for statement in statements or ["pass"])
        self.source = (
            f"def bind({', '.join(['inference_mode', *names.values])}):\n"
            "    def replay():\n"
            f"        with inference_mode():{body}\n"
            "    return replay\n"
        )
        self.names = names.values
        made: dict[str, Any] = {}
        exec(compile(self.source, "<tape>", "exec"), made)  # noqa: S102  the code is generated here
        self.run: Callable[[], None] = made["bind"](torch.inference_mode, *names.values.values())


class _Names:
    """Names of the objects in the generated code.

    Attributes:
        values: The objects by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def of(self, value: Any, prefix: str) -> str:
        """Return the name of an object, always the same name for the same object."""
        if id(value) not in self._known:
            name = self._known[id(value)] = f"{prefix}{len(self.values)}"
            self.values[name] = value
        return self._known[id(value)]

    def argument(self, value: Any) -> str:
        """Return the source code of an argument."""
        if isinstance(value, torch.Tensor):
            return self.of(value, "t")
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self.of(value, "c")

    def arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        """Return the source code of the arguments of a call."""
        named = (f"{name}={self.argument(value)}" for name, value in kwargs.items())
        return ", ".join([*map(self.argument, args), *named])


def _statement(node: Node, names: _Names, trial: "_Trial") -> str:
    op, args, kwargs = node
    if not isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
        return f"{names.of(op, 'call')}({names.arguments(args, kwargs)})"
    name = op.overloadpacket.__name__
    outputs = [a.name for a in op._schema.arguments if a.is_out]  # noqa: SLF001  no public way
    if not outputs and args and isinstance(args[0], torch.Tensor):
        method = getattr(args[0], name, None)
        if method is not None and trial.dispatches(node, lambda: method(*args[1:], **kwargs)):
            return f"{names.argument(args[0])}.{name}({names.arguments(args[1:], kwargs)})"
    given = {key: value for key, value in kwargs.items() if key not in outputs}
    if outputs and tensors_of(
        (args, given)
    ):  # otherwise a mode that sets the default device would change the call
        into = tuple(kwargs[key] for key in outputs)
        called = {**given, "out": into[0] if len(into) == 1 else into}
        for namespace in _BINDINGS:
            function = getattr(namespace, name, None)
            if function is not None and trial.dispatches(node, lambda: function(*args, **called)):  # noqa: B023
                return f"{names.of(function, name + '_')}({names.arguments(args, called)})"
    return f"{names.of(op._op, name + '_')}({names.arguments(args, kwargs)})"  # noqa: SLF001


class _Trial(DispatchMode):
    """A dispatch mode that runs nothing and compares the dispatched operation with an expected one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._dispatched: list[Node] = []

    def dispatches(self, node: Node, call: Callable[[], object]) -> bool:
        """Return whether ``call()`` dispatches ``node`` and no other operation."""
        self._dispatched.clear()
        try:
            call()
        except (
            TypeError,
            ValueError,
            IndexError,
            RuntimeError,
        ):  # this binding does not accept these arguments
            return False
        found = [_normal(each) for each in self._dispatched]
        self._dispatched.clear()
        return len(found) == 1 and _equal(found[0], _normal(node))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._dispatched.append((func, args, kwargs or {}))
        marked = [  # the number of results in its schema
            tensors_of(args[at] if at < len(args) else (kwargs or {}).get(a.name))
            for at, a in enumerate(func._schema.arguments)  # noqa: SLF001  no public way
            if a.alias_info is not None and a.alias_info.is_write
        ]
        results = [t for tensors in marked for t in tensors]
        return results[0] if len(results) == 1 else tuple(results)


def _normal(node: Node) -> list[Any]:
    """Return the operation of a node and the leaves of its arguments, including default values."""
    op, args, kwargs = node
    if not isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
        return [op]
    schema = op._schema.arguments  # noqa: SLF001  no public way
    names = [a.name for a in schema]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    values = [given.get(a.name, a.default_value) for a in schema]
    return [op, *((len(leaves_of(v)), *leaves_of(v)) for v in values)]


def _equal(first: list[Any], second: list[Any]) -> bool:
    """Return whether two normal nodes are equal: the same tensors, and equal values of the same types."""
    if first[0] is not second[0] or len(first) != len(second):
        return False
    pairs = (pair for each in zip(first[1:], second[1:], strict=True) for pair in zip(*each, strict=False))
    return all(
        a is b if isinstance(a, torch.Tensor) else type(a) is type(b) and repr(a) == repr(b) for a, b in pairs
    )
