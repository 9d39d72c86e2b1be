"""Imports of ranks with dynamic or static tables, done once before the ranks are forked."""

import whole_job.torchrec_rows  # noqa: F401

import tutorials.dlrm.job.rank_imports  # noqa: F401  as the job's ranks
