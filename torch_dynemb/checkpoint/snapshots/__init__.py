"""Snapshots of tables with rows on a disk, from which training resumes after a crash."""
