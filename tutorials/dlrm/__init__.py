"""DLRM on click logs in the Criteo format, with dynamic embedding tables.

Run it with ``python -m tutorials.dlrm.train --help``.
"""
