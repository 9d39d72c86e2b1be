"""What ranks of dynamic tables or of static ones need, imported once before they are forked."""

import whole_job.torchrec_rows  # noqa: F401

import tutorials.dlrm.job.rank_imports  # noqa: F401  as the job's ranks
