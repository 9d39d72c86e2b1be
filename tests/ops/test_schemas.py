"""Schemas of the ops, their registrations, and the columns that Python and C++ share."""

from __future__ import annotations

import enum
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import CASES, ops_with_cases, schema
from torch import Tensor

from torch_dynemb._library.op_names import tagged_ops
from torch_dynemb.ops import OPTIMIZER_NAMES, columns, memory
from torch_dynemb.optim import base
from torch_dynemb.policy.half_life import MOST_HALF_LIFE
from torch_dynemb.policy.layout import INDEX_STEP
from torch_dynemb.policy.policy import SCORES

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")

expecttest = pytest.importorskip("expecttest")

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# With an autograd formula.
DIFFERENTIABLE = {
    "embedding",
    "pool_rows",
    "ragged_tile",
    "ragged_cutoff_2d",
    "ragged_cutoff_3d",
    "ragged_topk_index_cutoff",
    "ragged_to_dense",
    "dense_to_ragged",
}


def is_plain(name: str) -> bool:
    """Whether an op has no tensor: it runs as it is under torch.compile, with nothing to fake."""
    return "Tensor" not in str(schema(name))


def listing(*names: str) -> str:
    """Schemas, wrapped."""
    return "\n".join(
        textwrap.fill(str(schema(name)), 90, subsequent_indent="    ") for name in names
    )


