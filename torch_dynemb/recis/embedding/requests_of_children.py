"""Requests of a joint lookup, from the ids of an embedding's children."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torch_dynemb.recis.embedding.bags import Ids, bags_of
from torch_dynemb.recis.embedding.joint_lookup import Request
from torch_dynemb.recis.embedding.options import EmbeddingOption


def requests_of(
    owner: str,
    option: EmbeddingOption,
    input_ids: Ids | Mapping[str, Ids],
    input_weights: Tensor | None,
) -> dict[str, Request]:
    """Return the requests of an embedding by child.

    Args:
        owner: prefix of error messages.
        option: of the embedding.
        input_ids, input_weights: as :meth:`DynamicEmbedding.forward` takes them.

    Raises:
        KeyError: names of a dict are not those of the children.
        TypeError, ValueError: dtypes, shapes or devices do not match, or weights are given beside a
            dict.
    """
    children = option.children
    features: Mapping[str, Ids]
    if isinstance(input_ids, Mapping):
        if sorted(input_ids) != sorted(children):
            raise KeyError(
                f"{owner}: input_ids has {sorted(input_ids)}, expected the children "
                f"{sorted(children)}"
            )
        if input_weights is not None:
            raise ValueError(
                f"{owner}: input_weights is given with several children, expected "
                "RaggedTensors that have weights"
            )
        features = input_ids
    elif len(children) > 1:
        raise TypeError(
            f"{owner}: input_ids is a {type(input_ids).__name__}, expected a dict of "
            f"ids by child, {children}"
        )
    else:
        features = {children[0]: input_ids}
    return {
        name: Request(
            children.index(name),
            bags_of(
                f"{owner} {option.shared_name!r}: input_ids",
                ids,
                input_weights,
                use_weight=option.use_weight,
            ),
            option.combiner_kwargs,
        )
        for name, ids in features.items()
    }


__all__ = ["requests_of"]
