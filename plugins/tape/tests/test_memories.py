"""Host and device as two memories on a machine with one: copies, pinned memory, and host tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.errors import CaptureError, ReplayError
from graphpact.tensors import storage_id
from graphpact_tape import HostMemory, TapeDriver, two_memories

CPU, NAMED = torch.device("cpu"), torch.device("cpu", 0)
DEVICES = pytest.mark.parametrize("device", [CPU, NAMED], ids=["unnamed", "named"])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


@dataclass
class PlacedTensors:
    """Tensors of a program, each with the memory that it has on a machine with a GPU.

    Args:
        device: The device.
        host: The host memory.
    """

    device: torch.device
    host: HostMemory = field(default_factory=HostMemory)
    tensors: list[tuple[torch.Tensor, bool, int]] = field(default_factory=list)
    """A tensor, whether it is on the host, and the number of its memory."""
    count: int = 0

    def add(self, tensor: torch.Tensor, *, on_host: bool, memory: int | None = None) -> None:
        """Add a tensor with the number of its memory; None for new memory."""
        if memory is None:
            memory = self.count
            self.count += 1
        self.tensors.append((tensor, on_host, memory))

    def check(self) -> None:
        """Assert that tensors share memory, and are on the host, exactly as with a GPU."""
        by_memory: dict[int, int] = {}
        for tensor, on_host, memory in self.tensors:
            assert (tensor in self.host) is on_host
            assert by_memory.setdefault(memory, storage_id(tensor)) == storage_id(tensor)
        assert len({*by_memory.values()}) == len(by_memory)


def _to_device_and_cast(placed: PlacedTensors, x: torch.Tensor) -> None:
    placed.add(x.to(placed.device, torch.float64).long(), on_host=False)


def _pin(placed: PlacedTensors, x: torch.Tensor, *, on_host: bool, memory: int) -> None:
    if on_host:
        placed.add(x.pin_memory(), on_host=True, memory=memory if x.is_pinned() else None)
        assert placed.tensors[-1][0].is_pinned()
    else:
        with pytest.raises(RuntimeError, match="only host tensors"):
            x.pin_memory()


def _from_numpy(placed: PlacedTensors, x: torch.Tensor) -> None:
    array = np.zeros(3, dtype=np.int64)
    placed.add(torch.from_numpy(array), on_host=True)
    placed.add(torch.as_tensor(array, device=placed.device), on_host=False)
    array += len(x)
    assert placed.tensors[-2][0].tolist() == array.tolist()
    assert placed.tensors[-1][0].tolist() == [0, 0, 0]


def _made(placed: PlacedTensors, *tensors: torch.Tensor, on_host: bool) -> None:
    for tensor in tensors:
        placed.add(tensor, on_host=on_host)


MOVES: dict[str, Callable[[PlacedTensors, torch.Tensor], torch.Tensor]] = {
    "cpu": lambda _, x: x.cpu(),
    "to cpu": lambda _, x: x.to("cpu", non_blocking=True),
    "to cpu, as a keyword": lambda _, x: x.to(device="cpu"),
    "to the device": lambda placed, x: x.to(placed.device),
    "to the device, as a keyword": lambda placed, x: x.to(device=placed.device, non_blocking=True),
    "as_tensor": lambda placed, x: torch.as_tensor(x, device=placed.device),
}
"""Copies to the host or to the device, which make new memory if the tensor is in the other memory."""
NEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x.to(torch.float64).to(torch.int64),
    "compute": lambda x: x + 1,
    "clone": lambda x: x.clone(),
    "new_zeros": lambda x: x.new_zeros(3),
    "empty_like": torch.empty_like,
}
"""Operations whose results are in the memory of their argument."""
OTHERS: dict[str, Callable[[PlacedTensors, torch.Tensor], None]] = {
    "to the device and cast": _to_device_and_cast,
    "from numpy": _from_numpy,
    "made on the device": lambda placed, _: _made(
        placed,
        torch.zeros(4, device=placed.device),
        torch.tensor([1, 2], device=placed.device),
        on_host=False,
    ),
    "made on the host": lambda placed, _: _made(
        placed,
        *(torch.zeros(4), torch.as_tensor([1, 2]), torch.scalar_tensor(3).view(1), torch.hann_window(3)),
        *(torch.LongTensor([1]), torch.zeros(4, pin_memory=True)),
        on_host=True,
    ),
}


def moved(placed: PlacedTensors, at: int, how: str) -> None:
    """Do one operation on a placed tensor, in the program and in the model."""
    x, on_host, memory = placed.tensors[at % len(placed.tensors)]
    if how in MOVES:
        to_host = "cpu" in how
        made = MOVES[how](placed, x)
        placed.add(made, on_host=to_host, memory=memory if to_host is on_host else None)
    elif how in NEW:
        placed.add(NEW[how](x), on_host=on_host)
    elif how in OTHERS:
        OTHERS[how](placed, x)
    elif how == "view":
        placed.add(x[:2], on_host=on_host, memory=memory)
    elif how == "pin":
        _pin(placed, x, on_host=on_host, memory=memory)
    else:
        other, other_on_host, _ = placed.tensors[(at + 1) % len(placed.tensors)]
        same = other_on_host is on_host and other.dtype == x.dtype
        placed.add(x.to(other), on_host=other_on_host, memory=memory if same else None)


WAYS = (*MOVES, *NEW, *OTHERS, "view", "pin", "to another")


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(WAYS)), max_size=12),
    named=st.booleans(),
)
def test_tensors_share_memory_as_they_do_with_a_gpu(steps: list[tuple[int, str]], *, named: bool) -> None:
    """After any program, tensors share memory, and are on the host, exactly as with a GPU."""
    with torch.inference_mode():
        placed = PlacedTensors(NAMED if named else CPU)
        with two_memories(placed.host, placed.device):
            placed.add(torch.arange(4, device=placed.device), on_host=False)
            placed.add(torch.arange(4), on_host=True)
            for at, how in steps:
                moved(placed, at, how)
            placed.check()


def test_a_device_with_a_name_is_not_the_host() -> None:
    """The ``device`` of a tensor says which memory it has, even if it was made with this device."""
    host = HostMemory()
    with two_memories(host, NAMED):
        on_device, on_host = torch.zeros(2, device=NAMED), torch.zeros(2)
        assert (on_device.device, on_host.device) == (NAMED, CPU)
        for made, is_there in (
            (torch.zeros(2, device=on_device.device), False),
            (torch.zeros(2, device=on_host.device), True),
            (torch.zeros(2, device="cpu"), True),
            (torch.zeros(2, device=str(on_device.device)), False),
            (torch.zeros_like(on_host, device=NAMED), False),
            (on_device.new_zeros(2), False),
            (on_host.new_zeros(2), True),
            (on_host.to(on_device.device), False),
            (on_device.to(CPU), True),
        ):
            assert (made in host) is is_there
    assert torch.zeros(2, device=NAMED).device == CPU  # outside the context nothing is changed


@DEVICES
def test_a_copy_is_of_the_moment(device: torch.device) -> None:
    """A copy to the host or from it does not change with its source."""
    host = HostMemory()
    with two_memories(host, device):
        x = torch.arange(3, device=device)
        kept, there = x.cpu(), torch.arange(3)
        back = there.to(device)
        x.fill_(7)
        there.fill_(8)
        assert kept.tolist() == back.tolist() == [0, 1, 2]
        expanded = torch.zeros(1, device=device).expand(3)
        assert expanded.cpu().tolist() == [0, 0, 0]


# -- a strict lane -------------------------------------------------------------------------------------


def test_pinned_memory_is_made_in_a_preparation_and_read_there() -> None:
    """Outside a capture, pinned memory is host memory: it may be made, written, read, and copied from."""
    driver = TapeDriver(CPU, strict=True)
    target = torch.zeros(3)
    with driver.preparation():
        for made in (
            torch.empty(3, pin_memory=True),
            torch.empty(3, device="cpu", pin_memory=True),
            torch.tensor([0.0, 0.0, 0.0], device="cpu", pin_memory=True),
            torch.zeros(3).pin_memory(),
            torch.zeros(3).new_empty(3, pin_memory=True),
        ):
            made.copy_(torch.tensor([1.0, 2.0, 3.0]))
            assert made.is_pinned()
            assert made.tolist() == [1, 2, 3]
            driver.copy_async(target, made)
    driver.synchronize()
    assert target.tolist() == [1, 2, 3]


def test_pinning_a_device_tensor_is_refused_as_it_raises_with_a_gpu() -> None:
    """Only host memory is pinned."""
    driver = TapeDriver(CPU, strict=True)
    with pytest.raises(ReplayError, match="pins a device tensor"), driver.preparation():
        torch.zeros(3, device=CPU).pin_memory()


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(3, pin_memory=True), lambda: torch.zeros(3).pin_memory()]
)
def test_a_capture_pins_nothing(make: Callable[[], torch.Tensor]) -> None:
    """In a region a pinned allocation is refused, as older releases of torch refuse it on a GPU."""
    with pytest.raises(CaptureError, match="allocates pinned memory"):
        TapeDriver(CPU, strict=True).capture(make, warmup=0)


def test_a_host_copy_of_eager_work_is_host_memory_of_later_preparations() -> None:
    """A hook may copy to the host outside a preparation and read the unchanged copy in a later one."""
    driver = TapeDriver(CPU, strict=True)
    x = torch.zeros(3)
    with driver.unprepared():
        kept, pinned = x.cpu(), torch.zeros(3, pin_memory=True)
        lengths = torch.from_numpy(np.zeros(3))
    x.fill_(5)
    with driver.preparation():
        assert kept.tolist() == pinned.tolist() == lengths.tolist() == [0, 0, 0]
    with pytest.raises(ReplayError, match="contents on the host"), driver.preparation():
        x.tolist()