class TestSchemas(expecttest.TestCase):
    """Run with EXPECTTEST_ACCEPT=1 to accept a change."""

    def test_index(self) -> None:
        shown = listing(
            "find",
            "find_or_insert_",
            "erase_",
            "grow_",
            "sample_ids",
            "merge_top_k",
            "export_batch",
            "changed_ids_",
            "get_scores",
            "set_scores_",
            "combine_scores_",
            "reported_counts",
            "shrink_",
            "set_handles_",
        )
        self.assertExpectedInline(
            shown,
            """\
dynemb::find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids, Tensor offsets, int[]
    feature_tables) -> (Tensor handles, Tensor missing)
dynemb::find_or_insert_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables,
    Tensor(d!) slabs, Tensor free_rows, Tensor(e!) sketch, Tensor(f!) evicted, Tensor
    meta, Tensor policy, Tensor clock, Tensor ids, Tensor offsets, Tensor? admit, int[]
    feature_tables, int[] feature_policies) -> Tensor
dynemb::erase_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor(d!) slabs,
    Tensor(e!) free_rows, Tensor meta, Tensor ids, Tensor offsets, int[] feature_tables)
    -> Tensor
dynemb::grow_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor meta, int
    table, int ids) -> ()
dynemb::sample_ids(Tensor buckets, Tensor tables, Tensor meta, int table, Tensor seed,
    SymInt samples) -> Tensor
dynemb::merge_top_k(Tensor scores, Tensor ids, Tensor best_scores, Tensor best_ids) ->
    (Tensor scores, Tensor ids)
dynemb::export_batch(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int table,
    int begin, int max_ids) -> (Tensor ids, Tensor handles, Tensor scores, Tensor next)
dynemb::changed_ids_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor
    generations, Tensor dirty_bits, Tensor before, Tensor(a!) now, int slab, int reader)
    -> (Tensor ids, Tensor handles, Tensor counts)
dynemb::get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
    Tensor offsets, int[] feature_tables, int word) -> (Tensor scores, Tensor found)
dynemb::set_scores_(Tensor buckets, Tensor(a!) scores, Tensor tables, Tensor meta, Tensor
    ids, Tensor offsets, int[] feature_tables, Tensor values, int word) -> Tensor
dynemb::combine_scores_(Tensor buckets, Tensor(a!) scores, Tensor tables, Tensor meta,
    Tensor clock, Tensor ids, Tensor offsets, int[] feature_tables, Tensor values, int[]
    combines, int[] half_lives, int word) -> ()
dynemb::reported_counts(Tensor buckets, Tensor tables, Tensor row_clock) -> (Tensor
    tables, Tensor row_clock)
dynemb::shrink_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor meta, int
    table, int ids) -> ()
dynemb::set_handles_(Tensor(a!) buckets, Tensor tables, Tensor meta, Tensor ids, Tensor
    offsets, int[] feature_tables, Tensor handles) -> Tensor""",
        )

    def test_routing(self) -> None:
        self.assertExpectedInline(
            listing(
                "mix_ids",
                "unmix_ids",
                "unique_ids",
                "id_owners",
                "ids_partition",
                "ids_concat",
                "ids_encode",
            ),
            """\
dynemb::mix_ids(Tensor ids) -> Tensor
dynemb::unmix_ids(Tensor quotients, int parts, int part) -> Tensor
dynemb::unique_ids(Tensor ids, Tensor offsets, bool padded) -> (Tensor ids, Tensor
    offsets, Tensor inverse, Tensor counts)
dynemb::id_owners(Tensor ids, int parts, int slots) -> Tensor
dynemb::ids_partition(Tensor ids, Tensor offsets, int parts, int slots) -> (Tensor ids,
    Tensor lengths, Tensor inverse, Tensor counts)
dynemb::ids_concat(Tensor[] ids, Tensor[] offsets, int[] ragged, SymInt bags) -> (Tensor
    ids, Tensor offsets)
dynemb::ids_encode(Tensor[] ids, int[] tables) -> Tensor""",
        )

    def test_values_of_features(self) -> None:
        self.assertExpectedInline(
            listing("mod", "bucketize", "multi_hash", "string_hash"),
            """\
dynemb::mod(Tensor[] values, int[] divisors) -> Tensor[]
dynemb::bucketize(Tensor[] values, Tensor[] boundaries) -> Tensor[]
dynemb::multi_hash(Tensor[] values, int[] multipliers, int[] primes, int[] buckets, int[]
    hashes) -> Tensor[]
dynemb::string_hash(Tensor[] values, Tensor[] offsets, int hash, int seed) -> Tensor[]""",
        )

    def test_plain_rows(self) -> None:
        self.assertExpectedInline(
            listing(
                "pool_rows",
                "pool_rows_grad",
                "pool_rows_weight_grad",
                "ragged_tile",
                "ragged_tile_grad",
                "ragged_tile_weight_grad",
            ),
            """\
dynemb::pool_rows(Tensor rows, Tensor positions, Tensor offsets, int features, Tensor?
    weights, int pooling) -> Tensor
dynemb::pool_rows_grad(Tensor grad, Tensor positions, Tensor offsets, int features, SymInt
    rows, Tensor? weights, int pooling) -> Tensor
dynemb::pool_rows_weight_grad(Tensor grad, Tensor rows, Tensor positions, Tensor offsets,
    Tensor weights, int features, int pooling) -> Tensor
dynemb::ragged_tile(Tensor rows, Tensor positions, Tensor offsets, Tensor? weights, int[]
    tile_lens, int[] pad_left) -> Tensor[]
dynemb::ragged_tile_grad(Tensor[] grads, Tensor positions, Tensor offsets, Tensor?
    weights, SymInt rows, int[] tile_lens, int[] pad_left) -> Tensor
dynemb::ragged_tile_weight_grad(Tensor[] grads, Tensor rows, Tensor positions, Tensor
    offsets, int[] tile_lens, int[] pad_left) -> Tensor""",
        )

    def test_ragged(self) -> None:
        self.assertExpectedInline(
            listing(
                "ragged_cutoff_2d",
                "ragged_cutoff_3d",
                "ragged_topk_index_cutoff",
                "ragged_to_dense",
                "ragged_indices",
                "dense_to_ragged",
                "feature_cross_ragged",
            ),
            """\
dynemb::ragged_cutoff_2d(Tensor[] values, Tensor[] offsets, Tensor[] weights, int[]
    weighted, int[] keep_lengths, int[] drop_left) -> (Tensor[] values, Tensor[] offsets,
    Tensor[] weights)
dynemb::ragged_cutoff_3d(Tensor[] values, Tensor[] outer_offsets, Tensor[] inner_offsets,
    Tensor[] weights, int[] weighted, int[] keep_lengths, int[] drop_left, int[] pad_left)
    -> (Tensor[] values, Tensor[] outer_offsets, Tensor[] inner_offsets, Tensor[] weights)
dynemb::ragged_topk_index_cutoff(Tensor[] values, Tensor[] offsets, Tensor[] indices,
    Tensor[] weights, int[] weighted) -> (Tensor[] values, Tensor[] offsets, Tensor[]
    weights)
dynemb::ragged_to_dense(Tensor[] values, Tensor[] offsets, int[] depths, int[] lengths,
    float padding, int integer_padding) -> Tensor[]
dynemb::ragged_indices(Tensor[] values, Tensor[] offsets, int[] depths, int[] lengths) ->
    Tensor[]
dynemb::dense_to_ragged(Tensor[] dense, bool trim, float invalid, int integer_invalid) ->
    (Tensor[] values, Tensor[] offsets)
dynemb::feature_cross_ragged(Tensor[] x_values, Tensor[] x_offsets, Tensor[] y_values,
    Tensor[] y_offsets, Tensor[] x_weights, int[] x_weighted, Tensor[] y_weights, int[]
    y_weighted) -> (Tensor[] values, Tensor[] offsets, Tensor[] weights)""",
        )

    def test_lookup(self) -> None:
        shown = listing(
            "embedding",
            "embedding_forward",
            "embedding_inference",
            "find_and_read",
            "bind_lookup",
            "release_lookup",
            "insert_and_read",
        )
        self.assertExpectedInline(
            shown,
            """\
dynemb::embedding(Tensor[] weights, Tensor[] generations, Tensor[] state, Tensor[]
    dirty_bits, Tensor[] copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
    Tensor init_data, Tensor[] pending, Tensor ids, Tensor handles, Tensor offsets,
    Tensor? per_sample_weights, Tensor grad_anchor, int[] feature_tables, int[]
    feature_dims, int pooling, int optimizer) -> (Tensor output, Tensor updates)
dynemb::embedding_forward(Tensor[] weights, Tensor[] generations, Tensor row_clock, Tensor
    meta, Tensor init_data, Tensor ids, Tensor handles, Tensor offsets, Tensor?
    per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling) -> (Tensor
    output, Tensor updates)
dynemb::embedding_inference(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor
    init_data, Tensor ids, Tensor handles, Tensor offsets, Tensor? per_sample_weights,
    int[] feature_tables, int[] feature_dims, int pooling, int[] formats=[]) -> Tensor
dynemb::find_and_read(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights,
    Tensor[] generations, Tensor init_data, Tensor ids, Tensor offsets, Tensor?
    per_sample_weights=None, int[] feature_tables=[], int[] feature_dims=[], int
    pooling=2, bool include_last_offset=True) -> Tensor
dynemb::bind_lookup(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor
    free_rows, Tensor sketch, Tensor evicted, Tensor meta, Tensor policy, Tensor clock,
    Tensor[] weights, Tensor[] generations, Tensor row_clock, Tensor init_data) -> int
dynemb::release_lookup(int lookup) -> ()
dynemb::insert_and_read(int lookup, Tensor ids, Tensor offsets, Tensor?
    per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling, int[]
    feature_policies) -> (Tensor output, Tensor handles, Tensor updates)""",
        )

    def test_quantized_rows(self) -> None:
        shown = listing("quantize_rows", "dequantize_rows")
        self.assertExpectedInline(
            shown,
            """\
dynemb::quantize_rows(Tensor rows, int format) -> Tensor
dynemb::dequantize_rows(Tensor packed, int format, int dim) -> Tensor""",
        )

    def test_rows(self) -> None:
        shown = listing(
            "reduce_grad",
            "bag_weight_grad",
            "materialize_",
            "copy_before_write_",
            "take_unchanged_rows_",
            "accumulate_grad_",
            "merge_grad_",
        )
        self.assertExpectedInline(
            shown,
            """\
dynemb::reduce_grad(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor init_data,
    Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, Tensor?
    per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling) ->
    (Tensor[] handles, Tensor[] ids, Tensor[] tables, Tensor[] gradients, Tensor counts)
dynemb::bag_weight_grad(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor
    init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, Tensor
    per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling) -> Tensor
dynemb::materialize_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[] state,
    Tensor(d!)[] dirty_bits, Tensor(e!)[] copy_on_write, Tensor buckets, Tensor tables,
    Tensor hyper, Tensor meta, Tensor init_data) -> Tensor
dynemb::copy_before_write_(Tensor weights, Tensor[] state, Tensor(a!) copy_on_write,
    Tensor rows) -> ()
dynemb::take_unchanged_rows_(Tensor weights, Tensor[] state, Tensor(a!) copy_on_write,
    Tensor rows, Tensor(b!) out_weights, Tensor(c!)[] out_state) -> ()
dynemb::accumulate_grad_(Tensor(a!)[] pending_handles, Tensor(b!)[] pending_ids,
    Tensor(c!)[] pending_tables, Tensor(d!)[] pending_gradients, Tensor(e!)
    pending_counts, Tensor(f!) row_clock, Tensor[] weights, Tensor[] generations, Tensor
    meta, Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor
    offsets, Tensor? per_sample_weights, Tensor updates, int[] feature_tables, int[]
    feature_dims, int pooling) -> ()
dynemb::merge_grad_(Tensor(a!)[] pending_handles, Tensor(b!)[] pending_ids, Tensor(c!)[]
    pending_tables, Tensor(d!)[] pending_gradients, Tensor(e!) pending_counts, Tensor(f!)
    row_clock) -> ()""",
        )

    def test_optimizers(self) -> None:
        shown = listing("apply_grad_", "embedding_backward_")
        self.assertExpectedInline(
            shown,
            """\
dynemb::apply_grad_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[] state,
    Tensor(d!)[] dirty_bits, Tensor(e!)[] copy_on_write, Tensor(f!) row_clock, Tensor
    hyper, Tensor meta, Tensor init_data, Tensor[] handles, Tensor[] ids, Tensor[] tables,
    Tensor[] gradients, Tensor counts, Tensor updates, int[] updated_tables, int
    optimizer) -> ()
dynemb::embedding_backward_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[]
    state, Tensor(d!)[] dirty_bits, Tensor(e!)[] copy_on_write, Tensor(f!) row_clock,
    Tensor hyper, Tensor meta, Tensor init_data, Tensor grad_output, Tensor ids, Tensor
    handles, Tensor offsets, Tensor? per_sample_weights, Tensor updates, int[]
    feature_tables, int[] feature_dims, int pooling, int optimizer) -> ()""",
        )

    def test_machine(self) -> None:
        shown = listing(
            "end_step_",
            "reserve",
            "release_",
            "available_memory",
            "being_changed",
            "lock_memory",
            "unlock_memory",
            "simd_level",
            "set_simd_level",
            "compiled_with",
            "op_tags",
            "optimizer_names",
        )
        self.assertExpectedInline(
            shown,
            """\
dynemb::end_step_(Tensor buckets, Tensor tables, Tensor(a!) row_clock, Tensor(b!)? clock,
    int? now) -> ()
dynemb::reserve(int[] size, int dtype, bool huge_pages) -> Tensor
dynemb::release_(Tensor(a!) tensor, int begin, int end) -> ()
dynemb::available_memory() -> int
dynemb::being_changed(int[] memory) -> bool
dynemb::lock_memory(int[] memory, bool moves_rows) -> ()
dynemb::unlock_memory(int[] memory, bool moves_rows) -> ()
dynemb::simd_level() -> int
dynemb::set_simd_level(int level) -> ()
dynemb::compiled_with() -> int[]
dynemb::op_tags() -> str[]
dynemb::optimizer_names() -> str[]""",
        )

    def test_memory_of_a_gpu(self) -> None:
        self.assertExpectedInline(
            listing(*sorted(tagged_ops("gpu"))),
            """\
dynemb::available_cuda_memory(int device) -> int
dynemb::bind_group(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor
    free_rows, Tensor meta, Tensor[] weights, Tensor[] generations, Tensor[] state,
    Tensor[] dirty_bits, Tensor[] pending, int[] table_buckets, int[] slab_rows, Tensor?
    policy=None) -> ()
dynemb::bind_tiers(Tensor buckets, Tensor[] places, Tensor[] slots, Tensor[] free_slots,
    Tensor(a!) tier_clock, Tensor[] weights, Tensor[] generations, Tensor[] state, float
    fraction, int[] limits, int host_bytes) -> ()
dynemb::cuda_architectures() -> int[]
dynemb::end_epoch_(Tensor(a!) tier_clock) -> ()
dynemb::raise_device_errors(int device) -> ()
dynemb::release_group(Tensor buckets, int[] table_buckets, int[] slab_rows) -> ()
dynemb::release_slots(Tensor tier_clock, int slab, int slots) -> ()
dynemb::reserve_cuda(int[] size, int dtype, int device) -> Tensor
dynemb::split_bytes(Tensor buckets) -> int[]
dynemb::split_rows(Tensor buckets, int[] slabs, int hbm_bytes, int host_bytes) -> ()
dynemb::take_slots_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, int[]
    feature_tables, bool trains, int ahead) -> (Tensor handles, Tensor moves, Tensor
    missing)""",
        )

    def test_storage(self) -> None:
        self.assertExpectedInline(
            listing("crc32c", "store_io_paths", "read_blocks", *sorted(tagged_ops("store"))),
            """\
dynemb::crc32c(Tensor data, int crc) -> Tensor
dynemb::store_io_paths() -> int[]
dynemb::read_blocks(Tensor path, Tensor offsets, int block_bytes, int io) -> Tensor
dynemb::store_check(Tensor tier_clock) -> ()
dynemb::store_close(Tensor tier_clock) -> ()
dynemb::store_drain(Tensor tier_clock) -> ()
dynemb::store_erase(Tensor tier_clock, int slab, Tensor handles) -> ()
dynemb::store_keep(Tensor tier_clock, Tensor[] files) -> ()
dynemb::store_load(Tensor tier_clock, Tensor[] records, Tensor[] segments) -> ()
dynemb::store_open(Tensor tier_clock, Tensor path, Tensor[] places, Tensor[] slots,
    Tensor[] free_slots, Tensor[] weights, Tensor[] generations, Tensor[] state, Tensor
    tiered, Tensor names, int segment_bytes, int disk_bytes, int io) -> ()
dynemb::store_pin(Tensor tier_clock) -> Tensor
dynemb::store_read(Tensor tier_clock, int slab, Tensor handles, Tensor ids, int? pin) ->
    (Tensor records, Tensor found)
dynemb::store_release(Tensor tier_clock, int pin) -> ()
dynemb::store_stats(Tensor tier_clock) -> Tensor
dynemb::store_sync(Tensor tier_clock) -> (Tensor[] records, Tensor[] segments)
dynemb::store_write(Tensor tier_clock, int slab, Tensor handles, Tensor ids, int table,
    Tensor records) -> ()""",
        )

    def test_serving(self) -> None:
        self.assertExpectedInline(
            listing("serve_lookup", "serve_apply_", "serve_ids", "serve_rows"),
            """\
dynemb::serve_lookup(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, Tensor
    init_data, Tensor ids, Tensor offsets, Tensor? per_sample_weights, int[]
    feature_tables, int[] feature_dims, int pooling, int[] formats, bool live) -> (Tensor
    output, Tensor missing)
dynemb::serve_apply_(Tensor(a!) buckets, Tensor(b!) tables, Tensor(c!)[] weights,
    Tensor(d!) free, Tensor meta, int table, Tensor ids, Tensor values, Tensor erased,
    int[] formats) -> Tensor
dynemb::serve_ids(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, int[]
    formats, int table, int slots) -> (Tensor ids, Tensor found)
dynemb::serve_rows(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, int[]
    formats, int table, int dim, Tensor ids, Tensor? wanted) -> (Tensor rows, Tensor
    found)""",
        )

    def test_row_files(self) -> None:
        self.assertExpectedInline(
            listing(
                "file_open",
                "file_make_live",
                "file_close",
                "file_lookup",
                "file_ids",
                "file_stats",
                "file_pages",
                "file_apply",
                "file_room",
                "file_counts",
            ),
            """\
dynemb::file_open(Tensor file) -> ()
dynemb::file_make_live(Tensor file, Tensor meta, int[] headroom) -> ()
dynemb::file_close(Tensor file) -> ()
dynemb::file_lookup(Tensor file, Tensor tables, Tensor meta, Tensor init_data, Tensor ids,
    Tensor offsets, Tensor? per_sample_weights, int[] feature_tables, int[] feature_dims,
    int pooling) -> (Tensor output, Tensor missing)
dynemb::file_ids(Tensor file, int table, int ids) -> Tensor
dynemb::file_stats(Tensor file) -> Tensor
dynemb::file_pages(Tensor ids, Tensor packed, int crc) -> Tensor
dynemb::file_apply(Tensor file, int table, Tensor ids, Tensor values, Tensor erased) ->
    Tensor
dynemb::file_room(Tensor file, int table, Tensor ids, Tensor erased, bool write) -> Tensor
dynemb::file_counts(Tensor file, int tables) -> Tensor""",
        )

    def test_tiers(self) -> None:
        self.assertExpectedInline(
            listing(
                "reserve_space_",
                "reserve_saves_",
                "stage_records_",
                "stage_",
                "staged_lookup_",
                "prefetch_",
                "plan_moves_",
                "take_dirty_",
                "shrink_cache_",
                "forget_rows_",
                "gather_records",
                "scatter_records_",
                "store_submit",
            ),
            """\
dynemb::reserve_space_(Tensor(a!) tier_clock, Tensor buckets, Tensor(b!) tables, Tensor
    meta, Tensor ids, Tensor offsets, int[] feature_tables) -> ()
dynemb::reserve_saves_(Tensor tier_clock, int[] rows) -> ()
dynemb::stage_records_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, int[]
    feature_tables, Tensor overwritten) -> Tensor
dynemb::stage_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, int[]
    feature_tables, bool trains) -> Tensor
dynemb::staged_lookup_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor[] weights, Tensor[] generations, Tensor meta, Tensor
    init_data, Tensor ids, Tensor handles, Tensor offsets, Tensor? per_sample_weights,
    int[] feature_tables, int[] feature_dims, int pooling) -> Tensor
dynemb::prefetch_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, int[]
    feature_tables, int ahead) -> ()
dynemb::plan_moves_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, int[]
    feature_tables, bool trains, int ahead) -> (Tensor handles, Tensor moves)
dynemb::take_dirty_(Tensor[] places, Tensor(a!)[] slots, Tensor[] free_slots, Tensor(b!)
    tier_clock, int slab, int begin, int most) -> Tensor
dynemb::shrink_cache_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, int slab, int limit) -> Tensor
dynemb::forget_rows_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots,
    Tensor(d!) tier_clock, int slab, Tensor handles) -> ()
dynemb::gather_records(Tensor[] weights, Tensor[] generations, Tensor[] state, int slab,
    Tensor slots) -> Tensor
dynemb::scatter_records_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[]
    state, int slab, Tensor slots, Tensor records) -> ()
dynemb::store_submit(Tensor tier_clock, Tensor moves) -> ()""",
        )


