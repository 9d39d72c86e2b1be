"""Parts of the DLRM tutorial: metrics, model, baseline, settings, command line."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeding import seeded
from torch import nn

import torch_dynemb as td
from tutorials.dlrm import metrics, options
from tutorials.dlrm.data import MISSING_ID, MISSING_INTEGER
from tutorials.dlrm.job import checkpoint
from tutorials.dlrm.job.baseline import HashedRows, SparseRowWiseAdagrad, split_rows
from tutorials.dlrm.metrics import RunningAUC, exact_auc
from tutorials.dlrm.model import DLRM, DynamicRows, dense_features

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")

scored = st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=40)


def auc_of_pairs(samples):
    positives = [score for label, score in samples if label]
    negatives = [score for label, score in samples if not label]
    if not positives or not negatives:
        return float("nan")
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


@given(scored)
def test_exact_auc_counts_pairs(samples):
    auc = exact_auc([float(label) for label, _ in samples], [score for _, score in samples])
    assert auc == pytest.approx(auc_of_pairs(samples), nan_ok=True)


@given(scored)
def test_running_auc_without_fading_is_exact_up_to_bins(samples):
    running = RunningAUC(half_life=1e12, bins=16)
    labels = torch.tensor([float(label) for label, _ in samples])
    probabilities = torch.tensor([score / 8 - 1 / 64 for _, score in samples]).clamp(0, 1)
    for half in (slice(None, 5), slice(5, None)):
        running.update(labels[half], probabilities[half])
    np.testing.assert_allclose(running.compute(), auc_of_pairs(samples), atol=1e-9)


def test_running_auc_forgets():
    running = RunningAUC(half_life=10)
    labels = torch.tensor([0.0, 1.0]).repeat(50)
    running.update(labels, labels)
    assert running.compute() == 1.0
    for _ in range(3):
        running.update(labels, 1 - labels)
    assert running.compute() < 0.01


def test_metric_examples():
    assert doctest.testmod(metrics).failed == 0


def test_dense_features():
    integers = np.full((1, 13), MISSING_INTEGER)
    integers[0, :3] = [0, 7, -7]
    dense = dense_features(integers)[0].tolist()
    assert dense[:4] == pytest.approx([0, np.log(8), -np.log(8), 0])
    assert dense[13:] == [0] * 3 + [1] * 10


def test_both_kinds_of_rows_have_the_same_shape_and_range():
    ids = torch.randint(-(2**63), 2**63 - 1, (26, 5))
    ids[:, 0] = MISSING_ID
    for rows in (
        DynamicRows(4, td.RowWiseAdagrad(0.1)),
        HashedRows([3] * 26, 4, lr=0.1),
    ):
        embeddings = rows(ids)
        assert embeddings.shape == (5, 26, 4)
        assert embeddings.dtype == torch.float32
        assert 0 < embeddings.abs().max() <= 0.01


def test_features_have_id_spaces_of_their_own():
    rows = DynamicRows(4, td.RowWiseAdagrad(0.1))
    embeddings = rows(torch.full((26, 1), 7))
    assert len(embeddings[0].unique(dim=0)) == 26
    assert rows.figures().ids_by_feature == (1,) * 26


def test_interaction_is_the_dot_product_of_every_pair():
    class Given(nn.Module):
        def forward(self, ids):
            return vectors

    vectors = torch.randn(3, 26, 4)
    model = DLRM(Given(), 4)
    seen = []
    model.top.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    dense = torch.randn(3, 26)
    model(dense, torch.zeros(26, 3, dtype=torch.int64))
    bottom = model.bottom(dense)
    everything = [bottom, *vectors.unbind(1)]
    pairs = [(everything[i] * everything[j]).sum(1) for i in range(27) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([bottom, torch.stack(pairs, 1)], 1))


@pytest.mark.parametrize("dim", [1, 5])
def test_rowwise_adagrad_is_the_formula(dim):
    rows, lr, eps = 7, 0.1, 1e-8
    bag = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = SparseRowWiseAdagrad(bag.parameters(), lr, eps=eps)
    weight = bag.weight.detach().double()
    s = torch.zeros(rows, dtype=torch.float64)
    for step in range(50):
        generator = seeded(step)
        ids = torch.randint(rows, (6, 2), generator=generator)
        target = torch.randn(6, dim, generator=generator)
        optimizer.zero_grad()
        ((bag(ids) - target) ** 2).sum().backward()
        optimizer.step()
        g = torch.zeros_like(weight)
        error = 2 * (weight[ids].sum(1) - target.double())
        g.index_add_(0, ids.reshape(-1), error.repeat_interleave(2, 0))
        s += (g * g).mean(1)
        weight -= lr * g / (s.sqrt() + eps).unsqueeze(1)
    torch.testing.assert_close(bag.weight.detach().double(), weight, rtol=1e-4, atol=1e-5)


def test_rowwise_adagrad_errors():
    dense = nn.Embedding(3, 2)
    optimizer = SparseRowWiseAdagrad(dense.parameters(), 0.1)
    dense(torch.arange(3)).sum().backward()
    with pytest.raises(ValueError, match="sparse gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="lr must be 0 or above, got -1"):
        SparseRowWiseAdagrad(dense.parameters(), -1)


def test_hashed_rows_without_collisions_train_as_dynamic_rows():
    """The baseline differs in nothing but collisions."""
    torch.manual_seed(0)
    dynamic = DynamicRows(4, td.RowWiseAdagrad(0.1))
    hashed = HashedRows([1 << 10] * 26, 4, lr=0.1)
    ids = torch.arange(26 * 3).view(26, 3)
    start = dynamic(ids).detach()
    positions = [[] for _ in range(26)]
    with torch.no_grad():
        for f, bag in enumerate(hashed.bags):
            bag.register_forward_hook(lambda m, i, o, f=f: positions[f].append(i[0][:, 0]))
        hashed(ids)
        for f, bag in enumerate(hashed.bags):
            assert len(positions[f][0].unique()) == 3
            bag.weight[positions[f][0]] = start[:, f]
    optimizer = hashed.optimizer()
    for step in range(20):
        target = torch.randn(3, 26, 4, generator=seeded(step))
        ((dynamic(ids) - target) ** 2).sum().backward()
        dynamic.optimizer().step()
        optimizer.zero_grad()
        ((hashed(ids) - target) ** 2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(dynamic(ids), hashed(ids), rtol=1e-5, atol=1e-6)


@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=26, max_size=26),
    dim=st.sampled_from([4, 16]),
)
def test_hashed_tables_take_no_more_memory(sizes, dim):
    row_bytes = 4 * (dim + 1)
    counts = split_rows(sizes, sum(sizes) * row_bytes, dim)
    assert min(counts) >= 1
    assert sum(counts) <= max(26, sum(sizes))
    assert sum(counts) >= sum(sizes) - 26
    # No feature gets much less than its proportion, and small ones get more.
    assert all(c >= 0.9 * n - 1 for c, n in zip(counts, sizes, strict=True))
    assert min(counts) >= 0.9 * (sum(sizes) // 260)


def test_hashed_rows_errors():
    with pytest.raises(ValueError, match="26 numbers"):
        HashedRows([3] * 25, 4, lr=0.1)


# -- settings of a checkpoint ----------------------------------------------------------------------


def test_differing_settings_are_named():
    checkpoint.check_same_settings({"--seed": 1}, {"--seed": 1})
    with pytest.raises(
        checkpoint.CheckpointError,
        match=re.escape("--lr: None in the checkpoint, 0.5 now; --seed: 1 in the checkpoint, 2"),
    ):
        checkpoint.check_same_settings({"--seed": 1}, {"--seed": 2, "--lr": 0.5})


# -- command line ----------------------------------------------------------------------------------


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        options.parse(["--help"])
    text = capsys.readouterr().out
    for name in options.settings_of_job(options.parse([])):
        assert name == "--data" or name in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "1"], "--samples: expected an integer from 2 on, got '1'"),
        (["--lr", "0"], "--lr: expected a number above 0, got '0'"),
        (["--lr", "much"], "--lr: expected a number, got 'much'"),
        (["--held-out", "1"], "--held-out: expected a number between 0 and 1, got '1'"),
        (["--threads", "x"], "--threads: expected an integer from 1 on, got 'x'"),
        (["--on-bad-line", "ignore"], "--on-bad-line: invalid choice: 'ignore'"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.parse(arguments)
    assert message in capsys.readouterr().err


def test_rows_survive_a_checkpoint(tmp_path):
    rows = DynamicRows(4, td.RowWiseAdagrad(0.1))
    ids = torch.arange(26 * 5).view(26, 5)
    rows(ids).sum().backward()
    rows.optimizer().step()
    td.checkpoint.save(tmp_path / "rows", rows)
    other = DynamicRows(4, td.RowWiseAdagrad(0.1))
    td.checkpoint.load(tmp_path / "rows", other)
    assert isinstance(other.tables, td.DynamicEmbeddingBagCollection)
    assert torch.equal(rows.eval()(ids), other.eval()(ids))
