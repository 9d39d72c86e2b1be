"""Alpha-beta model of the links between ranks (Hockney 1994)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Links(NamedTuple):
    """Rates of a rank's links, which send and receive at the same time.

    Attributes:
        between: bytes a second from a rank to other nodes.
        inside: bytes a second from a rank to ranks of its node.
        latency: seconds for each message, beside its bytes.
    """

    between: float
    inside: float
    latency: float


class Exchange(NamedTuple):
    """Bytes of one collective.

    Attributes:
        kind: of the bytes: splits, lengths, ids, rows or gradients.
        sent: float64 [ranks, 2], bytes that each rank sends: inside its node, to other nodes.
        received: float64 [ranks, 2], bytes that each rank receives from there.
        messages: ranks that a rank sends to.
    """

    kind: str
    sent: Tensor
    received: Tensor
    messages: int

    def reverse(self, kind: str) -> Exchange:
        """Return the exchange that takes the same bytes back.

        Args:
            kind: of these bytes.
        """
        return Exchange(kind, self.received, self.sent, self.messages)

    def seconds(self, links: Links) -> float:
        """Return the time until the last rank is done."""
        rates = torch.tensor([links.inside, links.between], dtype=torch.float64, device="cpu")
        most = torch.maximum(self.sent, self.received).amax(0) / rates
        return links.latency * self.messages + float(most.max())


def to_owners(kind: str, bytes_to: Tensor, node_size: int) -> Exchange:
    """Return the all-to-all in which every rank sends the same numbers of bytes to each rank.

    Args:
        kind: of the bytes.
        bytes_to: float64 [ranks], bytes that each rank receives from every rank.
        node_size: ranks of a node.
    """
    ranks = len(bytes_to)
    local = min(node_size, ranks)
    of_node = bytes_to.view(-1, local).sum(1).repeat_interleave(local)
    sent = torch.stack([of_node - bytes_to, bytes_to.sum() - of_node], 1)
    received = torch.stack([bytes_to * (local - 1), bytes_to * (ranks - local)], 1)
    return Exchange(kind, sent, received, ranks - 1)


__all__ = ["Exchange", "Links", "to_owners"]
