"""Snapshots of tables whose rows lie on a disk: what makes the files there go on after a crash."""
