"""Calls every op of ``torch.ops.dynemb`` with damaged arguments; every call works, or raises.

A call takes the arguments of a case of ``op_cases`` and damages none to three of them: extreme
numbers, other shapes, dtypes, strides and devices, empty tensors, lists of other lengths. Nothing
but the seed and the call's number decides what is damaged, and how. Tensors are copies that the
allocator has made, so that AddressSanitizer knows where they end.

    python tests/tools/fuzz_ops.py --seed 0 --calls 1000              the library of the package
    python tests/tools/fuzz_ops.py --seed 0 --calls 1000 --sanitized  one that sanitized.py builds
    python tests/tools/fuzz_ops.py --seed 0 --first 17 --calls 1 -v   a call, and what it raises
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(Path(__file__).resolve().parent)]

# that results may take, of a process without AddressSanitizer, which has a limit of its own
SPARE_ADDRESSES = 1 << 29
LONGEST = 300  # seconds for 200 calls, after which one of them hangs

INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 100, 1000, 65536),
    *(2**n + d for n in (15, 28, 31, 32, 35, 36, 40, 47, 53, 59, 60, 61, 62) for d in (-1, 0, 1)),
    *(2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, -(2**62), -(2**32), -(2**31), -(2**31) - 1),
    *(-1, -2, -3, -4, -5, -64, -1000),
)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, 5.5, 100.0, 1e10, 2.0**31, 2.0**53, 2.0**63),
    *(-(2.0**63), 1e38, 1e39, 1e300, -1e300, 1e-300, 1e-45),
    *(float("inf"), float("-inf"), float("nan")),
)


def ended_by(status: int) -> str:
    """How a process with this status ended."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def is_named(message: str) -> bool:
    """Whether an error says which op, or which dispatch to one, it comes from."""
    return "dynemb" in message.partition(": ")[2]


