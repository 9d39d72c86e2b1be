"""Which test files run with another ``--device`` than ``cpu``.

Every test file is named here once, but for test_cuda_*, which run with ``cuda`` and ``emulated``,
and those of tests/sharding, which run on CPUs. test_marked_device.py counts them.
"""

# They say something about tables on any device.
ANY_DEVICE = {
    "test_admission",
    "test_collections",
    "test_compaction",
    "test_eviction",
    "test_freeze",
    "test_index",
    "test_index_growth",
    "test_index_sequences",
    "test_initializers",
    "test_interrupts",
    "test_known_faults",
    "test_life_cycle",
    "test_long_life",
    "test_lookup",
    "test_module_optimizer",
    "test_module_training",
    "test_modules",
    "test_optimizer_options",
    "test_optimizers",
    "test_policy_sequences",
    "test_recis_faults",
    "test_recis_lookup",
    "test_recis_optimizers",
    "test_recomputation",
    "test_row_dtypes",
    "test_split",
    "test_state",
    "test_state_refused",
    "test_table_content",
}

CPU_ONLY = {
    # compilers and what they are told of ops
    "test_compile",
    "test_dispatch_counts",
    "test_generated_code",
    "test_opcheck",
    "test_schemas",
    "test_misuse",
    "test_doctest",
    "test_readme",
    # the build, the emulator, programs and jobs, which start processes of their own
    "test_benchmarks",
    "test_build",
    "test_emulator",
    "test_gpu_check",
    "test_inspection",
    "test_saved_files",
    "test_saved_numbers",
    "test_state_fuzz",
    "test_sequence_model",
    "test_train_end_to_end",
    "test_train_model",
    "test_train_optimizers",
    "test_train_policies",
    "test_train_reader",
    "test_train_resume",
    # processes and what is left of deleted objects
    "test_freed",
    "test_processes",
    # threads, instruction sets and memory of the CPU
    "test_index_threads",
    "test_large_batches",
    "test_memory",
    "test_simd",
    # ops whose kernels tests/cuda/test_cuda_kernels.py compares with the CPU's
    "test_constants",
    "test_errors_ops",
    "test_feature_values",
    "test_fuzz_ops",
    "test_ids_concat",
    "test_pooling",
    "test_ragged_ops",
    "test_raw_arguments",
    "test_routing",
    "test_strings",
    # arguments that are refused before a device sees them
    "test_embedding_option",
    "test_errors_groups",
    "test_guards",
    # modules over those ops
    "test_feature_engine",
    "test_recis_functional",
    "test_ragged_tensor",
    # several processes over gloo
    "test_ranks",
    "test_recis_ranks",
    # of themselves
    "test_marked_device",
}
