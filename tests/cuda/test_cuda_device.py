"""What only a GPU can show: streams, graphs, compiled steps, sizes, waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from group_calls import Call, same_bits
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = [pytest.mark.own_device, pytest.mark.cuda]

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamQuery",
    "DtoH",
)


def make_group(dim: int = 16, **arguments: object) -> td.TableGroup:
    table = td.TableConfig("table", dim, initializer=td.Uniform(-1.0, 1.0))
    given = {"optimizer": td.Adam(lr=0.01), "seed": 1, "device": "cuda", **arguments}
    return td.TableGroup([table], **given)  # type: ignore[arg-type]


def bags_of(group: td.TableGroup, ids: Tensor, length: int) -> Call:
    offsets = torch.arange(ids.numel() // length + 1, device=ids.device) * length
    return Call(ids, offsets, [0], [group.config.slabs[0].dim])


def ids_of_step(step: int, count: int = 512) -> Tensor:
    """Old and new ids, some several times, on the GPU."""
    generator = torch.Generator(device="cpu").manual_seed(step)
    ids = torch.randint(0, 50 + step * 20, (count,), generator=generator, device="cpu")
    return (ids * 7919).cuda()


def train_step(group: td.TableGroup, call: Call) -> Tensor:
    output = bag_lookup_on_gpu(group, call)
    output.backward(torch.ones_like(output) * 0.25)
    return output.detach()


def bag_lookup_on_gpu(group: td.TableGroup, call: Call) -> Tensor:
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    return ops.embedding(
        group.rows,
        call.batch(),
        handles,
        torch.zeros(1, device="cuda", requires_grad=True),
        optimizer=group.config.optimizer_code,
    )


def rows_by_id(group: td.TableGroup) -> dict[int, list[float]]:
    batches = list(group.export(0))
    ids = torch.cat([batch.ids for batch in batches]).tolist()
    rows = torch.cat([batch.rows for batch in batches]).tolist()
    return dict(zip(ids, rows, strict=True))


def test_a_captured_step_replayed_a_thousand_times_equals_eager() -> None:
    eager, captured = make_group(), make_group()
    for step in range(3):  # warm-up
        for group in (eager, captured):
            train_step(group, bags_of(group, ids_of_step(step), 4))
            group.end_step()
    ids = ids_of_step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = train_step(captured, bags_of(captured, ids, 4))
    for step in range(3, 1003):
        expected = train_step(eager, bags_of(eager, ids_of_step(step), 4))
        eager.end_step()
        ids.copy_(ids_of_step(step))
        graph.replay()
        captured.end_step()
        if step % 100 == 3:
            assert same_bits(expected.cpu(), output.cpu()), step
    assert captured.size(0) == eager.size(0) > 10_000
    assert rows_by_id(captured) == rows_by_id(eager)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_equals_eager(mode: str) -> None:
    def make() -> td.DynamicEmbeddingBag:
        torch.manual_seed(0)
        return td.DynamicEmbeddingBag(
            16, mode="sum", name="x", optimizer=td.Adam(lr=0.01), device="cuda"
        )

    eager, module = make(), make()
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    for step in range(30):
        ids = ids_of_step(step).reshape(-1, 4)
        losses = []
        for bag, lookup in ((eager, eager), (module, compiled)):
            loss = lookup(ids).square().sum()
            loss.backward()
            bag.optimizer.step()
            losses.append(loss.detach().clone())
        torch.testing.assert_close(*losses)
    assert rows_by_id(module.group).keys() == rows_by_id(eager.group).keys()


def waits_in(call: Callable[[], object]) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
    names = [event.name for event in profiled.events()]
    assert any("Launch" in name for name in names), "the profiler has seen no launch"
    return [name for name in names if any(wait in name for wait in WAITS)]


@pytest.mark.parametrize(
    "policy",
    [
        td.Policy(),
        td.Policy(score="frequency", capacity=500, check="warning"),
        td.Policy(score="timestamp", admission=td.AdmitFrequent(2), ttl=60),
        td.Policy(admission=td.AdmitFrequentSketch(2, "64KB", halve_every=1)),
    ],
    ids=["plain", "evicting", "counted", "sketch"],
)
def test_no_waiting_in_a_step_nor_in_inference(policy: td.Policy) -> None:
    module = td.DynamicEmbeddingBag(
        16, mode="sum", optimizer=td.Adam(lr=0.01), device="cuda", policy=policy
    )
    ids = ids_of_step(9).reshape(-1, 4)

    def step() -> None:
        module(ids).sum().backward()
        module.optimizer.step()

    step()
    step()
    assert [name for name in waits_in(step) if name != "cudaDeviceSynchronize"] == []
    module.eval()
    with torch.no_grad():
        assert [w for w in waits_in(lambda: module(ids)) if w != "cudaDeviceSynchronize"] == []


def test_another_stream() -> None:
    group, expected = make_group(), make_group()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(5):
        ids = ids_of_step(step)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = train_step(group, bags_of(group, ids, 4))
        torch.cuda.current_stream().wait_stream(stream)
        assert same_bits(output.cpu(), train_step(expected, bags_of(expected, ids, 4)).cpu())


def test_tensors_on_another_device() -> None:
    group = make_group()
    ids = torch.arange(4, device="cpu")
    offsets = torch.tensor([0, 4], device="cpu")
    with pytest.raises(ValueError, match=r"ids is on cpu .* but the table is on cuda:0"):
        group.find_or_insert(ids, offsets, [0])
    with pytest.raises(RuntimeError, match=r"find: ids is on the CPU, but the table is on cuda:0"):
        torch.ops.dynemb.find(
            group.index.buckets, group.index.tables, group.index.meta, ids, offsets, [0]
        )
    with torch.device("cpu"):
        host = make_group(device="cpu")
    message = r"find: buckets is on the CPU, but another argument is on a GPU"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dynemb.find(
            host.index.buckets, host.index.tables, host.index.meta, ids.cuda(), offsets.cuda(), [0]
        )


def test_a_gradient_that_is_not_contiguous() -> None:
    group = make_group()
    call = bags_of(group, ids_of_step(1, 8), 4)
    bag_lookup_on_gpu(group, call).backward(torch.ones(16, 2, device="cuda").t())
    handles = group.find(call.ids, call.offsets, [0]).handles
    arguments = (call.ids, handles, call.offsets, None, torch.tensor([1], device="cuda"))
    with pytest.raises(RuntimeError, match="embedding_backward_: grad_output is not contiguous"):
        torch.ops.dynemb.embedding_backward_(
            *group.rows.updated,
            torch.ones(16, 2, device="cuda").t(),
            *arguments,
            [0],
            [16],
            0,
            group.config.optimizer.kernel_number,
        )


def test_modules_move() -> None:
    with torch.device("cpu"):
        module = td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.5))
        optimizer = module.optimizer
        ids = torch.arange(100)
        module(ids).sum().backward()
        before = module.group.read(0, ids)
    group = optimizer.param_groups[0]
    module.cuda()
    assert module.group.device.type == "cuda"
    assert optimizer is module.optimizer
    assert group is optimizer.param_groups[0]
    group["lr"] = 1.0
    module(ids.cuda()).sum().backward()
    module.optimizer.step()
    module.cpu()
    with torch.device("cpu"):
        torch.testing.assert_close(module.group.read(0, ids), before - 1.0)


# -- sizes ---------------------------------------------------------------------------------------


def test_a_million_times_one_id_and_a_million_ids() -> None:
    group = make_group(dim=8, optimizer=td.SGD(lr=1.0))
    ids = torch.cat([torch.full((1 << 20,), 5), torch.arange(1 << 20)]).cuda()
    before = group.read(0, torch.tensor([5, 6], device="cuda"))
    output = bag_lookup_on_gpu(group, bags_of(group, ids, 8))
    output.backward(torch.full_like(output, 2.0**-10))
    group.end_step()
    after = group.read(0, torch.tensor([5, 6], device="cuda"))
    expected = before - torch.tensor([[(2**20 + 1) * 2.0**-10], [2.0**-10]], device="cuda")
    torch.testing.assert_close(after, expected)
    assert group.size(0) == 1 << 20


def test_two_to_the_26_ids_in_a_batch() -> None:
    group = make_group(dim=1, optimizer=td.SGD(lr=1.0))
    count = 1 << 26
    ids = torch.arange(count, device="cuda") % (1 << 24)
    handles = group.find_or_insert(ids, torch.tensor([0, count], device="cuda"), [0])
    group.end_step()
    assert group.size(0) == 1 << 24
    assert torch.equal(handles[: 1 << 24], handles[1 << 24 : 1 << 25])
    assert torch.equal(handles[: 1 << 24] >> 28, torch.arange(1 << 24, device="cuda"))
    call = bags_of(group, ids, 1 << 10)
    output = bag_lookup_on_gpu(group, call)
    output.backward(torch.ones_like(output))
    group.end_step()
    rows = group.read(0, ids[:1000])
    fresh = make_group(dim=1, optimizer=td.SGD(lr=1.0)).read(0, ids[:1000])
    torch.testing.assert_close(rows, fresh - 4.0)


def test_more_elements_than_31_bits_count() -> None:
    """Rows are mapped in order, so the last of 2^20 rows of 4,096 columns lies 16 GB in."""
    group = make_group(dim=4096, optimizer=td.SGD(lr=1.0))
    count = (1 << 19) + 1000
    group.insert(0, torch.arange(count, device="cuda"))
    last = torch.arange(count - 8, count, device="cuda")
    before = group.read(0, last)
    output = bag_lookup_on_gpu(group, flat_call_on_gpu(group, last))
    output.backward(torch.ones_like(output))
    group.end_step()
    torch.testing.assert_close(group.read(0, last), before - 1.0)
    assert int(group.index.slabs[0, 0]) * 4096 > 1 << 31


def flat_call_on_gpu(group: td.TableGroup, ids: Tensor) -> Call:
    return bags_of(group, ids, 1)


@pytest.mark.alone
def test_out_of_memory_leaves_the_table_usable() -> None:
    group = make_group(dim=128)
    group.insert(0, torch.arange(1000, device="cuda"))
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (512 << 20), dtype=torch.uint8, device="cuda")
    many = torch.arange(4_000_000, device="cuda")
    with pytest.raises(RuntimeError, match=r"out of (GPU )?memory"):
        group.insert(0, many)
    assert group.size(0) == 1000
    del hog
    torch.cuda.empty_cache()
    group.insert(0, many)
    group.end_step()
    assert group.size(0) == 4_000_000


def test_a_captured_frozen_lookup_is_replayed() -> None:
    bag = td.DynamicEmbeddingBag(
        16, mode="sum", name="x", optimizer=td.Adam(lr=0.01), device="cuda"
    )
    for step in range(3):
        bag(ids_of_step(step).reshape(-1, 4)).square().sum().backward()
        bag.optimizer.step()
    frozen = td.freeze(bag)
    ids = ids_of_step(0).reshape(-1, 4).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        frozen(ids)  # warm-up
        with torch.cuda.graph(graph):
            output = frozen(ids)
        for step in (1, 2, 3):  # the ids of the last one are not there
            ids.copy_(ids_of_step(step).reshape(-1, 4))
            graph.replay()
            assert same_bits(frozen(ids).cpu(), output.cpu())
