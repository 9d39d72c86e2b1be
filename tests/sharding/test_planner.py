"""Plans for models with dynamic tables: what is offered, what it costs, and errors on all ranks."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_cases import BATCH, bags, machine, nothing_reserved, sequences, sharders
from planning_steps import Failing, plans_and_errors
from ranks import Ranks
from record_dict import RecordDict
from torch import nn
from torchrec import DataType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.table.group_config import TIERED_ROW_BYTES
from torch_dynemb.torchrec import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
    collective_plan,
    dynamic_enumerator,
    table_sizes,
)
from torch_dynemb.torchrec.planning.estimators import (
    bytes_beyond_hbm,
    bytes_on_disk,
    planned_optimizer,
    shard_bytes,
)
from torch_dynemb.torchrec.planning.fused_params import optimizer_of
from torch_dynemb.torchrec.planning.options import planned_options

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

INDEX = (16 + 8) / 0.7  # bytes of an id with one score


def dynamic(capacity: int | None = None, **constraints: Any) -> DynamicTableConstraints:
    return DynamicTableConstraints(TableOptions(policy=td.Policy(capacity=capacity)), **constraints)


def options_of(
    enumerator: EmbeddingEnumerator, module: nn.Module, name: str, *, sharders: list[Any]
) -> dict[str, ShardingOption]:
    found = enumerator.enumerate(module, sharders)
    return {option.sharding_type: option for option in found if option.name == name}


def planned(
    module: nn.Module,
    constraints: dict[str, Any],
    topology: Topology,
    kind: Any = EmbOptimType.EXACT_SGD,
    optimizer: OptimizerConfig | None = None,
) -> ShardingPlan:
    planner = EmbeddingShardingPlanner(
        topology,
        batch_size=BATCH,
        enumerator=dynamic_enumerator(topology, constraints, BATCH),
        storage_reservation=nothing_reserved(),
        constraints=constraints,
        debug=False,
    )
    return planner.plan(module, sharders(kind, optimizer=optimizer))


def test_storage_of_a_table_is_rows_state_index_and_buffers() -> None:
    enumerator = dynamic_enumerator(machine(), {"a": dynamic(1001)}, BATCH)
    offers = options_of(enumerator, bags(a=10), "a", sharders=sharders(EmbOptimType.ADAM))
    row = 16 * 4 + 4 + 2 * 16 * 4
    ids = BATCH * 8  # of one feature, on one rank
    outputs = BATCH * 16 * 4

    storage = offers["table_wise"].shards[0].storage
    assert storage.ddr == math.ceil(1001 * (row + INDEX)) + 2 * ids + 2 * outputs
    assert storage.hbm == 0

    for shard in offers["row_wise"].shards:
        # half of the ids of both ranks, and their sums for all of both ranks' samples
        expected = math.ceil(501 * (row + INDEX)) + ids + 2 * outputs
        assert shard.storage.ddr == expected


def test_every_column_shard_has_an_index_of_its_own() -> None:
    constraints = {"a": dynamic(1000, sharding_types=["column_wise"], min_partition=8)}
    enumerator = dynamic_enumerator(machine(), constraints, BATCH)
    params = sharders(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    option = options_of(enumerator, bags(a=10), "a", sharders=params)["column_wise"]
    assert shard_bytes(option) == [math.ceil(1000 * (8 * 4 + 4 + 4 + INDEX))] * 2


def test_storage_lies_in_device_memory_on_a_gpu() -> None:
    enumerator = dynamic_enumerator(machine(device="cuda"), {"a": dynamic(1000)}, BATCH)
    offers = options_of(enumerator, bags(a=10), "a", sharders=sharders())
    storage = offers["table_wise"].shards[0].storage
    assert storage.ddr == 0
    assert storage.hbm > 1000 * (16 * 4 + 4 + INDEX)


def test_rows_beyond_hbm_count_as_host_memory() -> None:
    """Weights and moments of 64 bytes each beyond the budget; generations and index are in HBM."""
    rows = 1000 * 3 * 16 * 4
    for hbm, on_host in {0: rows, 50_000: rows - 50_000, 1 << 20: 0}.items():
        options = TableOptions(policy=td.Policy(capacity=1000), storage=td.HostStore(hbm=hbm))
        constraints = {"a": DynamicTableConstraints(options)}
        whole, split = (
            options_of(
                dynamic_enumerator(machine(device=device), constraints, BATCH),
                bags(a=10),
                "a",
                sharders=sharders(EmbOptimType.ADAM),
            )["table_wise"]
            for device in ("cpu", "cuda")
        )
        assert bytes_beyond_hbm(split) == [on_host]
        assert split.shards[0].storage.ddr == on_host
        assert split.shards[0].storage.hbm == whole.shards[0].storage.ddr - on_host


def test_a_cache_in_hbm_counts_beside_all_rows_in_host_memory() -> None:
    """100 slots of 36 bytes with their rows, and 4 bytes for the place of each row."""
    row = 3 * 16 * 4
    options = TableOptions(policy=td.Policy(capacity=1000), storage=td.HostStore(cache="100 rows"))
    without = TableOptions(policy=td.Policy(capacity=1000), storage=td.HostStore())
    cached, split = (
        options_of(
            dynamic_enumerator(machine(device="cuda"), {"a": DynamicTableConstraints(of)}, BATCH),
            bags(a=10),
            "a",
            sharders=sharders(EmbOptimType.ADAM),
        )["table_wise"]
        for of in (options, without)
    )
    assert bytes_beyond_hbm(cached) == bytes_beyond_hbm(split) == [1000 * row]
    extra = 1000 * 4 + 100 * (row + 4 + 36)
    assert cached.shards[0].storage.hbm == split.shards[0].storage.hbm + extra


def test_caches_above_a_store_count_by_place(tmp_path: Path) -> None:
    """100 slots of 36 bytes with their rows in HBM, 300 in host memory; the disk does not count."""
    row = 3 * 16 * 4 + 4
    storage = td.SSDStore(tmp_path, cache="300 rows", device_cache="100 rows")
    stored, whole = (
        {
            device: options_of(
                dynamic_enumerator(
                    machine(device=device), {"a": DynamicTableConstraints(options)}, BATCH
                ),
                bags(a=10),
                "a",
                sharders=sharders(EmbOptimType.ADAM),
            )["table_wise"]
            .shards[0]
            .storage
            for device in ("cpu", "cuda")
        }
        for options in (
            TableOptions(policy=td.Policy(capacity=1000), storage=of) for of in (storage, None)
        )
    )
    on_host = 1000 * TIERED_ROW_BYTES + 300 * (row + 36)
    in_hbm = 1000 * 4 + 100 * (row + 36)
    assert stored["cuda"].ddr == on_host
    assert stored["cuda"].hbm == whole["cuda"].hbm - 1000 * row + in_hbm
    assert stored["cpu"].ddr == whole["cpu"].ddr - 1000 * row + on_host


def test_words_of_a_row_never_count_as_host_memory() -> None:
    constraints = {"a": DynamicTableConstraints(TableOptions(storage=td.HostStore()))}
    enumerator = dynamic_enumerator(machine(device="cuda"), constraints, BATCH)
    params = sharders(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    option = options_of(enumerator, bags(a=100), "a", sharders=params)["table_wise"]
    assert bytes_beyond_hbm(option) == [100 * 64]


def test_num_embeddings_counts_where_the_policy_has_no_capacity() -> None:
    enumerator = dynamic_enumerator(machine(), {"a": dynamic()}, BATCH)
    option = options_of(enumerator, bags(a=700), "a", sharders=sharders())["table_wise"]
    assert shard_bytes(option) == [700 * 68 + 1000 * 16]


def test_scores_expiry_and_sketches_count() -> None:
    def bytes_of(policy: td.Policy) -> int:
        enumerator = dynamic_enumerator(
            machine(), {"a": DynamicTableConstraints(TableOptions(policy=policy))}
        )
        option = options_of(enumerator, bags(a=7), "a", sharders=sharders())["table_wise"]
        return shard_bytes(option)[0]

    slots = 700 / 0.7
    none = bytes_of(td.Policy(capacity=700, score="none", on_full="default"))
    assert none == 700 * 68 + slots * 16
    assert bytes_of(td.Policy(capacity=700, score="step")) == none + slots * 8
    assert bytes_of(td.Policy(capacity=700, score="frequency")) == none + slots * 16
    assert bytes_of(td.Policy(capacity=700, score="frequency", ttl=9)) == none + slots * 24
    sketch = td.AdmitFrequentSketch(2, memory=1 << 16)
    assert bytes_of(td.Policy(capacity=700, admission=sketch)) == none + slots * 8 + (1 << 16)


@pytest.mark.parametrize("score", ["step", "frequency"])
def test_a_full_table_takes_what_was_planned(score: Any) -> None:
    policy = td.Policy(score=score, capacity=40_000)
    constraints = {"a": DynamicTableConstraints(TableOptions(policy=policy))}
    enumerator = dynamic_enumerator(machine(), constraints)
    adam = sharders(EmbOptimType.ADAM)
    option = options_of(enumerator, bags(a=7), "a", sharders=adam)["table_wise"]
    config = td.TableConfig("a", 16, policy=policy)
    group = td.TableGroup([config], optimizer=td.Adam(lr=0.1))
    for step in range(8):
        group.insert(0, torch.arange(step * 5000, (step + 1) * 5000))
    [expected] = shard_bytes(option)
    taken = group.usage.memory()["total"]
    assert 0.9 * expected < taken < 1.02 * expected


@pytest.mark.filterwarnings("ignore:a step needed")  # when the table is small
def test_a_full_tiered_table_takes_what_was_planned() -> None:
    """Its cache and its index; not what is on the disk."""
    storage = td.ExternalStore(RecordDict(), cache="10%")
    policy = td.Policy(capacity=20_000)
    constraints = {"a": DynamicTableConstraints(TableOptions(policy=policy, storage=storage))}
    enumerator = dynamic_enumerator(machine(), constraints)
    adam = sharders(EmbOptimType.ADAM)
    option = options_of(enumerator, bags(a=7), "a", sharders=adam)["table_wise"]
    table = td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1), policy=policy, storage=storage)
    for ids in torch.arange(20_000).split(1000):
        table(ids).sum().backward()
        table.optimizer.step()
    [expected] = shard_bytes(option)
    assert 0.9 * expected < table.memory()["total"] < 1.1 * expected
    in_memory = 20_000 * (16 * 4 + 4 + 2 * 16 * 4)
    assert expected < 20_000 * INDEX + in_memory / 4


def test_a_cache_of_a_size_is_counted_once_for_each_shard() -> None:
    slot = 16 * 4 + 4 + 36
    counted = {
        f"{500 * slot}": 500,
        "500 rows": 500,
        "5000 rows": 1000,
        "50%": 500,
        "1 rows": 64,
    }
    for cache, rows in counted.items():
        given = int(cache) if cache.isdecimal() else cache
        options = TableOptions(
            policy=td.Policy(capacity=1000), storage=td.SSDStore("rows", cache=given)
        )
        enumerator = dynamic_enumerator(machine(), {"a": DynamicTableConstraints(options)})
        option = options_of(enumerator, bags(a=7), "a", sharders=sharders())["table_wise"]
        assert shard_bytes(option) == [math.ceil(1000 * INDEX) + 1000 * 12 + rows * slot], cache
        assert bytes_on_disk(option) == [1000 * (24 + 64)]
        assert option.shards[0].storage.ssd == 1000 * (24 + 64)


def test_a_plan_has_the_store_that_was_given() -> None:
    storage = td.ExternalStore(RecordDict())
    constraints = {"a": DynamicTableConstraints(TableOptions(storage=storage))}
    plan = planned(bags(a=100), constraints, machine())
    [of_module] = plan.plan.values()
    options = planned_options(of_module["a"])
    assert options is not None
    assert options.storage is storage


def test_time_is_that_of_the_fused_kernel_and_the_probes() -> None:
    topology = machine(device="cuda")
    constraints = {"a": dynamic(1000, pooling_factors=[3.0])}
    ours = options_of(
        dynamic_enumerator(topology, constraints, BATCH), bags(a=100), "a", sharders=sharders()
    )
    fused = {"a": ParameterConstraints(compute_kernels=["fused"], pooling_factors=[3.0])}
    stock = options_of(
        EmbeddingEnumerator(topology, BATCH, fused), bags(a=100), "a", sharders=sharders()
    )
    assert ours.keys() == stock.keys() >= {"table_wise", "row_wise"}
    for sharding_type, parts in (("table_wise", 1), ("row_wise", 2)):
        probe = 2 * BATCH * 3 / parts * 64 / topology.hbm_mem_bw
        for shard, other in zip(
            ours[sharding_type].shards, stock[sharding_type].shards, strict=True
        ):
            expected = dataclasses.replace(other.perf, fwd_compute=other.perf.fwd_compute + probe)
            assert shard.perf == expected


def test_an_estimate_changes_no_option() -> None:
    enumerator = dynamic_enumerator(machine(), {"a": dynamic(1000)}, BATCH)
    option = options_of(enumerator, bags(a=100), "a", sharders=sharders())["row_wise"]
    before = copy.deepcopy(option)
    enumerator.populate_estimates([option])
    assert option.compute_kernel == "customized_kernel"
    assert option.shards == before.shards
    assert option.tensor is before.tensor


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_static_tables_are_offered_and_priced_as_torchrec_does(device: str) -> None:
    topology = machine(device=device)
    stock = EmbeddingEnumerator(topology, BATCH, {}).enumerate(
        bags(a=100, b=1000), [EmbeddingBagCollectionSharder()]
    )
    ours = dynamic_enumerator(topology, {"a": dynamic(5)}, BATCH).enumerate(
        bags(a=100, b=1000), sharders()
    )

    def of_b(found: list[ShardingOption]) -> set[tuple[Any, ...]]:
        return {(o.sharding_type, o.compute_kernel, str(o.shards)) for o in found if o.name == "b"}

    # a sharder may offer more
    assert of_b(ours) >= of_b(stock)
    assert "customized_kernel" not in {o.compute_kernel for o in ours if o.name == "b"}
    assert {o.compute_kernel for o in ours if o.name == "a"} == {"customized_kernel"}
    assert "data_parallel" not in {o.sharding_type for o in ours if o.name == "a"}
    assert "data_parallel" in {o.sharding_type for o in ours if o.name == "b"}


@pytest.mark.parametrize("collection", [bags, sequences])
def test_a_mixed_plan_carries_options_and_can_be_pickled(collection: Any) -> None:
    options = TableOptions(policy=td.Policy(capacity=5000), padding_idx=7)
    constraints = {"a": DynamicTableConstraints(options, sharding_types=["row_wise"])}
    plan = planned(collection(a=100, b=100), constraints, machine())
    plan = pickle.loads(pickle.dumps(plan))
    assert plan.plan[""]["b"].compute_kernel != "customized_kernel"
    assert plan.plan[""]["a"].compute_kernel == "customized_kernel"
    assert plan.plan[""]["a"].sharding_type == "row_wise"
    read = planned_options(plan.plan[""]["a"])
    assert read is not None
    assert (read.policy.capacity, read.padding_idx) == (5000, 7)
    assert planned_options(plan.plan[""]["b"]) is None


def beside_another(constraints: DynamicTableConstraints) -> dict[str, Any]:
    """With a second table: two ranks have one each, rather than halves of the first."""
    return {"a": constraints, "b": ParameterConstraints(sharding_types=["table_wise"])}


def test_another_capacity_changes_the_plan() -> None:
    def sharding_type(capacity: int) -> str:
        constraints = beside_another(dynamic(capacity, sharding_types=["table_wise", "row_wise"]))
        module, small = bags(a=100, b=100), machine(memory=8 << 20)
        plan = planned(module, constraints, small, EmbOptimType.ADAM)
        return plan.plan[""]["a"].sharding_type

    # a row takes 230 bytes: 46,000 do not fit into the 8 MiB of one rank, but into those of two
    assert sharding_type(1000) == "table_wise"
    assert sharding_type(46_000) == "row_wise"
    with pytest.raises(PlannerError):
        sharding_type(100_000)


def test_another_optimizer_changes_the_plan() -> None:
    constraints = beside_another(dynamic(46_000, sharding_types=["table_wise", "row_wise"]))
    module, small = bags(a=100, b=100), machine(memory=8 << 20)

    def sharding_type(kind: Any, optimizer: OptimizerConfig | None = None) -> str:
        plan = planned(module, constraints, small, kind, optimizer)
        return str(plan.plan[""]["a"].sharding_type)

    assert sharding_type(EmbOptimType.EXACT_SGD) == "table_wise"
    assert sharding_type(EmbOptimType.ADAM) == "row_wise"
    assert sharding_type(EmbOptimType.EXACT_SGD, td.Adam(lr=0.1)) == "row_wise"
    eight_bits = td.Adam(lr=0.1, state_dtype=torch.uint8)
    assert sharding_type(EmbOptimType.ADAM, eight_bits) == "table_wise"


def test_which_optimizer_counts() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    assert type(planned_optimizer(parameter, EmbeddingBagCollectionSharder())) is td.SGD
    adam = sharders(EmbOptimType.ADAM)[0]
    assert type(planned_optimizer(parameter, adam)) is td.Adam
    ftrl = sharders(EmbOptimType.ADAM, optimizer=td.Ftrl(lr=0.5))[0]
    assert type(planned_optimizer(parameter, ftrl)) is td.Ftrl
    parameter._optimizer_classes = [torch.optim.Adagrad]
    parameter._optimizer_kwargs = [{"lr": 0.1}]
    for sharder in (adam, ftrl):
        assert type(planned_optimizer(parameter, sharder)) is td.Adagrad
    for kind in (EmbOptimType.MADGRAD, EmbOptimType.NONE):
        with pytest.raises(
            NotImplementedError, match=r"has optimizer .*expected one of.*'adam'.*optimizer="
        ):
            optimizer_of("planner", {"optimizer": kind})


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a'.*data_parallel would replicate.*use 'row_wise'"):
        dynamic_enumerator(machine(), {"a": dynamic(5, sharding_types=["data_parallel"])})
    allowed = {"a": dynamic(5, sharding_types=["data_parallel", "row_wise"])}
    enumerator = dynamic_enumerator(machine(), allowed)
    assert options_of(enumerator, bags(a=9), "a", sharders=sharders()).keys() == {"row_wise"}


def test_what_no_dynamic_table_can_meet_is_refused() -> None:
    topology = machine()
    with pytest.raises(ValueError, match=r"compute_kernels of table 'a'.*DynamicTableConstraints"):
        dynamic_enumerator(
            topology, {"a": ParameterConstraints(compute_kernels=["customized_kernel"])}
        )
    with pytest.raises(ValueError, match=r"'a' is to be dynamic.*DynamicEmbeddingBagCollection"):
        dynamic_enumerator(topology, {"a": dynamic(5)}).enumerate(
            bags(a=9), [EmbeddingBagCollectionSharder()]
        )
    with pytest.raises(ValueError, match=r"make \['x'\] dynamic, but.*\['a'\]: correct"):
        dynamic_enumerator(topology, {"x": dynamic(5)}).enumerate(bags(a=9), sharders())


def test_constraints_name_tables_of_the_model() -> None:
    for constraints, message in (
        (
            {"user": dynamic()},
            r"constraints make \['user'\] dynamic, but the model's tables are \[",
        ),
        (
            {"a": dynamic(), "user": ParameterConstraints(min_partition=8)},
            r"constraints name tables \['user'\], but those of the model are \['a",
        ),
    ):
        enumerator = dynamic_enumerator(machine(), constraints, BATCH)
        with pytest.raises(ValueError, match=message):
            enumerator.enumerate(bags(a=10), sharders())

    class Both(nn.Module):
        """One collection is not sharded by these sharders: its tables are tables all the same."""

        def __init__(self) -> None:
            super().__init__()
            self.bags, self.sequences = bags(a=10), sequences(user=10)

    enumerator = dynamic_enumerator(
        machine(), {"a": dynamic(), "user": ParameterConstraints(min_partition=8)}, BATCH
    )
    assert {option.name for option in enumerator.enumerate(Both(), sharders()[:1])} == {"a"}


def test_a_model_that_is_not_sharded_has_no_sizes() -> None:
    with pytest.raises(ValueError, match="model, a EmbeddingBagCollection, has no sharded collec"):
        table_sizes(bags(a=10))


def test_planner_by_dynamicembs_name() -> None:
    module, topology = bags(a=100, b=100), machine()
    configs, constraints = module.embedding_bag_configs(), {"a": dynamic(5)}
    with pytest.raises(ValueError, match=r"constraints name \['x'\].*\['a', 'b'\]: correct"):
        DynamicEmbeddingShardingPlanner(configs, topology, constraints={"x": dynamic(5)})
    with pytest.raises(TypeError, match="expected a DynamicEmbeddingEnumerator"):
        DynamicEmbeddingShardingPlanner(
            configs, topology, enumerator=EmbeddingEnumerator(topology, BATCH)
        )
    with pytest.raises(ValueError, match="give both the same constraints"):
        DynamicEmbeddingShardingPlanner(
            configs,
            topology,
            constraints=constraints,
            enumerator=DynamicEmbeddingEnumerator(topology),
        )
    for enumerator in (None, DynamicEmbeddingEnumerator(topology, constraints=constraints)):
        planner = DynamicEmbeddingShardingPlanner(
            configs,
            topology,
            constraints=constraints,
            enumerator=enumerator,
            storage_reservation=nothing_reserved(),
            debug=False,
        )
        plan = planner.plan(module, sharders()).plan[""]
        assert {
            name: table.compute_kernel == "customized_kernel" for name, table in plan.items()
        } == {
            "a": True,
            "b": False,
        }


def test_planning_errors_reach_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(plans_and_errors)
    assert first == second


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"process group is missing.*init_process_group"):
        collective_plan(Failing(ValueError("")), bags(a=9))


def test_half_precision_rows_count_half() -> None:
    enumerator = dynamic_enumerator(machine(), {"a": dynamic(700)}, BATCH)
    module = bags(DataType.BF16, a=7)
    option = options_of(enumerator, module, "a", sharders=sharders())["table_wise"]
    assert shard_bytes(option) == [700 * (16 * 2 + 4) + 1000 * 24]
