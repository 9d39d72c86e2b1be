"""Stores that several tables are given."""

from __future__ import annotations

import gc

import pytest
import torch
from record_dict import RecordDict

import torch_dynemb as td
from torch_dynemb.storage.tiers.sharing import part_of_storage

pytestmark = pytest.mark.cpu_only("stores of rows are for the CPU")


def embedding(name: str, storage: td.ExternalStore) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(4, name=name, optimizer=td.SGD(lr=0.1), storage=storage)


@pytest.mark.long
def test_two_tables_of_a_name_do_not_share_a_store() -> None:
    """Else each would read the rows of the other, which may have equal handles."""
    store = RecordDict()
    storage = td.ExternalStore(store, cache="64 rows")
    users = embedding("users", storage)
    ads = embedding("ads", storage)
    with pytest.raises(RuntimeError, match="another table 'users' of this process has its rows in"):
        embedding("users", td.ExternalStore(store))
    with pytest.raises(RuntimeError, match="another table 'ads'"):
        td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, 4, storage=storage) for name in ("new", "ads")],
            optimizer=td.SGD(lr=0.1),
        )
    of_module = part_of_storage(storage, "model", ["users"], rank=0, ranks=1)
    assert isinstance(of_module, td.ExternalStore)
    third, new = embedding("users", of_module), embedding("new", storage)
    with pytest.raises(RuntimeError, match=r"another table 'model\.users'"):
        embedding("model.users", storage)
    for module in (users, ads, third, new):
        module(torch.arange(8)).sum().backward()
        module.optimizer.step()
        assert len(module) == 8
    del users, module
    gc.collect()
    embedding("users", storage)
