"""Run a benchmark, with --help after its name for its arguments.

Runners are ``training_steps`` for whole steps, ``compose`` for layouts and features against one
process, and ``runner`` for kernels and layers.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

_PARTS = ("__init__", "__main__", "compose_features", "compose_runs", "records", "runner", "timing",
          "training_steps")  # fmt: skip
NAMES = sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - {*_PARTS})


def main() -> None:
    """Run the benchmark that the command line names."""
    name, *words = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
        parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
        parser.parse_args([name])
    sys.argv[0] = f"python -m benchmarks {name}"  # argparse shows it
    import_module(f"benchmarks.{name}").main(words)


if __name__ == "__main__":
    main()
