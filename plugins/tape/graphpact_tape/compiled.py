"""Refuse compiled code while a region is recorded.

Code made by torch.compile, inductor or AOTInductor launches its kernels below torch's dispatcher. A recorder
does not see these kernels, so every replay would lack their work. Torch has no hook for calls of such code.
Therefore the functions of torch through which all these calls pass are replaced while a region is recorded.

If torch does not compile, because of ``torch.compiler.disable`` or the stance ``force_eager``, nothing is
refused. TorchScript dispatches its operators, so it is recorded.

Does not: import a compiler; see a compiler that the region is the first to import, which the warm-up
prevents; see kernels that Python launches directly, such as a Triton kernel.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from graphpact_tape.entrances import Entrance, recording, replaced
from graphpact_tape.host_guard import HostReadGuard

__tracebackhide__ = True

_HINT = (
    "a recorder cannot see the kernels of compiled code: call the function that was given to the compiler,"
    ' or, if a library calls it, capture under torch.compiler.set_stance("force_eager"); the driver inductor'
    " compiles what it records, the driver cuda records compiled code, and the runner piecewise_cuda_graph"
    " splits a model by torch.compile"
)

_Check: TypeAlias = Callable[[], bool]
_Refuse: TypeAlias = Callable[[str], Exception]


@contextlib.contextmanager
def compiled_code_refused(guard: HostReadGuard) -> Iterator[None]:
    """Refuse calls of compiled code inside the context, except while ``guard`` is paused.

    Calls in other threads are not refused.
    """

    def refusal(name: str) -> Exception:
        return guard.refusal(f"{name} is called", _HINT)

    with replaced(_entrances(recording(guard), refusal)):
        yield


def _entrances(is_recorded: _Check, refusal: _Refuse) -> Iterator[Entrance]:
    """Yield each function through which compiled code is called.

    Modules that were not imported are skipped, because they cannot have compiled any code.
    """

    def calls(call: Callable[..., Any]) -> Callable[..., Any]:
        return _refusing_calls(call, is_recorded, refusal)

    def frames(choose: Callable[..., Any]) -> Callable[..., Any]:
        return _refusing_frames(choose, is_recorded, refusal)

    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        yield dynamo, "_callback_from_stance", frames
    inductor: Any = sys.modules.get("torch._inductor.output_code")
    if inductor is not None:
        yield inductor.CompiledFxGraph, "__call__", calls
        yield inductor.CompiledAOTI, "__call__", calls
    # Inductor's C++ programs take their inputs from it.
    yield torch._C._aoti, "unsafe_alloc_void_ptrs_from_tensors", calls  # noqa: SLF001  no public name
    for kind in vars(torch._C._aoti).values():  # noqa: SLF001  AOTInductor's loaders have no public names
        for name in {"run", "boxed_run"} & vars(kind).keys() if isinstance(kind, type) else ():
            yield kind, name, calls


def _refusing_calls(call: Callable[..., Any], is_recorded: _Check, refusal: _Refuse) -> Callable[..., Any]:
    """Return a replacement of ``call``, a method that runs inductor's code, which refuses first."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_recorded():
            raise refusal("code compiled by inductor")
        return call(*args, **kwargs)

    return checked


def _refusing_frames(choose: Callable[..., Any], is_recorded: _Check, refusal: _Refuse) -> Callable[..., Any]:
    """Return a replacement of ``choose``, which gives dynamo its callback for frames; the callback refuses.

    If there is no callback (None or False), nothing is compiled. The refusal is in the callback, because
    torch restores its settings after an error in a callback.
    """

    def checked(callback: Any) -> Any:
        chosen = choose(callback)
        if chosen is None or chosen is False or not is_recorded():
            return chosen

        def refuse(frame: Any, *_: Any) -> None:
            module = frame.f_locals.get("self")
            is_module = isinstance(module, torch.nn.Module)
            name = type(module).__name__ if is_module else frame.f_code.co_qualname
            raise refusal(f"{name}, compiled by torch.compile,")

        return refuse

    return checked
