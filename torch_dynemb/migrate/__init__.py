"""Migration of rows, optimizer state and scores from other libraries and formats.

The functions ``read_...`` return sources, and :func:`load` writes a source into the tables of a
model, in one process or in many. A load succeeds as a whole or changes nothing.
``tutorials/migrate`` has a page for each library.
"""

from torch_dynemb.migrate.dynamicemb_dump import read_dynamicemb
from torch_dynemb.migrate.load import load
from torch_dynemb.migrate.npz import read_npz
from torch_dynemb.migrate.parquet import read_parquet
from torch_dynemb.migrate.raw_files import read_raw
from torch_dynemb.migrate.recis_checkpoint import read_recis
from torch_dynemb.migrate.source import Source, SourceRows
from torch_dynemb.migrate.tensors import read_embedding, read_tensors
from torch_dynemb.migrate.torchrec_collisions import read_torchrec_hash_zch, read_torchrec_mch
from torch_dynemb.table.content import CountedIds

__all__ = [
    "CountedIds",
    "Source",
    "SourceRows",
    "load",
    "read_dynamicemb",
    "read_embedding",
    "read_npz",
    "read_parquet",
    "read_raw",
    "read_recis",
    "read_tensors",
    "read_torchrec_hash_zch",
    "read_torchrec_mch",
]
