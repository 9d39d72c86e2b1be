"""Modules that every rank needs, imported once by the process of which ranks are forks."""

import gc

# Modules stay as long as the process does, so there is nothing to collect among their objects:
# neither while they come, nor, frozen, in the ranks, which would copy their pages to look at them.
gc.disable()
import tutorials.dlrm.job.ranks  # noqa: E402
import tutorials.dlrm.job.sharded_model  # noqa: E402, F401

gc.freeze()
gc.enable()
