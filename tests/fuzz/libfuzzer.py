"""One target in one process: ``python -m tests.fuzz.libfuzzer TARGET [LIBFUZZER'S ARGUMENTS]``."""

from __future__ import annotations

import sys
import warnings

import atheris

# What is imported in here reports which of its branches were taken.
with atheris.instrument_imports(include=["holdfast", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    warnings.simplefilter("ignore")  # of cryptography, about odd certificates
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name].run, internal_libfuzzer=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
