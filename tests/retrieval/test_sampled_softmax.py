"""Losses against sampled negatives, and their updates of rows, against double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loss_reference import Reference
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import HashTable
from torch_dynemb.table.sampling import draw_by_count, draw_uniform

pytestmark = pytest.mark.any_device

DIM, KNOWN, TEMPERATURE = 5, 12, 0.5
POSITIVES = [3, 7, 3, 11, -50, 0, 7]  # -50 is new; others repeat
UNIFORM, BY_COUNT = td.UniformNegatives(9), td.FrequencyNegatives(8, power=0.5)
IN_BATCH = td.InBatchNegatives()


def items_of(**options: Any) -> td.DynamicEmbedding:
    torch.manual_seed(4)
    options = {"policy": td.Policy(score="frequency"), **options}
    items = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=1.0), **options)
    known = torch.arange(KNOWN)
    items.group.insert(0, known.repeat_interleave(known % 4 + 1))
    return items


def query_of(n: int = len(POSITIVES)) -> Tensor:
    return torch.randn(n, DIM, generator=seeded(5)).requires_grad_()


def drawn_by(items: td.DynamicEmbedding, negatives: Any, seed: int) -> list[Tensor]:
    """Draw as a loss does that began with a seed."""
    torch.manual_seed(seed)
    drawn = []
    for source in negatives if isinstance(negatives, tuple) else (negatives,):
        if isinstance(source, td.UniformNegatives):
            drawn.append(draw_uniform(items.group.tables, 0, source.n).ids)
        elif isinstance(source, td.FrequencyNegatives):
            drawn.append(draw_by_count(items.group.tables, 0, source.n, source.power).ids)
    return drawn


def counts_of(items: td.DynamicEmbedding) -> dict[int, int]:
    ids = items.ids()
    return dict(zip(ids.tolist(), items.group.scores.get(0, ids).scores.tolist(), strict=True))


def expected_by(
    items: td.DynamicEmbedding,
    listed: dict[int, int],
    negatives: Any,
    positives: int,
) -> Any:
    """How often an id is expected among the negatives of a query.

    Sums, and the weights of drawn ids, are of the counts that were listed before the batch.
    """
    counts = counts_of(items)
    sources = negatives if isinstance(negatives, tuple) else (negatives,)
    sampled = [of for of in sources if not isinstance(of, td.InBatchNegatives)]

    def expected(item: int, draw: int | None) -> float:
        total = 0.0
        for source in sources:
            if isinstance(source, td.InBatchNegatives):
                total += (positives - 1) * counts[item] / sum(listed.values())
            elif isinstance(source, td.UniformNegatives):
                total += source.n / len(counts)
            else:
                of = listed if draw is not None and sampled[draw] is source else counts
                weights = sum(count**source.power for count in listed.values())
                total += source.n * of[item] ** source.power / weights
        return total

    return expected


@pytest.mark.parametrize(
    "negatives",
    [IN_BATCH, UNIFORM, BY_COUNT, (IN_BATCH, UNIFORM), (UNIFORM, BY_COUNT, IN_BATCH)],
    ids=["batch", "uniform", "frequency", "mixed", "all"],
)
@pytest.mark.parametrize(
    ("form", "correction", "hits", "weighted"),
    [
        ("softmax", "logq", True, False),
        ("softmax", None, False, True),
        ("bce", "logq", True, True),
        ("bce", None, False, False),
        ("bpr", None, True, True),
    ],
)
def test_losses_and_gradients(
    negatives: Any,
    form: Any,
    correction: Any,
    hits: bool,
    weighted: bool,
) -> None:
    items, query = items_of(), query_of()
    loss = td.SampledSoftmaxLoss(
        items,
        negatives=negatives,
        form=form,
        correction=correction,
        temperature=TEMPERATURE,
        remove_accidental_hits=hits,
    )
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 3.0, 0.25]) if weighted else None
    listed = counts_of(items)
    torch.manual_seed(9)
    value = loss(query, torch.tensor(POSITIVES), weights)
    drawn = drawn_by(items, negatives, 9)
    ids, rows = items.ids(), items.group.read(0, items.ids())
    counted = expected_by(items, listed, negatives, len(POSITIVES))
    in_batch = negatives is IN_BATCH or (isinstance(negatives, tuple) and IN_BATCH in negatives)
    with torch.device("cpu"):
        reference = Reference.of(query, ids, rows, TEMPERATURE)
        expected = reference.mean_loss(
            form,
            POSITIVES,
            [part.tolist() for part in drawn],
            in_batch=in_batch,
            hits=hits,
            expected=counted if correction else lambda item, draw: 1.0,
            weights=None if weights is None else weights.tolist(),
        )
        expected.backward()
    value.backward()
    items.optimizer.step()
    torch.testing.assert_close(
        value.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6
    )
    assert query.grad is not None
    assert reference.query.grad is not None
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(query.grad.cpu().double(), reference.query.grad, **close)
    changes = (rows - items.group.read(0, ids)).cpu().double()  # lr is 1
    gradients = torch.stack(
        [torch.zeros_like(row) if row.grad is None else row.grad for row in reference.rows.values()]
    )
    torch.testing.assert_close(changes, gradients, **close)


def test_negatives_are_neither_inserted_nor_counted() -> None:
    items = items_of()
    ids = torch.arange(KNOWN)
    before = items.group.scores.get(0, ids).scores
    loss = td.SampledSoftmaxLoss(items, negatives=(UNIFORM, BY_COUNT))
    loss(query_of(2), torch.tensor([1, -7])).backward()
    items.optimizer.step()
    assert len(items) == KNOWN + 1
    after = items.group.scores.get(0, ids).scores
    assert (after - before).tolist() == (ids == 1).long().tolist()


@pytest.mark.parametrize("negatives", [UNIFORM, BY_COUNT], ids=["uniform", "frequency"])
def test_negatives_that_the_same_step_evicts_do_not_count(negatives: Any) -> None:
    """Ids are listed once for many steps, so a list has some that have gone."""
    items = items_of(policy=td.Policy(score=("step", "frequency"), capacity=KNOWN))
    loss = td.SampledSoftmaxLoss(
        items, negatives=negatives, correction=None, temperature=TEMPERATURE
    )
    query, fresh = query_of().detach(), torch.arange(len(POSITIVES)) + 100
    loss(query, torch.arange(len(POSITIVES)))  # lists
    items.optimizer.step()
    torch.manual_seed(9)
    value = loss(query, fresh)
    drawn = torch.cat(drawn_by(items, negatives, 9))
    ids = items.ids()
    present = torch.isin(drawn, ids)
    assert bool(present.all()) == (negatives is UNIFORM)
    with torch.device("cpu"):
        reference = Reference.of(query, ids, items.group.read(0, ids), TEMPERATURE)
        expected = reference.mean_loss(
            "softmax",
            fresh.tolist(),
            [drawn[present].tolist()],
            in_batch=False,
            hits=True,
            expected=lambda item, draw: 1.0,
            weights=None,
        )
    torch.testing.assert_close(value.detach().cpu().double(), expected.detach())


def test_nothing_changes_in_eval_mode() -> None:
    items = items_of().eval()
    before = items.state_dict()
    loss = td.SampledSoftmaxLoss(items, negatives=(UNIFORM, IN_BATCH))
    query = query_of(2)
    loss(query, torch.tensor([1, -7])).backward()
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())
    after = items.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("negatives", [IN_BATCH, (IN_BATCH, UNIFORM)], ids=["batch", "mixed"])
def test_padding_ids_have_no_loss(negatives: Any) -> None:
    """As if they had not been there."""
    results = []
    for positives in ([3, 7, 11], [3, 0, 7, 0, 11]):
        items = items_of(padding_idx=0)
        query = query_of(5).detach()[: len(positives)].clone()
        if len(positives) == 5:
            query[[0, 2, 4]] = query_of(5).detach()[:3]
        query.requires_grad_()
        loss = td.SampledSoftmaxLoss(items, negatives=negatives, temperature=TEMPERATURE)
        torch.manual_seed(2)
        value = loss(query, torch.tensor(positives))
        value.backward()
        assert query.grad is not None
        kept = torch.tensor(positives) != 0
        assert not bool(query.grad[~kept].any())
        results.append((value.detach(), query.grad[kept]))
    torch.testing.assert_close(results[0], results[1])


def test_a_query_without_negatives_has_no_loss() -> None:
    loss = td.SampledSoftmaxLoss(items_of())
    query = query_of(1)
    value = loss(query, torch.tensor([3]))
    value.backward()
    assert float(value.detach()) == 0.0
    assert query.grad is not None
    assert not bool(query.grad.any())


def test_many_negatives_give_the_loss_of_all_ids() -> None:
    """A correction makes the sum over negatives an estimate of that over all ids."""
    items = items_of()
    query = query_of().detach()
    positives = torch.tensor([3, 7, 3, 11, 2, 0, 7])
    full = td.FullSoftmaxLoss(items, temperature=1.0)(query, positives)
    for negatives in (td.UniformNegatives(20_000), td.FrequencyNegatives(20_000, power=0.75)):
        loss = td.SampledSoftmaxLoss(items, negatives=negatives, temperature=1.0)
        torch.manual_seed(1)
        torch.testing.assert_close(loss(query, positives), full, rtol=0.01, atol=0)


def test_split_mode_adds_up_micro_batches() -> None:
    changes = []
    for split in (False, True):
        items = items_of(split=split)
        ids, before = torch.arange(KNOWN), items.group.read(0, torch.arange(KNOWN))
        loss = td.SampledSoftmaxLoss(items, negatives=UNIFORM)
        for _ in range(2 if split else 1):
            torch.manual_seed(3)
            loss(query_of(2), torch.tensor([1, 5])).backward()
        if split:
            assert torch.equal(items.group.read(0, ids), before)
        items.optimizer.step()
        changes.append(items.group.read(0, ids) - before)
    torch.testing.assert_close(changes[1], 2 * changes[0], rtol=1e-4, atol=1e-5)


def test_a_loss_meets_other_lookups_of_its_table() -> None:
    """A history in the query: one update by the sum of the gradients."""
    changes = []
    for together in (True, False):
        items = items_of(split=not together)
        ids, before = torch.arange(KNOWN), items.group.read(0, torch.arange(KNOWN))
        loss = td.SampledSoftmaxLoss(items, negatives=UNIFORM)
        query = items(torch.tensor([[1, 2], [3, 1]])).mean(1)
        torch.manual_seed(3)
        loss(query, torch.tensor([1, 5])).backward()
        items.optimizer.step()
        changes.append(items.group.read(0, ids) - before)
    torch.testing.assert_close(*changes, rtol=1e-4, atol=1e-5)


def test_a_hash_table_of_recis_is_trained_alike() -> None:
    ids, rows = torch.arange(KNOWN), torch.randn(KNOWN, DIM, generator=seeded(6))
    table = HashTable([DIM], name="items", device=torch.get_default_device())
    plain = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=1.0))
    changes = []
    for items, optimizer in (
        (plain, plain.optimizer),
        (table, table.set_optimizer(td.SGD(lr=1.0))),
    ):
        items.group.insert_or_assign(0, ids, rows)
        for loss in (
            td.SampledSoftmaxLoss(items, correction=None, temperature=TEMPERATURE),
            td.FullSoftmaxLoss(items, temperature=TEMPERATURE),
        ):
            loss(query_of(3), torch.tensor([1, 5, 1])).backward()
            optimizer.step()
        changes.append(items.group.read(0, ids) - rows)
        drawn = td.SampledSoftmaxLoss(items, negatives=UNIFORM)(query_of(1), torch.tensor([2]))
        assert float(drawn.detach()) > 0
    torch.testing.assert_close(*changes)
    assert bool(changes[0].any(1).all())


def test_autocast_computes_scores_in_bfloat16() -> None:
    values = []
    for enabled in (False, True):
        items, query = items_of(), query_of()
        loss = td.SampledSoftmaxLoss(items, negatives=(UNIFORM, IN_BATCH), temperature=TEMPERATURE)
        torch.manual_seed(3)
        device = items.group.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            value = loss(query, torch.tensor(POSITIVES))
        value.backward()
        items.optimizer.step()
        assert value.dtype == torch.float32
        values.append((value.detach(), query.grad))
    torch.testing.assert_close(values[1], values[0], rtol=0.05, atol=0.02)
    assert not torch.equal(values[1][0], values[0][0])


def test_rows_that_another_module_looked_up() -> None:
    """in_batch_softmax_loss has the value and the gradients of in-batch negatives."""
    items, query, ids = items_of().eval(), query_of(), torch.tensor(POSITIVES) % KNOWN
    counts = items.group.scores.get(0, items.ids()).scores.sum()
    shares = items.group.scores.get(0, ids).scores / counts
    for correction, log_probabilities in ((None, None), ("logq", shares.log())):
        rows = items(ids).detach().requires_grad_()
        loss = td.SampledSoftmaxLoss(items, correction=correction, temperature=TEMPERATURE)
        value = td.in_batch_softmax_loss(
            query, rows, ids, temperature=TEMPERATURE, log_probabilities=log_probabilities
        )
        torch.testing.assert_close(value, loss(query, ids))
        value.backward()
        assert rows.grad is not None
        assert bool((rows.grad.norm(dim=1) > 0).all())


@pytest.mark.parametrize("negatives", [IN_BATCH, td.FrequencyNegatives(8)])
@pytest.mark.parametrize("used", [False, True])
def test_a_resumed_job_goes_on_with_the_same_bits(
    negatives: Any, used: bool, tmp_path: Path
) -> None:
    """Lists of counts are not saved, and were made some steps before the save."""

    def train(items: td.DynamicEmbedding, steps: range) -> None:
        loss = td.SampledSoftmaxLoss(items, negatives=negatives)
        for step in steps:
            torch.manual_seed(step)
            ids = (torch.rand(64) ** 3 * 200).long()
            loss(torch.randn(64, DIM, requires_grad=True), ids).backward()
            items.optimizer.step()

    def new() -> td.DynamicEmbedding:
        policy = td.Policy(score="frequency")
        return td.DynamicEmbedding(DIM, name="items", optimizer=td.Adam(lr=0.1), policy=policy)

    model, resumed = new(), new()
    train(model, range(7))
    td.checkpoint.save(tmp_path / "last", model)
    train(model, range(7, 12))
    if used:
        train(resumed, range(100, 103))
    td.checkpoint.load(tmp_path / "last", resumed)
    train(resumed, range(7, 12))
    ids = model.ids().sort().values
    assert torch.equal(ids, resumed.ids().sort().values)
    assert torch.equal(model.group.read(0, ids), resumed.group.read(0, ids))