class Damage:
    """Draws what becomes of arguments."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def number_like(self, given: Any) -> Any:
        if isinstance(given, bool):
            return not given
        if isinstance(given, float):
            return self.random.choice(FLOATS)
        if self.random.random() < 0.3:
            return given + self.random.choice((-2, -1, 1, 2))
        return self.random.choice(INTEGERS)

    def numbers(self, tensor: Any) -> Any:
        """One, some or all elements get other numbers."""
        import torch

        tensor = tensor.detach().clone()
        count = tensor.numel()
        if count == 0:
            return tensor
        if tensor.dtype.is_floating_point:
            pool: Sequence[Any] = torch.tensor(FLOATS, dtype=torch.float64).to(tensor.dtype)
        elif tensor.dtype == torch.bool:
            pool = (True, False)
        else:
            info = torch.iinfo(tensor.dtype)
            pool = [n for n in INTEGERS if info.min <= n <= info.max]
        kind = self.random.randrange(6)
        flat = tensor.reshape(-1)
        if kind == 0:
            return tensor.fill_(self.random.choice(pool))
        if kind == 1:
            drawn = torch.as_tensor(self.random.choices(pool, k=count))
            return tensor.copy_(drawn.reshape(tensor.shape))
        if kind == 2 and tensor.dim() == 2:
            tensor[:, self.random.randrange(tensor.shape[1])] = self.random.choice(pool)
            return tensor
        for _ in range(1 if kind < 5 else 4):
            at = self.random.randrange(count)
            if kind == 3 and tensor.dtype.is_signed and not tensor.dtype.is_floating_point:
                step = self.random.choice((-2, -1, 1, 2, 64))
                flat[at] = max(info.min, min(info.max, int(flat[at]) + step))
            else:
                flat[at] = self.random.choice(pool)
        return tensor

    def shape(self, tensor: Any) -> Any:
        import torch

        tensor = tensor.detach()
        changes: list[Callable[[], Any]] = [
            lambda: tensor.reshape(-1),
            lambda: tensor[None],
            lambda: tensor[..., None],
            lambda: tensor.new_zeros(()),
            lambda: tensor.new_zeros((0,)),
            lambda: tensor.new_zeros((0, *tensor.shape[1:])),
            lambda: tensor.new_zeros((*tensor.shape[:-1], 0)),
            lambda: tensor.new_zeros((*tensor.shape, 0)),
            lambda: tensor.t() if tensor.dim() == 2 else tensor,
        ]
        if tensor.dim() > 0:
            changes += [
                lambda: tensor[:-1],
                lambda: tensor[:1],
                lambda: tensor[1:],
                lambda: torch.cat([tensor, tensor]),
                lambda: tensor[..., :-1],
                lambda: torch.cat([tensor, tensor], -1),
            ]
        changed = self.random.choice(changes)()
        return changed.clone(memory_format=torch.contiguous_format)

    def layout(self, tensor: Any) -> Any:
        """Other dtypes, strides and devices."""
        import torch

        tensor = tensor.detach()
        dtypes = (
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.complex64, torch.float8_e4m3fn),
        )
        kind = self.random.randrange(8)
        if kind == 0:
            return torch.stack([tensor, tensor], -1)[..., 0]
        if kind == 1:
            return tensor.to("meta")
        if kind == 2 and tensor.dim() > 0:
            return tensor.to_sparse()
        if kind == 3:
            return tensor[:1].expand(tensor.shape) if tensor.dim() > 0 else tensor
        if kind == 4:
            return torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
        return tensor.to(self.random.choice(dtypes))

    def tensor(self, given: Any) -> Any:
        import torch

        plain = given.layout == torch.strided and given.device.type == "cpu"
        if not plain or given.is_complex() or given.dtype == torch.float8_e4m3fn:
            return given  # by an earlier damage
        kind = self.random.randrange(10)
        if kind < 6:
            return self.numbers(given)
        if kind < 8:
            return self.shape(given)
        return self.layout(given)

    def argument(self, given: Any) -> Any:
        import torch

        if self.random.random() < 0.02:
            return None
        if isinstance(given, torch.Tensor):
            return self.tensor(given)
        if isinstance(given, list):
            return self.entries(given)
        if given is None:
            return torch.ones(self.random.randrange(9))
        return self.number_like(given)

    def entries(self, given: list[Any]) -> list[Any]:
        given = list(given)
        kind = self.random.randrange(10)
        if kind == 0:
            return given[:-1]
        if kind == 1:
            return given + given[:1]
        if kind == 2:
            return []
        if kind == 3:
            self.random.shuffle(given)
            return given
        if given:
            at = self.random.randrange(len(given))
            given[at] = self.argument(given[at])
        elif self.random.random() < 0.5:
            given.append(self.random.choice(INTEGERS))
        return given


def copied(given: Any) -> Any:
    """The same arguments in memory of their own."""
    import torch

    if isinstance(given, list):
        return [copied(entry) for entry in given]
    if isinstance(given, torch.Tensor):
        return given.detach().clone().requires_grad_(given.requires_grad)
    return given


def schema_of(name: str) -> Any:
    import torch

    return getattr(torch.ops.dynemb, name).default._schema


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor, or a list of some."""
    return "Tensor" in str(argument.type)


class Fuzzer:
    """Makes the calls of a seed."""

    def __init__(self, seed: int, *, only: str | None = None) -> None:
        from op_cases import CASES

        self.seed = seed
        # made once: a group takes longer than a call
        self.cases = {
            name: [case() for case in cases.values()]
            for name, cases in CASES.items()
            if only is None or name == only
        }
        # instances of one function: a few of them are enough
        self.names = sorted(self.cases)
        self.numbers = {
            name: [at for at, a in enumerate(schema_of(name).arguments) if not is_tensor(a)]
            for name in self.names
        }

    def call(self, number: int) -> tuple[str, tuple[Any, ...], bool]:
        """An op, its arguments, and whether its backward is called too."""
        import torch

        damage = Damage(f"{self.seed}/{number}")
        name = damage.random.choice(self.names)
        arguments = copied(list(damage.random.choice(self.cases[name])))
        for _ in range(damage.random.choice((0, 1, 1, 1, 2, 3))):
            if arguments:
                at = damage.random.randrange(len(arguments))
                if at in self.numbers[name] and isinstance(arguments[at], torch.Tensor):
                    continue  # by an earlier damage: torch reads a number of it before any op
                arguments[at] = damage.argument(arguments[at])
        return name, tuple(arguments), damage.random.random() < 0.5

    def run(self, number: int) -> tuple[str, str]:
        """Makes a call.

        Returns:
            The op, and what it said; "" if it worked.
        """
        import torch

        name, arguments, backward = self.call(number)
        try:
            result = getattr(torch.ops.dynemb, name)(*arguments)
            results = result if isinstance(result, tuple | list) else [result]
            wanted = [
                r.double().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad
            ]
            if backward and wanted:
                sum(wanted).backward()  # type: ignore[union-attr]
        except Exception as error:  # what is raised is looked at by the caller
            return name, f"{type(error).__name__}: {error}".partition("\n")[0]
        return name, ""


