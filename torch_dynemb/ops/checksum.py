"""The checksum of blocks of files: crc32c of the memory of a tensor, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb._library.library import register_fake


def crc32c(data: Tensor, crc: int = 0) -> int:
    """crc32c of the bytes of a tensor, by the processor's instruction for it where it has one.

    It is the checksum of iSCSI (RFC 3720, appendix B.4), ext4 and many storage formats: the
    Castagnoli polynomial 0x1EDC6F41, bits reversed, all ones at the beginning and inverted at the
    end. One thread computes it; other Python threads run meanwhile, so blocks can be summed side
    by side.

    Code for ``torch.compile(fullgraph=True)`` calls ``torch.ops.dynemb.crc32c(data, crc)``, which
    gives the sum as an int64 scalar tensor, because a compiled program has no integers that depend
    on values. There is no gradient.

    Args:
        data: contiguous, of any shape and dtype, on the CPU. Its memory is summed.
        crc: the sum of the bytes that come before, 0 to 2**32 - 1; 0 if there are none.

    Returns:
        The sum, 0 to 2**32 - 1.

    Raises:
        RuntimeError: data is not on the CPU or not contiguous, or crc is no such number.

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
