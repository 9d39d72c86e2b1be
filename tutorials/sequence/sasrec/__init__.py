"""The next item of a user, by a transformer over items without a vocabulary: SASRec.

Run it with ``python -m tutorials.sequence.sasrec --help``.
"""