def test_optimizers_are_those_of_cpp() -> None:
    text = (CSRC / "core" / "optimizers.h").read_text()
    listed = text[text.index("#define DYNEMB_FOR_EACH_OPTIMIZER(X)") : text.index("namespace")]
    assert re.findall(r"  X\((\w+), \w+\)", listed) == list(OPTIMIZER_NAMES)


def test_no_schema_is_left_out() -> None:
    shown = set(re.findall(r'"(\w+)"', Path(__file__).read_text()))
    assert set(ops_with_cases()) <= shown


@pytest.mark.parametrize("name", ops_with_cases())
def test_registrations(name: str) -> None:
    """A CPU kernel, a fake if there are tensors, autograd for differentiable ops."""

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"dynemb::{name}", key)

    assert has("CPU") or has("CompositeExplicitAutograd")
    assert has("Meta") == (not is_plain(name))
    assert has("Autograd") == (name in DIFFERENTIABLE)
    assert not has("CompositeImplicitAutograd")


# -- mutations -----------------------------------------------------------------------------------


def tensors_of(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return argument
    return []


def changed_arguments(name: str, arguments: tuple[Any, ...]) -> set[str]:
    """Names of arguments with other bits after the call."""
    before = [[t.detach().clone() for t in tensors_of(argument)] for argument in arguments]
    getattr(torch.ops.dynemb, name)(*arguments)
    return {
        formal.name
        for formal, argument, old in zip(schema(name).arguments, arguments, before, strict=True)
        if any(not torch.equal(a, b) for a, b in zip(tensors_of(argument), old, strict=True))
    }


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if not is_plain(name)])
def test_what_is_declared_changed_changes_and_nothing_else(name: str) -> None:
    declared = {
        formal.name
        for formal in schema(name).arguments
        if formal.alias_info is not None and formal.alias_info.is_write
    }
    assert bool(declared) == name.endswith("_")
    if "dirty_bits" in declared:
        declared.remove("copy_on_write")  # changes during a save: checkpoint/test_copy_on_write.py
    seen: set[str] = set()
    for case in CASES[name].values():
        changed = changed_arguments(name, case())
        assert changed <= declared
        seen |= changed
    assert seen == declared


