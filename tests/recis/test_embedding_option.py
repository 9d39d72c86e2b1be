"""EmbeddingOption and hooks: what they say and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.recis import (
    READ_ONLY,
    AdmitHook,
    ConstantInitializer,
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    HashTable,
    KaimingNormalInitializer,
    KaimingUniformInitializer,
    NormalInitializer,
    RowFilter,
    Slice,
    TruncNormalInitializer,
    UniformInitializer,
    XavierNormalInitializer,
    XavierUniformInitializer,
    gen_slice,
    register_admit_hook,
    register_filter_hook,
)
from torch_dynemb.recis.tables import hooks as hooks_module

pytestmark = pytest.mark.cpu_only("arguments that are refused before a device sees them")


def test_defaults_are_recis_s() -> None:
    option = EmbeddingOption()
    assert option.embedding_dim == 16
    assert option.block_size == 10240
    assert option.dtype == torch.float32
    assert option.device == torch.device("cpu")
    assert option.max_partition_num == 65536
    assert (option.shared_name, option.children) == ("embedding", ["embedding"])
    assert option.initializer == td.Constant(0.0)
    assert (option.combiner, option.grad_reduce_by) == ("sum", "worker")
    assert option.trainable
    assert option.use_weight
    assert not option.coalesced
    assert not option.fp16_enabled


def test_initializers_by_recis_s_names() -> None:
    assert ConstantInitializer(init_val=2.0) == td.Constant(2.0)
    assert UniformInitializer(a=-1.0, b=3.0) == td.Uniform(-1.0, 3.0)
    assert NormalInitializer(mean=1.0, std=2.0) == td.Normal(1.0, 2.0)
    truncated = TruncNormalInitializer(mean=1.0, std=2.0, a=-1.0, b=3.0)
    assert truncated == td.TruncatedNormal(1.0, 2.0, -1.0, 7.0)
    assert EmbeddingOption(initializer=truncated).initializer is truncated


RANDOM: list[tuple[Any, float, float]] = [  # of 64 rows of 16: name, bound, standard deviation
    (UniformInitializer, 1.0, 12**-0.5),
    (NormalInitializer, 5.0, 1.0),
    (TruncNormalInitializer, 2.0, 0.88),
    (XavierUniformInitializer, (6 / 80) ** 0.5, (2 / 80) ** 0.5),
    (XavierNormalInitializer, 5 * (2 / 80) ** 0.5, (2 / 80) ** 0.5),
    (KaimingUniformInitializer, (6 / 16) ** 0.5, (2 / 16) ** 0.5),
    (KaimingNormalInitializer, 5 * (2 / 16) ** 0.5, (2 / 16) ** 0.5),
    (partial(KaimingUniformInitializer, mode="FAN_OUT", nonlinearity="linear"), 3**0.5 / 8, 1 / 8),
    (partial(KaimingNormalInitializer, a=3.0, mode="fan_out"), 5 * (0.2 / 64) ** 0.5, 0.2**0.5 / 8),
]


@pytest.mark.parametrize(("kind", "bound", "deviation"), RANDOM)
def test_initializers_fill_tensors_and_tables_alike(
    kind: Any, bound: float, deviation: float
) -> None:
    def made(seed: int) -> Any:
        initializer = kind(generator=torch.Generator().manual_seed(seed))
        initializer.set_shape([64, 16])
        initializer.set_dtype()
        return initializer

    initializer, same, other = made(5), made(5), made(6)
    assert initializer == same
    assert initializer != other
    assert initializer != kind()
    with pytest.raises(RuntimeError, match=r"build\(\) has not been called"):
        initializer.generate()
    for each in (initializer, same, other):
        each.build()
    with pytest.raises(RuntimeError, match=r"build\(\) has been called before"):
        initializer.build()
    values = initializer.generate()
    assert torch.equal(same.generate(), values)
    assert not torch.equal(initializer.generate(), values)
    assert not torch.equal(other.generate(), values)
    of_table, again, changed = (  # block_size is the number of rows of the matrix
        HashTable([16], 64, initializer=made(seed))(torch.arange(64)) for seed in (5, 5, 6)
    )
    assert torch.equal(again, of_table)
    assert not torch.equal(changed, of_table)
    for filled in (values, of_table):
        assert filled.abs().max() <= bound
        assert abs(filled.std() / deviation - 1) < 0.1


def test_a_constant_fills_tensors_of_its_dtype() -> None:
    initializer = ConstantInitializer(3.0, torch.float16)
    initializer.set_shape([2, 3])
    initializer.build()
    assert torch.equal(initializer.generate(), torch.full((2, 3), 3.0, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"shape is \[2\], expected \[rows, dim\]"):
        KaimingNormalInitializer([2]).build()
    with pytest.raises(ValueError, match="mode is 'fan', expected one of"):
        KaimingUniformInitializer(mode="fan")


def test_options_with_other_generators_are_other_tables() -> None:
    def info(seed: int | None) -> str:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return EmbeddingOption(initializer=UniformInitializer(generator=generator)).coalesced_info()

    assert info(1) == info(1)
    assert len({info(1), info(2), info(None)}) == 3
    assert info(None) == EmbeddingOption(initializer=td.Uniform()).coalesced_info()


def test_infos_say_what_is_shared() -> None:
    option = EmbeddingOption(
        filter_hook=FilterHook("GlobalStepFilter", {"filter_step": 3}),
        admit_hook=AdmitHook("ReadOnly"),
    )
    coalesced, runtime = json.loads(option.coalesced_info()), json.loads(option.runtime_info())
    assert list(coalesced) == [
        "dim",
        "dtype",
        "device",
        "initializer",
        "grad_reduce_by",
        "filter_hook",
    ]
    assert list(runtime) == ["combiner", "use_weight", "trainable", "admit_hook", "fp16_enabled"]
    for change in (
        {"embedding_dim": 8},
        {"dtype": torch.bfloat16},
        {"initializer": td.Normal()},
        {"grad_reduce_by": "id"},
        {"filter_hook": FilterHook("GlobalStepFilter", {"filter_step": 4})},
        {"max_rows": 100},
    ):
        assert EmbeddingOption(**change).coalesced_info() != EmbeddingOption().coalesced_info()  # type: ignore[arg-type]
        assert EmbeddingOption(**change).runtime_info() == EmbeddingOption().runtime_info()  # type: ignore[arg-type]
    for change in (
        {"combiner": "mean"},
        {"use_weight": False},
        {"trainable": False},
        {"admit_hook": AdmitHook("ReadOnly")},
    ):
        assert EmbeddingOption(**change).runtime_info() != EmbeddingOption().runtime_info()  # type: ignore[arg-type]
        assert EmbeddingOption(**change).coalesced_info() == EmbeddingOption().coalesced_info()  # type: ignore[arg-type]


def test_max_rows_bound_the_tables() -> None:
    bounded = EmbeddingOption(embedding_dim=4, shared_name="a", max_rows=100)
    alone = DynamicEmbedding(bounded)
    assert alone.hashtable.group.rows.weights[0].shape == (100, 4)
    engine = EmbeddingEngine({"a": bounded, "b": EmbeddingOption(embedding_dim=4, shared_name="b")})
    assert sorted(t.group.config.max_rows or 0 for t in engine.tables.values()) == [0, 100]
    different = replace(bounded, max_rows=101)
    with pytest.raises(ValueError, match="do not describe one table"):
        EmbeddingEngine({"a": bounded, "b": different})


def test_fp16_is_for_rows_of_8_bits() -> None:
    assert EmbeddingOption(dtype=torch.int8, fp16_enabled=True).fp16_enabled


def test_hooks_of_other_names_and_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name is 'Steps', expected one of .*GlobalStepFilter"):
        FilterHook("Steps")
    with pytest.raises(ValueError, match=r"name is 'Some', expected one of .*ReadOnly"):
        AdmitHook("Some")
    with pytest.raises(ValueError, match=r"FilterHook 'GlobalStepFilter': params is {'steps': 1}"):
        FilterHook("GlobalStepFilter", {"steps": 1})
    with pytest.raises(ValueError, match="filter_step is 0, expected at least 1"):
        FilterHook("GlobalStepFilter", {"filter_step": 0})
    with pytest.raises(ValueError, match=r"AdmitHook 'ReadOnly': params is {'a': 1}"):
        AdmitHook("ReadOnly", {"a": 1})
    assert AdmitHook("ReadOnly").make() == READ_ONLY
    assert AdmitHook("Frequency", {"threshold": 3}).make() == td.AdmitFrequent(3)
    assert AdmitHook("Probability", {"probability": 0.5}).make() == td.AdmitByChance(0.5)


def test_users_add_hooks() -> None:
    register_admit_hook("Twice")(lambda: td.AdmitFrequent(2))

    @register_filter_hook("Never")
    class Never(RowFilter):
        interval = 7

    try:
        assert AdmitHook("Twice").make() == td.AdmitFrequent(2)
        assert FilterHook("Never").make().interval == 7
        with pytest.raises(NotImplementedError, match="Never does not define remove"):
            FilterHook("Never").make().remove(None, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'Never' is registered already"):
            register_filter_hook("Never")(Never)
    finally:
        del hooks_module._ADMISSIONS["Twice"], hooks_module._FILTERS["Never"]


@pytest.mark.parametrize(("parts", "slots"), [(1, 8), (3, 8), (8, 8), (7, 65536)])
def test_slices_divide_the_slots(parts: int, slots: int) -> None:
    slices = [gen_slice(part, parts, slots) for part in range(parts)]
    assert [s.slice_begin for s in slices] == [0, *(s.slice_end for s in slices[:-1])]
    assert slices[-1].slice_end == slots
    sizes = [end - begin for begin, end, _ in slices]
    assert max(sizes) - min(sizes) <= 1
    assert Slice(0, slots, slots).whole
    assert [s.whole for s in slices] == [parts == 1] * parts
