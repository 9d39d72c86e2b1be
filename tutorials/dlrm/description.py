"""What ``--help`` of the DLRM training program says before the options."""

DESCRIPTION = """\
Train DLRM on click logs in the Criteo format, with dynamic embedding tables.

A line has 40 tab-separated fields: a label (0 or 1), 13 integers, 26 categories as hexadecimal
strings; empty means missing. Files may be gzipped and are streamed once, in the order given; there
is no vocabulary and no preprocessing. Without files, samples of a known model are generated once
and kept.

Tables grow with the ids that come, or up to --capacity, which is divided among the features after a
look at the first lines: in equal shares, but none larger than the feature needs. Rows are updated
by --optimizer and kept in --row-dtype, its state in --state-dtype.

The last lines of the data are held out for the AUC. Then the same model is trained with hashed
tables of the same size as a baseline. The last line of the output is a JSON object: auc, best_auc
(of the planted probabilities; null for your own files), baseline_auc, samples (trained on),
samples_per_s, ids (in the tables at the end), table_bytes (rows, optimizer state, index, scores and
counts of ids not admitted), optimizer, row_dtype, state_dtype, rounding, accumulate, capacity,
eviction, admission, evicted (ids that had to go), rejected and not_admitted (new ids without a row,
once per step: for want of room, or by --admission), device, compiled, storage (null where all rows
are in memory).

With --quantize the trained model is also frozen, as it would be served, and its AUC is computed
with rows as they are and with rows of each of the kinds. The JSON object has one more entry then,
quantized, an object with an entry for each kind, and one named unchanged: auc, row_bytes (of an
id's row) and bytes_per_id (of all that the frozen tables have).

With --export the frozen model is also written as a package, which torch_dynemb.serving.load and the
C++ reader run without a compiler and without these classes: FOLDER/unchanged, and one for each kind
of --quantize, such as FOLDER/int8. Each is compiled in half a minute or so, loaded, and has to give
the frozen model's log-odds of the held-out samples. The entry exported is an object with an entry
for each package: path, bytes, samples (that were compared) and largest_difference (of log-odds).

With --storage ssd the rows and their optimizer state lie in files, and a cache in memory has those
in use; table_bytes is what is in memory. While a batch is trained on, the rows of the next one are
fetched (not with --torchrec). The results are those of a run in memory, to the last bit; hashed
tables get as much memory as the cache and the index have. The entry storage is an object, of the
training alone: kind, cache, hits (ids whose row was in memory), misses (rows that a step waited
for, or that were new), prefetched (rows that came while the batch before was trained on),
read_mb_per_s, written_mb_per_s (of the files), waited_s (for the disk), stored (rows in files),
disk_bytes and peak_bytes (the most memory that the process has had).

With --torchrec the tables are sharded over processes by TorchRec's DistributedModelParallel and the
MLPs are data parallel. Each rank takes its part of every batch, so that all together do the steps
of one process. There is no baseline, and the JSON object has two more entries: world_size and
sharding (of each table). For several machines, start the program with torchrun on each.
"""
