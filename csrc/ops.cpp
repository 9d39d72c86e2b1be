// Every schema of the library. Kernels are in cpu/ and cuda/; fake implementations and autograd
// formulas in torch_dynemb/ops.
//
// A group of tables is a set of plain tensors. The index (buckets, scores, tables, slabs,
// free_rows) is changed in the forward only; the rows (weights, generations, state, row_clock) in
// the backward only. A tensor changed in both would be copied whole by every compiled step.
#include <torch/csrc/stable/library.h>

#include <array>
#include <string>

#include "library.h"
#include "op_tags.h"

DYNEMB_DEFINE_OPS(m) {
  // Ops defined on m have a kernel for every device.
  dynemb::TaggedOps host(m, dynemb::op_tag::kHost);
  dynemb::TaggedOps store(m, dynemb::op_tag::kStore);
  dynemb::TaggedOps gpu(m, dynemb::op_tag::kGpu);

  // Memory and instruction set.
  host.def("reserve(int[] size, int dtype, bool huge_pages) -> Tensor");
  host.def("release_(Tensor(a!) tensor, int begin, int end) -> ()");
  host.def("available_memory() -> int");
  host.def("being_changed(int[] memory) -> bool");
  host.def("lock_memory(int[] memory, bool moves_rows) -> ()");
  host.def("unlock_memory(int[] memory, bool moves_rows) -> ()");
  gpu.def("reserve_cuda(int[] size, int dtype, int device) -> Tensor");
  gpu.def("available_cuda_memory(int device) -> int");
  gpu.def("raise_device_errors(int device) -> ()");
  gpu.def(
      "bind_group(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows, "
      "Tensor meta, Tensor[] weights, Tensor[] generations, Tensor[] state, Tensor[] dirty_bits, "
      "Tensor[] pending, "
      "int[] table_buckets, int[] slab_rows, Tensor? policy=None) -> ()");
  gpu.def("split_rows(Tensor buckets, int[] slabs, int hbm_bytes, int host_bytes) -> ()");
  gpu.def("split_bytes(Tensor buckets) -> int[]");
  gpu.def(
      "bind_tiers(Tensor buckets, Tensor[] places, Tensor[] slots, Tensor[] free_slots, "
      "Tensor(a!) tier_clock, Tensor[] weights, Tensor[] generations, Tensor[] state, "
      "float fraction, int[] limits, int host_bytes) -> ()");
  gpu.def("end_epoch_(Tensor(a!) tier_clock) -> ()");
  gpu.def(
      "take_slots_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
      "Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, "
      "int[] feature_tables, bool trains, int ahead) -> "
      "(Tensor handles, Tensor moves, Tensor missing)");
  gpu.def("release_slots(Tensor tier_clock, int slab, int slots) -> ()");
  gpu.def("release_group(Tensor buckets, int[] table_buckets, int[] slab_rows) -> ()");
  // Without a clock the step is not counted.
  m.def(
      "end_step_(Tensor buckets, Tensor tables, Tensor(a!) row_clock, Tensor(b!)? clock, "
      "int? now) -> ()");
  host.def("simd_level() -> int");
  host.def("set_simd_level(int level) -> ()");
  host.def("compiled_with() -> int[]");
  host.def("op_tags() -> str[]");
  host.def("optimizer_names() -> str[]");
  gpu.def("cuda_architectures() -> int[]");

  // Checksum of the memory of a tensor, as in files.
  host.def("crc32c(Tensor data, int crc) -> Tensor");

  // Rows of tiered tables: a cache of them in memory, and moves between it and a store. places,
  // slots and free_slots have an entry for each slab, empty if its rows are in memory.
  host.def(
      "reserve_space_(Tensor(a!) tier_clock, Tensor buckets, Tensor(b!) tables, Tensor meta, "
      "Tensor ids, Tensor offsets, int[] feature_tables) -> ()");
  host.def("reserve_saves_(Tensor tier_clock, int[] rows) -> ()");
  host.def(
      "stage_records_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
      "Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets, "
      "int[] feature_tables, Tensor overwritten) -> Tensor");
  for (const auto& [name, more, result] :
       {std::array{"stage_", "bool trains", "Tensor"}, std::array{"prefetch_", "int ahead", "()"},
        std::array{"plan_moves_", "bool trains, int ahead", "(Tensor handles, Tensor moves)"}}) {
    const std::string schema = std::string(name) +
                               "(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
                               "Tensor(d!) tier_clock, Tensor meta, Tensor ids, Tensor handles, "
                               "Tensor offsets, int[] feature_tables, " +
                               more + ") -> " + result;
    if (std::string(name) == "plan_moves_") {
      host.def(schema);
    } else {
      m.def(schema.c_str());
    }
  }
  m.def(
      "staged_lookup_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
      "Tensor(d!) tier_clock, "
      "Tensor[] weights, Tensor[] generations, Tensor meta, Tensor init_data, Tensor ids, "
      "Tensor handles, Tensor offsets, Tensor? per_sample_weights, int[] feature_tables, "
      "int[] feature_dims, int pooling) -> Tensor");
  host.def(
      "take_dirty_(Tensor[] places, Tensor(a!)[] slots, Tensor[] free_slots, "
      "Tensor(b!) tier_clock, int slab, int begin, int most) -> Tensor");
  host.def(
      "shrink_cache_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
      "Tensor(d!) tier_clock, int slab, int limit) -> Tensor");
  host.def(
      "forget_rows_(Tensor(a!)[] places, Tensor(b!)[] slots, Tensor(c!)[] free_slots, "
      "Tensor(d!) tier_clock, int slab, Tensor handles) -> ()");
  host.def(
      "gather_records(Tensor[] weights, Tensor[] generations, Tensor[] state, int slab, "
      "Tensor slots) -> Tensor");
  host.def(
      "scatter_records_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[] state, "
      "int slab, Tensor slots, Tensor records) -> ()");
  host.def("store_submit(Tensor tier_clock, Tensor moves) -> ()");

  // Blocks of a file; a path is the bytes of its name.
  host.def("store_io_paths() -> int[]");
  host.def("read_blocks(Tensor path, Tensor offsets, int block_bytes, int io) -> Tensor");

  // Rows on a disk. The address of tier_clock identifies a store, which keeps the addresses of the
  // tensors it was opened with; text is uint8, names have a line for each slab.
  store.def(
      "store_open(Tensor tier_clock, Tensor path, Tensor[] places, Tensor[] slots, "
      "Tensor[] free_slots, Tensor[] weights, Tensor[] generations, Tensor[] state, Tensor tiered, "
      "Tensor names, "
      "int segment_bytes, int disk_bytes, int io) -> ()");
  store.def(
      "store_read(Tensor tier_clock, int slab, Tensor handles, Tensor ids, int? pin) "
      "-> (Tensor records, Tensor found)");
  store.def(
      "store_write(Tensor tier_clock, int slab, Tensor handles, Tensor ids, int table, "
      "Tensor records) -> ()");
  store.def("store_erase(Tensor tier_clock, int slab, Tensor handles) -> ()");
  store.def("store_drain(Tensor tier_clock) -> ()");
  store.def("store_check(Tensor tier_clock) -> ()");
  store.def("store_sync(Tensor tier_clock) -> (Tensor[] records, Tensor[] segments)");
  store.def("store_keep(Tensor tier_clock, Tensor[] files) -> ()");
  store.def("store_load(Tensor tier_clock, Tensor[] records, Tensor[] segments) -> ()");
  store.def("store_pin(Tensor tier_clock) -> Tensor");
  store.def("store_release(Tensor tier_clock, int pin) -> ()");
  store.def("store_stats(Tensor tier_clock) -> Tensor");
  store.def("store_close(Tensor tier_clock) -> ()");

  // Owners of ids among shards, and distinct ids.
  m.def("mix_ids(Tensor ids) -> Tensor");
  m.def("unmix_ids(Tensor quotients, int parts, int part) -> Tensor");
  m.def(
      "unique_ids(Tensor ids, Tensor offsets, bool padded) -> (Tensor ids, Tensor offsets, "
      "Tensor inverse, Tensor counts)");
  m.def("id_owners(Tensor ids, int parts, int slots) -> Tensor");
  m.def(
      "ids_partition(Tensor ids, Tensor offsets, int parts, int slots) -> (Tensor ids, "
      "Tensor lengths, Tensor inverse, Tensor counts)");
  m.def("ids_encode(Tensor[] ids, int[] tables) -> Tensor");

  // Ids of many features, concatenated for a lookup; offsets are those of the features in ragged.
  m.def(
      "ids_concat(Tensor[] ids, Tensor[] offsets, int[] ragged, SymInt bags) -> (Tensor ids, "
      "Tensor offsets)");

  // Values of many features: lists have an entry for each.
  m.def("mod(Tensor[] values, int[] divisors) -> Tensor[]");
  m.def("bucketize(Tensor[] values, Tensor[] boundaries) -> Tensor[]");
  m.def(
      "multi_hash(Tensor[] values, int[] multipliers, int[] primes, int[] buckets, int[] hashes) "
      "-> Tensor[]");
  // hash: see core/features/string_hash.h.
  m.def("string_hash(Tensor[] values, Tensor[] offsets, int hash, int seed) -> Tensor[]");

  // Rows of a plain tensor, such as those received from other shards.
  m.def(
      "pool_rows(Tensor rows, Tensor positions, Tensor offsets, int features, "
      "Tensor? weights, int pooling) -> Tensor");
  m.def(
      "pool_rows_grad(Tensor grad, Tensor positions, Tensor offsets, int features, SymInt rows, "
      "Tensor? weights, int pooling) -> Tensor");
  m.def(
      "pool_rows_weight_grad(Tensor grad, Tensor rows, Tensor positions, Tensor offsets, "
      "Tensor weights, int features, int pooling) -> Tensor");
  m.def(
      "ragged_tile(Tensor rows, Tensor positions, Tensor offsets, Tensor? weights, "
      "int[] tile_lens, int[] pad_left) -> Tensor[]");
  m.def(
      "ragged_tile_grad(Tensor[] grads, Tensor positions, Tensor offsets, Tensor? weights, "
      "SymInt rows, int[] tile_lens, int[] pad_left) -> Tensor");
  m.def(
      "ragged_tile_weight_grad(Tensor[] grads, Tensor rows, Tensor positions, Tensor offsets, "
      "int[] tile_lens, int[] pad_left) -> Tensor");

  // Ragged rows of many features. weights are those of the features in weighted; offsets and
  // lengths of several depths follow each other, feature after feature.
  m.def(
      "ragged_cutoff_2d(Tensor[] values, Tensor[] offsets, Tensor[] weights, int[] weighted, "
      "int[] keep_lengths, int[] drop_left) "
      "-> (Tensor[] values, Tensor[] offsets, Tensor[] weights)");
  m.def(
      "ragged_cutoff_3d(Tensor[] values, Tensor[] outer_offsets, Tensor[] inner_offsets, "
      "Tensor[] weights, int[] weighted, int[] keep_lengths, int[] drop_left, int[] pad_left) "
      "-> (Tensor[] values, Tensor[] outer_offsets, Tensor[] inner_offsets, Tensor[] weights)");
  m.def(
      "ragged_topk_index_cutoff(Tensor[] values, Tensor[] offsets, Tensor[] indices, "
      "Tensor[] weights, int[] weighted) "
      "-> (Tensor[] values, Tensor[] offsets, Tensor[] weights)");
  m.def(
      "ragged_to_dense(Tensor[] values, Tensor[] offsets, int[] depths, int[] lengths, "
      "float padding, int integer_padding) -> Tensor[]");
  m.def(
      "ragged_indices(Tensor[] values, Tensor[] offsets, int[] depths, int[] lengths) "
      "-> Tensor[]");
  m.def(
      "dense_to_ragged(Tensor[] dense, bool trim, float invalid, int integer_invalid) "
      "-> (Tensor[] values, Tensor[] offsets)");
  m.def(
      "feature_cross_ragged(Tensor[] x_values, Tensor[] x_offsets, Tensor[] y_values, "
      "Tensor[] y_offsets, Tensor[] x_weights, int[] x_weighted, Tensor[] y_weights, "
      "int[] y_weighted) -> (Tensor[] values, Tensor[] offsets, Tensor[] weights)");

  // Index.
  m.def(
      "find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids, Tensor offsets, "
      "int[] feature_tables) -> (Tensor handles, Tensor missing)");
  m.def(
      "find_or_insert_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor(d!) slabs, "
      "Tensor free_rows, Tensor(e!) sketch, Tensor(f!) evicted, Tensor meta, Tensor policy, "
      "Tensor clock, Tensor ids, Tensor offsets, Tensor? admit, int[] feature_tables, "
      "int[] feature_policies) -> Tensor");
  m.def(
      "erase_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor(d!) slabs, "
      "Tensor(e!) free_rows, Tensor meta, Tensor ids, Tensor offsets, int[] feature_tables) "
      "-> Tensor");
  m.def(
      "grow_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor meta, int table, "
      "int ids) -> ()");
  m.def(
      "shrink_(Tensor(a!) buckets, Tensor(b!) scores, Tensor(c!) tables, Tensor meta, int table, "
      "int ids) -> ()");
  m.def(
      "set_handles_(Tensor(a!) buckets, Tensor tables, Tensor meta, Tensor ids, Tensor offsets, "
      "int[] feature_tables, Tensor handles) -> Tensor");
  m.def(
      "export_batch(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int table, "
      "int begin, int max_ids) -> (Tensor ids, Tensor handles, Tensor scores, Tensor next)");
  host.def(
      "changed_ids_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor generations, "
      "Tensor dirty_bits, Tensor before, Tensor(a!) now, int slab, int reader) "
      "-> (Tensor ids, Tensor handles, Tensor counts)");
  m.def(
      "get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids, "
      "Tensor offsets, int[] feature_tables, int word) -> (Tensor scores, Tensor found)");
  m.def(
      "set_scores_(Tensor buckets, Tensor(a!) scores, Tensor tables, Tensor meta, Tensor ids, "
      "Tensor offsets, int[] feature_tables, Tensor values, int word) -> Tensor");
  // Live ids of a table, drawn with replacement; seed is int64 [1].
  m.def(
      "sample_ids(Tensor buckets, Tensor tables, Tensor meta, int table, Tensor seed, "
      "SymInt samples) -> Tensor");
  m.def(
      "combine_scores_(Tensor buckets, Tensor(a!) scores, Tensor tables, Tensor meta, "
      "Tensor clock, Tensor ids, Tensor offsets, int[] feature_tables, Tensor values, "
      "int[] combines, int[] half_lives, int word) -> ()");
  m.def(
      "reported_counts(Tensor buckets, Tensor tables, Tensor row_clock) "
      "-> (Tensor tables, Tensor row_clock)");

  // Lookups. State, dirty_bits, copy_on_write, hyper, pending, grad_anchor and optimizer are for
  // the autograd formula: its backward updates the rows, or appends to pending. The second output
  // is the number of updates of the rows.
  m.def(
      "embedding(Tensor[] weights, Tensor[] generations, Tensor[] state, Tensor[] dirty_bits, "
      "Tensor[] copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta, Tensor init_data, "
      "Tensor[] pending, Tensor ids, Tensor handles, Tensor offsets, Tensor? per_sample_weights, "
      "Tensor grad_anchor, int[] feature_tables, int[] feature_dims, int pooling, int optimizer) "
      "-> (Tensor output, Tensor updates)");
  // Its forward without the formula: called by the formula, and by code compiled by
  // torch.compile.
  m.def(
      "embedding_forward(Tensor[] weights, Tensor[] generations, Tensor row_clock, Tensor meta, "
      "Tensor init_data, Tensor ids, Tensor handles, Tensor offsets, Tensor? per_sample_weights, "
      "int[] feature_tables, int[] feature_dims, int pooling) -> (Tensor output, Tensor updates)");
  // The same without row_clock. formats has an entry for each slab (core/rows/quantized.h); empty:
  // rows of floats.
  m.def(
      "embedding_inference(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor init_data, "
      "Tensor ids, Tensor handles, Tensor offsets, Tensor? per_sample_weights, "
      "int[] feature_tables, int[] feature_dims, int pooling, int[] formats=[]) -> Tensor");

  // find and a lookup for inference in one call, on the CPU, if all tables of the index have rows.
  // Without feature_tables and feature_dims there is one table and one feature. Omitted arguments
  // make a small call faster: rows of one table need none. Without include_last_offset, offsets of
  // bags of one feature lack the number of ids at their end.
  host.def(
      "find_and_read(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, "
      "Tensor[] generations, Tensor init_data, Tensor ids, Tensor offsets, "
      "Tensor? per_sample_weights=None, int[] feature_tables=[], int[] feature_dims=[], "
      "int pooling=2, bool include_last_offset=True) -> Tensor");

  // find_or_insert_ and embedding_forward in one call, on the CPU, for eager training. The tensors
  // of a group, which change as in find_or_insert_, are those that bind_lookup got; they live until
  // release_lookup.
  host.def(
      "bind_lookup(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows, "
      "Tensor sketch, Tensor evicted, Tensor meta, Tensor policy, Tensor clock, Tensor[] weights, "
      "Tensor[] generations, Tensor row_clock, Tensor init_data) -> int");
  host.def("release_lookup(int lookup) -> ()");
  host.def(
      "insert_and_read(int lookup, Tensor ids, Tensor offsets, Tensor? per_sample_weights, "
      "int[] feature_tables, int[] feature_dims, int pooling, int[] feature_policies) "
      "-> (Tensor output, Tensor handles, Tensor updates)");

  // Served tables, on the CPU: ids are found and their rows read in one pass. Frozen tables, or
  // live ones beside a thread that updates them. weights and formats have an entry for each slab
  // (core/rows/quantized.h, core/serving/live_row.h).
  host.def(
      "serve_lookup(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, "
      "Tensor init_data, Tensor ids, Tensor offsets, Tensor? per_sample_weights, "
      "int[] feature_tables, int[] feature_dims, int pooling, int[] formats, bool live) "
      "-> (Tensor output, Tensor missing)");
  host.def(
      "serve_apply_(Tensor(a!) buckets, Tensor(b!) tables, Tensor(c!)[] weights, "
      "Tensor(d!) free, Tensor meta, int table, Tensor ids, Tensor values, Tensor erased, "
      "int[] formats) -> Tensor");
  // All ids of a live table, and rows of ids, for searches.
  host.def(
      "serve_ids(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, int[] formats, "
      "int table, int slots) -> (Tensor ids, Tensor found)");
  host.def(
      "serve_rows(Tensor buckets, Tensor tables, Tensor meta, Tensor[] weights, int[] formats, "
      "int table, int dim, Tensor ids, Tensor? wanted) -> (Tensor rows, Tensor found)");
  // Served tables in a file; `file`, int64 [519], names it (cpu/serving/row_files.h).
  host.def("file_open(Tensor file) -> ()");
  host.def("file_make_live(Tensor file, Tensor meta, int[] headroom) -> ()");
  host.def(
      "file_apply(Tensor file, int table, Tensor ids, Tensor values, Tensor erased) -> Tensor");
  host.def("file_room(Tensor file, int table, Tensor ids, Tensor erased, bool write) -> Tensor");
  host.def("file_counts(Tensor file, int tables) -> Tensor");
  host.def("file_close(Tensor file) -> ()");
  host.def(
      "file_lookup(Tensor file, Tensor tables, Tensor meta, Tensor init_data, Tensor ids, "
      "Tensor offsets, Tensor? per_sample_weights, int[] feature_tables, int[] feature_dims, "
      "int pooling) -> (Tensor output, Tensor missing)");
  host.def("file_ids(Tensor file, int table, int ids) -> Tensor");
  host.def("file_stats(Tensor file) -> Tensor");
  host.def("file_pages(Tensor ids, Tensor packed, int crc) -> Tensor");
  // Rows of 8 or 4 bits a value.
  m.def("quantize_rows(Tensor rows, int format) -> Tensor");
  m.def("dequantize_rows(Tensor packed, int format, int dim) -> Tensor");

  // The largest scores by query: those of candidates, and the best so far.
  m.def(
      "merge_top_k(Tensor scores, Tensor ids, Tensor best_scores, Tensor best_ids) "
      "-> (Tensor scores, Tensor ids)");

  // Gradients of a lookup.
  m.def(
      "reduce_grad(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor init_data, "
      "Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, "
      "Tensor? per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling) "
      "-> (Tensor[] handles, Tensor[] ids, Tensor[] tables, Tensor[] gradients, Tensor counts)");
  m.def(
      "bag_weight_grad(Tensor[] weights, Tensor[] generations, Tensor meta, Tensor init_data, "
      "Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, "
      "Tensor per_sample_weights, int[] feature_tables, int[] feature_dims, int pooling) "
      "-> Tensor");

  // Gradients pending for the optimizer: [capacity] per slab, and pending_counts [slabs, 2].
  const std::string pending =
      "Tensor(a!)[] pending_handles, Tensor(b!)[] pending_ids, Tensor(c!)[] pending_tables, "
      "Tensor(d!)[] pending_gradients, Tensor(e!) pending_counts";
  m.def(("accumulate_grad_(" + pending +
         ", Tensor(f!) row_clock, Tensor[] weights, Tensor[] generations, Tensor meta, "
         "Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, "
         "Tensor? per_sample_weights, Tensor updates, int[] feature_tables, int[] feature_dims, "
         "int pooling) -> ()")
            .c_str());
  m.def(("merge_grad_(" + pending + ", Tensor(f!) row_clock) -> ()").c_str());

  // Rows.
  m.def(
      "materialize_(Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[] state, "
      "Tensor(d!)[] dirty_bits, Tensor(e!)[] copy_on_write, Tensor buckets, Tensor tables, Tensor "
      "hyper, Tensor meta, Tensor init_data) -> Tensor");
  // Copy-on-write of rows for a save that reads them while training goes on.
  host.def(
      "copy_before_write_(Tensor weights, Tensor[] state, Tensor(a!) copy_on_write, Tensor rows) "
      "-> "
      "()");
  host.def(
      "take_unchanged_rows_(Tensor weights, Tensor[] state, Tensor(a!) copy_on_write, Tensor rows, "
      "Tensor(b!) out_weights, Tensor(c!)[] out_state) -> ()");
  // Updates by an optimizer, a position in what optimizer_names returns: embedding_backward_
  // reduces the gradient of a lookup and applies it in one pass, apply_grad_ applies a reduced one.
  const std::string rows =
      "Tensor(a!)[] weights, Tensor(b!)[] generations, Tensor(c!)[] state, "
      "Tensor(d!)[] dirty_bits, Tensor(e!)[] copy_on_write, Tensor(f!) row_clock, Tensor hyper, "
      "Tensor meta, Tensor init_data, ";
  m.def(("embedding_backward_(" + rows +
         "Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets, "
         "Tensor? per_sample_weights, Tensor updates, int[] feature_tables, "
         "int[] feature_dims, int pooling, int optimizer) -> ()")
            .c_str());
  m.def(("apply_grad_(" + rows +
         "Tensor[] handles, Tensor[] ids, Tensor[] tables, Tensor[] gradients, Tensor counts, "
         "Tensor updates, int[] updated_tables, int optimizer) -> ()")
            .c_str());
}