# -- columns -------------------------------------------------------------------------------------


def enum_of(header: str, name: str) -> dict[str, int]:
    """Members of a C++ enum with explicit values."""
    text = (CSRC / "core" / header).read_text()
    body = re.search(rf"enum {name} : \w+ {{(.*?)}};", text, re.DOTALL)
    assert body is not None
    members = re.sub(r"//.*", "", body[1])
    return {key: int(value) for key, value in re.findall(r"k(\w+) = (-?\d+)", members)}


def camel_case(prefix: str, member: str) -> str:
    return prefix + "".join(word.capitalize() for word in member.split("_"))


@pytest.mark.parametrize(
    ("python", "header", "name", "prefix", "size"),
    [
        (columns.Meta, "columns.h", "MetaColumn", "Meta", "META_COLUMNS"),
        (columns.Table, "columns.h", "TableColumn", "Table", "TABLE_COLUMNS"),
        (columns.Slab, "columns.h", "SlabColumn", "Slab", "SLAB_COLUMNS"),
        (columns.RowClock, "columns.h", "RowClockColumn", "RowClock", "ROW_CLOCK_EXTRA"),
        (columns.Hyper, "columns.h", "HyperColumn", "Hyper", "HYPER_COLUMNS"),
        (columns.StoreStat, "columns.h", "StoreStatColumn", "StoreStat", "STORE_STAT_COLUMNS"),
        (columns.InitKind, "rows/initializer.h", "InitKind", "Init", None),
        (columns.PolicyColumn, "policy/decisions.h", "PolicyColumn", "Policy", "POLICY_COLUMNS"),
        (columns.OnFull, "policy/decisions.h", "OnFull", "Full", None),
        (columns.StringHash, "features/string_hash.h", "StringHash", "Hash", None),
        (columns.Combine, "policy/combine.h", "Combine", "Combine", None),
        (columns.Admission, "policy/decisions.h", "Admission", "Admit", None),
        (columns.Slot, "columns.h", "SlotColumn", "Slot", "SLOT_COLUMNS"),
        (columns.TierHead, "columns.h", "TierHeadColumn", "Tier", None),
        (columns.Tier, "columns.h", "TierColumn", "Tier", "TIER_COLUMNS"),
        (columns.LiveTable, "columns.h", "LiveTableColumn", "LiveTable", "LIVE_TABLE_COLUMNS"),
        (columns.LiveSlab, "columns.h", "LiveSlabColumn", "LiveSlab", "LIVE_SLAB_COLUMNS"),
        (columns.Move, "columns.h", "MoveColumn", "Move", "MOVE_COLUMNS"),
        (
            columns.CopyOnWrite,
            "rows/copy_on_write.h",
            "CopyOnWriteColumn",
            "Cow",
            "COPY_ON_WRITE_COLUMNS",
        ),
        (columns.CopyMark, "rows/copy_on_write.h", "CopyMark", "Cow", None),
        (columns.Evicted, "policy/decisions.h", "EvictedColumn", "Evicted", "EVICTED_COLUMNS"),
    ],
)
def test_columns_are_those_of_cpp(
    python: type[enum.IntEnum], header: str, name: str, prefix: str, size: str | None
) -> None:
    cpp = enum_of(header, name)
    mirrored = {camel_case(prefix, member.name): member.value for member in python}
    if size is not None:
        mirrored[prefix + ("Extra" if size.endswith("EXTRA") else "Columns")] = getattr(
            columns, size
        )
    assert mirrored == cpp
    limit = None if size is None else getattr(columns, size)
    assert limit is None or all(member.value < limit for member in python)


