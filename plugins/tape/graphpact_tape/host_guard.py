"""Refuse host reads of device tensors: `HostReadGuard` and `Watcher`.

Reading a device tensor on the host is refused, because on a GPU it would stall the host or break a capture.
Most host reads reach the dispatcher (``_local_scalar_dense``), where a `TorchDispatchMode` sees them. On a
CPU some do not, such as ``tolist`` and ``numpy``, so a `TorchFunctionMode` is needed as well.

In strict host memory, operations that mix host and device tensors are refused too, such as a copy from host
memory, or an index on the host. Tensors that are not plain are refused: sparse, nested, mkldnn and quantized.

Does not: record anything, or see a read that bypasses torch (a raw pointer); see `graphpact_tape.raw`.
"""

import abc
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphpact.errors import ContractError
from graphpact.graphs.lines import Line
from graphpact.tensors import storage_id
from graphpact_tape.host_calls import (
    ADDRESSES,
    COMPOSITE,
    FROM_PYTHON,
    INDEX_PUTS,
    MASKED_FILLS,
    READS,
    call_of_pinned,
    has_mask,
    is_composite,
    is_made_on_host,
    is_placed,
    pins,
    reads_on_host,
)
from graphpact_tape.host_tensors import HostMemory, kind_of, plain_of, plain_tensors
from graphpact_tape.operators import python_implementation, written_by
from graphpact_tape.trees import leaves_of, tensors_of

__tracebackhide__ = True

