"""The runner of benchmarks of kernels and layers: contenders in turns, at sizes, into a table."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import records, timing
from benchmarks.records import value_at
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.kernels.select import select_engine

Row = dict[str, Any]


def rows_of(
    builders: Mapping[str, Callable[[], Step]],
    row: Callable[[str, list[list[float]]], Row],
    head: Row,
    seconds: float,
    **options: int,
) -> list[Row]:
    """Measure contenders in turns.

    Args:
        builders: a function of each contender that makes its step.
        row: figures of a contender from its name and its laps in ms.
        head: what all rows begin with.
        seconds: time for each contender.
        options: of ``timing.measure``.

    Returns:
        A row for each contender, those last that refuse, with the reason.
    """
    steps, refused = timing.build(dict(builders))
    laps = timing.measure(steps, seconds, **options)
    rows = [head | {"contender": name} | row(name, laps[name]) for name in steps]
    return rows + [head | {"contender": name, "refused": why} for name, why in refused.items()]


def add_ratios(rows: Iterable[Row], key: str, base: str, *of: str) -> None:
    """Add how many times as fast as one contender the others are.

    Args:
        rows: rows of one size.
        key: key of the ratios.
        base: the contender that others are compared with.
        of: the path of a time; with several, ratios are by path.
    """
    rows = [row for row in rows if "refused" not in row]
    other = next((row for row in rows if row["contender"] == base), None)
    for row in rows if other is not None else ():
        ratios = {path: round(_at(other, path) / _at(row, path), 3) for path in of}
        row[key] = ratios if len(of) > 1 else ratios[of[0]]


def _at(row: Row, path: str) -> Any:
    """Return a figure of a row, of repetitions their median."""
    value = value_at(row, path)
    return value["median_ms"] if isinstance(value, Mapping) else value


def table(
    rows: Sequence[Row], title: str, columns: Mapping[str, str], name: str = "contender"
) -> Table:
    """Tabulate rows.

    Args:
        rows: of one size.
        title: above the table.
        columns: path of a figure by heading.
        name: key of the first column.
    """
    shown = Table(name, *columns, title=title)
    for row in rows:
        figures = [_at(row, path) for path in columns.values()]
        shown.add_row(row[name], *map(_figure, [row["refused"]] if "refused" in row else figures))
    return shown


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write(
    file: Path, rows: Sequence[Row], begin: float, limits: Ceilings | None = None, **head: Any
) -> None:
    """Write a record with the recipes' engine, seconds, and ceilings if they were measured."""
    engine = select_engine(timing.device())
    head = {"engine": f"{engine.name} ({engine.reason})", **head}
    head["seconds"] = round(time.monotonic() - begin)
    if limits is not None:
        head["ceilings"] = limits.as_json()
    records.write(file, head, rows=rows)


def over_sizes(
    benchmark: str,
    doc: str | None,
    contenders: Iterable[str],
    sizes: Sequence[Any],
    run: Callable[[Any, Sequence[str], Ceilings, float], list[Row]],
    columns: Mapping[str, str],
) -> Callable[[Sequence[str] | None], None]:
    """Make the command of a benchmark over sizes: measure, print the tables, write the JSON.

    The first of ``sizes``, named tuples, is the default one; all are the sweep. ``columns`` are
    figures of the tables.
    """
    names, size_type = list(contenders), type(sizes[0])

    def size(text: str) -> tuple:
        return size_type._make(map(int, text.split("x")))

    def main(argv: Sequence[str] | None = None) -> None:
        parser = records.parser(doc)
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument("--sweep", action="store_true", help=f"{len(sizes)} sizes")
        form = "x".join(map(str.upper, size_type._fields))
        chosen.add_argument("--sizes", nargs="+", type=size, metavar=form)
        parser.add_argument("--contenders", nargs="+", choices=names, default=names)
        parser.add_argument(
            "--seconds", type=float, default=0.15, help="seconds to measure each contender and size"
        )
        records.add_output(parser, benchmark)
        args = parser.parse_args(argv)
        begin, console, rows = time.monotonic(), Console(width=150), []
        torch.manual_seed(1234)
        limits = timing.ceilings()
        console.print(limits.as_json())
        for one_size in args.sizes or (sizes if args.sweep else sizes[:1]):
            measured = run(one_size, args.contenders, limits, args.seconds)
            console.print(table(measured, str(one_size), columns))
            rows += measured
            write(args.output, rows, begin, limits)
        print(args.output)

    return main
