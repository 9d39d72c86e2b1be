"""The checksum of blocks of files: CRC-32C of the memory of a tensor, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb._library.library import register_fake


def crc32c(data: Tensor, crc: int = 0) -> int:
    """Compute CRC-32C of the bytes of a tensor, by the processor's instruction where it has one.

    This is the checksum of iSCSI (RFC 3720, appendix B.4), ext4 and many storage formats. The
    Castagnoli polynomial is 0x1EDC6F41, bits reversed, all ones at the beginning and inverted at
    the end. One thread computes it and releases the GIL, so several blocks can be checked side by
    side.

    Code for ``torch.compile(fullgraph=True)`` calls ``torch.ops.dynemb.crc32c(data, crc)``. That
    returns an int64 scalar tensor, because a compiled program has no integers that depend on
    values. It has no gradient.

    Args:
        data: contiguous, of any shape and dtype, on the CPU.
        crc: checksum of the preceding bytes, 0 to 2**32 - 1; 0 if there are none.

    Returns:
        The checksum, 0 to 2**32 - 1.

    Raises:
        RuntimeError: data is not on the CPU or not contiguous, or crc is out of range.

    Example:
        >>> text = torch.tensor(list(b"123456789"), dtype=torch.uint8)
        >>> hex(crc32c(text))
        '0xe3069283'
        >>> hex(crc32c(text[4:], crc32c(text[:4])))
        '0xe3069283'
    """
    return int(torch.ops.dynemb.crc32c(data, crc))


@register_fake("crc32c")
def _crc32c_fake(data: Tensor, crc: int) -> Tensor:
    return data.new_empty((), dtype=torch.int64)
