"""Cost of a call: lookups so small that only the calls themselves take time, eager and compiled.

One id in one table, and one id in each of 26 tables, against nn.Embedding and nn.EmbeddingBag of
the same shape. A training step is forward, backward and optimizer step. With --no-kernels our ops
do nothing (peers/calls/nothing.cpp): what is left is torch's and Python's part of the same calls,
below which no kernel brings them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import interleave
from peers.build import build_calls
from torch import Tensor, nn

import torch_dynemb as td

BENCH = "overhead"
DIM = 16
PEER_ROWS = 1000  # small: a peer's dense gradient is no larger than it must be
MODES = ("inference", "training forward", "training step")
TARGETS = {  # ratios to torch's module, by mode and whether it is compiled
    ("inference", False): 2.0,
    ("training step", False): 1.5,
    ("training step", True): 1.0,
}
Call = Callable[[int], object]


class StackedEmbeddingBags(nn.Module):
    """One nn.EmbeddingBag a feature, outputs side by side."""

    def __init__(self, features: int) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(PEER_ROWS, DIM, mode="sum") for _ in range(features))
        self.bags = nn.ModuleList(bags)

    def forward(self, ids: list[Tensor], offsets: Tensor) -> Tensor:
        outputs = [bag(i, offsets) for bag, i in zip(self.bags, ids, strict=True)]
        return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class Contest:
    """Our module and a peer, each with its input and the optimizer that a step needs."""

    name: str
    peer_name: str
    ours: nn.Module
    our_input: tuple[object, ...]
    our_optimizer: torch.optim.Optimizer
    peer: nn.Module
    peer_input: tuple[object, ...]


def contests() -> Iterator[tuple[str, str, Callable[[], Contest]]]:
    """Name of each contest and of its peer, and how to set it up."""
    one_id, zero = torch.tensor([7]), torch.tensor([0])

    def embedding() -> Contest:
        ours = td.DynamicEmbedding(DIM, name="overhead", optimizer=td.SGD(lr=0.01))
        peer = nn.Embedding(PEER_ROWS, DIM)
        return Contest("1 id", "nn.Embedding", ours, (one_id,), ours.optimizer, peer, (one_id,))

    def bag() -> Contest:
        ours = td.DynamicEmbeddingBag(
            DIM, mode="sum", name="overhead_bag", optimizer=td.SGD(lr=0.01)
        )
        peer = nn.EmbeddingBag(PEER_ROWS, DIM, mode="sum")
        inputs = (one_id, zero)
        return Contest("1 bag", "nn.EmbeddingBag", ours, inputs, ours.optimizer, peer, inputs)

    def collection() -> Contest:
        names = [f"c{i}" for i in range(26)]
        ours = td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name=n, embedding_dim=DIM, feature_names=[n]) for n in names],
            optimizer=td.SGD(lr=0.01),
            mode="sum",
        )
        features = td.KeyedJagged(names, torch.arange(26), torch.arange(27))
        peer = StackedEmbeddingBags(26)
        peer_input = ([torch.tensor([i]) for i in range(26)], zero)
        return Contest(
            "26 tables", "26 nn.EmbeddingBag", ours, (features,), ours.optimizer, peer, peer_input
        )

    yield "1 id", "nn.Embedding", embedding
    yield "1 bag", "nn.EmbeddingBag", bag
    yield "26 tables", "26 nn.EmbeddingBag", collection


def call_of(
    module: nn.Module,
    inputs: tuple[object, ...],
    optimizer: torch.optim.Optimizer,
    mode: str,
    *,
    compiled: bool,
) -> Call:
    """Return the call that is timed."""
    run = torch.compile(module, fullgraph=True) if compiled else module
    if mode == "inference":

        def infer(_: int) -> None:
            with torch.no_grad():
                run(*inputs)

        return infer
    if mode == "training forward":
        return lambda _: run(*inputs)

    def step(_: int) -> None:
        optimizer.zero_grad()
        run(*inputs).sum().backward()
        optimizer.step()

    return step


def measure(*, rounds: int, calls: int, only: list[str], no_kernels: bool) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its row."""
    for name, peer_name, build in contests():
        for compiled in (False, True):
            for mode in MODES:
                case = f"{name}, {mode}, {'compiled' if compiled else 'eager'}"
                case += ", no kernels" if no_kernels else ""
                if not is_selected(only, case, peer_name):
                    continue
                yield case
                torch.compiler.reset()
                contest = build()
                contest.ours(*contest.our_input).sum().backward()  # the ids are known from here on
                contest.our_optimizer.step()
                training = mode != "inference"
                contest.ours.train(training)
                contest.peer.train(training)
                peer_optimizer = torch.optim.SGD(contest.peer.parameters(), lr=0.01)
                timings = interleave(
                    {
                        "ours": call_of(
                            contest.ours,
                            contest.our_input,
                            contest.our_optimizer,
                            mode,
                            compiled=compiled,
                        ),
                        "peer": call_of(
                            contest.peer,
                            contest.peer_input,
                            peer_optimizer,
                            mode,
                            compiled=compiled,
                        ),
                    },
                    rounds=rounds,
                    calls=calls,
                    warmup=2,  # compiles
                )
                yield compare(
                    BENCH,
                    case,
                    timings["ours"],
                    peer_name,
                    timings["peer"],
                    target=None if no_kernels else TARGETS.get((mode, compiled)),
                )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=positive, help="calls a round (default 300)")
    arguments.add_argument("--no-kernels", action="store_true", help="our ops do nothing: a limit")
    options = arguments.parse_args()
    if options.no_kernels:
        torch.ops.load_library(str(build_calls()))
    torch.set_num_threads(1)  # a thread more costs more than these calls
    calls = options.calls or (50 if options.quick else 300)
    report = Report(as_json=options.json, cases=18)
    report.take(
        measure(
            rounds=options.rounds, calls=calls, only=options.only, no_kernels=options.no_kernels
        )
    )
    report.close()


if __name__ == "__main__":
    main()