def constant(header: str, name: str) -> str:
    """The expression that a C++ constant is set to."""
    found = re.search(rf"constexpr \w+ {name} = ([^;]+);", (CSRC / header).read_text())
    assert found is not None
    return found[1]


def test_constants_are_those_of_cpp() -> None:
    width = re.search(
        r"#define DYNEMB_BUCKET_WIDTH (\d+)", (CSRC / "core/index/bucket.h").read_text()
    )
    assert width is not None
    assert int(width[1]) == columns.BUCKET_WIDTH
    assert constant("core/index/bucket.h", "kBucketWords") == "2 * kBucketWidth"
    assert columns.BUCKET_WORDS == 2 * columns.BUCKET_WIDTH
    assert int(constant("core/index/bucket.h", "kMaxLoadPercent")) == columns.MAX_LOAD_PERCENT
    assert int(constant("core/index/bucket.h", "kGrowthPercent")) == round(100 * INDEX_STEP - 100)
    assert int(constant("core/index/handle.h", "kGenerationBits")) == columns.GENERATION_BITS
    assert int(constant("core/index/handle.h", "kNoHandle")) == columns.NO_HANDLE
    assert int(constant("core/index/handle.h", "kPaddingHandle")) == columns.PADDING_HANDLE
    assert int(constant("core/index/handle.h", "kRefusedHandle")) == columns.REFUSED_HANDLE
    assert int(constant("core/policy/decisions.h", "kSketchRows")) == columns.SKETCH_ROWS
    clock = {f"Clock{c.name.capitalize()}": c.value for c in columns.Clock}
    assert enum_of("policy/decisions.h", "ClockColumn") == {
        **clock,
        "ClockHead": columns.CLOCK_HEAD,
    }
    records = enum_of("rows/initializer.h", "InitColumn")
    assert records["InitRecordColumns"] == columns.INIT_RECORD_COLUMNS
    assert constant("core/index/bucket.h", "kMinBuckets") == "64 / kBucketWidth"
    assert columns.MIN_BUCKETS == 64 // columns.BUCKET_WIDTH
    assert constant("cpu/index/probe.h", "kFreeStep") == "INT64_MAX"
    assert columns.FREE_STEP == (1 << 63) - 1
    assert constant("core/policy/counts.h", "kMaxCount") == "int64_t{1} << 62"
    assert constant("core/policy/decisions.h", "kMaxFrequency") == "kMaxCount"
    assert columns.MAX_COUNT == 1 << 62
    assert int(constant("core/policy/decay.h", "kDecayBits")) == columns.DECAY_BITS
    assert constant("core/policy/decay.h", "kNeverOccurred") == "-(int64_t{1} << 62)"
    assert columns.NEVER_OCCURRED == -(1 << 62)
    assert constant("core/policy/decay.h", "kMostHalfLives") == "(int64_t{1} << 32) - 1"
    assert columns.MOST_HALF_LIVES == (1 << 32) - 1
    assert constant("core/policy/decay.h", "kMostHalfLife") == "int64_t{1} << 32"
    assert MOST_HALF_LIFE == 1 << 32
    assert constant("core/index/row_allocation.h", "kCommitStepBytes") == "int64_t{64} << 20"
    assert columns.COMMIT_STEP_BYTES == 64 << 20
    assert float(constant("core/columns.h", "kDecayByItself")) == columns.DECAY_BY_ITSELF
    assert int(constant("core/columns.h", "kServedUnlocks")) == columns.SERVED_UNLOCKS
    assert int(constant("core/rows/storage.h", "kBlockColumns")) == base._BLOCK_COLUMNS
    assert int(constant("core/policy/decisions.h", "kMaxScoreWords")) == len((*SCORES, "expiry"))
    assert (columns.MAX_ROWS << columns.GENERATION_BITS) < 1 << 63


