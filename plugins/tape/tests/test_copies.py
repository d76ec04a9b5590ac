"""Copies from host memory that a strict driver keeps in flight until something waits for them."""

import pytest
import torch

from graphpact.errors import CaptureError, ReplayError
from graphpact.graphs import DeclaredMemory
from graphpact_tape.tape import TapeDriver


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_copy_from_memory_of_any_stride_arrives(count: int, stride: int) -> None:
    """A strided source of one element is copied like one of several elements, and checked for rewrites."""
    driver = TapeDriver(torch.device("cpu"), strict=True)
    numbers, target = torch.arange(1, 17), torch.zeros(count, dtype=torch.int64)
    source = numbers.as_strided((count,), (stride,))
    driver.copy_async(target, source)
    driver.synchronize()
    assert target.tolist() == source.tolist()
    driver.copy_async(target, source)
    numbers.neg_()
    if not count:
        driver.synchronize()
        return
    with pytest.raises(ReplayError, match="rewritten while a copy from it was in flight") as error:
        driver.synchronize()
    assert error.value.rule == "GP16"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ("none", "record an event after copy_async"),
        ("before", "record an event after copy_async"),
        ("after", "an event was recorded after this copy, and nothing waited for it"),
    ],
)
def test_a_rewrite_says_whether_the_copy_has_an_event(records: str, says: str) -> None:
    """Advice differs for a copy without an event, and for one whose event the host did not wait for."""
    driver = TapeDriver(torch.device("cpu"), strict=True)
    source, target = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    event = driver.event()
    if records == "before":
        event.record()
    driver.copy_async(target, source)
    if records == "after":
        event.record()
    source.neg_()
    with pytest.raises(ReplayError) as error:
        driver.synchronize()
    assert (error.value.hint or "").startswith(says)


# -- copies to the host ------------------------------------------------------------------------------


@pytest.fixture
def driver() -> TapeDriver:
    """Return a strict driver that knows pinned host memory."""
    return TapeDriver(torch.device("cpu"), strict=True)


def _pinned(driver: TapeDriver, *numbers: int) -> torch.Tensor:
    memory = torch.tensor(numbers)
    driver.declare(DeclaredMemory(host=[memory]))
    with driver.preparation():
        return memory


def test_a_copy_to_the_host_arrives_when_the_host_waits(driver: TapeDriver) -> None:
    """Before the wait the memory has its old values; then it has those of the copy's place in the stream."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    driver.copy_async(memory, source)
    source.zero_()
    assert memory.tolist() == [1, 2]
    event = driver.event()
    event.record()
    event.synchronize()
    assert memory.tolist() == [5, 6]


def test_a_wait_for_earlier_work_does_not_wait_for_the_copy(driver: TapeDriver) -> None:
    """An event that was recorded before the copy leaves it in flight; an eager step does too."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    event = driver.event()
    event.record()
    driver.copy_async(memory, source)
    event.synchronize()
    with driver.unprepared():
        pass
    assert memory.tolist() == [1, 2]
    assert driver.copy_in_flight(memory) is not None
    driver.synchronize()
    assert driver.copy_in_flight(memory) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda memory: memory.tolist(),
        lambda memory: memory.numpy(),
        lambda memory: int(memory[0]),
        lambda memory: memory + 1,
        lambda memory: memory.zero_(),
    ],
    ids=["tolist", "numpy", "int", "add", "write"],
)
def test_the_host_may_not_use_the_memory_before_it_waited(driver: TapeDriver, use: object) -> None:
    """Reads and writes in a preparation are refused until the event; views are allowed."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    assert callable(use)
    with driver.preparation():
        event = driver.event()
        driver.copy_async(memory, source)
        event.record()
        memory[:1].view(1, 1)
        with pytest.raises(ReplayError, match="while a copy to it was in flight") as error:
            use(memory)
        assert error.value.rule == "GP16"


def test_memory_that_was_used_after_the_wait_is_right(driver: TapeDriver) -> None:
    """After the event the host reads and writes the memory, and copies it to the device again."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    target = torch.zeros(2, dtype=torch.int64, device="cpu")
    with driver.preparation():
        event = driver.event()
        driver.copy_async(memory, source)
        event.record()
        event.synchronize()
        assert memory.tolist() == [5, 6]
        memory.add_(1)
        driver.copy_async(target, memory)
    driver.synchronize()
    assert target.tolist() == [6, 7]


def test_memory_that_is_rewritten_outside_of_a_preparation_is_found_later(driver: TapeDriver) -> None:
    """A write that no guard sees changes the memory, which the next wait finds."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    driver.copy_async(memory, source)
    memory.zero_()
    with pytest.raises(ReplayError, match="was rewritten while a copy to it") as error:
        driver.synchronize()
    assert error.value.rule == "GP16"


def test_the_values_go_on_to_the_device_without_a_wait_of_the_host(driver: TapeDriver) -> None:
    """On one stream a copy to the host comes before a copy from the same memory."""
    source, memory = torch.tensor([5, 6], device="cpu"), _pinned(driver, 1, 2)
    target = torch.zeros(2, dtype=torch.int64, device="cpu")
    driver.copy_async(memory, source)
    driver.copy_async(target, memory)
    driver.synchronize()
    assert target.tolist() == [5, 6]


def test_the_second_copy_to_the_same_memory_is_the_one_that_arrives(driver: TapeDriver) -> None:
    """A copy that follows another on its stream overwrites it, and a smaller one a part of it."""
    memory = _pinned(driver, 1, 2)
    driver.copy_async(memory, torch.tensor([3, 4], device="cpu"))
    driver.copy_async(memory, torch.tensor([5, 6], device="cpu"))
    driver.copy_async(memory[:1], torch.tensor([7], device="cpu"))
    driver.synchronize()
    assert memory.tolist() == [7, 6]


def test_a_region_copies_nothing_to_the_host(driver: TapeDriver) -> None:
    """The error names the rule, and says where to copy."""
    x, memory = torch.ones(2, dtype=torch.int64, device="cpu"), _pinned(driver, 1, 2)
    with pytest.raises(CaptureError, match="copies to the host") as error:
        driver.capture(lambda: driver.copy_async(memory, x), warmup=0)
    assert error.value.rule == "GP20"
