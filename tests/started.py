"""Processes that begin with torch imported: a server has imported it once, and forks them.

Imports take seconds of every fresh process, and tests start many.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# None of them starts a thread, which forks would not have. What is not installed is left out.
IMPORTED = ["torch_dynemb", "torch._dynamo", "torchrec.distributed.model_parallel"]


def start_server() -> ForkServerContext:
    """What makes such processes. The server of a test run is started by the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
