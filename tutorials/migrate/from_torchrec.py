"""From TorchRec: a static table with its vocabulary, and a table behind a managed collision module.

The optimizer state of a static table comes along, so that training goes on as if nothing had
happened. Both old parts run where TorchRec is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import migrate

DIM = 8


def known_ids(step: int, vocabulary: Tensor) -> Tensor:
    """Return ids of a step, [64]."""
    draw = torch.Generator().manual_seed(step)
    return vocabulary[torch.randint(0, vocabulary.numel(), (64,), generator=draw)]


def static_table() -> dict[str, object]:
    """Move a table with a vocabulary that was made in advance."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    vocabulary = torch.arange(100).square() - 50  # ids, ascending; row r is that of vocabulary[r]
    config = EmbeddingBagConfig(
        name="movies", embedding_dim=DIM, num_embeddings=100, feature_names=["movie"]
    )
    old = EmbeddingBagCollection(tables=[config])
    adagrad = torch.optim.Adagrad(old.parameters(), lr=0.1)

    def old_forward(ids: Tensor) -> Tensor:
        rows = torch.searchsorted(vocabulary, ids)  # before: every id is looked up twice
        features = KeyedJaggedTensor(["movie"], rows, lengths=torch.ones_like(rows))
        return old(features).to_dict()["movie"]

    new = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("movies", DIM, ["movie"])], optimizer=td.Adagrad(lr=0.1)
    )

    def new_forward(ids: Tensor) -> Tensor:
        features = KeyedJaggedTensor(["movie"], ids, lengths=torch.ones_like(ids))
        return new(features)

    for step in range(20):
        adagrad.zero_grad()
        old_forward(known_ids(step, vocabulary)).square().sum().backward()
        adagrad.step()

    table = old.embedding_bags["movies"]
    state = {"sum": adagrad.state[table.weight]["sum"]}
    migrate.load(new, migrate.read_embedding(table, vocabulary, state=state, optimizer_steps=20))

    for step in range(20, 40):  # both go on
        ids = known_ids(step, vocabulary)
        adagrad.zero_grad()
        old_forward(ids).square().sum().backward()
        adagrad.step()
        new_forward(ids).square().sum().backward()
        new.optimizer.step()
    difference = (old_forward(vocabulary) - new_forward(vocabulary)).abs().max()
    new_forward(torch.tensor([10**12]))  # no vocabulary has it
    return {"difference_after_training_on": float(difference.detach())}


def managed_collisions() -> dict[str, object]:
    """Move a table with ids that an MCH module has mapped to rows."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        LFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    config = EmbeddingBagConfig(
        name="ads", embedding_dim=DIM, num_embeddings=32, feature_names=["ad"]
    )
    module = MCHManagedCollisionModule(
        zch_size=32,
        device=torch.device("cpu"),
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=2,
        input_hash_size=2**62,
    )
    old = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]),
        ManagedCollisionCollection({"ads": module}, [config]),
    )

    def features(ids: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["ad"], ids, lengths=torch.ones_like(ids))

    often, seldom = torch.arange(20) * 2**40, torch.arange(1000, 1200)
    for step in range(10):
        draw = torch.Generator().manual_seed(step)
        old(features(torch.cat([often, seldom[torch.randperm(200, generator=draw)[:5]]])))
    old.eval()

    # after: no row is shared, and the table may grow; as large as before it evicts the same way
    policy = td.Policy(score="frequency", capacity=32)
    overflow = old._embedding_module.embedding_bags["ads"].weight[-1].detach()
    new = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("ads", DIM, ["ad"], policy=policy, eval_default=overflow)],
        optimizer=td.Adagrad(lr=0.1),
    )
    weight = old._embedding_module.embedding_bags["ads"]
    report = migrate.load(new, migrate.read_torchrec_mch(module, weight))
    new.eval()
    ids = torch.cat([often, torch.tensor([10**15])])  # one that neither knows
    same = torch.equal(new(features(ids)), old(features(ids))[0].to_dict()["ad"])
    return {"same_answers": same, "ids": report["ads"].ids}


def main() -> None:
    """Move both kinds of tables."""
    if importlib.util.find_spec("torchrec") is None:
        print("TorchRec is not installed: see the Makefile for how to install it on this machine")
        return
    torch.manual_seed(0)
    print(json.dumps({"static": static_table(), "managed": managed_collisions()}))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