def test_the_table_of_decayed_counts_is_that_of_its_formula() -> None:
    text = (CSRC / "core/policy/decay_table.h").read_text()
    bits = int(constant("core/policy/decay_table.h", "kDecayTableBits"))
    body = re.search(r"kTable\[kDecayTableSize\] = \{([^}]*)\}", text)
    assert body is not None
    found = [int(word) for word in re.findall(r"\d+", body[1])]
    exact = [math.log1p(2.0 ** (-i / 32)) / math.log(2) * 2**bits for i in range(len(found))]
    assert len(found) == int(constant("core/policy/decay_table.h", "kDecayTableSize"))
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.51


def enums() -> dict[str, list[dict[str, int]]]:
    """Members of all C++ and CUDA enums by name, of each file in which one stands."""
    found: dict[str, list[dict[str, int]]] = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cpp", ".cu"):
            continue
        text = re.sub(r"//.*", "", path.read_text())
        for name, body in re.findall(
            r"enum (?:class )?(\w+)(?: : \w+)? \{(.*?)\};", text, re.DOTALL
        ):
            members, value = {}, -1
            for key, given in re.findall(r"k(\w+)(?: = (-?\d+))?", body):
                value = int(given) if given else value + 1
                members[key] = value
            found.setdefault(name, []).append(members)
    return found