def make_calls(options: argparse.Namespace) -> None:
    """Makes the calls in this process."""
    import torch

    if options.library:
        load = torch.ops.load_library
        torch.ops.load_library = lambda _: load(options.library)  # in place of the package's
    else:
        torch.set_num_threads(1)
    fuzzer = Fuzzer(options.seed, only=options.op)
    if not options.library:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + SPARE_ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    said: Counter[str] = Counter()
    current = os.open(options.current, os.O_WRONLY | os.O_CREAT) if options.current else -1
    for number in range(options.first, options.first + options.calls):
        if number % 200 == 0 or number == options.first:
            faulthandler.dump_traceback_later(LONGEST, exit=True)
        if current >= 0:
            os.pwrite(current, f"{number:12d}".encode(), 0)
        if options.verbose:
            print(number, *fuzzer.call(number), flush=True)
        name, message = fuzzer.run(number)
        said["raised" if message else "worked"] += 1
        if message and not is_named(message):
            raise SystemExit(f"call {number} of {name}: the error names no op: {message}")
        if options.verbose or (options.messages and message):
            print(f"{number} {name}: {message or 'works'}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{options.calls} calls of seed {options.seed}: {dict(said)}")


def run_calls(seed: int, calls: int, *, library: Path | None, current: Path, first: int = 0) -> str:
    """Makes the calls in a process of their own.

    Args:
        seed: decides, together with the number of a call, what is damaged.
        calls: how many.
        library: in place of ``torch_dynemb._C``, made by sanitized.py; None: the package's.
        current: a file for the number of the call that is being made.
        first: number of the first call.

    Returns:
        What went wrong, with the command that repeats it; "" if nothing did.
    """
    from sanitized import environment

    command = [sys.executable, __file__, "--seed", str(seed)]
    if library is not None:
        command += ["--library", str(library)]
    span = ["--first", str(first), "--calls", str(calls), "--current", str(current)]
    reply = subprocess.run(
        [*command, *span],
        env=dict(os.environ) if library is None else environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if reply.returncode == 0:
        return ""
    number = current.read_text().strip() if current.exists() else "none"
    again = " ".join([*command, "--first", number, "--calls", "1", "-v"])
    return f"call {number}: {ended_by(reply.returncode)}\n{reply.stderr[-6000:]}\nagain: {again}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--op", help="this one only; calls get other numbers")
    parser.add_argument("--sanitized", action="store_true", help="build, and use, that library")
    parser.add_argument("--library", help="a library that sanitized.py has built")
    parser.add_argument("--current", help="file for the number of the call that is being made")
    parser.add_argument("--messages", action="store_true", help="print what calls raise")
    parser.add_argument("-v", "--verbose", action="store_true", help="print calls, too")
    options = parser.parse_args()
    if not options.sanitized:
        make_calls(options)
        return
    from sanitized import build, environment

    arguments = [a for a in sys.argv[1:] if a != "--sanitized"]
    command = [sys.executable, __file__, *arguments, "--library", str(build())]
    raise SystemExit(subprocess.run(command, env=environment(), check=False).returncode)


if __name__ == "__main__":
    main()
