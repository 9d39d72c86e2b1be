"""Classes of errors that the compiled library raises.

torch turns whatever an op throws into a RuntimeError with its text, so the library ends messages
with a mark of the class (``csrc/core/runtime/error_class.h``).
"""

from __future__ import annotations

import re

from torch_dynemb import errors

# at the end of a message, before the place in the source where there is one
_MARK = re.compile(r" \[(?P<name>\w+Error)\](?P<place> \(csrc/[^()]*\))?$", re.MULTILINE)


def typed_error(error: RuntimeError) -> RuntimeError:
    """Return the error of the class that its mark names, without the mark; else the error itself.

    Args:
        error: what an op raised.
    """
    if isinstance(error, errors.DynembError) or not error.args:
        return error
    message = str(error.args[0])
    found = _MARK.search(message)
    if found is None:
        return error
    kind: type[RuntimeError] = getattr(errors, found["name"])
    return kind(f"{message[: found.start()]}{found['place'] or ''}{message[found.end() :]}")


__all__ = ["typed_error"]
