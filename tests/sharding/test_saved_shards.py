"""Saved checkpoints and values hold the same as when they were written, and go on from there.

``saved_shards.py`` has written them, with torch 2.13 and TorchRec 1.8.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from planner_cases import bags, sharders
from ranks import Ranks
from saved_files import Numbers, kept, recorded
from saved_shards import DCP, TABLES, arguments, expected, load, results, values

import torch_dynemb as td
import torch_dynemb.torchrec
from torch_dynemb.compat import dynamicemb
from torch_dynemb.torchrec.planning.options import planned_options
from torch_dynemb.torchrec.state.inspect import LocalShard

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

needs_1_8 = pytest.mark.skipif(
    tuple(map(int, torchrec.__version__.split(".")[:2])) < (1, 8),
    reason="the values have objects of TorchRec 1.8, which older ones need not read",
)


def assert_numbers(given: Numbers, known: Numbers) -> None:
    """Exactly equal, dtypes included."""
    assert given.keys() == known.keys()
    for name, value in known.items():
        assert given[name].dtype == value.dtype, name
        assert torch.equal(given[name], value), name


def test_a_checkpoint_of_two_ranks_is_read_and_trained_on(two_ranks: Ranks) -> None:
    known = expected()
    assert {name.split()[0] for of_rank in known for name in of_rank} == {t.name for t in TABLES}
    assert all(int(n) == 3 for numbers in known for name, n in numbers.items() if "updates" in name)
    for (restored, trained, again), numbers in zip(
        two_ranks.run(load, str(DCP)), known, strict=True
    ):
        assert_numbers(restored, numbers)
        assert_numbers(again, trained)
        for name, value in numbers.items():
            if name.endswith("rows"):
                assert not torch.equal(trained[name], value)
            if name.endswith("updates"):
                assert int(trained[name]) == int(value) + 2


@needs_1_8
@pytest.mark.filterwarnings("ignore:.*KVCounter")
def test_values_are_those_that_were_saved() -> None:
    given, made = kept("torchrec_values.pickle.gz"), values()
    for name in ("a", "b"):
        one, other = given["constraints"][name], made["constraints"][name]
        assert str(one) == str(other)
        assert hash(one) == hash(other)
    assert (
        given["constraints"]["b"].dynamicemb_options == made["constraints"]["b"].dynamicemb_options
    )
    read = given["plan"].plan[""]["a"]
    assert (read.sharding_type, read.compute_kernel) == ("row_wise", "customized_kernel")
    assert str(planned_options(read)) == str(made["constraints"]["a"].options)
    for one, other in zip(given["sharders"], made["sharders"], strict=True):
        assert one.optimizer == other.optimizer == td.Adam(lr=0.25)
    planned = given["planner"].plan(bags(a=500, b=500), given["sharders"])
    assert str(planned) == str(given["plan"]) == str(made["plan"])
    options = given["enumerator"].enumerate(bags(a=500, b=500), sharders())
    assert {option.name for option in options} == {"a", "b"}
    kinds = [type(estimator).__name__ for estimator in given["estimators"]]
    assert kinds == ["DynamicPerfEstimator", "DynamicStorageEstimator"]
    assert str(given["rows"]) == str(made["rows"])


def test_a_shard_is_the_one_that_was_saved() -> None:
    (shard,) = kept("torchrec_shard.pt.gz")
    assert isinstance(shard, LocalShard)
    assert shard.table.split(".")[-1] in {table.name for table in TABLES}
    assert shard.group.size(shard.number) > 0


def test_results_are_those_that_were_saved() -> None:
    assert kept("torchrec_results.pickle.gz") == results()
    assert kept("dynamicemb_arguments.pickle.gz") == arguments()


# of what another process cannot have: one is made for a save, one has batches on their way, one
# has process groups; and what freeze() makes again of a saved model
NEVER_SAVED = {
    "DynamicDMPCollection",
    "Stager",
    "PrefetchTrainPipeline",
    "FrozenEmbeddingBagCollection",
    "FrozenEmbeddingCollection",
}


@needs_1_8
@pytest.mark.parametrize(
    "package", [torch_dynemb.torchrec, dynamicemb], ids=lambda package: package.__name__
)
def test_a_file_has_every_public_class(package: Any) -> None:
    classes = {
        name
        for name in package.__all__
        if isinstance(getattr(package, name), type)
        and getattr(package, name).__module__.startswith("torch_dynemb")
    }
    files = ("torchrec_values.pickle.gz", "torchrec_results.pickle.gz", "torchrec_shard.pt.gz")
    files += ("dynamicemb_arguments.pickle.gz",)
    saved = {name for file in files for _, name in recorded(file)[1]}
    assert classes - NEVER_SAVED <= saved
