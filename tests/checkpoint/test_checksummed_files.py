"""Files with a checksum for every block, which are checked from front to back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_dynemb.checkpoint import DamagedFileError
from torch_dynemb.files.checksummed_files import (
    ChecksummedWriter,
    FileChecksums,
    check_file,
)
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.tensor_file import TensorShape, as_bytes, header_of, rows_as_bytes

pytestmark = pytest.mark.cpu_only("about files, without tables")


def written(path: Path, block_bytes: int) -> FileChecksums:
    """Write a file with blocks that do not begin at the end of its header."""
    values = torch.arange(5000)
    writer = ChecksummedWriter(Disk(), path, block_bytes)
    header = header_of([TensorShape("id", values.dtype, tuple(values.shape))])
    writer.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    writer.write(as_bytes(values))
    return writer.finish()


@pytest.mark.parametrize("block_bytes", [4000, 4096, 8192, 10_000, 1 << 20])
def test_a_file_of_any_blocks_is_checked(tmp_path: Path, block_bytes: int) -> None:
    sums = written(tmp_path / "file", block_bytes)
    check_file(tmp_path / "file", sums)
    data = bytearray((tmp_path / "file").read_bytes())
    for at in range(4096, len(data), 3500):  # in every block
        data[at] ^= 1
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(DamagedFileError, match=f"block {at // block_bytes} "):
            check_file(tmp_path / "file", sums)
        data[at] ^= 1


def test_one_element_has_its_bytes_with_any_stride() -> None:
    one = torch.tensor([[1.0]]).as_strided((1, 1), (1, 0))  # contiguous, but view() refuses it
    wanted = list(torch.tensor([1.0]).numpy().tobytes())
    assert as_bytes(one).tolist() == wanted
    assert rows_as_bytes(one).tolist() == [wanted]
    assert rows_as_bytes(torch.ones(2, 2)[:, :1]).tolist() == [wanted, wanted]
    assert rows_as_bytes(torch.ones(0, 3)).shape == (0, 12)