@pytest.mark.parametrize(
    ("python", "name", "prefix"),
    [
        (columns.Pooling, "Pooling", "Pool"),
        (columns.NonFinite, "NonFinite", ""),
        (columns.RowFormat, "RowFormat", "RowsOf"),
    ],
)
def test_enums_of_arguments_are_those_of_cpp(
    python: type[enum.IntEnum], name: str, prefix: str
) -> None:
    expected = {camel_case(prefix, member.name): member.value for member in python}
    for members in enums()[name]:
        assert members == expected


def test_an_enum_is_the_same_on_every_device() -> None:
    for name, copies in enums().items():
        assert all(members == copies[0] for members in copies), name


def test_all_enums_of_python_have_been_compared() -> None:
    """With one of C++ of their name, or of their name and Column."""
    cpp = enums()
    for python in vars(columns).values():
        if isinstance(python, type) and issubclass(python, enum.IntEnum) and len(python) > 0:
            assert (
                python.__name__ in cpp or f"{python.__name__.removesuffix('Column')}Column" in cpp
            )
            compared = {
                mark.args[1][k][0] for mark in _compared() for k in range(len(mark.args[1]))
            }
            assert python in compared | {columns.Clock}, python


def _compared() -> list[pytest.Mark]:
    tests = (test_columns_are_those_of_cpp, test_enums_of_arguments_are_those_of_cpp)
    return [mark for test in tests for mark in test.pytestmark]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", list(memory._DTYPE_CODES), ids=str)
def test_codes_of_dtypes_are_those_of_cpp(dtype: torch.dtype) -> None:
    code = memory._DTYPE_CODES[dtype]
    assert torch.ops.dynemb.reserve([2], code, False).dtype == dtype
