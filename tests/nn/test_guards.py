"""What modules refuse: replication, constructor arguments, forward arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("arguments that are refused before a device sees them")

DIM = 4
IDS = torch.arange(6).reshape(2, 3)


class Model(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda dense: dense) -> None:
        super().__init__()
        self.table = td.DynamicEmbeddingBag(DIM, mode="sum", optimizer=td.SGD(lr=0.1))
        self.dense = wrap(nn.Linear(DIM, 2))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.dense(self.table(ids))
        return result


# -- replication -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def fsdp1_original_parameters(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS: list[tuple[Callable[[nn.Module], nn.Module], str]] = [
    (DistributedDataParallel, "DistributedDataParallel"),
    (fsdp1, "FSDP"),
    (fsdp1_original_parameters, "FSDP"),
    (fsdp2, "FSDP"),
]
NAMES = ["DDP", "FSDP1", "FSDP1 original parameters", "FSDP2"]
# FSDP warns that an accelerator is missing
QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@QUIET
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("wrap", "name"), WRAPPERS, ids=NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_a_replicated_table_raises(
    wrap: Callable[[nn.Module], nn.Module], name: str, training: bool
) -> None:
    model = Model()
    wrapped = wrap(model).train(training)
    with pytest.raises(RuntimeError, match=f"the table is inside {name}.*only the dense part"):
        wrapped(IDS)
    assert len(model.table) == 0


@QUIET
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("wrap", "name"), WRAPPERS, ids=NAMES)
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_replicated_table_raises_when_compiled(
    wrap: Callable[[nn.Module], nn.Module], name: str, inside: bool
) -> None:
    torch._dynamo.reset()
    model = Model()
    wrapped = wrap(torch.compile(model)) if inside else torch.compile(wrap(model))
    with pytest.raises(RuntimeError, match=f"the table is inside {name}"):
        wrapped(IDS)
    assert len(model.table) == 0


@QUIET
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [wrap for wrap, _ in WRAPPERS], ids=NAMES)
def test_the_dense_part_may_be_replicated(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    model = Model(wrap)
    for module in (plain, model):
        module.table.group.insert_or_assign(0, torch.arange(6), torch.ones(6, DIM))
        optimizer = torch.optim.SGD(module.dense.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(IDS).square().sum().backward()
            optimizer.step()
            module.table.optimizer.step()
    torch.testing.assert_close(model(IDS), plain(IDS))
    rows = model.table.group.read(0, torch.arange(6))
    torch.testing.assert_close(rows, plain.table.group.read(0, torch.arange(6)))
    assert not torch.equal(rows, torch.ones(6, DIM))


@pytest.mark.usefixtures("process_group")
def test_a_model_that_leaves_ddp_works_again() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        DistributedDataParallel(model)(IDS)
    model(IDS)
    assert len(model.table) == 6


# -- forward arguments -------------------------------------------------------------------------

SGD = td.SGD(lr=0.1)
ONE_TABLE = [td.TableConfig("t", 4)]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.rand(3), TypeError, r"dtype torch\.float32, expected int64 or int32"),
        (torch.tensor([True]), TypeError, r"dtype torch\.bool"),
        (torch.tensor([1], dtype=torch.int16), TypeError, r"dtype torch\.int16"),
        ([1, 2], TypeError, "input is a list, expected a Tensor"),
        (3, TypeError, "input is a int"),
        (torch.empty(2, dtype=torch.int64, device="meta"), RuntimeError, "device is meta"),
    ],
    ids=["float32", "bool", "int16", "list", "int", "meta"],
)
@pytest.mark.parametrize("training", [True, False])
def test_ids_of_a_wrong_kind(ids: Any, error: Any, message: str, training: bool) -> None:
    embedding = td.DynamicEmbedding(4, optimizer=SGD).train(training)
    with pytest.raises(error, match=message):
        embedding(ids)
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD).train(training)
    with pytest.raises(error, match=message):
        bag(ids, torch.tensor([0]))
    collection = td.DynamicEmbeddingCollection(ONE_TABLE, optimizer=SGD).train(training)
    with pytest.raises(error, match=message):
        collection({"t": ids})


FLAT = torch.arange(6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((FLAT,), ValueError, "offsets is None, expected where each bag of the 1-D input begins"),
        ((IDS, torch.tensor([0, 3])), ValueError, "offsets was given with a 2-D input"),
        ((IDS[None],), ValueError, r"input has shape \(1, 2, 3\), expected 1 or 2 dimensions"),
        ((FLAT[0], torch.tensor([0])), ValueError, r"input has shape \(\)"),
        ((FLAT, torch.tensor([0.0])), TypeError, r"offsets has dtype torch\.float32"),
        ((FLAT, torch.tensor([[0]])), ValueError, r"offsets has shape \(1, 1\)"),
        ((FLAT, [0]), TypeError, "offsets is a list, expected a Tensor"),
        ((FLAT, torch.tensor([0], device="meta")), RuntimeError, "device is meta"),
        ((FLAT, torch.tensor([1, 3])), RuntimeError, r"offsets\[0\] is 1, expected 0"),
        ((FLAT, torch.tensor([0, 3, 2])), RuntimeError, r"offsets\[2\] is 2, less than"),
        ((FLAT, torch.tensor([0, 7])), RuntimeError, r"offsets\[2\] is 6, less than"),
        ((FLAT, torch.tensor([-1, 7])), RuntimeError, r"offsets\[0\] is -1, expected 0"),
        ((FLAT, FLAT[:0]), RuntimeError, r"offsets\[0\] is 6, expected 0"),
    ],
)
def test_offsets_of_a_bag(arguments: Any, error: Any, message: str) -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD)
    for training in (True, False):
        with pytest.raises(error, match=message):
            bag.train(training)(*arguments)
    assert len(bag) == 0


def test_last_offset() -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", include_last_offset=True, optimizer=SGD)
    message = "is 5, expected the number of ids, 6: offsets have one element per bag and that"
    with pytest.raises(RuntimeError, match=message):
        bag(FLAT, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="offsets is empty, but include_last_offset"):
        bag(FLAT, FLAT[:0])
    assert len(bag) == 0


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.rand(6), ValueError, r"per_sample_weights has shape \(6,\), expected .* \(2, 3\)"),
        (torch.rand(3, 2), ValueError, r"has shape \(3, 2\)"),
        (torch.rand(2, 3).double(), TypeError, r"dtype torch\.float64, expected float32"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"dtype torch\.int64"),
        (torch.rand(2, 3, device="meta"), RuntimeError, "device is meta"),
        ([1.0], TypeError, "per_sample_weights is a list"),
    ],
    ids=["flat", "transposed", "float64", "int64", "meta", "list"],
)
def test_per_sample_weights(weights: Any, error: Any, message: str) -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD)
    with pytest.raises(error, match=message):
        bag(IDS, per_sample_weights=weights)
    assert len(bag) == 0


def test_a_full_table_names_the_remedy() -> None:
    embedding = td.DynamicEmbedding(4, optimizer=SGD, max_rows=100)
    embedding(torch.arange(100))
    with pytest.raises(RuntimeError, match="larger max_rows, or erase ids"):
        embedding(torch.arange(90, 101))
    assert len(embedding) == 100
    assert 100 not in embedding
    embedding.group.erase(0, torch.tensor([5]))
    embedding(torch.arange(90, 101)[1:])
    assert 100 in embedding


@pytest.mark.parametrize("names", [{"table"}, {"table", "dense"}])
def test_functional_call_with_a_new_anchor_says_what_is_wrong(names: set[str]) -> None:
    model = Model()
    new = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {name: p for name, p in new.items() if name.split(".")[0] in names}
    with pytest.raises(RuntimeError, match=r"functional_call was given .*leave the entries .*out"):
        torch.func.functional_call(model, given, (IDS,))
    assert len(model.table) == 0
    del new["table.grad_anchor"]
    output = torch.func.functional_call(model, new, (IDS,))
    assert torch.equal(output, model(IDS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
def test_live_tables_are_not_traced_or_scripted(training: bool) -> None:
    for model in (Model(), Model().table):
        model.train(training)
        with pytest.raises(RuntimeError, match=r"cannot be traced .*torch_dynemb\.freeze\(model\)"):
            torch.jit.trace(model, (IDS,), check_trace=False)
        for scripted in (model, td.freeze(model)):
            with pytest.raises(RuntimeError, match=r"torch\.jit\.script does not take"):
                torch.jit.script(scripted)


def test_live_tables_are_not_exported() -> None:
    model = Model()
    model(IDS)
    for training in (True, False):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="a live table cannot be exported"):
                torch.export.export(model.train(training), (IDS,), strict=strict)
