"""Tests of memory access outside the dispatcher: capsules, storages, addresses, unstrided tensors."""

import ctypes
import io
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import CaptureError
from graphpact.graphs import DeclaredMemory, GraphDriver
from graphpact_tape.tape import Tape, TapeDriver
from support import RECORDING_DRIVERS

CPU = torch.device("cpu")
RECORDERS = pytest.mark.parametrize("make", RECORDING_DRIVERS.values(), ids=RECORDING_DRIVERS)
TAPES = pytest.mark.parametrize("make", [*RECORDING_DRIVERS.values()][:2], ids=["tape", "strict"])

x = torch.arange(16.0).view(4, 4) / 8 - 1
out = torch.zeros(4)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps, and set the inputs."""
    with torch.inference_mode():
        x.copy_(torch.arange(16.0).view(4, 4) / 8 - 1)
        yield


def _is_refused(driver: GraphDriver, region: Callable[[], object], says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        driver.capture(region, warmup=0)
    assert caught.value.rule == "GP20"
    code = region.__code__
    assert f"{__file__}:{code.co_firstlineno}: " in str(caught.value)
    assert "help: " in str(caught.value)
    assert driver.capture(lambda: x).num_nodes == 0


def _equals_eager(driver: GraphDriver, region: Callable[[], torch.Tensor]) -> None:
    graph = driver.capture(region)
    for turn in range(2):
        x.normal_(generator=torch.Generator().manual_seed(turn))
        graph.outputs.fill_(77)
        graph.replay()
        assert torch.equal(graph.outputs.clone(), region())


# -- capsules and storages -------------------------------------------------------------------------

ACCESS: dict[str, Callable[[], object]] = {
    "numpy reads a capsule": lambda: x * float(np.from_dlpack(x)[0, 0]),
    "numpy reads an intermediate": lambda: np.from_dlpack(x * 2).sum(),
    "numpy writes": lambda: np.from_dlpack(x.mul_(1)).fill(3),
    "an alias by a capsule": lambda: torch.from_dlpack(x) * 2,
    "a capsule": lambda: [x.__dlpack__()],
    "a capsule of torch": lambda: torch.to_dlpack(x),
    "a capsule of its module": lambda: torch.utils.dlpack.to_dlpack(x),
    "an element of a storage": lambda: x.untyped_storage()[3],
    "a list of a storage": lambda: x.untyped_storage().tolist(),
    "bytes of a storage": lambda: bytes(x.untyped_storage()),
    "an element is set": lambda: x.untyped_storage().__setitem__(3, 1),
    "a storage is filled": lambda: x.untyped_storage().fill_(0),
    "a storage is copied": lambda: x.untyped_storage().copy_((x * 2).untyped_storage()),
    "a storage is turned": lambda: x.untyped_storage().byteswap(torch.float32),
    "a tensor is saved": lambda: torch.save(x, io.BytesIO()),
    "a storage is saved": lambda: torch.save(x.untyped_storage(), io.BytesIO()),
    "a storage is pickled": lambda: pickle.dumps(x.untyped_storage()),
    "a tensor is pickled": lambda: pickle.dumps(x),
    "memory is shared": lambda: [(x * 1).share_memory_()],
}


@RECORDERS
@pytest.mark.parametrize("name", ACCESS)
def test_access_to_memory_itself_is_refused(name: str, make: Callable[[], GraphDriver]) -> None:
    """Host access to device memory by a capsule or a storage is refused; the error names the line."""
    _is_refused(make(), ACCESS[name], "on the host|gives a tensor other memory")


@TAPES
def test_host_tensors_may_be_exported(make: Callable[[], GraphDriver]) -> None:
    """Declared host memory may be read through a capsule, as by ``numpy()``."""
    lengths = torch.tensor([2.0, 3.0])
    driver = make()
    driver.declare(DeclaredMemory(host=[lengths]))
    graph = driver.capture(lambda: x * float(np.from_dlpack(lengths)[1]) + float(lengths.numpy()[0]))
    graph.replay()
    assert torch.equal(graph.outputs, x * 3 + 2)


def test_functions_that_make_capsules_are_left_as_they_were() -> None:
    """After a capture, refused or not, torch has its own functions again."""
    owners = torch, torch.utils.dlpack, torch._C, torch.UntypedStorage, torch._C.PyTorchFileWriter
    before = [dict(vars(owner)) for owner in owners]
    _is_refused(TapeDriver(CPU), ACCESS["a capsule of torch"], "on the host")
    assert [dict(vars(owner)) for owner in owners] == before
    assert "byteswap" not in vars(torch.UntypedStorage)  # it is inherited


# -- addresses -------------------------------------------------------------------------------------

ADDRESSES: dict[str, Callable[[torch.Tensor], int]] = {
    "data_ptr": torch.Tensor.data_ptr,
    "a storage": lambda t: t.untyped_storage().data_ptr(),
    "a view": lambda t: t.view(-1)[:2].data_ptr(),
}


def _read(address: int, into: torch.Tensor) -> None:
    """Read memory by its address, as a kernel would."""
    numbers = (ctypes.c_float * into.numel()).from_address(address)
    into.copy_(torch.frombuffer(numbers, dtype=torch.float32))


_CHAIN = (torch.cos, torch.sin, torch.neg, lambda t: t * 2, lambda t: torch.cat([t, t])[: t.shape[0]])


@settings(derandomize=True, max_examples=150)
@given(
    chain=st.lists(st.sampled_from(range(len(_CHAIN))), min_size=2, max_size=8),
    taken=st.integers(0, 7),
    way=st.sampled_from([*ADDRESSES]),
    mode=st.sampled_from(["tape", "strict"]),
)
def test_memory_whose_address_was_taken_stays(chain: list[int], taken: int, way: str, mode: str) -> None:
    """An intermediate result keeps its address in every replay, whatever is computed later."""
    with torch.inference_mode():
        driver = RECORDING_DRIVERS[mode]()

        def region() -> torch.Tensor:
            tensors = [x[0] + 1]  # kept until the end, as on a device
            address = 0
            for at, which in enumerate(chain):
                if at == taken % len(chain):
                    address = ADDRESSES[way](tensors[-1])
                tensors.append(_CHAIN[which](tensors[-1]))
            driver.eager_call(_read, address, out)
            return out + tensors[-1]

        _equals_eager(driver, region)


@TAPES
def test_memory_that_only_an_address_names_is_kept(make: Callable[[], GraphDriver]) -> None:
    """Uninitialised memory that kernels use only by its address belongs to the graph until its release."""
    driver = make()

    def region() -> torch.Tensor:
        buffer = torch.empty(4, device=CPU)
        address = buffer.data_ptr()
        driver.eager_call(lambda: ctypes.memmove(address, x.data_ptr(), 16) and None)
        driver.eager_call(_read, address, out)
        return out + 1

    plain = driver.capture(lambda: out + 1).pool_nbytes
    _equals_eager(driver, region)
    graph = driver.capture(region)
    assert graph.pool_nbytes == plain + 16
    graph.release()
    assert graph.pool_nbytes == 0


def test_only_memory_whose_address_was_taken_stays() -> None:
    """Other intermediates still share memory; inspection by a driver does not take an address."""

    def chain(use: Callable[[torch.Tensor], object]) -> int:
        def region() -> torch.Tensor:
            t = x.exp()
            use(t)
            for _ in range(6):
                t = t.sin()
            return t + 1

        graph = TapeDriver(CPU).capture(region)
        assert isinstance(graph, Tape)
        return graph.pool_nbytes

    shared = chain(lambda _: None)
    assert chain(lambda t: t.shape) == shared
    assert shared < chain(torch.Tensor.data_ptr) <= shared + x.nbytes


def test_compiled_graphs_refuse_addresses() -> None:
    """Inductor moves intermediates, so taking their address is refused with its line; inputs are allowed."""
    driver = RECORDING_DRIVERS["inductor"]()
    says = r"asks for the address .*test_memory_access.py:\d+: .*data_ptr"
    with pytest.raises(CaptureError, match=says) as caught:
        driver.capture(lambda: [(x * 2).data_ptr()])
    assert caught.value.rule == "GP14"
    assert driver.capture(lambda: (x.data_ptr(), x)[1]).num_nodes == 0


# -- tensors that have no strided memory -----------------------------------------------------------

_WHOLE = torch.eye(4)
_SPARSE = _WHOLE.to_sparse()

KINDS: dict[str, Callable[[], object]] = {
    "sparse": lambda: x.to_sparse().to_dense() * 2,
    "sparse rows": lambda: torch.sparse.mm(x.to_sparse_csr(), x),
    "made sparse": lambda: torch.sparse_coo_tensor([[0], [1]], [2.0], (4, 4), device=CPU).to_dense(),
    "a sparse input": lambda: torch.sparse.mm(_SPARSE, x),
    "a sparse output": lambda: [_SPARSE],
    "nested": lambda: torch.nested.nested_tensor([x[:2], x[:3]]) * 2,
    "mkldnn": lambda: x.to_mkldnn().to_dense() * 2,
    "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "zeros without memory": lambda: x + torch._efficientzerotensor((4, 4)),
}
if torch.__version__ >= (2, 12):  # before, torch does not compute them in inference mode
    KINDS["second derivatives"] = lambda: torch.func.hessian(lambda row: (row**3).sum())(x[0])


@RECORDERS
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")  # torch deprecates some of them
def test_tensors_without_one_strided_memory_are_refused(name: str, make: Callable[[], GraphDriver]) -> None:
    """A region that takes, makes or returns such a tensor is refused with its line."""
    driver = make()
    says = "(takes|makes|returns) a (tensor of the layout|nested|quantized|tensor of zeros)"
    if name == "a sparse output":  # no line caused it
        with pytest.raises(CaptureError, match=says):
            driver.capture(KINDS[name])
    else:
        _is_refused(driver, KINDS[name], says)


def _made_sparse(other: torch.Tensor) -> torch.Tensor:
    """Return a sum with a sparse tensor that has no elements."""
    return torch.empty(4, 4, layout=torch.sparse_coo).to_dense() + other


@RECORDERS
def test_eager_calls_may_use_any_tensor(make: Callable[[], GraphDriver]) -> None:
    """Eager calls may use all kinds of tensors, but must return one that the next segment can read."""
    driver = make()
    driver.declare(DeclaredMemory(refreshed=[x]))
    _equals_eager(driver, lambda: driver.eager_call(torch.sparse.mm, _SPARSE, x))
    _equals_eager(driver, lambda: driver.eager_call(_made_sparse, x))
    with pytest.raises(CaptureError, match="an eager call returns a tensor of the layout"):
        driver.capture(lambda: driver.eager_call(torch.Tensor.to_sparse, x))


def _times_noise(row: torch.Tensor) -> torch.Tensor:
    return row * torch.rand((), device=CPU)


WRAPPED: dict[str, Callable[[], torch.Tensor]] = {
    "vmap": lambda: torch.vmap(lambda row: row * row.sum())(x),
    "vmap twice": lambda: torch.vmap(torch.vmap(torch.sin))(x),
    "vmap with a number": lambda: torch.vmap(lambda row: row.masked_fill(row > 0, 3.0))(x),
    "vmap of a conversion": lambda: torch.vmap(lambda row: row.to(torch.float64))(x),
    "vmap that draws": lambda: torch.vmap(
        lambda row: row * 0 * torch.rand((), device=CPU), randomness="same"
    )(x),
    "a jacobian": lambda: torch.func.jacrev(lambda t: (t * t).sum(0))(x),
    "a derivative forward": lambda: torch.func.jvp(lambda t: t * t.sin(), (x,), (x * 2,))[1],
    "without mutation": lambda: torch.func.functionalize(lambda t: t.clone().add_(1))(x),
    "a masked tensor": lambda: torch.masked.masked_tensor(x.clone(), x > 0).sum(0).to_tensor(0.0),
}


@TAPES
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func uses it
def test_wrapped_tensors_are_recorded_by_their_parts(name: str, make: Callable[[], GraphDriver]) -> None:
    """Operations on wrapped tensors (``torch.func``, subclasses) are recorded on the tensors inside."""
    _equals_eager(make(), WRAPPED[name])


@RECORDERS
def test_reads_of_wrapped_tensors_are_refused(make: Callable[[], GraphDriver]) -> None:
    """A host read of a tensor that `vmap` wrapped is refused like one of the tensor inside."""
    _is_refused(
        make(), lambda: torch.vmap(lambda row: row.cpu() * 2)(x), "needs a tensor's contents on the host"
    )


@TAPES
def test_jagged_tensors_are_recorded_by_their_values(make: Callable[[], GraphDriver]) -> None:
    """A region may compute on a jagged tensor; one that returns it is refused."""
    with torch.inference_mode(mode=False), torch.no_grad():  # inference mode does not support jagged tensors
        values = torch.zeros(4, 4)
        jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4]))
        driver = make()
        graph = driver.capture(lambda: jagged.sin().values() * 2)
        values.copy_(x)
        graph.replay()
        torch.testing.assert_close(graph.outputs, x.sin() * 2)
        with pytest.raises(CaptureError, match="the region returns NestedTensor"):
            driver.capture(lambda: jagged * 2)