_aten = torch.ops.aten
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class HostReadGuard(TorchFunctionMode):
    """A function mode that refuses host reads and host-device copies that do not reach the dispatcher.

    Args:
        host: The host memory, which may be read.
        when: For messages, such as ``"while a graph is recorded"``.
        error: The class of the error to raise.

    Attributes:
        refused: The first error that was raised, in case the caller caught it.
        paused: Whether all calls are allowed, for instance inside an eager call.
        copying: Whether a copy from host memory is allowed, because the driver itself makes one.
        addressed: The storages whose address the caller asked for, by `storage_id`, each with the first line
            that did.
        may_pin: Whether pinned memory may be made, which is allowed outside a capture.
        check_use: Called with each host tensor that is read or written, to raise if a copy to it is in
            flight; None where no copy can be.
    """

    def __init__(self, host: HostMemory, when: str, error: type[ContractError]) -> None:
        super().__init__()
        self.addressed: dict[int, tuple[torch.UntypedStorage, Line]] = {}
        self.host = host
        self.when = when
        self.error = error
        self.refused: ContractError | None = None
        self.paused = False
        self.copying = False
        self._operators: list[str] = []  # operators with a Python implementation that run now
        self.may_pin = False
        self.check_use: Callable[[torch.Tensor], None] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in READS:
            if args[0] not in self.host:
                raise self.host_read(READS[func])
            if self.check_use is not None:
                self.check_use(args[0])
        if func in ADDRESSES:
            self._note_address(args[0], sys._getframe(1))  # noqa: SLF001  no public way
        if func is torch.Tensor.__deepcopy__:  # replaces storages below the dispatcher
            func, args = torch.clone, args[:1]
        if func is torch.Tensor.__setitem__:
            self._check_masked_write(args[1], args[2])
        outer = self.host.call
        if self.host.depth == 0:
            self.host.call = args, kwargs
        try:
            if self.host.strict:
                return self._strictly(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.host.call = outer

    def _strictly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, and add the tensors that it makes on the host to the host memory."""
        host = self.host
        device = kwargs.get("device")
        if func is torch.Tensor.is_pinned and host.is_pinned(args[0]):
            return True
        is_pinned = pins(func, kwargs)
        placed = is_placed(kwargs) and not is_pinned
        if is_pinned:
            self._check_pinning(func, args)
            func, args, kwargs = call_of_pinned(func, args, kwargs)
        made_on_host = is_pinned or is_made_on_host(func, args, kwargs)
        if func is torch.Tensor.new_tensor or (func in FROM_PYTHON and placed and not tensors_of(args[:1])):
            raise self.refusal(
                "copies Python numbers to the device, which makes the host wait,",
                "make the tensor earlier, or use torch.full or torch.arange, which run on the device",
            )
        if func is torch.Tensor.to:
            self._check_to(args, device)
        is_type = func is torch.Tensor.type and args[1:] and not isinstance(args[1], torch.dtype)
        if is_type and args[0] not in host:
            raise self.host_read("Tensor.type() with a host tensor type")
        host.depth += made_on_host
        try:
            result = func(*args, **kwargs)
        finally:
            host.depth -= made_on_host
        if is_pinned:
            host.pin(tensors_of(result))
        elif made_on_host:
            host.add(tensors_of(result))
        return result

    def _check_pinning(self, func: Any, args: tuple[Any, ...]) -> None:
        if not self.may_pin:
            raise self.refusal("allocates pinned memory", "allocate it earlier")
        if func is torch.Tensor.pin_memory and args[0] not in self.host:
            raise self.refusal("pins a device tensor", "pin host memory, and copy into it")

    def _check_to(self, args: tuple[Any, ...], device: Any) -> None:
        if device is None:
            device = next((a for a in args[1:] if isinstance(a, (str, torch.device))), None)
        if args[0] not in self.host:
            if device == "cpu":  # a torch.device may be the device of the lane, which may be a CPU
                raise self.host_read('Tensor.to("cpu")')
        elif isinstance(device, torch.device) or device not in (None, "cpu"):
            raise self.refusal(
                "copies host memory to the device, which makes the host wait,",
                "use driver.copy_async() from a buffer that lives as long as the lane",
            )

    def _note_address(self, tensor: torch.Tensor, caller: FrameType) -> None:
        plain = plain_of(tensor)
        # A driver's module needs the address only to identify the memory.
        if plain is not None and caller.f_globals.get("__tracebackhide__") is not True:
            self.addressed.setdefault(storage_id(plain), (plain.untyped_storage(), Line()))

    def _check_masked_write(self, key: Any, value: Any) -> None:
        mask = has_mask(key if isinstance(key, tuple) else (key,))
        if mask and isinstance(value, torch.Tensor) and value not in self.host:
            raise self.host_read("an assignment by a mask")

    def refusal(self, what: str, hint: str, rule: str = "GP20") -> ContractError:
        """Return the error for the action ``what`` at the caller's line."""
        error = self.error(f"{what} {self.when}, at {Line()}", hint=hint, rule=rule)
        self.refused = self.refused or error
        return error

    def host_read(self, what: str) -> ContractError:
        """Return the error for a host read by ``what``."""
        hint = (
            "a graph replays device work only: keep the value in a tensor, or pass a host number that"
            " is fixed for the shape; declared host tensors may be read"
        )
        if "numpy" in what:
            hint += (
                '; host memory from which a copy fills a slot is a slot with role="staging", which hooks may'
                " write by numpy too, after they have waited for the last copy from it"
            )
        if self._operators:
            hint += (
                f"; the Python implementation of {self._operators[-1]} reads it: if it models one kernel,"
                " declare that with graphpact.declare_kernel"
            )
        return self.refusal(f"{what} needs a tensor's contents on the host", hint)

    @contextlib.contextmanager
    def inside(self, func: Any) -> Iterator[None]:
        """Keep this mode active in the Python implementation of ``func``, which torch calls without modes."""
        self._operators.append(str(func))
        try:
            with self:
                yield
        finally:
            self._operators.pop()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. With True, torch would import its compiler here, which takes seconds."""
        return False


class Watcher(DispatchMode, abc.ABC):
    """A dispatch mode that refuses host reads and host-device copies, and calls `perform` for other work.

    An operator with a Python implementation is a part of the program, like the function that calls it: the
    operations that it calls are performed. If it is declared to represent a kernel, the operator itself is
    performed.

    Args:
        guard: The function mode that is active together with it.
    """

    supports_higher_order_operators = True  # the guard refuses them

    def __init__(self, guard: HostReadGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.guard = guard
        self.host = guard.host

    @abc.abstractmethod
    def perform(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run one operation of device work, which is not composite. ``given`` are its tensor arguments."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type[torch.Tensor]],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # torch.tensor() ends with a detach_.
        if self.guard.paused or func is _aten.detach_.default:
            return func(*args, **kwargs)
        # For ``x.data`` torch passes the class of ``x``, such as Parameter, which dispatches nothing itself.
        if any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            return NotImplemented  # a subclass calls operations on its parts, which are dispatched here
        given = tensors_of((args, kwargs))
        self._check_call(func, given)
        on_host = [t for t in given if t in self.host]
        if self._is_host_work(func, given, on_host):
            result = self.run(func, args, kwargs)
            self._check_use(func, args, kwargs, on_host, result)
            self.host.add(tensors_of(result))
            return result
        if reads_on_host(func, args, kwargs):
            raise self.guard.host_read(str(func))
        if is_composite(func):
            # Decompose it; the operations that it calls are dispatched here again.
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)  # noqa: SLF001  no public name
        implementation = python_implementation(func, given)
        if implementation is not None:
            self._check_addresses(func, args, kwargs)
            with self.guard.inside(func), self:
                return implementation(*args, **kwargs)
        if func in INDEX_PUTS:
            self._check_index_put(func, args)
        elif func in MASKED_FILLS and not self.host.is_number(args[2]):
            raise self.guard.host_read(f"{func} of a tensor's value")
        if on_host:
            self._check_traffic(func, args, kwargs, len(given), on_host)
        return self.perform(func, args, kwargs, given)

    def _check_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor], result: Any
    ) -> None:
        """Refuse host work, other than making a view, on memory to which a copy is in flight."""
        if self.guard.check_use is None:
            return
        given, made = plain_tensors(given), plain_tensors(tensors_of(result))
        known = {storage_id(t) for t in given}
        if made and all(storage_id(t) in known for t in made) and not written_by(func, args, kwargs):
            return
        for tensor in given:
            self.guard.check_use(tensor)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, of the host or the device, and return its result."""
        return func(*args, **kwargs)

    def _check_call(self, func: Any, given: list[torch.Tensor]) -> None:
        if isinstance(func, HigherOrderOperator):
            raise self.guard.refusal(
                f"{func.name()} is called, an operator that takes functions,",
                "call that function directly in the region",
            )
        self.check_kinds(func, "takes", given)

    def _check_addresses(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operator in Python that is given an address, because its reads there are not seen."""
        numbers = [leaf for leaf in leaves_of((args, kwargs)) if type(leaf) is int]
        for memory, line in self.guard.addressed.values() if numbers else ():
            begin = memory.data_ptr()
            if any(begin <= number < begin + memory.nbytes() for number in numbers):
                raise self.guard.refusal(
                    f"{func}, which is implemented in Python, is given the address taken at {line}",
                    "if it models one kernel, declare that with graphpact.declare_kernel; else give it the"
                    " tensor",
                )

    def check_kinds(self, what: object, does: str, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse tensors of unsupported kinds, which ``what`` takes or makes."""
        for tensor in tensors:
            kind = kind_of(tensor)
            if kind is not None:
                raise self.guard.refusal(
                    f"{what} {does} {kind}",
                    "only tensors with one strided memory are recorded: use dense tensors in the region, or"
                    " driver.eager_call() around work with others",
                )

    def _is_host_work(self, func: Any, given: list[torch.Tensor], on_host: list[torch.Tensor]) -> bool:
        if not given:
            return self.host.depth > 0
        if func is _aten.lift_fresh.default:  # torch makes a tensor from Python objects with it
            return self.host.strict
        return len(on_host) == len(given)

    def _check_index_put(self, func: Any, args: tuple[Any, ...]) -> None:
        is_number = self.host.is_number(args[2])
        if has_mask(args[1]):
            # For a number torch runs masked_fill. For a tensor it needs the number of true elements.
            if not is_number:
                raise self.guard.host_read(f"{func} by a mask")
        elif is_number and self.host.strict:
            raise self.guard.refusal(
                f"{func} of a number copies it to the device, which makes the host wait,",
                "use index_fill_(), or a tensor that was made earlier",
            )

    def _check_traffic(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        on_host: list[torch.Tensor],
    ) -> None:
        """Refuse device work that copies to the host, or from it other than by `GraphDriver.copy_async`.

        Args:
            func: The operation.
            args: Its arguments.
            kwargs: Its arguments by name.
            count: The number of tensors among them.
            on_host: The host tensors among them, at least one.
        """
        if func is _aten._foreach_copy_.default:
            for pair in zip(*args[:2], strict=True):
                # A single number is passed by value, even if it is expanded to many rows.
                if pair[1].untyped_storage().nbytes() != pair[1].element_size():
                    mine = [t for t in pair if t in self.host]
                    if mine:
                        self._check_traffic(_aten.copy_.default, pair, {}, 2, mine)
            return
        if len(on_host) == count:
            return
        if any(t in self.host for t in written_by(func, args, kwargs)):
            raise self.guard.host_read(f"{func}, a copy to the host,")
        is_copy = func is _aten.copy_.default
        if not self.host.strict or self.guard.copying:
            return
        if is_copy or any(t.dim() for t in on_host):
            raise self.guard.refusal(
                f"{func} takes a host tensor",
                "make the tensor with device=, or copy it with driver.copy_async(); for a single number, use"
                " fill_()",
            )


@contextlib.contextmanager
def modes_left(function_mode: TorchFunctionMode, dispatch_mode: TorchDispatchMode) -> Iterator[None]:
    """Deactivate both modes, and the modes that were entered inside them, during the context."""
    with (
        _left(TorchFunctionMode, function_mode, _get_current_function_mode_stack()),
        _left(TorchDispatchMode, dispatch_mode, _get_current_dispatch_mode_stack()),
    ):
        yield


@contextlib.contextmanager
def _left(kind: Any, mode: Any, stack: list[Any]) -> Iterator[None]:
    """Leave ``mode`` and the modes above it in the stack; use ``kind``'s methods, not those of subclasses."""
    inside = stack[stack.index(mode) :] if mode in stack else []  # a mode is not in the stack while it runs
    for each in reversed(inside):
        kind.__exit__(each, None, None, None)
    try:
        yield
    finally:
        for each in inside:
            kind.__enter__(each)
