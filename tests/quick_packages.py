"""Options of the compiler for packages of tests.

Compiling takes most of their time, and no test asks anything of the speed of the code.
"""

from __future__ import annotations

QUICK = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}
